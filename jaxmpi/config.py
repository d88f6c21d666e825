"""What a run is: frozen dataclasses that check themselves, and durations turned into steps once.

Every field below is a command-line flag of `python -m jaxmpi.train`; the comment after it is its help text.
Importing this file starts neither MPI nor a device.
"""

import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro

T = TypeVar("T")
InPython = tyro.conf.Suppress  # a field that an experiment file sets and no flag can


# What moves a terminal's cursor or changes its colours or title, and what turns the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text as a terminal may get it: names of a stranger's files hold any bytes."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class UsageError(ValueError):
    """What the user asked for cannot be: got, expected, way out. Shown without a traceback."""

    def __str__(self) -> str:
        return printable(super().__str__())


class TrainingError(RuntimeError):
    """A run that cannot go on, for a reason the message gives in full. Shown without a traceback."""

    def __str__(self) -> str:
        return printable(super().__str__())


class AgreedError(TrainingError):
    """One that all ranks raise together: rank 0 speaks for them."""


class NotFinite(AgreedError):
    """A loss or gradients that are not finite: the run has diverged."""


def lookup(table: Mapping[str, T], name: str, kind: str) -> T:
    """`table[name]`, or a `UsageError` that lists what exists and suggests the nearest."""
    if name in table:
        return table[name]
    raise UsageError(f"unknown {kind} {name!r}; {nearest(name, table)}")


# Words of other libraries for fields of ours, which no spelling leads to.
ELSEWHERE = {
    "learning-rate": "optim.lr",
    "optim.learning-rate": "optim.lr",
    "batch-size": "local-batch",
    "epochs": "train-for",
    "steps": "train-for",
    "max-steps": "train-for",
    "optimizer": "optim.name",
    "output-dir": "run-dir",
}


def nearest(name: str, known: Mapping[str, Any]) -> str:
    """The tail of an error about an unknown name: the nearest known one, and all of them."""
    meant = [ELSEWHERE[name]] if ELSEWHERE.get(name) in known else []
    close = meant or difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}there are: {', '.join(sorted(known))}"


def check(holds: bool, message: str) -> None:
    """Raise `UsageError(message)` unless `holds`."""
    if not holds:
        raise UsageError(message)


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written later; several ranks may ask at once."""
    try:
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror}; name a file in a folder that exists"
        ) from error


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ep|st|ex|%)")


def steps(duration: str, steps_per_epoch: int, effective_batch: int, total_steps: int = 0) -> int:
    """A duration as whole steps, rounded to the nearest; at least one, unless the number is 0.

    Args:
        duration: a number and a unit: `90ep` epochs, `125st` steps, `20000ex` examples, `10%` of the run.
        steps_per_epoch: steps in one epoch, >= 1.
        effective_batch: examples of one step over all workers.
        total_steps: steps of the run; needed by `%` only.

    Raises:
        UsageError: the text is no duration.
    """
    match = _DURATION.fullmatch(duration.replace(" ", ""))
    check(
        match is not None,
        f"got duration {duration!r}; expected a number and a unit: 90ep (epochs), 125st (steps), "
        "20000ex (examples) or 10% (of the run)",
    )
    assert match is not None
    number, unit = float(match[1]), match[2]
    per_unit = {
        "ep": steps_per_epoch,
        "st": 1,
        "ex": 1 / effective_batch,
        "%": total_steps / 100,
    }
    return max(round(number * per_unit[unit]), int(number > 0))


# Where examples are while they are read.
MEMORY = {
    "none": "in files, or wherever the source has them",
    "partition": "in the memory of the workers: each group of them holds one full copy",
}


MOST_LOADERS = 1024  # per worker; each is a thread or a process


@dataclass(frozen=True)
class Data:
    """Where examples come from and what becomes of an image before the model sees it."""

    source: str = "digits"  # digits | synthetic | array | imagefolder | batchfiles | tfds | packed | text | stdlib
    dir: str = ""  # root folder of imagefolder, batchfiles, tfds, packed or text; JAXMPI_DATA where empty, but for text
    name: str = ""  # tfds: data set, such as imagenet2012 or mnist:3.0.1
    train_split: str = "train"  # folder under `dir` or tfds split
    validation_split: str = "validation"  # the same, for evaluation
    resize: int = 0  # px: shorter side after decoding, aspect kept; 0 keeps the size; not for crops by `crop_area`
    crop: int = 0  # px: random square in training, the centre one in evaluation; 0 takes the whole image
    # smallest and largest share of the image that a training crop takes; empty: crops of `crop` px
    crop_area: tuple[float, ...] = ()
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)  # with crop_area: narrowest and widest width / height of a crop
    mirror: bool = False  # flip half of the training images left to right
    mean: tuple[float, ...] = ()  # per channel, of pixels in [0, 1], subtracted
    std: tuple[float, ...] = ()  # per channel, of pixels in [0, 1], divided by
    mean_image: str = ""  # .npy file, u8 or f32[height, width, channels] in [0, 255]; instead of `mean`
    channels: int = 3  # of the model's input; grey images are repeated
    synthetic_examples: int = 4096  # size of the synthetic training set
    window: int = 128  # text, stdlib: bytes that an example predicts
    on_error: str = "stop"  # stop | skip: what a corrupt image does
    max_skipped: float = 0.01  # largest share of the examples that a run may skip in an epoch, of each epoch begun
    loader: str = "auto"  # auto | processes | threads | spawn: who makes batches; auto: processes to decode images
    loaders: int = 2  # of them, per worker
    prefetch: int = 2  # batches made ahead, per worker
    stall_s: float = 300.0  # seconds that a loader may be at one example before the run ends
    shuffle_by: str = "auto"  # auto | examples | files: what is put in a new order each epoch; auto: see docs/data.md
    memory: str = "none"  # none | partition: keep compressed examples in the memory of the workers
    group_size: int = 0  # partition: workers that hold one full copy together; 0 = all workers
    shuffle_period: int = 1  # partition: epochs between two shuffles over a group; 0 = after the first none
    train: InPython[Any] = None  # source `array`: anything with __len__ and __getitem__ -> (image, label)
    validation: InPython[Any] = None  # the same, for evaluation

    def __post_init__(self) -> None:
        check(self.on_error in ("stop", "skip"), f"data.on_error: got {self.on_error!r}; stop or skip")
        check(0 <= self.max_skipped <= 1, f"data.max_skipped: got {self.max_skipped}; expected a share in [0, 1]")
        for name in ("resize", "crop"):
            check(
                getattr(self, name) >= 0,
                f"data.{name}: got {getattr(self, name)} px; expected >= 0",
            )
        for name in ("channels", "loaders", "prefetch", "synthetic_examples", "window"):
            check(getattr(self, name) >= 1, f"data.{name}: got {getattr(self, name)}; expected >= 1")
        check(self.loaders <= MOST_LOADERS, f"data.loaders: got {self.loaders}; expected at most {MOST_LOADERS}")
        check(
            self.loader in ("auto", "processes", "threads", "spawn"),
            f"data.loader: got {self.loader!r}; expected auto, processes, threads or spawn",
        )
        check(
            self.shuffle_by in ("auto", "examples", "files"),
            f"data.shuffle_by: got {self.shuffle_by!r}; expected auto, examples or files",
        )
        check(
            self.shuffle_by != "files" or self.memory == "none",
            f"data.shuffle_by: got files with data.memory {self.memory}, which reads no file after the start; use auto",
        )
        check(self.stall_s > 0, f"data.stall_s: got {self.stall_s}; expected seconds > 0")
        for name in ("mean", "std"):
            got = len(getattr(self, name))
            check(
                got in (0, 1, self.channels),
                f"data.{name}: got {got} numbers; expected {self.channels}, one a channel, or 1 for all",
            )
        check(all(math.isfinite(m) for m in self.mean), f"data.mean: got {self.mean}; every entry must be finite")
        check(all(s > 0 for s in self.std), f"data.std: got {self.std}; every entry must be > 0")
        check(
            not (self.mean and self.mean_image),
            "data.mean and data.mean_image: give one of the two",
        )
        lookup(MEMORY, self.memory, "data.memory")
        for name in ("group_size", "shuffle_period"):
            check(getattr(self, name) >= 0, f"data.{name}: got {getattr(self, name)}; expected >= 0")
        self._check_crop_area()

    def _check_crop_area(self) -> None:
        area, (narrow, wide) = self.crop_area, self.crop_aspect
        check(
            not area or (len(area) == 2 and 0 < area[0] <= area[1] <= 1),
            f"data.crop_area: got {area}; expected two shares with 0 < smallest <= largest <= 1",
        )
        check(0 < narrow <= wide, f"data.crop_aspect: got {self.crop_aspect}; expected 0 < narrowest <= widest")
        check(not area or self.crop > 0, "data.crop_area: data.crop is 0; expected the px that crops are scaled to")
        check(
            not (area and self.mean_image),
            "data.crop_area scales pixels, data.mean_image wants them in place; use data.mean, one number a channel",
        )


@dataclass(frozen=True)
class Optim:
    """The optimizer that every worker runs."""

    name: str = "momentum"  # sgd | momentum | nesterov | adam | adamw | rmsprop | adagrad
    lr: float = 0.01  # what each worker runs, before `lr_scaling`
    lr_scaling: str = "rule"  # none | linear | sqrt in the number of workers; rule = the rule's own default
    momentum: float = 0.9  # mu, in [0, 1)
    rate_in_velocity: bool = False  # momentum, nesterov: v <- mu v - eta g; else w <- w - eta v
    weight_decay: float = 0.0  # lambda; added to the gradient (adamw: decoupled)
    bias_lr_factor: float = 1.0  # tensors of one axis run this times lr; the papers use 2
    decay_bias: bool = True  # whether weight decay covers tensors of one axis; the papers say no
    clip_norm: float = 0.0  # largest global norm of the gradients a rule steps with; 0 = no clipping

    def __post_init__(self) -> None:
        check(self.lr > 0 and math.isfinite(self.lr), f"optim.lr: got {self.lr}; expected > 0")
        check(0 <= self.momentum < 1, f"optim.momentum: got {self.momentum}; expected [0, 1)")
        check(
            not self.rate_in_velocity or self.name in ("momentum", "nesterov"),
            f"optim.rate_in_velocity: optimizer {self.name!r} has no velocity; use momentum or nesterov",
        )
        check(self.weight_decay >= 0, f"optim.weight_decay: got {self.weight_decay}; expected >= 0")
        check(self.clip_norm >= 0, f"optim.clip_norm: got {self.clip_norm}; expected >= 0")
        check(
            self.bias_lr_factor > 0,
            f"optim.bias_lr_factor: got {self.bias_lr_factor}; expected > 0",
        )


@dataclass(frozen=True)
class Schedule:
    """How the learning rate moves: a warm-up to it, then a decay from it."""

    decay: str = "constant"  # constant | step | poly | poly_epoch | cosine
    boundaries: tuple[str, ...] = ()  # step: durations after which lr is multiplied by `factor`
    factor: float = 0.1  # step: multiplier at each boundary
    power: float = 0.5  # poly: lr (1 - t / span)^power; poly_epoch holds it through each epoch
    span: str = "100%"  # poly, cosine: duration over which lr falls to 0
    warmup: str = "0st"  # duration of the warm-up
    warmup_shape: str = "linear"  # linear | geometric; geometric rises once an epoch
    warmup_lr: float = 0.0  # lr at the start, whatever lr is scaled to; 0 means warmup_from
    warmup_from: float = 0.0  # share of lr at the start; 0 means 1/steps (linear), 1/workers (geometric)

    def __post_init__(self) -> None:
        check(self.factor > 0, f"schedule.factor: got {self.factor}; expected > 0")
        check(self.warmup_lr >= 0, f"schedule.warmup_lr: got {self.warmup_lr}; expected >= 0")
        check(
            not (self.warmup_lr and self.warmup_from),
            f"got schedule.warmup_lr {self.warmup_lr} and schedule.warmup_from {self.warmup_from}; give one of them",
        )
        check(self.power > 0, f"schedule.power: got {self.power}; expected > 0")
        check(
            0 <= self.warmup_from <= 1,
            f"schedule.warmup_from: got {self.warmup_from}; expected a share in [0, 1]",
        )


@dataclass(frozen=True)
class RuleConfig:
    """When workers talk, and about what."""

    name: str = "gradients"  # gradients | subgd | awagd | local_sgd | diloco | easgd | easgd_sync | asgd | gosgd
    average_momentum: bool = False  # awagd: average the optimizer's moments as well as the params
    force: bool = False  # run an optimizer that is not linear in the gradient under a rule that expects one
    alpha: float = 0.5  # easgd: share of its distance to the center that a worker goes at an exchange, in (0, 1]
    server_alpha: float = 0.0  # easgd: share of it that the center goes, in (0, 1]; 0 = alpha
    tau: int = 1  # easgd, asgd: steps between a worker's exchanges
    p: float = 0.01  # gosgd: probability that a worker sends its params to another after a step, in [0, 1]
    staleness: int = 0  # easgd, asgd: steps a worker may be ahead of the slowest before it waits; 0 = no bound
    servers: int = 0  # easgd, asgd: last ranks, which only keep the center; 0 = a thread of rank 0 does
    momentum: float = 0.0  # easgd: Nesterov momentum delta of EAMSGD, in [0, 1), over optimizer sgd
    local_steps: int = 50  # local_sgd, diloco: H, steps from one exchange to the next
    outer_lr: float = 0.7  # diloco: eta of the outer optimizer; take optim.lr lower, a seventh to a third
    outer_momentum: float = 0.9  # diloco: Nesterov momentum mu of the outer optimizer, in [0, 1)
    noise_scale: bool = True  # gradients: record variance between workers and noise scale, where there are several

    def __post_init__(self) -> None:
        shares = {"alpha": (0, 1), "p": (0, 1)} | ({"server_alpha": (0, 1)} if self.server_alpha else {})
        far = "beyond 1 a worker would end on the far side of the center, at 0 they would never meet"
        for name in shares:
            value = getattr(self, name)
            is_open = name != "p"
            check(
                0 <= value <= 1 and not (is_open and value == 0),
                f"rule.{name}: got {value}; expected "
                + (f"(0, 1]: {far}" if is_open else "[0, 1]: it is a probability"),
            )
        check(0 <= self.momentum < 1, f"rule.momentum: got {self.momentum}; expected [0, 1): at 1 it never forgets")
        for name, least, why in (
            ("tau", 1, "it counts steps from one exchange to the next"),
            ("local_steps", 1, "it counts steps from one exchange to the next"),
            ("staleness", 0, "nobody can be ahead of the slowest by less; 0 is no bound"),
            ("servers", 0, "with 0 a thread of rank 0 keeps the center"),
        ):
            got = getattr(self, name)
            check(got >= least, f"rule.{name}: got {got}; expected >= {least}: {why}")
        check(
            self.outer_lr > 0 and math.isfinite(self.outer_lr),
            f"rule.outer_lr: got {self.outer_lr}; expected > 0: at 0 nothing that workers learn would stay",
        )
        check(
            0 <= self.outer_momentum < 1,
            f"rule.outer_momentum: got {self.outer_momentum}; expected [0, 1): at 1 it never forgets",
        )


def check_bucket_bytes(bucket_bytes: int | None) -> None:
    """Raise `UsageError` unless it is None or can hold a float."""
    check(
        bucket_bytes is None or (hasattr(bucket_bytes, "__index__") and bucket_bytes >= 4),
        f"bucket_bytes: got {bucket_bytes!r}; expected None (one flat buffer) or a whole number of bytes >= 4",
    )


# When buckets travel.
OVERLAPS = {
    "auto": "on where it pays, which is between hosts",
    "on": "while the backward pass goes on",
    "off": "after it",
    "delayed": "while the next step goes on: gradients are applied one step late, another algorithm",
}


@dataclass(frozen=True)
class ExchangeConfig:
    """How they talk, and what travels."""

    strategy: str = "auto"  # algorithm[:wire] or an alias, as asa16, ring32, shm; lowrank4/ring16 compresses
    bucket_bytes: int | None = 4 << 20  # bytes up to which small leaves are fused; None = one flat buffer
    # auto | on | off | delayed: exchange beside the backward pass; delayed applies gradients one step late
    overlap: str = "auto"

    def __post_init__(self) -> None:
        check_bucket_bytes(self.bucket_bytes)
        lookup(OVERLAPS, self.overlap, "exchange.overlap")


# What a job does that gets no further.
ON_STALL = {"abort": "ends, with a code other than 0", "warn": "says so and goes on"}
# What becomes of a step whose gradients or loss are not finite.
RECOVERIES = {
    "stop": "the run stops",
    "skip": "the step changes nothing; params that differ between workers stop the run",
    "rollback": "back to the newest checkpoint; a step that fails twice is left out",
}

# What becomes of the other workers where one dies.
LOSSES = {
    "end": "the job ends; jaxmpi train --restarts starts it again",
    "shrink": "they do the step again without it and go on, on one host under mpirun --with-ft ulfm; experimental",
}

# How batch norm's statistics cross workers: what training normalises with, what evaluation does.
BATCH_STATISTICS = {
    "local": "a worker's own batch; a worker's own running ones",
    "averaged": "a worker's own batch; the mean of all workers' running ones",
    "synchronised": "all workers' batches, exchanged at every layer; the same",
}


# Who carries what workers exchange.
COMMS = {
    "mpi": "MPI, one process a worker",
    "xla": "XLA's collectives over a jax.distributed job that MPI sets up: NCCL between GPUs, gloo between CPUs",
}


# The parts of an experiment, and how each is spelled: objects of other libraries, such as Optax's, are none of them.
PARTS: dict[str, tuple[type, str]] = {
    "data": (Data, 'Data("array", train=..., validation=...) takes examples of your own'),
    "optim": (Optim, 'Optim("adamw", lr=1e-3); Optax optimizers go into a loop of your own, docs/exchange.md'),
    "schedule": (Schedule, 'Schedule("cosine", warmup="5ep"); Optax schedules go into a loop of your own'),
    "rule": (RuleConfig, 'RuleConfig("awagd")'),
    "exchange": (ExchangeConfig, 'ExchangeConfig("asa16")'),
}


@dataclass(frozen=True)
class Experiment:
    """One training run. An experiment file holds one as `experiment`."""

    model: InPython[Any] = None  # a jaxmpi.Model
    loss: InPython[Callable[..., Any] | None] = (
        None  # (outputs, labels i32[batch, ...]) -> f32[batch, ...]; default: softmax cross-entropy
    )
    embedded: InPython["Experiment | None"] = None  # what runs when no data folder is given
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    rule: RuleConfig = field(default_factory=RuleConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    local_batch: int = 0  # examples per worker and step; give this or effective_batch
    effective_batch: int = 0  # examples per step over all workers; must divide by their number
    micro_batch: int = 0  # examples per accumulation slice of the local batch; 0 = no accumulation
    train_for: str = "10ep"  # duration of the run: 10ep, 500st, 20000ex
    eval_every: str = "1ep"  # duration between evaluations; 0st: only the last step, which is always evaluated
    checkpoint_every: str = "1ep"  # duration between checkpoints; 0st: only the last step, which is always saved
    keep_checkpoints: int = 2  # newest checkpoints kept
    keep_best: int = 1  # beside them, those of lowest eval_loss, of steps that were evaluated and saved
    log_every: int = 10  # steps between lines of the record; the first step always has one
    quiet: bool = False  # nothing on the terminal but errors; the record is written all the same
    trace: str = ""  # first and last step, as 10:20: what all ranks do when, as trace.json in the run directory
    profile: str = ""  # first and last step, as 10:20: JAX's own profiler, into profile/ in the run directory
    tensorboard: bool = False  # lines of the record to TensorBoard, too, in the run directory
    sinks: InPython[tuple[Callable[[dict[str, Any]], None], ...]] = ()  # get every line of the record
    lone_every: int = 200  # steps between steps without exchange, on a copy, where only they tell its time; 0 = never
    stall_s: float = 600.0  # seconds without progress after which late ranks are named, with stacks; 0 = never
    on_stall: str = "abort"  # abort | warn: what then happens
    run_dir: str = ""  # run directory; empty: runs/<experiment>-<time>
    resume: bool = False  # go on from the newest checkpoint in run_dir
    from_start: bool = False  # begin again at step 0 in run_dir; the record and checkpoints in it are set aside
    continue_from: str = (
        ""  # run directory whose newest checkpoint a new run goes on from, with another effective batch
    )
    params: str = ""  # Orbax folder of params and model state that the run begins with, instead of the model's own
    recover: str = "stop"  # stop | skip | rollback: what steps that are not finite, or params that differ, do
    recover_limit: int = 10  # times that a run may skip or roll back before it stops
    compare_every: str = "100st"  # duration between comparisons of all workers' params; 0st: when saving only
    ft: str = "end"  # end | shrink: where a worker dies the job ends, or the others go on without it (experimental)
    inject: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # kind:key=value,...: a fault on order; repeatable
    seed: int = 0  # of initialisation, order, augmentation and dropout
    batch_statistics: str = "averaged"  # local | averaged | synchronised: of batch norm, see docs/models.md
    compute_dtype: str = "float32"  # float32 | bfloat16: of forward and backward; params stay float32
    devices: int = 1  # local devices of one process, a worker each; more than 1 in several processes needs comm xla
    comm: str = "mpi"  # mpi | xla: who carries what workers exchange; xla: NCCL between GPUs, gloo between CPUs
    form: str = "auto"  # auto | fused | split: one jit for the step, or gradients, exchange and update apart

    def __post_init__(self) -> None:
        for name, (part, way_out) in PARTS.items():
            got = getattr(self, name)
            kind = f"{type(got).__module__.partition('.')[0]}.{type(got).__name__}"
            check(isinstance(got, part), f"{name}: got a {kind}; expected jaxmpi.config.{part.__name__}: {way_out}")
        check(
            not (self.local_batch and self.effective_batch),
            f"got local_batch {self.local_batch} and effective_batch {self.effective_batch}; give one of them",
        )
        check(not (self.resume and self.from_start), "got resume and from_start; give one of them")
        check(not (self.continue_from and self.params), "got continue_from and params; give one of them")
        check(
            not self.run_dir.startswith("-"), f"run_dir: got {self.run_dir!r}; expected a path: write ./{self.run_dir}"
        )
        for name in ("local_batch", "effective_batch", "micro_batch", "keep_best", "recover_limit"):
            check(getattr(self, name) >= 0, f"{name}: got {getattr(self, name)}; expected >= 0")
        check(0 <= self.seed < 2**32, f"seed: got {self.seed}; expected 0 to 2^32 - 1")
        for name in ("log_every", "keep_checkpoints", "devices"):
            check(getattr(self, name) >= 1, f"{name}: got {getattr(self, name)}; expected >= 1")
        check(
            self.compute_dtype in ("float32", "bfloat16"),
            f"compute_dtype: got {self.compute_dtype!r}; expected float32 or bfloat16",
        )
        lookup(BATCH_STATISTICS, self.batch_statistics, "batch_statistics")
        lookup(ON_STALL, self.on_stall, "on_stall")
        for name in ("lone_every", "stall_s"):
            check(getattr(self, name) >= 0, f"{name}: got {getattr(self, name)}; expected >= 0")
        for name in ("trace", "profile"):
            step_range(getattr(self, name), name)
        lookup(RECOVERIES, self.recover, "recover")
        lookup(LOSSES, self.ft, "ft")
        lookup(COMMS, self.comm, "comm")
        check(
            self.form in ("auto", "fused", "split"),
            f"form: got {self.form!r}; expected auto, fused or split",
        )
        check(
            self.form != "split" or self.devices == 1,
            f"form: got split with {self.devices} devices; several devices of one process share one jit",
        )
        check(
            self.form != "split" or self.comm == "mpi",
            "form: got split with comm xla; all workers share one jit there: use auto or fused",
        )
        for name in ("train_for", "eval_every", "checkpoint_every", "compare_every"):
            steps(getattr(self, name), 1, 1, 1)
        check(
            "%" not in self.train_for and float(re.sub(r"[^\d.]", "", self.train_for)) > 0,
            f"train_for: got {self.train_for}; expected a duration > 0 in ep, st or ex",
        )


def step_range(text: str, name: str) -> tuple[int, int]:
    """First and last step of `10:20`; (0, 0) where nothing is given.

    Raises:
        UsageError: no two steps in this order.
    """
    if not text:
        return 0, 0
    first, _, last = text.partition(":")
    is_one = first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)
    check(is_one, f"{name}: got {text!r}; expected the first and the last step, as 10:20")
    return int(first), int(last)


def local_batch(experiment: Experiment, workers: int, uneven: bool = False) -> int:
    """Examples per worker and step, the most of them where shares are uneven.

    Args:
        uneven: let the effective batch not divide: a run that goes on with another number of workers.

    Raises:
        UsageError: the effective batch does not divide by the workers, or the local batch by the micro-batch;
            the nearest that do are named.
    """
    effective = experiment.effective_batch
    if uneven and effective:
        return -(-effective // workers)
    check_divides("effective_batch", effective, workers, "workers")
    local = experiment.local_batch or effective // workers or 32
    check_divides("local batch", local, experiment.micro_batch or 1, "(micro_batch)")
    return local


def seconds_from(variable: str, default: float) -> float:
    """A time limit that the environment may set.

    Ends the process where the variable holds no number > 0: it is read while modules load.
    """
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        sys.exit(f"jaxmpi: error: {variable}: got {text!r}; expected seconds > 0")
    return seconds


def check_divides(what: str, total: int, parts: int, parts_name: str) -> None:
    """Raise `UsageError` naming the nearest totals that divide unless `total % parts == 0`."""
    below = total // parts * parts
    close = f"{below} or {below + parts}" if below else f"{parts}"
    check(
        total % parts == 0,
        f"{what} {total} is not divisible by {parts} {parts_name}; nearest that are: {close}",
    )


def flags(part: type, prefix: str = "") -> dict[str, Any]:
    """Command-line names of a dataclass's fields, such as `optim.bias-lr-factor`."""
    names: dict[str, Any] = {}
    hints = get_type_hints(part, include_extras=True)
    for f in dataclasses.fields(part):
        name = prefix + f.name.replace("_", "-")
        if dataclasses.is_dataclass(hints[f.name]):
            names |= flags(hints[f.name], f"{name}.")
        elif tyro.conf.Suppress not in getattr(hints[f.name], "__metadata__", ()):
            names[name] = f
    return names


def unknown_flags(argv: Sequence[str]) -> list[str]:
    """Names given as `--name` or `--no-name` that no field has."""
    given = [arg[2:].split("=")[0].replace("_", "-") for arg in argv if arg.startswith("--")]
    known = {"help", *flags(Experiment)}
    return [name for name in given if name not in known and without_no(name) not in known]


def with_objects(part: Any, original: Any) -> Any:
    """`part` with those of `original`'s values that only Python can set, such as the model.

    The command line sees an experiment without them: its parser would take an array's class for a group of options.
    """
    hints = get_type_hints(type(part), include_extras=True)
    values = {}
    for f in dataclasses.fields(part):
        if tyro.conf.Suppress in getattr(hints[f.name], "__metadata__", ()):
            values[f.name] = getattr(original, f.name)
        elif dataclasses.is_dataclass(hints[f.name]):
            values[f.name] = with_objects(getattr(part, f.name), getattr(original, f.name))
    return dataclasses.replace(part, **values)


def without_no(name: str) -> str:
    """`rule.force` for `rule.no-force`."""
    head, dot, last = name.rpartition(".")
    return head + dot + last.removeprefix("no-")


def resolved(experiment: Experiment) -> dict[str, Any]:
    """The configuration as plain JSON values; what only Python can set appears by its name."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and len(value) <= 100:
            return [plain(v) for v in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return getattr(value, "name", None) or getattr(value, "__name__", type(value).__name__)

    return {k: v for k, v in plain(experiment).items() if k != "embedded"}
