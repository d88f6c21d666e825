"""Every setting of a run in `Experiment`, a dataclass that checks itself.

A wrong setting should stop a run before it starts MPI or a device. `Experiment` therefore checks values and
combinations when it is made, and importing this file starts neither. Fields become command-line flags of `python -m
jaxmpi.train`, and the comment at each field is its help text. Fields marked `InPython` have no flag; an experiment file
sets them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxmpi.config.data import Data
from jaxmpi.config.durations import check_divides, duration_seconds, duration_steps, step_range
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.validate import InPython, Repeatable, check_fields
from jaxmpi.core.errors import UsageError

# What a job does once late ranks are named.
ON_STALL = {"abort": "ends, with a code other than 0", "warn": "says so and goes on"}
# The parts of an experiment, and how each is spelled: objects of other libraries, such as Optax's, are none of them.
PARTS: dict[str, tuple[type, str]] = {
    "data": (Data, 'Data("array", train=..., validation=...) takes examples of your own'),
    "optim": (Optim, 'Optim("adamw", lr=1e-3), or Optim("mine", transform=...) with an Optax optimizer'),
    "schedule": (Schedule, 'Schedule("cosine", warmup="5ep"), or Schedule(rate=...) with an Optax schedule'),
    "rule": (RuleConfig, 'RuleConfig("awagd")'),
    "exchange": (ExchangeConfig, 'ExchangeConfig("asa16")'),
}


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
    whole_set: InPython[Callable[[Any, Any], dict[str, Any]] | None] = (
        None  # (outputs, labels) of all validation examples, in order on rank 0 -> {name: number}, such as AUC
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
    train_for: str = "10ep"  # duration of the run: 10ep, 500st, 20000ex, or by the clock 2h, 30min, 45s
    eval_every: str = "1ep"  # duration between evaluations; 0st: only the last step, which is always evaluated
    eval_for: str = ""  # evaluate on the first examples alone: 2000ex, 20st or 10%, in whole batches; empty: all
    checkpoint_every: str = "1ep"  # duration between checkpoints; 0st: only the last step, which is always saved
    keep_checkpoints: int = 2  # newest checkpoints kept
    keep_best: int = 1  # beside them, the best by `monitor`, of steps that were evaluated and saved
    monitor: str = "eval_loss"  # figure of the evaluation by which checkpoints are the best, such as eval_top1
    monitor_mode: Literal["auto", "min", "max"] = "auto"  # its best value; auto: as its metric says
    log_every: int | str = 10  # steps, or a duration, between lines of the record; the first step always has one
    train_metrics: bool = True  # progress lines have the task's figures of training, such as train_top1
    quiet: bool = False  # nothing on the terminal but errors; the record is written all the same
    trace: str = ""  # first and last step, as 10:20: what all ranks do when, as trace.json in the run directory
    profile: str = ""  # first and last step, as 10:20: JAX's own profiler, into profile/ in the run directory
    # csv, mlflow, tensorboard, wandb: get every line of the record; functions may, too
    sinks: tuple[str | Callable[[dict[str, Any]], None], ...] = ()
    callbacks: InPython[tuple[Any, ...]] = ()  # jaxmpi.Callback objects: EarlyStop(), ReduceOnPlateau(), your own
    stall_timeout_s: float = 600.0  # seconds without progress after which late ranks are named, with stacks; 0 = never
    on_stall: Literal["abort", "warn"] = "abort"  # action once late ranks are named
    run_dir: str = ""  # run directory; empty: runs/<experiment>-<time>
    resume: bool = False  # go on from the newest checkpoint in run_dir
    dry_run: bool = False  # try 2 steps, an evaluation and a checkpoint in a run directory that is removed again
    from_start: bool = False  # begin again at step 0 in run_dir; the record and checkpoints in it are set aside
    params: str = ""  # Orbax folder or .safetensors file of params and model state that the run begins with
    # at a loss or gradients that are not finite: stop; skip the step, which then changes nothing; or rollback to the
    # newest checkpoint, where a step that fails twice is left out
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    recover_limit: int = 10  # times that a run may skip or roll back before it stops
    replica_check_every: str = "100st"  # duration between comparisons of all workers' params; 0st: when saving only
    # if a worker dies the job ends (--restarts starts it again), or the others repeat the step without it and continue:
    # on one host, under mpirun --with-ft ulfm (experimental)
    on_rank_loss: Literal["end", "shrink"] = "end"
    inject: Repeatable[tuple[str, ...]] = ()  # kind:key=value,...: a fault on order; repeatable
    seed: int = 0  # seed of initialisation, order, augmentation and dropout
    # batch norm normalises by a worker's own batch and evaluates with its own running statistics (local) or their mean
    # over workers (averaged), or normalises by the batches of all workers, exchanged at every layer (synchronised)
    batch_statistics: Literal["local", "averaged", "synchronised"] = "averaged"
    # dtype of forward and backward; params stay float32
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # local devices of each process, a worker each; over MPI they add theirs up before processes exchange
    devices: int = 1
    # transport of what workers exchange; xla: XLA's collectives, which are NCCL between GPUs and gloo between CPUs
    comm: Literal["mpi", "xla"] = "mpi"

    def __post_init__(self) -> None:
        for name, (part, way_out) in PARTS.items():
            got = getattr(self, name)
            kind = f"{type(got).__module__.partition('.')[0]}.{type(got).__name__}"
            if not isinstance(got, part):
                raise UsageError(f"{name}: got a {kind}; expected jaxmpi.config.{part.__name__}: {way_out}")
        if self.run_dir.startswith("-"):
            raise UsageError(f"run_dir: got {self.run_dir!r}; expected a path: write ./{self.run_dir}")
        check_fields(
            self,
            local_batch=">= 0",
            effective_batch=">= 0",
            micro_batch=">= 0",
            keep_best=">= 0",
            recover_limit=">= 0",
            seed=f"[0, {2**32 - 1}]",
            keep_checkpoints=">= 1",
            devices=">= 1",
            stall_timeout_s=">= 0",
        )
        if not isinstance(self.sinks, (tuple, list)):
            raise UsageError(f"sinks: got {self.sinks!r}; expected a tuple, as ('csv',)")
        for sink in self.sinks:
            if not (isinstance(sink, str) or callable(sink)):
                raise UsageError(f"sinks: got {sink!r}; expected a word or a function of a dict")
        for name in ("trace", "profile"):
            step_range(getattr(self, name), name)
        for one, other in (("local_batch", "effective_batch"), ("resume", "from_start")):
            if getattr(self, one) and getattr(self, other):
                raise UsageError(f"got {one} and {other}; give one of them")
        if isinstance(self.log_every, int):
            check_fields(self, log_every=">= 1")
        for name in ("train_for", "eval_every", "checkpoint_every", "replica_check_every", "log_every"):
            text = getattr(self, name)
            if isinstance(text, str) and duration_seconds(text) is None:
                duration_steps(text, 1, 1, 1, name)
        if self.eval_for:
            duration_steps(self.eval_for, 1, 1, 1, "eval_for")
        if not ("%" not in self.train_for and float(re.sub(r"[^\d.]", "", self.train_for)) > 0):
            raise UsageError(f"train_for: got {self.train_for}; expected a duration > 0, as 10ep, 500st, 20000ex or 2h")


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
