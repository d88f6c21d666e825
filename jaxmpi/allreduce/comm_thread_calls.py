"""Sums of a program's buckets, made by the communication thread."""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce import host_engine
from jaxmpi.allreduce.algorithms import STRATEGIES, parse
from jaxmpi.allreduce.comm_thread_handlers import DONE, OPEN, START, exchange_handlers
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.core.errors import check
from jaxmpi.runtime import host_callbacks

TICKET = jax.ShapeDtypeStruct((), jnp.uint32)


class UnfitForThread(StrEnum):
    """Why an exchange cannot run beside a program."""

    NO_MPI = "workers are not MPI ranks"
    PART = "workers are a part of the job's ranks"
    NOT_ON_HOST = "strategy {strategy} does not run beside a program; {able} do, as jaxmpi has them and by its wires"
    RANKS = (
        "strategy {strategy} is not for these ranks: hier-<cross> needs equally many on every host, tree 2, 4, 8 or "
        "another power of two"
    )
    ONE_THREAD = "MPI gives MPI_THREAD_SERIALIZED, and two threads at once need MPI_THREAD_MULTIPLE"


def unavailable_reason(strategy: str, comm: Comm) -> str | None:
    """Why this exchange cannot run beside a program; None if it can.

    The same on all ranks.
    """
    if comm.size == 1:
        return "no other worker takes part in a step"
    if not isinstance(comm, MpiComm):
        return UnfitForThread.NO_MPI
    if comm.processes.size < world().size:
        return UnfitForThread.PART
    chosen = parse(strategy)
    if not chosen.is_in_c():
        able = ", ".join(name for name, row in STRATEGIES.items() if row.parts)
        return UnfitForThread.NOT_ON_HOST.format(strategy=strategy, able=able)
    if not chosen.is_in_c(comm.hosts):
        return UnfitForThread.RANKS.format(strategy=strategy)
    if not comm.processes.may_overlap:
        return UnfitForThread.ONE_THREAD
    return host_callbacks.unavailable_reason() or host_engine.unavailable_reason(comm) or None


class Calls(NamedTuple):
    """Facts of one exchange that its calls need."""

    plan: str  # JSON: what must be the same on all ranks
    what: str  # this exchange's name, which ranks compare whenever a program comes to it; empty: they do not
    buckets: list[dict[str, Any]]  # facts of each: strategy, half of it or all, number of its first segment, label
    segments: int  # number of segments of all buckets
    effect: Any  # JAX effect that orders exchanges among other calls

    @classmethod
    def of(
        cls,
        strategy: str,
        comm: Comm,
        plan: Any,
        vectors: Sequence[jax.Array | jax.ShapeDtypeStruct],
        labels: Sequence[str],
        portable: bool,
        what: str = "",
        half: str = "",
    ) -> "Calls":
        """The calls that exchange these vectors.

        Unless portable, the effect is that of mpi4jax, so that none of its calls waits for one behind it.

        Args:
            strategy: its full name.
            plan: what must be the same on all ranks, JSON.
            labels: of the vectors, for messages.
            portable: the program can be exported.
            what: the exchange's name, for ranks to compare at each run.
            half: of the strategy's sum, `scatter` or `gather`; empty: all of it.
        """
        record = exchange_handlers().engine.record
        ends = np.cumsum([0, *(record(strategy, half, vector.size).count for vector in vectors)]).tolist()
        most = exchange_handlers().control.tags // 2  # a resumed exchange has the upper half
        check(ends[-1] <= most, f"got {ends[-1]} segments of gradients, expected {most} or fewer; use overlap off")
        each = zip(ends[:-1], labels, strict=True)
        buckets = [{"strategy": strategy, "half": half, "first": first, "label": label} for first, label in each]
        effect = host_callbacks.ORDERED if portable or not isinstance(comm, MpiComm) else comm.effect
        return cls(json.dumps(plan), what, buckets, ends[-1], effect)

    def opened(self, segments: int) -> dict[str, Any]:
        """Attributes of the call that opens an exchange of so many segments."""
        return {"segments": segments, "plan": self.plan, "what": self.what}


def labelled(names: Sequence[str], buckets: Sequence[Sequence[int]]) -> list[str]:
    """Labels of buckets, as `bucket 2 of 7 (conv1/kernel and 3 more)`."""
    more = [f" and {len(bucket) - 1} more" if len(bucket) > 1 else "" for bucket in buckets]
    return [f"bucket {b + 1} of {len(buckets)} ({names[bucket[0]]}{more[b]})" for b, bucket in enumerate(buckets)]


def travelled(vectors: Sequence[jax.Array], calls: Calls) -> list[jax.Array]:
    """f32[n] each -> their sums over workers, by the communication thread.

    Each starts when it is ready; when all have, they are waited for in turn. In a portable program data alone orders
    waits, so results of the first sums may travel beside the last. No wait may be left out, though nobody uses its sum:
    until then the thread writes into the program's buffer. On a GPU it has a buffer of its own.
    """
    [ticket] = host_callbacks.call(OPEN, [], [TICKET], effect=calls.effect, **calls.opened(calls.segments))
    is_copied = bool(host_callbacks.why_copies())
    place: list[tuple[int, int]] = [] if is_copied else [(0, 0)]
    started = []  # results of each bucket's start: on a CPU the buffer into which the sum comes, and a ticket
    for vector, bucket in zip(vectors, calls.buckets, strict=True):
        results = [TICKET] if is_copied else [like(vector), TICKET]
        started.append(host_callbacks.call(START, [vector, ticket], results, place, None, **bucket))
    before, sums = [own for *_, own in started], []  # tickets of all starts: no wait may hold up a computation
    is_free = calls.effect is host_callbacks.ORDERED and not is_copied  # a GPU's calls run one after another anyway
    effect = host_callbacks.KEPT if is_free else calls.effect
    for vector, buffer_and_ticket, bucket in zip(vectors, started, calls.buckets, strict=True):
        operands, results = [*buffer_and_ticket, *before], [like(vector), TICKET]
        options = {"first": bucket["first"]} | ({"is_copied": 1} if is_copied else {})
        total, last = host_callbacks.call(DONE, operands, results, place, effect, **options)
        sums, before = [*sums, total], [last]
    return sums


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
