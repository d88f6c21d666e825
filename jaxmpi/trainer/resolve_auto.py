"""Choices that an experiment leaves open: the strategy `auto`, and `--exchange.shard-update auto`.

They are resolved before the step is built: its form, the rule's state and what a checkpoint holds depend on them. Each
choice comes with a line for the log that says why. The exchange is that of the run that is resumed, so that it goes on
bit for bit. A new run has a probe of these ranks choose (`allreduce/autotune.py`). Updates are sharded if they can be
and a worker saves enough. To find out, rule and exchange are built once with sharded updates, in shapes alone; their
error, if there is one, is the reason why not.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax

from jaxmpi.allreduce import algorithms, overlap
from jaxmpi.allreduce.algorithms.table import algorithms_in_c, with_halves
from jaxmpi.allreduce.autotune import choose, is_auto
from jaxmpi.checkpoint import run_directory
from jaxmpi.comm.base import Comm
from jaxmpi.config import exchange_config
from jaxmpi.core import errors
from jaxmpi.core.pytrees import size_bytes
from jaxmpi.rules import registry
from jaxmpi.trainer.build import rule_in_program, rule_state
from jaxmpi.trainer.compatibility import check_compatible
from jaxmpi.trainer.step_form import (
    SAVED_BYTES,
    chosen_overlap,
    sharding_of,
    shares_params,
    unfit_for_overlap,
    unfit_slices,
)
from jaxmpi.trainer.training_plan import Job, with_exchange

# ---------------------------------------------------------------- the exchange


def resolve_overlap(job: Job) -> tuple[Job, str]:
    """Drop overlap if fewer workers need micro-batches; return why.

    Options for the workers that began the run must not end it on fewer, of which each has more examples. Micro-batches
    that the user asks for are refused with them.
    """
    asked, plan = job.experiment.exchange, job.plan
    local_batch = plan.feed.samplers[0].local_batch
    is_own = not job.experiment.micro_batch and plan.micro_batch not in (0, local_batch)
    if not (is_own and asked.overlap == "on"):
        return job, ""
    why = (
        f"overlap off: a worker's {local_batch} examples are computed in "
        f"micro-batches of {plan.micro_batch}, since the run began with {plan.scaled_for} workers"
    )
    return with_exchange(job, overlap="off"), why


def resolve_exchange(job: Job, kept: run_directory.StoredSettings | None) -> tuple[Job, str]:
    """Settle `auto` as strategy, bucket size and overlap, and return why.

    The line is empty if nothing was left open. The choice is that of the run that is resumed, so that the run goes on
    bit for bit. Without one, or if these ranks cannot have it, a probe chooses.
    """
    asked, comm = job.experiment.exchange, job.workers.comm
    if registry.is_asynchronous(job.experiment.rule):
        return with_exchange(job, strategy=to_center(asked)), ""
    if not is_auto(asked.strategy):
        return job, ""
    stored = run_directory.settled_exchange(kept, asked)
    unfit = partial(unfit_slices, job) if asked.shard_update == "on" else None
    if stored and can_go_on(stored["strategy"], asked, comm, unfit):
        resolved = with_exchange(job, **stored)
        exchange = resolved.experiment.exchange
        off = ", overlap off" if exchange.overlap != asked.overlap else ""
        return resolved, f"{asked.strategy}: {exchange.strategy}{off}, as before"
    sizes = [leaf.size for leaf in jax.tree.leaves(job.plan.params())]
    is_beside, _ = overlap.chosen(asked.overlap, "asa:32", comm, unfit_for_overlap(job))
    alone = with_halves(comm.hosts, asked.gather_wire) if unfit else ()
    beside = tuple(name for name in alone if not unfit(name)) if unfit else algorithms_in_c(comm.hosts)
    exchange, why = probed(asked, comm, sizes, beside if is_beside else (), alone)
    gone = f"{stored['strategy']}, as before, cannot be here; " if stored else ""
    return job.with_fields(exchange=exchange), gone + why


def probed(
    asked: exchange_config.ExchangeConfig,
    comm: Comm,
    sizes: Sequence[int],
    beside: Sequence[str],
    alone: Sequence[str] = (),
) -> tuple[exchange_config.ExchangeConfig, str]:
    """Probe strategies for these leaves, overlapping ones if overlap pays; say why.

    Args:
        beside: algorithms that can travel beside the step; none if overlap is off.
        alone: those that can be without overlap; none given: all.
    """
    verdict = choose(comm, sizes, asked.strategy, asked.bucket_bytes, beside or alone)
    if beside and asked.overlap == "auto" and not verdict.overlap:
        without, why = probed(dataclasses.replace(asked, overlap="off"), comm, sizes, (), alone)
        return without, f"{why}; overlap off: most of an exchange is work for cores, which compute already"
    return dataclasses.replace(asked, strategy=verdict.strategy, bucket_bytes=verdict.bucket_bytes), verdict.why


def can_go_on(
    name: str, asked: exchange_config.ExchangeConfig, comm: Comm, unfit: Callable[[str], str] | None = None
) -> bool:
    """Return True if these ranks and options allow `auto`'s earlier strategy.

    Args:
        unfit: of sharded updates: why the halves of an algorithm cannot travel beside the step.
    """
    strategy, algorithm = algorithms.parse(name), name.partition(":")[0]
    must = comm.size > 1 and asked.overlap == "on"
    if unfit:
        is_able = algorithm in with_halves(comm.hosts, asked.gather_wire) and not (must and unfit(algorithm))
    else:
        is_able = not must or strategy.is_in_c(comm.hosts)
    return is_able and strategy.spec.fits(comm.hosts)


def to_center(asked: exchange_config.ExchangeConfig) -> str:
    """The strategy of params between workers and center, in the requested wire."""
    if is_auto(asked.strategy):
        return f"root:{asked.strategy.partition(':')[2] or '32'}"
    return f"root:{algorithms.parse(asked.strategy).name.partition(':')[2]}"


# ---------------------------------------------------------------- sharded updates


def resolve_shards(job: Job) -> tuple[Job, str]:
    """Settle `--exchange.shard-update auto` as on or off, and return why.

    The line is empty if nothing was left open. Updates are sharded if they can be, each worker holds at least
    SAVED_BYTES less, and rows of whole tensors have not too much padding. Communicates nothing: all ranks know the
    same.
    """
    if job.experiment.exchange.shard_update != "auto":
        return job, ""
    on, off = (with_shards(job, word) for word in ("on", "off"))
    workers, strategy, why = job.workers, job.experiment.exchange.strategy, why_whole(on)
    if not why and not shares_params(on, strategy) and chosen_overlap(off, strategy)[0]:
        unfit = unfit_slices(on, strategy)
        why = f"the exchange goes on beside the backward pass, and sharded it could not: {unfit}" if unfit else ""
    if not why:
        whole, own = (state_bytes(each) for each in (off, on))
        padding, most = sharding_of(on).padding, most_padding(whole / size_bytes(job.plan.params()), workers.size)
        if padding > most:
            filled = f"filled up by {padding:.0%} of the params, above {most:.0%}".replace("%", " %")
            why = f"rows of whole tensors would be {filled}: more would be copied than updates save"
        elif whole - own >= SAVED_BYTES:
            of = f"{own / 1e6:.3g} of {whole / 1e6:.3g} MB of the optimizer's state"
            return on, f"exchange.shard_update auto: on, each of {workers.size} workers holds {of}"
        else:
            saved = f"{(whole - own) / 1e6:.3g} MB of the optimizer's state"
            why = f"each worker would hold {saved} less, which is less than a bucket of {SAVED_BYTES / 1e6:.3g}"
    return off, f"exchange.shard_update auto: off, {why}"


def most_padding(arrays: float, workers: int) -> float:
    """Padding with which a step copies as much as without sharding.

        8 p (w - 1) / w = (3 + 2 s) (1 - (1 + p) / w)

    Padding is a share p of n params, and w is the number of workers. Padding p n travels in both halves, read and
    written by sender and receiver. An update reads and writes gradients, params twice and s arrays of state twice, of
    which a row is left.

    Args:
        arrays: s, of the optimizer's state, in params.
    """
    passes = 3 + 2 * arrays
    return passes * (workers - 1) / (8 * (workers - 1) + passes)


def with_shards(job: Job, word: str) -> Job:
    """The job with sharded updates on, or off."""
    whole = {} if word == "on" else {"gather_wire": "32"}
    return with_exchange(job, shard_update=word, **whole)


def why_whole(on: Job) -> str:
    """Why each worker updates all params; empty if updates can be sharded.

    Args:
        on: with sharded updates, its strategy chosen.
    """
    if on.workers.size == 1:
        return "there is one worker"
    if on.experiment.on_rank_loss == "shrink":
        return "on_rank_loss shrink would go back to a checkpoint, since a dead worker takes its shard with it"
    try:
        check_compatible(on.experiment)
        rule_state(rule_in_program(on), on.plan.params())
        chosen_overlap(on, on.experiment.exchange.strategy)
    except errors.UsageError as error:
        return str(error)
    return ""


def state_bytes(job: Job) -> int:
    """Bytes of the rule's state that one worker holds."""
    return size_bytes(rule_state(rule_in_program(job), job.plan.params()))
