"""Every setting of a run in `Experiment`, a dataclass that checks itself.

A wrong setting should stop a run before it starts MPI or a device. `Experiment` therefore checks values and
combinations when it is made, and importing this file starts neither. Fields become command-line flags of `python -m
jaxmpi.train`, and the comment at each field is its help text. Fields marked `InPython` have no flag; an experiment file
sets them. The table `REFUSALS` lists settings that exclude each other.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jaxmpi.config.choices import Choices, check_choices, use_python_numbers
from jaxmpi.config.data import Data, InPython
from jaxmpi.config.durations import check_divides, duration_steps, step_range
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.refusals import GIVE_ONE, PAIR, incompatible, refuse_incompatible
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.errors import check

WORDS = "words"  # marks a tuple of words and objects: flags name its words, and an experiment file both
if TYPE_CHECKING:
    Sinks = tuple[str | Callable[[dict[str, Any]], None], ...]
else:  # as the command line's parser is to see it
    Sinks = Annotated[tuple[str, ...], WORDS]
# Actions of a job that gets no further.
ON_STALL = {"abort": "ends, with a code other than 0", "warn": "says so and goes on"}
# Outcomes of a step whose gradients or loss are not finite.
RECOVERIES = {
    "stop": "the run stops",
    "skip": "the step changes nothing; params that differ between workers stop the run",
    "rollback": "back to the newest checkpoint; a step that fails twice is left out",
}
# Outcomes for the other workers if one dies.
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
# Transports of what workers exchange.
COMMS = {
    "mpi": "MPI, one process a worker",
    "xla": "XLA's collectives over a jax.distributed job that MPI sets up: NCCL between GPUs, gloo between CPUs",
}
# The parts of an experiment, and how each is spelled: objects of other libraries, such as Optax's, are none of them.
PARTS: dict[str, tuple[type, str]] = {
    "data": (Data, 'Data("array", train=..., validation=...) takes examples of your own'),
    "optim": (Optim, 'Optim("adamw", lr=1e-3), or Optim("mine", transform=...) with an Optax optimizer'),
    "schedule": (Schedule, 'Schedule("cosine", warmup="5ep"), or Schedule(rate=...) with an Optax schedule'),
    "rule": (RuleConfig, 'RuleConfig("awagd")'),
    "exchange": (ExchangeConfig, 'ExchangeConfig("asa16")'),
}

REFUSALS = (
    *incompatible(
        lambda x: x.effective_batch,
        "effective_batch {effective_batch}",
        ("local_batch", "any", GIVE_ONE),
        form="got {field} {got} and {words}; {instead}",
    ),
    *incompatible(lambda x: x.from_start, "from_start", ("resume", "any", GIVE_ONE), form=PAIR),
    *incompatible(lambda x: x.params, "params", ("continue_from", "any", GIVE_ONE), form=PAIR),
    *incompatible(
        lambda x: x.comm == "xla",
        "comm xla",
        ("step_mode", "split", "all workers share one jit there: use auto or fused"),
    ),
)


@dataclass(frozen=True)
class Experiment:
    """One training run. An experiment file holds one as `experiment`."""

    model: InPython[Any] = None  # a jaxmpi.Model
    task: InPython[Any] = (
        "auto"  # a row of jaxmpi.tasks.registry.TASKS, or a jaxmpi.Task instead of a model; auto: by the model's labels
    )
    loss: InPython[Callable[..., Any] | None] = (
        None  # (outputs, labels i32[batch, ...]) -> f32[batch, ...]; default: softmax cross-entropy
    )
    fallback: InPython["Experiment | None"] = None  # experiment that runs when no data folder is given
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
    keep_best: int = 1  # beside them, the best by `monitor`, of steps that were evaluated and saved
    monitor: str = "eval_loss"  # figure of the evaluation by which checkpoints are the best, such as eval_top1
    monitor_mode: Annotated[str, Choices("auto", "min", "max")] = "auto"  # its best value; auto: as its metric says
    log_every: int = 10  # steps between lines of the record; the first step always has one
    quiet: bool = False  # nothing on the terminal but errors; the record is written all the same
    trace: str = ""  # first and last step, as 10:20: what all ranks do when, as trace.json in the run directory
    profile: str = ""  # first and last step, as 10:20: JAX's own profiler, into profile/ in the run directory
    sinks: Sinks = ()  # csv, mlflow, tensorboard, wandb: get every line of the record; functions may, too
    callbacks: InPython[tuple[Any, ...]] = ()  # jaxmpi.Callback objects: EarlyStop(), ReduceOnPlateau(), your own
    stall_timeout_s: float = 600.0  # seconds without progress after which late ranks are named, with stacks; 0 = never
    on_stall: Annotated[str, Choices(*ON_STALL)] = "abort"  # action once late ranks are named
    run_dir: str = ""  # run directory; empty: runs/<experiment>-<time>
    resume: bool = False  # go on from the newest checkpoint in run_dir
    from_start: bool = False  # begin again at step 0 in run_dir; the record and checkpoints in it are set aside
    # run directory whose newest checkpoint a new run goes on from, with another effective batch
    continue_from: str = ""
    params: str = ""  # Orbax folder or .safetensors file of params and model state that the run begins with
    # action at steps that are not finite, or params that differ
    on_nonfinite: Annotated[str, Choices(*RECOVERIES)] = "stop"
    recover_limit: int = 10  # times that a run may skip or roll back before it stops
    replica_check_every: str = "100st"  # duration between comparisons of all workers' params; 0st: when saving only
    # if a worker dies the job ends, or the others go on without it (experimental)
    on_rank_loss: Annotated[str, Choices(*LOSSES)] = "end"
    inject: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # kind:key=value,...: a fault on order; repeatable
    seed: int = 0  # seed of initialisation, order, augmentation and dropout
    # statistics of batch norm, see docs/models.md
    batch_statistics: Annotated[str, Choices(*BATCH_STATISTICS)] = "averaged"
    # dtype of forward and backward; params stay float32
    compute_dtype: Annotated[str, Choices("float32", "bfloat16")] = "float32"
    # local devices of each process, a worker each; over MPI they add theirs up before processes exchange
    devices: int = 1
    # transport of what workers exchange; xla: NCCL between GPUs, gloo between CPUs
    comm: Annotated[str, Choices(*COMMS)] = "mpi"
    # one jit for the step, or gradients, exchange and update apart
    step_mode: Annotated[str, Choices("auto", "fused", "split")] = "auto"

    def __post_init__(self) -> None:
        use_python_numbers(self)
        for name, (part, way_out) in PARTS.items():
            got = getattr(self, name)
            kind = f"{type(got).__module__.partition('.')[0]}.{type(got).__name__}"
            check(isinstance(got, part), f"{name}: got a {kind}; expected jaxmpi.config.{part.__name__}: {way_out}")
        check(
            not self.run_dir.startswith("-"), f"run_dir: got {self.run_dir!r}; expected a path: write ./{self.run_dir}"
        )
        for name in ("local_batch", "effective_batch", "micro_batch", "keep_best", "recover_limit"):
            check(getattr(self, name) >= 0, f"{name}: got {getattr(self, name)}; expected >= 0")
        check(0 <= self.seed < 2**32, f"seed: got {self.seed}; expected 0 to 2^32 - 1")
        for name in ("log_every", "keep_checkpoints", "devices"):
            check(getattr(self, name) >= 1, f"{name}: got {getattr(self, name)}; expected >= 1")
        check_choices(self)
        check(isinstance(self.sinks, (tuple, list)), f"sinks: got {self.sinks!r}; expected a tuple, as ('csv',)")
        for sink in self.sinks:
            check(
                isinstance(sink, str) or callable(sink), f"sinks: got {sink!r}; expected a word or a function of a dict"
            )
        check(self.stall_timeout_s >= 0, f"stall_timeout_s: got {self.stall_timeout_s}; expected >= 0")
        for name in ("trace", "profile"):
            step_range(getattr(self, name), name)
        refuse_incompatible(REFUSALS, self)
        for name in ("train_for", "eval_every", "checkpoint_every", "replica_check_every"):
            duration_steps(getattr(self, name), 1, 1, 1)
        check(
            "%" not in self.train_for and float(re.sub(r"[^\d.]", "", self.train_for)) > 0,
            f"train_for: got {self.train_for}; expected a duration > 0 in ep, st or ex",
        )


def local_batch(experiment: Experiment, workers: int, uneven: bool = False) -> int:
    """Examples per worker and step; the most if shares are uneven.

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
