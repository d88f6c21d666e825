"""The table of options that do not go together, and its check.

A row has a field with its values, what they do not go with, why, and the way out. Rows about one dataclass stand with
that dataclass, and are refused when it is made. `IN_A_JOB` has the words of refusals that depend on more, such as
hosts, or the strategy that `auto` found; the part that knows it raises them. The tables of docs/combining.md are made
of both.
"""

from typing import Any

import jax

from jaxmpi.allreduce import algorithms, building_blocks, comm_thread, overlap, zero
from jaxmpi.allreduce.compression import is_compressor
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm import base
from jaxmpi.config import data, exchange_config, schema
from jaxmpi.config.data import Data
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.schema import Experiment
from jaxmpi.config.validate import incompatible, refuse_incompatible
from jaxmpi.core import sharding
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.data import feed, memory_source
from jaxmpi.data.sources import mixture
from jaxmpi.data.sources.grain_datasets import is_stream
from jaxmpi.optim.optimizers import OPTIMIZERS, has_own_rate
from jaxmpi.recover import shrink
from jaxmpi.rules import averaged, registry
from jaxmpi.runtime.process import launched_workers
from jaxmpi.tasks.base import Task
from jaxmpi.trainer import callbacks, plan, step
from jaxmpi.trainer.step_form import UnfitForOverlap


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


def has_stream(experiment: Experiment) -> bool:
    """Return True if examples of a split have no numbers."""
    return is_streamed(experiment.data)


def is_streamed(part: Any) -> bool:
    """Return True if `Data` has a stream, alone or in a mixture."""
    if not isinstance(part, Data):
        return False
    if part.source == "mixture":
        pairs = part.train if isinstance(part.train, (tuple, list)) else ()
        return any(map(is_streamed, [part.validation, *(pair[0] for pair in pairs if pair)]))
    return part.source == "grain" and any(map(is_stream, (part.train, part.validation)))


def drives_several(experiment: Experiment) -> bool:
    """Return True if each of several MPI processes drives several devices."""
    return experiment.devices > 1 and experiment.comm == "mpi" and launched_workers() > 1


def evaluates_average(experiment: Experiment) -> bool:
    """Return True for a schedule-free optimizer by name, whose state has no shards."""
    optim = experiment.optim
    return optim.transform is None and optim.name in OPTIMIZERS and not OPTIMIZERS[optim.name].by


def has_foreign_momentum(experiment: Experiment) -> bool:
    """Return True for a rule with a momentum over an optimizer other than sgd."""
    return lookup(registry.RULES, experiment.rule.name, "rule").uses("momentum") and experiment.optim.name != "sgd"


SHARDED, SHRINK, END = "exchange.shard_update on", "--on-rank-loss shrink", "or --on-rank-loss end"
ASYNCHRONOUS = "an asynchronous rule, whose workers do not meet"
OWN_RATE = "leave it out, or give optim.transform a function of the schedule"
STREAM = "grain with an IterDataset"
is_streaming, is_not_gradients, is_several = ("grain", "mixture").__contains__, "gradients".__ne__, (1).__ne__
AT_START = (
    *incompatible(
        lambda x: x.exchange.shard_update == "on",
        f"{SHARDED}, which is an update with the mean gradient",
        ("rule.name", "all but gradients", "use rule gradients, or off", is_not_gradients),
    ),
    *incompatible(
        lambda x: lookup(registry.RULES, x.rule.name, "rule").sums_updates,
        "a rule that sums updates, whose step grows with the number of workers already",
        ("optim.lr_for_batch", "any", "leave it out, or take another rule"),
    ),
    *incompatible(
        is_asynchronous,
        ASYNCHRONOUS,
        ("on_nonfinite", "rollback", "skip or stop"),
        ("batch_statistics", "synchronised", "averaged or local"),
        (
            "callbacks",
            "EarlyStop, ReduceOnPlateau",
            "leave EarlyStop and ReduceOnPlateau out",
            lambda callbacks: any(callback.needs_lock_step for callback in callbacks),
        ),
    ),
    *incompatible(
        lambda x: has_stream(x) and is_asynchronous(x),
        "an IterDataset and an asynchronous rule, whose workers end no step together",
        ("data.source", STREAM, "take a MapDataset", is_streaming),
    ),
    *incompatible(is_asynchronous, f"{ASYNCHRONOUS} to shuffle", ("data.memory", "partition", "take another")),
    *incompatible(
        has_stream,
        "an IterDataset of Grain, whose examples have no numbers",
        ("data.memory", "partition", "take a MapDataset, or none"),
        ("data.on_error", "skip", "filter corrupt ones in the dataset, or take a MapDataset"),
    ),
    *incompatible(
        has_stream,
        "an IterDataset of Grain, which goes on at a step of as many examples only",
        ("continue_from", "any", "begin with --params, or take a MapDataset"),
    ),
    *incompatible(
        lambda x: registry.is_periodic(x.rule),
        "rule {rule.name}, whose workers step alone and would have to agree on every step",
        ("on_nonfinite", "skip", "use stop or rollback"),
    ),
    *incompatible(
        drives_several,
        "several ranks of several devices each, which exchange between programs",
        ("batch_statistics", "synchronised", "it exchanges inside one: take averaged or local, or --comm xla"),
        (
            "exchange.strategy",
            "compressors",
            "a compressor keeps what each worker owes: take another strategy, or a process a device",
            is_compressor,
        ),
    ),
    *incompatible(
        shrinks,
        SHRINK,
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
            lambda callbacks: any(callback.scales_rate for callback in callbacks),
        ),
        ("comm", "xla", "XLA's collectives end with the first rank: --comm mpi"),
        ("devices", "above 1", "it is between processes: leave --devices out", is_several),
        (
            "rule.name",
            "all but gradients",
            "easgd, asgd and gosgd outlive workers by themselves; of the others only gradients leaves nothing with one "
            f"worker alone: take it, {END}",
            is_not_gradients,
        ),
        (
            "exchange.strategy",
            "compressors, none",
            f"what a dead worker owes, or has to itself, is gone: take another strategy, {END}",
            keeps_residual,
        ),
        ("exchange.overlap", "on", f"a step must end before the vote on it: take off, {END}"),
        ("batch_statistics", "synchronised", "it has not been tried inside a backward pass: take averaged or local"),
        ("data.memory", "partition", f"a dead worker's part of the data goes with its memory: take none, {END}"),
    ),
    *incompatible(
        lambda x: has_stream(x) and shrinks(x),
        f"an IterDataset and {SHRINK}",
        (
            "data.source",
            STREAM,
            f"examples that a dead worker has read do not come back: take a MapDataset, {END}",
            is_streaming,
        ),
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
        is_asynchronous,
        "an asynchronous rule, whose workers are processes of their own",
        ("devices", "above 1", "leave it out, and start as many ranks (mpirun -n 4, jaxmpi train -n 4)", is_several),
    ),
    *incompatible(is_asynchronous, ASYNCHRONOUS, ("comm", "xla", "take --comm mpi")),
    *incompatible(
        has_foreign_momentum,
        "rule {rule.name} and optimizer {optim.name}",
        ("rule.momentum", "any", "EAMSGD is rule easgd over optim.name sgd, others bring a momentum of their own"),
    ),
    *incompatible(
        is_asynchronous,
        "the asynchronous rule {rule.name}: its workers have made different numbers of steps, which no single place in "
        "the data stands for",
        ("continue_from", "any", "begin a new run from its params: jaxmpi export RUN FOLDER, then --params FOLDER"),
    ),
    *incompatible(
        is_asynchronous,
        "an asynchronous rule, which takes its wire only",
        ("exchange.strategy", "compressors, none", "give a strategy with one of the wires {wires}", keeps_residual),
        form="{field}: got {got} with {words}: {instead}",
    ),
    *incompatible(
        evaluates_average,
        "optimizer {optim.name}, which evaluates an average of its own",
        ("exchange.shard_update", "on", "expected {cut}, or off"),
    ),
)


BACKEND = "backend: got {backend} with --on-rank-loss shrink; it has been tried on CPUs only: --on-rank-loss end"
AVERAGES = (
    "{asked}: got optimizer {optimizer}, which is schedule-free: it evaluates an average of its own, made for one "
    "rate; leave it out"
)
WHOLE_AVERAGES = (
    "exchange.shard_update: got on with optimizer {optimizer}, which is schedule-free: it evaluates an average of its "
    "own, of whole params; use off"
)
IN_A_JOB = (
    *(overlap.UNFIT.format(asked="on", reason=why) for why in (*comm_thread.UnfitForThread, *UnfitForOverlap)),
    BACKEND,
    *shrink.NEEDS,
    base.ONE_HOST,
    building_blocks.UNEVEN,
    zero.NO_HALVES,
    zero.NO_FIT,
    zero.NO_WIRE,
    sharding.NO_WORD,
    sharding.WRONG_WORD,
    averaged.OWN_PARAMS,
    averaged.OWN_AVERAGE,
    AVERAGES,
    WHOLE_AVERAGES,
    step.NO_BATCH_MEAN,
    callbacks.NO_STOP,
    plan.NO_EPOCHS,
    memory_source.TEXT,
    memory_source.ENDLESS,
    memory_source.NO_GROUP,
    feed.NO_FILES,
    feed.NO_SPANS,
    mixture.STREAM,
)
REFUSALS = (*schema.REFUSALS, *exchange_config.REFUSALS, *data.REFUSALS, *AT_START)


def check_compatible(experiment: Experiment) -> None:
    """Refuse incompatible options, as far as the options alone show it."""
    cut = ", ".join(name for name, row in OPTIMIZERS.items() if row.by)
    refuse_incompatible(AT_START, experiment, wires=", ".join(WIRES), cut=cut)
    if shrinks(experiment) and (backend := jax.default_backend()) != "cpu":
        raise UsageError(BACKEND.format(backend=backend))
