"""Sums of a program's buckets by the communication thread: the calls in the program, and the functions that they call.

In a program an exchange is three kinds of calls. `open` numbers it, in the order of programs, so that all ranks give a
bucket the same number. `start` hands a bucket to the thread and returns at once. It waits for nothing but its own
gradients. So XLA runs it when they are there, on each rank in an order of its own. `done`, after the last start, waits
until a bucket holds the sum. The bucket passes through both in one buffer, which the thread changes in between: nothing
is copied, and XLA, for which only these calls use the buffer, leaves it alone. Python sees the buffers of a GPU as
copies. So on a GPU `start` leaves a copy with the thread, and `done` takes the sum from the thread.

Messages have no names. So ranks that run two programs of equal shapes in different orders would add up gradients of
different programs. `open` therefore has the thread compare over ranks which exchange each has come to, and buckets wait
for that. The comparison travels while the program computes; waiting for it in `open` would put it before each step.
"""

import functools
import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce import host_engine
from jaxmpi.allreduce.algorithms import STRATEGIES, parse
from jaxmpi.allreduce.comm_thread import THREAD, PendingExchange, comm_thread, same_calls
from jaxmpi.allreduce.host_engine import HostEngine, HostSum
from jaxmpi.comm.agreement import fingerprint
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.core.errors import check
from jaxmpi.runtime import host_callbacks
from jaxmpi.runtime.host_callbacks import copy_unless_shared

OPEN, START, DONE = (f"{THREAD}: {verb}" for verb in ("open", "start", "done"))
RANK = f"{THREAD}: rank"
OPENINGS = 64  # exchanges of which it is known whether ranks have agreed on them; fewer are under way
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
    return _unavailable_handlers(comm) or host_engine.unavailable_reason(comm) or None


@functools.cache
def _unavailable_handlers(comm: MpiComm) -> str:
    """Why a rank cannot call the thread from a program; empty if all can. All come here together at first."""
    return next(filter(None, comm.processes.allgather_object(host_callbacks.unavailable_reason() or "")), "")


def all_reduce_on_comm_thread(
    vectors: Sequence[jax.Array],
    strategy: str,
    comm: Comm,
    plan: Any,
    labels: Sequence[str],
    *,
    half: str = "",
    what: str = "",
    portable: bool = False,
) -> list[jax.Array]:
    """f32[n] each -> their sums over workers, by the communication thread.

    Each starts when it is ready; when all have, they are waited for in turn. No wait may be left out, though nobody
    uses its sum: until then the thread writes into the program's buffer. On a GPU it has a buffer of its own.

    Args:
        strategy: its full name.
        plan: what must be the same on all ranks, JSON.
        labels: of the vectors, for messages.
        half: of the strategy's sum, `scatter` or `gather`; empty: all of it.
        what: the exchange's name, for ranks to compare whenever a program comes to it; empty: they do not.
        portable: the program can be exported. Then data alone orders waits, so results of the first sums may be used
            while the last are under way. Else the calls are ordered among mpi4jax's, so that none of these waits for
            one behind it.
    """
    handlers = exchange_handlers()
    counts = [handlers.engine.record(strategy, half, vector.size).count for vector in vectors]
    most = handlers.control.tags // 2  # a resumed exchange has the upper half
    check(sum(counts) <= most, f"got {sum(counts)} segments of gradients, expected {most} or fewer; use overlap off")
    effect = host_callbacks.ORDERED if portable or not isinstance(comm, MpiComm) else comm.effect
    opening = {"segments": sum(counts), "plan": json.dumps(plan), "what": what}
    [ticket] = host_callbacks.call(OPEN, [], [TICKET], effect=effect, **opening)
    is_copied = bool(host_callbacks.why_copies())
    place: list[tuple[int, int]] = [] if is_copied else [(0, 0)]
    firsts = np.cumsum([0, *counts[:-1]]).tolist()
    started = []  # results of each bucket's start: on a CPU the buffer into which the sum comes, and a ticket
    for vector, first, label in zip(vectors, firsts, labels, strict=True):
        results = [TICKET] if is_copied else [like(vector), TICKET]
        bucket = {"strategy": strategy, "half": half, "first": first, "label": label}
        started.append(host_callbacks.call(START, [vector, ticket], results, place, None, **bucket))
    before, sums = [own for *_, own in started], []  # tickets of all starts: no wait may hold up a computation
    is_free = effect is host_callbacks.ORDERED and not is_copied  # a GPU's calls run one after another anyway
    for vector, buffer_and_ticket, first in zip(vectors, started, firsts, strict=True):
        operands, results = [*buffer_and_ticket, *before], [like(vector), TICKET]
        options = {"first": first} | ({"is_copied": 1} if is_copied else {})
        order = host_callbacks.KEPT if is_free else effect
        total, last = host_callbacks.call(DONE, operands, results, place, order, **options)
        sums, before = [*sums, total], [last]
    return sums


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# ---------------------------------------------------------------- called by programs


class ExchangeHandlers:
    """Exchanges over all ranks of the job, on the communication thread."""

    def __init__(self, comm: MpiComm) -> None:
        """Register the functions; all ranks call this together."""
        host_engine.unavailable_reason(comm)  # all ranks agree on it here, though one may trace for others
        self.thread, self.engine = comm_thread(), HostEngine(comm)
        self.control = self.engine.control
        self._comparisons_comm = self.control.clone()
        self.count = 0  # segments so far, in all programs; equal on all ranks
        self._agreed: set[str] = set()  # plans
        self._comparisons: dict[int, PendingExchange] = {}  # by ticket, of which exchange it is
        calls = {OPEN: self._open, START: self._start, DONE: self._done, RANK: self._rank}
        for name, function in calls.items():
            host_callbacks.register(name, function, ends_job=True)

    def _rank(self, operands: list, results: list) -> None:
        """i32[]: the rank that runs a program; another may have traced it."""
        results[0][...] = self.control.rank

    def _open(self, operands: list, results: list, segments: int, plan: str, what: str) -> None:
        """Ticket u32[]: the number of the exchange's first segment.

        Ranks compare a plan, which is JSON, when it is first used. They compare `what`, if it is given, at every call.
        """
        self.thread.note("open")
        if what:  # first: ranks at different exchanges may have plans that some of them know already
            steps = same_calls(self._comparisons_comm, self.control, what)
            comparison = PendingExchange(f"the comparison of {what}", np.empty(0), steps, control=self.control)
            self._comparisons = {**dict(list(self._comparisons.items())[-OPENINGS:]), self.count: comparison}
            self.thread.hand_over(comparison)
        if plan not in self._agreed:
            self.control.compare(fingerprint("the exchange beside a program", json.loads(plan)))
            self._agreed.add(plan)
        results[0][...] = self.count
        self.count = (self.count + segments) % 2**32

    def _start(self, operands: list, results: list, **bucket: Any) -> None:
        """(bucket, ticket) -> ([the bucket, which is not ready,] ticket)."""
        x, ticket = operands
        *place, own = results
        check(
            not (place and host_callbacks.sees_copies()),
            "an exchange beside a program was traced where programs run on CPUs, and runs on a GPU; expected one kind "
            "of device: trace and export it on a GPU",
        )
        own[...] = ticket
        if place:
            copy_unless_shared(x, place[0])
        self._carry((int(ticket), bucket["first"]), place[0] if place else x.copy(), int(ticket), **bucket)

    def _done(self, operands: list, results: list, first: int, is_copied: int = 0) -> None:
        """([bucket,] ticket, what must be there before) -> (sum, ticket); waits."""
        ticket = operands[1 - is_copied]
        pending = self.thread.wait((int(ticket), first))
        if is_copied:
            np.copyto(results[0], pending.bucket)
        else:
            moved = pending.bucket.ctypes.data != operands[0].ctypes.data
            advice = "use --exchange.overlap off, and report this"
            check(not moved, f"XLA has moved {pending.label} while it travelled; {advice}")
            copy_unless_shared(operands[0], results[0])
        results[1][...] = ticket

    def _carry(
        self,
        key: tuple[int, ...],
        x: np.ndarray,
        number: int,
        *,
        strategy: str,
        half: str,
        first: int,
        label: str,
    ) -> None:
        plan = self.engine.plan(strategy, half, [x.size])
        begin = functools.partial(HostSum, self.engine, plan, x, (number + first) % self.engine.tags)
        after = self._comparisons.get(number)
        pending = PendingExchange(label, x, after=after, control=self.control, begin_sum=begin)
        self.thread.unclaimed[key] = pending
        self.thread.note("start", label)
        self.thread.hand_over(pending)


@functools.cache
def exchange_handlers() -> ExchangeHandlers:
    """This process's; all ranks make the first call together."""
    comm = world()
    assert isinstance(comm, MpiComm)
    return ExchangeHandlers(comm)
