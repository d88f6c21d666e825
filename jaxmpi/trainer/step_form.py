"""What a step is made of: its programs, what is sent while they compute, and what `auto` becomes.

A step is *fused*, one jit with the exchange inside, or *split*: gradients, exchange and update are three jits. Only a
fused step can exchange buckets during the backward pass. But a program that holds a communicator is never found in the
compile cache, so every rank would compile the whole model for itself: eight ranks on two cores take eight times as
long. Several ranks on CPUs therefore split the step unless the exchange runs beside it (docs/decisions/0007), and so do
processes of several devices, between whose programs MPI is called.

All of this is decided before anything is compiled, alike on all ranks, with a line for the log for each choice. The
exchange that `auto` found is kept by checkpoints, so that a resumed run continues bit for bit.
"""

from enum import StrEnum
from typing import Any, NamedTuple

import jax

from jaxmpi.allreduce import algorithms, comm_thread, compression, overlap
from jaxmpi.allreduce.algorithms.table import algorithms_in_c, with_halves
from jaxmpi.allreduce.api import BUCKET_BYTES
from jaxmpi.allreduce.autotune import choose, is_auto
from jaxmpi.allreduce.sharded import check_floats
from jaxmpi.checkpoint import run_directory
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.core.pytrees import size_bytes
from jaxmpi.core.sharding import ElementSharding, TensorSharding
from jaxmpi.optim import optimizers
from jaxmpi.rules import registry
from jaxmpi.trainer.plan import Plan

# `auto` shards updates if a worker saves this much of the optimizer's state, and sums gradients as they come if it
# saves this much of them.
SAVED_BYTES = BUCKET_BYTES


class UnfitForOverlap(StrEnum):
    """Why a step cannot hide its exchange behind the backward pass."""

    DEVICES = "the {devices} devices of a process add up their gradients before it"
    SCATTERS = "batch statistics are synchronised in the program that would scatter gradients"
    WHOLE = "optimizer {optimizer} takes whole tensors, of which gradients are dealt together"
    HALVES = "the halves of {algorithm} do not run beside a program; those of {able} do"
    SLICES = "batch statistics are synchronised in the program that slices would travel beside"
    VOTES = "a step ends before the vote on it (on_rank_loss shrink)"
    PERIODIC = "rule {rule} exchanges every so many steps only, and no gradients"
    COMPRESSOR = "a compressor exchanges more than once, one after another"
    MICRO_BATCHES = "with gradient accumulation gradients are complete only after the last micro-batch"


class StepForm(NamedTuple):
    """The form of a run's step."""

    is_split: bool  # gradients, exchange and update are jits of their own; else all are one
    overlaps: bool  # buckets are sent during the backward pass
    is_early: bool  # gradients go into a sum in shared memory as they come, so that they never exist together
    why: str  # the exchange is hidden or not, for the log


def choose_form(plan: Plan) -> StepForm:
    """The form that suits these workers.

    Raises:
        UsageError: `exchange.overlap` on, where that cannot be.
    """
    word, obstacle = plan.experiment.exchange.overlap, overlap_obstacle(plan)
    if shares_params(plan):
        saved = size_bytes(plan.param_shapes) * (plan.workers.size - 1) // plan.workers.size
        if word == "auto" and not obstacle and saved < SAVED_BYTES:
            obstacle = f"{saved / 1e6:.3g} MB of gradients less are less than a bucket of {SAVED_BYTES / 1e6:.3g}"
        is_early, why = overlap.chosen_in_memory(word, obstacle)
        return StepForm(is_split=True, overlaps=False, is_early=is_early, why=why)
    overlaps, why = overlap.chosen(word, plan.strategy, plan.workers.comm, obstacle)
    return StepForm(is_split=is_split(plan) and not overlaps, overlaps=overlaps, is_early=False, why=why)


def is_split(plan: Plan) -> bool:
    """Return True if the step is split unless its exchange is hidden."""
    workers = plan.workers
    if workers.devices > 1:
        return True
    return workers.mesh is None and workers.comm.size > 1 and jax.default_backend() == "cpu"


def shares_params(plan: Plan, strategy: str = "") -> bool:
    """Return True if sharded updates write the one copy of the params that the host's ranks share.

    The ranks read these params between programs, so the step is split. The params before a step must not be needed any
    more. With `--comm xla` a step is one program over all devices.

    Args:
        strategy: in place of the plan's.
    """
    experiment, strategy = plan.experiment, strategy or plan.experiment.exchange.strategy
    if experiment.exchange.shard_update != "on" or plan.workers.size == 1 or experiment.comm == "xla":
        return False
    if compression.is_compressor(strategy) or is_auto(strategy) or experiment.exchange.gather_wire != "32":
        return False
    needs_previous = experiment.on_nonfinite == "skip" or experiment.on_rank_loss == "shrink"
    is_near = algorithms.in_shared_memory(strategy) and jax.default_backend() == "cpu"
    return is_near and not needs_previous and is_split(plan) and experiment.devices == 1


def overlap_obstacle(plan: Plan) -> str:
    """Why this step cannot hide an exchange; empty if it can."""
    experiment, workers = plan.experiment, plan.workers
    if workers.devices > 1:
        return UnfitForOverlap.DEVICES.format(devices=workers.devices)
    if experiment.exchange.shard_update == "on" and (reason := shards_obstacle(plan, experiment.exchange.strategy)):
        return reason
    if experiment.on_rank_loss == "shrink":
        return UnfitForOverlap.VOTES
    if registry.is_periodic(experiment.rule):
        return UnfitForOverlap.PERIODIC.format(rule=experiment.rule.name)
    if compression.is_compressor(experiment.exchange.strategy):
        return UnfitForOverlap.COMPRESSOR
    return "" if plan.micro_batch in (0, plan.local_batch) else UnfitForOverlap.MICRO_BATCHES


def shards_obstacle(plan: Plan, strategy: str) -> str:
    """Why the halves of a sharded exchange cannot run while the step computes; empty if they can."""
    experiment, workers = plan.experiment, plan.workers
    if compression.is_compressor(strategy):
        return ""  # refused for itself
    name = "asa:32" if is_auto(strategy) else algorithms.parse(strategy).name
    if shares_params(plan, name):
        if experiment.batch_statistics == "synchronised":
            return UnfitForOverlap.SCATTERS
        if isinstance(sharding_of(plan), TensorSharding):
            return UnfitForOverlap.WHOLE.format(optimizer=experiment.optim.name)
        return ""
    halves, algorithm = algorithms.parse(name).spec.halves, name.partition(":")[0]
    if not halves:
        return ""  # refused for itself
    if not halves.scatter_part:
        if nowhere := comm_thread.unavailable_reason("asa:32", workers.comm):
            return nowhere
        with_both = [(each, algorithms.parse(each).spec.halves) for each in with_halves(workers.comm.hosts)]
        able = ", ".join(each for each, both in with_both if both and both.scatter_part)
        return UnfitForOverlap.HALVES.format(algorithm=algorithm, able=able)
    if experiment.batch_statistics == "synchronised":
        return UnfitForOverlap.SLICES
    return comm_thread.unavailable_reason(f"{algorithm}:{experiment.exchange.gather_wire}", workers.comm) or ""


def sharding_of(plan: Plan) -> ElementSharding | TensorSharding:
    """How sharded updates divide the params among workers.

    Raises:
        UsageError: the optimizer allows none, or params are not float32.
    """
    check_floats(plan.param_shapes)
    return optimizers.sharding_for(plan.experiment.optim, plan.lr, plan.param_shapes, plan.workers.size)


# ---------------------------------------------------------------- what the experiment leaves open


def choose_exchange(plan: Plan, stored: run_directory.StoredSettings | None) -> Plan:
    """The plan with its strategy settled, and a note for each choice; all ranks call it.

    A resumed run keeps what `auto` found before, if these ranks can have it. Else the candidates are timed.

    Communicates: exchanges of `allreduce.autotune`, if `auto` is to be found.
    """
    exchange, comm = plan.experiment.exchange, plan.workers.comm
    if registry.is_asynchronous(plan.experiment.rule):
        return plan.with_exchange(strategy=center_strategy(exchange.strategy))
    if exchange.overlap == "on" and not plan.experiment.micro_batch and plan.micro_batch not in (0, plan.local_batch):
        # Options of the job that began the run must not end a smaller one, whose workers have more examples.
        plan = plan.with_exchange(overlap="off").with_note(
            f"overlap off: a worker's {plan.local_batch} examples are computed in micro-batches of {plan.micro_batch}, "
            f"since the run began with {plan.scaled_for} workers"
        )
        exchange = plan.experiment.exchange
    if not is_auto(exchange.strategy):
        return plan
    kept, dropped = run_directory.settled_exchange(stored, exchange), ""
    if kept:
        if can_keep(plan, kept["strategy"]):
            off = ", overlap off" if kept["overlap"] != exchange.overlap else ""
            return plan.with_exchange(**kept).with_note(f"{exchange.strategy}: {kept['strategy']}{off}, as before")
        dropped = f"{kept['strategy']}, as before, cannot be here; "
    is_sharded = exchange.shard_update == "on"
    candidates = with_halves(comm.hosts, exchange.gather_wire) if is_sharded else ()
    hidden: tuple[str, ...] = ()  # candidates that can run during the backward pass
    if overlap.chosen(exchange.overlap, "asa:32", comm, overlap_obstacle(plan))[0]:
        hidden = algorithms_in_c(comm.hosts)
        if is_sharded:
            hidden = tuple(name for name in candidates if not shards_obstacle(plan, name))
    sizes = [leaf.size for leaf in jax.tree.leaves(plan.param_shapes)]
    found = choose(comm, sizes, exchange.strategy, exchange.bucket_bytes, hidden or candidates)
    options: dict[str, Any] = {}
    if hidden and exchange.overlap == "auto" and not found.overlap:
        found = choose(comm, sizes, exchange.strategy, exchange.bucket_bytes, candidates)
        options["overlap"] = "off"
        dropped += "overlap off, since most of an exchange is work for cores, which compute already; "
    plan = plan.with_exchange(strategy=found.strategy, bucket_bytes=found.bucket_bytes, **options)
    return plan.with_note(dropped + found.why)


def can_keep(plan: Plan, name: str) -> bool:
    """Return True if these ranks and options allow the strategy that `auto` found before."""
    exchange, comm = plan.experiment.exchange, plan.workers.comm
    strategy, algorithm = algorithms.parse(name), name.partition(":")[0]
    must_hide = comm.size > 1 and exchange.overlap == "on"
    if exchange.shard_update == "on":
        is_able = algorithm in with_halves(comm.hosts, exchange.gather_wire)
        is_able = is_able and not (must_hide and shards_obstacle(plan, algorithm))
    else:
        is_able = not must_hide or strategy.is_in_c(comm.hosts)
    return is_able and strategy.spec.fits(comm.hosts)


def center_strategy(name: str) -> str:
    """The strategy of params between asynchronous workers and their center, in the requested wire."""
    wire = name.partition(":")[2] or "32" if is_auto(name) else algorithms.parse(name).name.partition(":")[2]
    return f"root:{wire}"


def with_sharding(plan: Plan, word: str) -> Plan:
    """The plan with sharded updates on, or off."""
    return plan.with_exchange(
        shard_update=word, **({} if word == "on" else {"gather_wire": ExchangeConfig.gather_wire})
    )


def most_padding(arrays: float, workers: int) -> float:
    """The padding of whole tensors with which a step copies as much as without sharding.

        8 p (w - 1) / w = (3 + 2 s) (1 - (1 + p) / w)

    p is a share of the params and w the number of workers. Padding is sent in both halves, read and written by sender
    and receiver. An update reads and writes gradients, params twice and s arrays of state twice, of which 1/w is left.

    Args:
        arrays: s, of the optimizer's state, in params.
    """
    passes = 3 + 2 * arrays
    return passes * (workers - 1) / (8 * (workers - 1) + passes)
