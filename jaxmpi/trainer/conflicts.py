"""The table of options that do not go together, and its check.

A row has a field with its values, what they do not go with, why, and the way out. What depends on more, such as hosts,
or the strategy that `auto` found, is refused by the part that knows it. The table of docs/combining.md is made of these
rows.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxmpi.allreduce import algorithms
from jaxmpi.allreduce.compression import is_compressor
from jaxmpi.config.data import Data, validation_sets
from jaxmpi.config.durations import duration_seconds
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.data.sources.grain_datasets import is_stream
from jaxmpi.optim.optimizers import has_own_rate
from jaxmpi.rules import registry
from jaxmpi.runtime.process import launched_workers
from jaxmpi.tasks.base import Task


class Refusal(NamedTuple):
    """Values of a field that do not go with other options: the words of an error, and a row of docs/combining.md."""

    field: str  # such as `data.memory`
    values: str  # in the docs; `any` is any that is given
    beside: Callable[[Any], object]  # the other options
    words: str  # for them; names in braces are fields
    instead: str
    refuses: Callable[[Any], object] | None = None  # by its value; None: as `values` says


def incompatible(beside: Callable[[Any], object], words: str, *rows: tuple) -> tuple[Refusal, ...]:
    """Refusals with the same `beside` and `words`; rows have the other fields."""
    return tuple(Refusal(field, values, beside, words, *rest) for field, values, *rest in rows)


def shrinks(experiment: Experiment) -> bool:
    """Return True if the others continue when a worker dies."""
    return experiment.on_rank_loss == "shrink"


def is_asynchronous(experiment: Experiment) -> bool:
    """Return True if workers do not wait for each other."""
    return registry.is_asynchronous(experiment.rule)


def keeps_residual(strategy: str) -> bool:
    """Return True if a strategy leaves something with one worker alone."""
    return is_compressor(strategy) or not algorithms.exchanges(strategy)


def has_weights(task: Any) -> bool:
    """Return True if examples weigh differently; workers then sum the weights before every step."""
    return task.weight is not None if isinstance(task, Task) else task == "token-classification"


def is_streamed(part: Any) -> bool:
    """Return True if `Data` has a stream, whose examples have no numbers, alone or in a mixture."""
    if not isinstance(part, Data):
        return False
    sets = [data.validation for data in validation_sets(part).values()]
    if part.source == "mixture":
        pairs = part.train if isinstance(part.train, (tuple, list)) else ()
        return any(map(is_streamed, [*sets, *(pair[0] for pair in pairs if pair)]))
    return part.source == "grain" and any(map(is_stream, (part.train, *sets)))


END, OWN_RATE = "or --on-rank-loss end", "leave it out, or give optim.transform a function of the schedule"
STREAM, NOT_IN_LOCK_STEP = "grain with an IterDataset", "leave EarlyStop and ReduceOnPlateau out"
is_by_clock = lambda duration: isinstance(duration, str) and duration_seconds(duration) is not None  # noqa: E731
is_streaming, is_not_gradients, is_several = ("grain", "mixture").__contains__, "gradients".__ne__, (1).__ne__
TIMED_FIELDS = "train_for", "eval_every", "checkpoint_every", "log_every", "replica_check_every"
REFUSALS = (
    *incompatible(
        lambda x: lookup(registry.RULES, x.rule.name, "rule").sums_updates,
        "a rule that sums updates, whose step grows with the number of workers already",
        ("optim.lr_for_batch", "any", "leave it out, or take another rule"),
    ),
    *incompatible(
        is_asynchronous,
        "an asynchronous rule, whose workers do not meet",
        ("on_nonfinite", "rollback", "skip or stop"),
        ("batch_statistics", "synchronised", "averaged or local"),
        *((name, "in h, min or s", "give epochs, steps or examples", is_by_clock) for name in TIMED_FIELDS),
        ("callbacks", "EarlyStop, ReduceOnPlateau", NOT_IN_LOCK_STEP, lambda own: any(x.needs_lock_step for x in own)),
        ("data.memory", "partition", "take another"),
        ("devices", "above 1", "start as many ranks (mpirun -n 4, jaxmpi train -n 4)", is_several),
        ("comm", "xla", "take --comm mpi"),
        ("exchange.strategy", "compressors, none", "it takes the wire of a strategy only", keeps_residual),
    ),
    *incompatible(
        lambda x: is_streamed(x.data) and (is_asynchronous(x) or shrinks(x)),
        "an IterDataset, and workers that end no step together or may die",
        ("data.source", STREAM, "what a worker has read does not come back: take a MapDataset", is_streaming),
    ),
    *incompatible(
        lambda x: is_streamed(x.data),
        "an IterDataset of Grain, whose examples have no numbers",
        ("data.memory", "partition", "take a MapDataset, or none"),
        ("data.on_error", "skip", "filter corrupt ones in the dataset, or take a MapDataset"),
    ),
    *incompatible(
        lambda x: registry.is_periodic(x.rule),
        "rule {rule.name}, whose workers step alone and would have to agree on every step",
        ("on_nonfinite", "skip", "use stop or rollback"),
    ),
    *incompatible(
        lambda x: x.devices > 1 and x.comm == "mpi" and launched_workers() > 1,
        "several ranks of several devices each, which exchange between programs",
        ("batch_statistics", "synchronised", "it exchanges inside one: take averaged or local, or --comm xla"),
        ("exchange.strategy", "compressors", "take another strategy, or a process a device", is_compressor),
    ),
    *incompatible(
        lambda x: x.exchange.shard_update == "on",
        "exchange.shard_update on, which is an update with the mean gradient",
        ("rule.name", "all but gradients", "use rule gradients, or off", is_not_gradients),
    ),
    *incompatible(
        shrinks,
        "--on-rank-loss shrink",
        (
            "task",
            "with `weight`, token-classification",
            "its weights are summed over workers before each step, when a death is not noticed in time: take another "
            f"task, {END}",
            has_weights,
        ),
        (
            "callbacks",
            "ReduceOnPlateau",
            "an evaluation that a death ends is counted by some workers only, whose rates would then differ: take a "
            f"schedule, {END}",
            lambda own: any(callback.scales_rate for callback in own),
        ),
        ("comm", "xla", "XLA's collectives end with the first rank: --comm mpi"),
        ("devices", "above 1", "it is between processes: leave --devices out", is_several),
        (
            "rule.name",
            "all but gradients",
            f"only gradients leaves nothing with one worker: take it, {END}",
            is_not_gradients,
        ),
        (
            "exchange.strategy",
            "compressors, none",
            f"a dead worker's residual is gone: take another, {END}",
            keeps_residual,
        ),
        ("exchange.overlap", "on", f"a step must end before the vote on it: take off, {END}"),
        ("batch_statistics", "synchronised", "it has not been tried inside a backward pass: take averaged or local"),
        ("data.memory", "partition", f"a dead worker's part of the data goes with its memory: take none, {END}"),
    ),
    *incompatible(
        lambda x: has_own_rate(x.optim),
        "an optimizer of one's own that was made with its rates",
        ("optim.lr", "any", OWN_RATE, Optim.lr.__ne__),
        ("optim.lr_for_batch", "any", OWN_RATE),
        ("schedule.decay", "any", OWN_RATE, Schedule.decay.__ne__),
        ("schedule.warmup", "any", OWN_RATE, Schedule.warmup.__ne__),
        ("schedule.rate", "any", OWN_RATE, callable),
    ),
    *incompatible(
        lambda x: lookup(registry.RULES, x.rule.name, "rule").uses("momentum") and x.optim.name != "sgd",
        "rule {rule.name} and optimizer {optim.name}",
        ("rule.momentum", "any", "EAMSGD is rule easgd over optim.name sgd, others bring a momentum of their own"),
    ),
)


def check_compatible(experiment: Experiment) -> None:
    """Raise `UsageError` for options that do not go together, as far as the options alone show it."""
    for row in REFUSALS:
        got = operator.attrgetter(row.field)(experiment)
        is_one = got if row.values == "any" else got in row.values.split(", ")
        if (row.refuses(got) if row.refuses else is_one) and row.beside(experiment):
            words, instead = (text.format(**vars(experiment)) for text in (row.words, row.instead))
            raise UsageError(f"{row.field}: got {got} with {words}; {instead}")
    if shrinks(experiment) and (backend := jax.default_backend()) != "cpu":
        raise UsageError(
            f"backend: got {backend} with --on-rank-loss shrink; it has been tried on CPUs only: --on-rank-loss end"
        )
