"""The table of options that do not go together, and its check.

A row has field and values, what they do not go with, why, and the way out. Rows about one dataclass stand beside it,
and refuse when it is made. `IN_A_JOB` has the words of refusals that depend on more, such as hosts, or the strategy
that `auto` takes. The part that knows it raises them. The tables of docs/combining.md are made of both.
"""

from enum import StrEnum
from typing import Any

import jax

from jaxmpi.allreduce import algorithms, building_blocks, comm_thread, overlap, zero
from jaxmpi.allreduce.compression import is_compressor
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.comm import base
from jaxmpi.config import data, exchange_config, schema
from jaxmpi.config.data import Data
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.refusals import incompatible, refuse_incompatible
from jaxmpi.config.schema import Experiment
from jaxmpi.core import sharding
from jaxmpi.core.errors import check, lookup
from jaxmpi.data import feed, memory_source
from jaxmpi.data.sources import mixture
from jaxmpi.data.sources.grain_datasets import is_stream
from jaxmpi.optim.optimizers import OPTIMIZERS, has_own_rate
from jaxmpi.recover import shrink
from jaxmpi.rules import averaged, registry
from jaxmpi.runtime.process import launched_workers
from jaxmpi.tasks.base import Task
from jaxmpi.trainer import callbacks, step, training_plan


def shrinks(experiment: Experiment) -> bool:
    """Return True if the others go on when a worker dies."""
    return experiment.on_rank_loss == "shrink"


def is_asynchronous(experiment: Experiment) -> bool:
    """Return True if workers do not wait for each other."""
    return registry.is_asynchronous(experiment.rule)


def keeps_own(strategy: str) -> bool:
    """Return True if a strategy leaves something with one worker alone."""
    return is_compressor(strategy) or not algorithms.exchanges(strategy)


def weighs(task: Any) -> bool:
    """Return True if examples weigh differently.

    Workers then sum the weights before every step.
    """
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
        is_asynchronous,
        ASYNCHRONOUS,
        ("on_nonfinite", "rollback", "skip or stop"),
        ("batch_statistics", "synchronised", "averaged or local"),
        ("step_mode", "split", "auto"),
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
            weighs,
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
            keeps_own,
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
        ("optim.lr_scaling", "linear, sqrt", OWN_RATE),
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
        lambda x: lookup(registry.RULES, x.rule.name, "rule").uses("momentum") and x.optim.name != "sgd",
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
        ("exchange.strategy", "compressors, none", "give a strategy with one of the wires {wires}", keeps_own),
        form="{field}: got {got} with {words}: {instead}",
    ),
    *incompatible(
        lambda x: x.optim.transform is None and x.optim.name in OPTIMIZERS and not OPTIMIZERS[x.optim.name].by,
        "optimizer {optim.name}, which evaluates an average of its own",
        ("exchange.shard_update", "on", "expected {cut}, or off"),
    ),
)


class UnfitForOverlap(StrEnum):
    """Why a step cannot hide its exchange."""

    DEVICES = "the {devices} devices of a process add up their gradients before it"
    SCATTERS = "batch statistics are synchronised in the program that would scatter gradients"
    WHOLE = "optimizer {optimizer} takes whole tensors, of which gradients are dealt together"
    HALVES = "the halves of {algorithm} do not run beside a program; those of {able} do"
    SLICES = "batch statistics are synchronised in the program that slices would travel beside"
    SPLIT = "the step is split (step_mode split)"
    VOTES = "a step ends before the vote on it (on_rank_loss shrink)"
    PERIODIC = "rule {rule} exchanges every so many steps only, and no gradients"
    COMPRESSOR = "a compressor exchanges more than once, one after another"
    MICRO_BATCHES = "gradients come to exist with the last micro-batch only"


BACKEND = "backend: got {backend} with --on-rank-loss shrink; it has been tried on CPUs only: --on-rank-loss end"
AVERAGES = (
    "{asked}: got optimizer {optimizer}, which is schedule-free: it evaluates an average of its own, made for one "
    "rate; leave it out"
)
WHOLE_AVERAGES = (
    "exchange.shard_update: got on with optimizer {optimizer}, which is schedule-free: it evaluates an average of its "
    "own, of whole params; use off"
)
ONE_JIT = "step_mode: got split with {devices} devices of one process, which share one jit; use auto or fused"
ALWAYS_SPLIT = (
    "step_mode: got fused with {devices} devices of each of {ranks} processes, between whose programs sums travel; the "
    "step is split there: use auto"
)
IN_A_JOB = (
    ONE_JIT,
    ALWAYS_SPLIT,
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
    training_plan.NO_EPOCHS,
    memory_source.TEXT,
    memory_source.ENDLESS,
    memory_source.NO_GROUP,
    feed.NO_FILES,
    feed.NO_SPANS,
    mixture.STREAM,
)
REFUSALS = (*schema.REFUSALS, *exchange_config.REFUSALS, *data.REFUSALS, *AT_START)


def check_step_mode(experiment: Experiment, ranks: int) -> None:
    """Refuse a form that several devices of so many processes cannot have."""
    mode, devices = experiment.step_mode, experiment.devices
    if devices > 1 and experiment.comm == "mpi":
        check(ranks > 1 or mode != "split", ONE_JIT.format(devices=devices))
        check(ranks == 1 or mode != "fused", ALWAYS_SPLIT.format(devices=devices, ranks=ranks))


def check_compatible(experiment: Experiment) -> None:
    """Refuse incompatible options, as far as the options alone show it.

    Raises:
        UsageError: a field, what it goes not with, and the way out.
    """
    cut = ", ".join(name for name, row in OPTIMIZERS.items() if row.by)
    refuse_incompatible(AT_START, experiment, wires=", ".join(WIRES), cut=cut)
    backend = jax.default_backend() if shrinks(experiment) else "cpu"
    check(backend == "cpu", BACKEND.format(backend=backend))
