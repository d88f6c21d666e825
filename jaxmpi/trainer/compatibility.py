"""Options that do not go together, in one table: field and values, with which other options, why, and the way out.

Pairs that only one dataclass needs to know stand in its own checks. What depends on the ranks that are there, or on the
strategy that `auto` takes, is refused by the part that knows it. `markdown` gives the lines for docs/combining.md.
"""

import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxmpi.allreduce.compression import is_compressor
from jaxmpi.config.data import Data
from jaxmpi.config.flags import flags
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import check
from jaxmpi.data.sources.grain_streams import is_stream
from jaxmpi.optim import optimizers
from jaxmpi.rules import registry
from jaxmpi.runtime.launchers import launched_workers
from jaxmpi.tasks.base import Task


class Refusal(NamedTuple):
    """Values of a field that do not go with other options."""

    field: str  # such as `data.memory`
    values: str  # in the docs
    refuses: Callable[[Any], bool]  # of its value
    beside: Callable[[Experiment], bool]  # the other options
    words: str  # for them, after `with`
    instead: str


def shrinks(experiment: Experiment) -> bool:
    """Return True if the others go on when a worker dies."""
    return experiment.on_rank_loss == "shrink"


def is_asynchronous(experiment: Experiment) -> bool:
    """Return True if workers do not wait for each other."""
    return registry.is_asynchronous(experiment.rule)


def is_delayed(experiment: Experiment) -> bool:
    """Return True if a step uses the gradients of the step before."""
    return experiment.exchange.overlap == "delayed"


def is_periodic(experiment: Experiment) -> bool:
    """Return True if workers step alone between exchanges."""
    return registry.is_periodic(experiment.rule)


def keeps_own(strategy: str) -> bool:
    """Return True if a strategy leaves something with one worker alone."""
    return is_compressor(strategy) or strategy.startswith("none")


def weighs(task: Any) -> bool:
    """Return True if examples weigh differently, whose sum workers need before every step."""
    return task.weight is not None if isinstance(task, Task) else task == "token-classification"


def has_stream(experiment: Experiment) -> bool:
    """Return True if examples of a split have no numbers."""
    return is_streamed(experiment.data)


def is_streamed(data: Any) -> bool:
    """Return True for `Data` with a stream, or a mixture with such a part."""
    if not isinstance(data, Data):
        return False
    if data.source == "mixture":
        pairs = data.train if isinstance(data.train, (tuple, list)) else ()
        return any(map(is_streamed, [data.validation, *(pair[0] for pair in pairs if pair)]))
    return data.source == "grain" and any(map(is_stream, (data.train, data.validation)))


def drives_several(experiment: Experiment) -> bool:
    """Return True if each of several processes drives several devices, between which MPI is not called."""
    return experiment.devices > 1 and experiment.comm == "mpi" and launched_workers() > 1


def knows_its_rates(experiment: Experiment) -> bool:
    """Return True if the optimizer is the user's own and was made with its learning rates."""
    return optimizers.has_own_rate(experiment.optim)


def shards_updates(experiment: Experiment) -> bool:
    """Return True if each worker updates a slice of the params."""
    return experiment.exchange.shard_update == "on"


SHRINK = "--on-rank-loss shrink"
SEVERAL = "several ranks of several devices each, which exchange between programs"
APART = "an asynchronous rule, whose workers do not meet"
OWN_RATE = "an optimizer of one's own that was made with its rates"
TAKE_A_SCHEDULE = "leave it out, or give optim.transform a function of the schedule"
SHARDED = "exchange.shard_update on"
REFUSALS = (
    Refusal(
        "rule.name",
        "all but gradients",
        "gradients".__ne__,
        shards_updates,
        f"{SHARDED}, which is an update with the mean gradient",
        "use rule gradients, or off",
    ),
    Refusal(
        "exchange.overlap",
        "delayed",
        "delayed".__eq__,
        shards_updates,
        f"{SHARDED}, whose slices are of this step's gradients",
        "use auto, on or off",
    ),
    Refusal(
        "exchange.shard_update",
        "on",
        "on".__eq__,
        lambda experiment: shrinks(experiment) and not experiment.exchange.buddy,
        f"{SHRINK} without --exchange.buddy",
        "a dead worker's slice of the optimizer's state is gone: add --exchange.buddy 1, for a copy at the next "
        "worker, or take off",
    ),
    Refusal(
        "exchange.buddy",
        "more than 0",
        (0).__ne__,
        lambda experiment: not shrinks(experiment),
        "--on-rank-loss end, when nobody needs a copy",
        "leave it out, or take --on-rank-loss shrink",
    ),
    Refusal(
        "on_nonfinite",
        "skip",
        "skip".__eq__,
        lambda experiment: experiment.exchange.gather == "late",
        "exchange.gather late, when a step ends before its params are whole on any worker",
        "use stop or rollback, or in-step",
    ),
    Refusal("on_nonfinite", "rollback", "rollback".__eq__, is_asynchronous, APART, "skip or stop"),
    Refusal("batch_statistics", "synchronised", "synchronised".__eq__, is_asynchronous, APART, "averaged or local"),
    Refusal("step_mode", "split", "split".__eq__, is_asynchronous, APART, "auto"),
    Refusal(
        "callbacks",
        "EarlyStop, ReduceOnPlateau",
        lambda callbacks: any(callback.needs_lock_step for callback in callbacks),
        is_asynchronous,
        APART,
        "leave EarlyStop and ReduceOnPlateau out",
    ),
    Refusal(
        "data.source",
        "grain with an IterDataset",
        ("grain", "mixture").__contains__,
        lambda experiment: has_stream(experiment) and is_asynchronous(experiment),
        "an IterDataset and an asynchronous rule, whose workers end no step together",
        "take a MapDataset",
    ),
    Refusal("data.memory", "partition", "partition".__eq__, is_asynchronous, f"{APART} to shuffle", "take another"),
    Refusal(
        "data.memory",
        "partition",
        "partition".__eq__,
        has_stream,
        "an IterDataset of Grain, whose examples have no numbers",
        "take a MapDataset, or none",
    ),
    Refusal(
        "data.on_error",
        "skip",
        "skip".__eq__,
        has_stream,
        "an IterDataset of Grain, whose examples have no numbers",
        "filter corrupt ones in the dataset, or take a MapDataset",
    ),
    Refusal(
        "continue_from",
        "any",
        bool,
        has_stream,
        "an IterDataset of Grain, which goes on at a step of as many examples only",
        "begin with --params, or take a MapDataset",
    ),
    Refusal(
        "on_nonfinite",
        "skip",
        "skip".__eq__,
        is_delayed,
        "exchange.overlap delayed, when a step's gradients are used by the next one, which cannot be left out for them",
        "use stop or rollback, or another overlap",
    ),
    Refusal(
        "on_nonfinite",
        "skip",
        "skip".__eq__,
        is_periodic,
        "rule {rule}, whose workers step alone and would have to agree on every step",
        "use stop or rollback",
    ),
    Refusal(
        "batch_statistics",
        "synchronised",
        "synchronised".__eq__,
        drives_several,
        SEVERAL,
        "it exchanges inside one: take averaged or local, or --comm xla",
    ),
    Refusal(
        "exchange.strategy",
        "compressors",
        is_compressor,
        drives_several,
        SEVERAL,
        "a compressor keeps what each worker owes: take another strategy, or a process a device",
    ),
    Refusal(
        "task",
        "with `weight`, token-classification",
        weighs,
        shrinks,
        SHRINK,
        "its weights are summed over workers before each step, when a death is not noticed in time: take another "
        "task, or --on-rank-loss end",
    ),
    Refusal(
        "callbacks",
        "ReduceOnPlateau",
        lambda callbacks: any(callback.scales_rate for callback in callbacks),
        shrinks,
        SHRINK,
        "an evaluation that a death ends is counted by some workers only, whose rates would then differ: take a "
        "schedule, or --on-rank-loss end",
    ),
    Refusal(
        "data.source",
        "grain with an IterDataset",
        ("grain", "mixture").__contains__,
        lambda experiment: has_stream(experiment) and shrinks(experiment),
        f"an IterDataset and {SHRINK}",
        "examples that a dead worker has read do not come back: take a MapDataset, or --on-rank-loss end",
    ),
    Refusal("comm", "xla", "mpi".__ne__, shrinks, SHRINK, "XLA's collectives end with the first rank: --comm mpi"),
    Refusal("devices", "more than 1", (1).__ne__, shrinks, SHRINK, "it is between processes: leave --devices out"),
    Refusal(
        "rule.name",
        "all but gradients",
        "gradients".__ne__,
        shrinks,
        SHRINK,
        "easgd, asgd and gosgd outlive workers by themselves; of the others only gradients leaves nothing with one "
        "worker alone: take it, or --on-rank-loss end",
    ),
    Refusal(
        "exchange.strategy",
        "compressors, none",
        keeps_own,
        shrinks,
        SHRINK,
        "what a dead worker owes, or has to itself, is gone: take another strategy, or --on-rank-loss end",
    ),
    Refusal(
        "exchange.overlap",
        "on, delayed",
        ("on", "delayed").__contains__,
        shrinks,
        SHRINK,
        "a step must end before the vote on it: take off, or --on-rank-loss end",
    ),
    Refusal(
        "batch_statistics",
        "synchronised",
        "synchronised".__eq__,
        shrinks,
        SHRINK,
        "it has not been tried inside a backward pass: take averaged or local",
    ),
    Refusal(
        "data.memory",
        "partition",
        "none".__ne__,
        shrinks,
        SHRINK,
        "a dead worker's part of the data goes with its memory: take none, or --on-rank-loss end",
    ),
    Refusal("optim.lr", "any", Optim.lr.__ne__, knows_its_rates, OWN_RATE, TAKE_A_SCHEDULE),
    Refusal(
        "optim.lr_scaling", "linear, sqrt", ("linear", "sqrt").__contains__, knows_its_rates, OWN_RATE, TAKE_A_SCHEDULE
    ),
    Refusal("schedule.decay", "any", Schedule.decay.__ne__, knows_its_rates, OWN_RATE, TAKE_A_SCHEDULE),
    Refusal("schedule.warmup", "any", Schedule.warmup.__ne__, knows_its_rates, OWN_RATE, TAKE_A_SCHEDULE),
    Refusal("schedule.rate", "any", callable, knows_its_rates, OWN_RATE, TAKE_A_SCHEDULE),
)


def check_compatible(experiment: Experiment) -> None:
    """Refuse options that do not go together.

    Raises:
        UsageError: a field, what it goes not with, and the way out.
    """
    for row in REFUSALS:
        got = operator.attrgetter(row.field)(experiment)
        words = row.words.format(rule=experiment.rule.name)
        check(not (row.refuses(got) and row.beside(experiment)), f"{row.field}: got {got} with {words}; {row.instead}")
    backend = jax.default_backend() if shrinks(experiment) else "cpu"
    check(backend == "cpu", f"backend: got {backend} with {SHRINK}; it has been tried on CPUs only: --on-rank-loss end")


def markdown() -> str:
    """The table for docs/combining.md, which has it between two marks."""
    known = flags(Experiment())
    periodic = ", ".join(name for name, row in registry.RULES.items() if row.is_periodic)
    lines = ["| option | values | not with | way out |", "|---|---|---|---|"]
    for row in REFUSALS:
        flag = row.field.replace("_", "-")
        option = f"--{flag}" if flag in known else f"{row.field}="
        words = [re.sub(r"--[\w.-]+( (end|mpi|shrink|xla))?", r"`\g<0>`", text) for text in (row.words, row.instead)]
        lines.append(f"| `{option}` | {row.values} | {words[0].format(rule=periodic)} | {words[1]} |")
    return "\n".join(lines) + "\n"
