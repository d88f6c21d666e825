"""The Python functions by which programs hand buckets to the communication thread.

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
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxmpi.allreduce import host_engine
from jaxmpi.allreduce.comm_thread import THREAD, Opening, PendingExchange, Requests, comm_thread, same_calls
from jaxmpi.allreduce.host_engine import HostEngine, HostSum
from jaxmpi.comm.agreement import fingerprint
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.core.errors import check
from jaxmpi.runtime import host_callbacks
from jaxmpi.runtime.host_callbacks import copy_unless_shared

OPEN, START, DONE = (f"{THREAD}: {verb}" for verb in ("open", "start", "done"))
RANK = f"{THREAD}: rank"
OPENINGS = 64  # exchanges of which it is known whether ranks have agreed on them; fewer are under way


class ExchangeHandlers:
    """Exchanges over all ranks of the job, on the communication thread."""

    def __init__(self, comm: MpiComm) -> None:
        """Register the functions; all ranks call this together."""
        host_engine.unavailable_reason(comm)  # all ranks agree on it here, though one may trace for others
        self.thread, self.control = comm_thread(), comm.processes.on_own_communicator()
        self.engine = HostEngine(self.control.world.Clone(), comm.order, comm.hosts)
        self._openings_comm = self.control.world.Clone()
        self.count = 0  # segments so far, in all programs; equal on all ranks
        self._agreed: set[str] = set()  # plans
        self._openings: dict[int, Opening] = {}  # by ticket, of exchanges that ranks compare
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
            opening = Opening(what)
            self._openings = {**dict(list(self._openings.items())[-OPENINGS:]), self.count: opening}
            label, steps = f"the comparison of {what}", self._compared(opening)
            self.thread.hand_over(PendingExchange(label, np.empty(0), steps, control=self.control))
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
        record, tags = self.engine.record(strategy, half, x.size), self.control.tags
        begin = functools.partial(HostSum, record, x, (number + first) % tags, tags)
        opening = self._openings.get(number)
        pending = PendingExchange(label, x, opening=opening, control=self.control, begin_sum=begin)
        self.thread.unclaimed[key] = pending
        self.thread.note("start", label)
        self.thread.hand_over(pending)

    def _compared(self, opening: Opening) -> Iterator[Requests]:
        """Compare over ranks which exchange each has reached; then begin held buckets."""
        yield from same_calls(self._openings_comm, self.control, opening.what)
        opening.is_agreed = True
        held, opening.held = opening.held, []  # openings are kept for a while, and exchanges hold gradients
        for pending in held:
            self.thread.begin(pending)


@functools.cache
def exchange_handlers() -> ExchangeHandlers:
    """This process's; all ranks make the first call together."""
    comm = world()
    assert isinstance(comm, MpiComm)
    return ExchangeHandlers(comm)
