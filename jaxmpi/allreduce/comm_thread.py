"""The communication thread of a rank, and the Python functions by which programs hand it buckets.

In a program an exchange is three kinds of calls. `open` numbers it, in the order of programs, so that all ranks give a
bucket the same number. `start` hands a bucket to the thread and returns at once; it waits for nothing but its own
gradients, so XLA runs it when they are there, on each rank in an order of its own. `done`, after the last start, waits
until a bucket holds the sum. The bucket passes through both in one buffer, which the thread changes in between: nothing
is copied, and XLA, for which only these calls use the buffer, leaves it alone.

An exchange that goes on in the next step has `send` and `collect` instead, which copy: its buckets outlive a program.
Buckets have turns: while one is under way no segment of a later one is begun. What a program waits for before it hands
over the next bucket is of the first turn, so ranks that hand over in different orders do not wait for each other.

Messages have no names, so ranks that run two programs of equal shapes in different orders would add up gradients of
different programs. `open` therefore has the thread compare over ranks which exchange each has come to, and buckets wait
for that. The comparison travels while the program computes; waiting for it in `open` would put it before each step.
"""

import functools
import hashlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.allreduce.algorithms.table import HostSum
from jaxmpi.allreduce.host_comm import HostComm, Requests, some_are_complete
from jaxmpi.comm.agreement import different_calls, fingerprint
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.exchange_watch import BESIDE, Roll
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.comm.polling import WaitClock
from jaxmpi.core import scheduling
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.runtime import host_callbacks, spans
from jaxmpi.runtime.host_callbacks import copy_unless_shared
from jaxmpi.runtime.mpi_end import before_mpi_ends

THREAD = "jaxmpi exchange"
OPEN, START, DONE, SEND, COLLECT = (f"{THREAD}: {verb}" for verb in ("open", "start", "done", "send", "collect"))
RANK = f"{THREAD}: rank"
# Between two looks at messages that have not come: beside a computation, whose time each look takes, and when somebody
# waits. Enough is under way to keep a link busy meanwhile.
CALM_S, HURRY_S = 0.002, 0.0003
WINDOW = 24  # segments of a bucket under way at once; with more of a tree's, what goes up holds up what comes down
WHAT_BYTES = 256  # of an exchange's name, for messages; ranks compare its digest, too
LATE = itertools.count()  # programs whose buckets travel behind the next step; all ranks make the same
OPENINGS = 64  # exchanges of which it is known whether ranks have agreed on them; fewer are under way
TIMEOUT_S = seconds_from("JAXMPI_EXCHANGE_TIMEOUT_S", 1800)
PATIENT_S = 0.5  # without a message before a rank looks whether another has given up


@dataclass(eq=False)
class Job:
    """A bucket on its way."""

    label: str
    bucket: np.ndarray  # f32[n], the thread's to change until it is summed
    waiting: Iterator[Iterator[Requests]]  # segments not yet begun
    opening: "Opening | None" = None  # the exchange's, if ranks compare which it is
    roll: Roll | None = None  # of a comparison: where other ranks are
    turn: int = 0  # the least of those under way has the link
    under_way: int = 0  # segments
    has_all: bool = False  # whether no segment is left to begin
    start_s: float = field(default_factory=time.perf_counter)
    summed: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class Opening:
    """An exchange that ranks have come to, while they compare which it is."""

    what: str
    is_agreed: bool = False
    held: list[Job] = field(default_factory=list)  # buckets that are ready, and wait for the comparison


class Segment(NamedTuple):
    """Part of a bucket, and what it waits for."""

    job: Job
    sum: Iterator[Requests]
    requests: Requests


class Event(NamedTuple):
    """Events of buckets, with their times."""

    what: str  # open | start | summed | wait | done
    label: str
    time_s: float  # of time.perf_counter


class CommThread:
    """The communication thread, and what programs call to reach it."""

    def __init__(self, control: MpiProcesses, order: tuple[int, ...], hosts: tuple[int, ...]) -> None:
        """Start the thread; all ranks call this together, and each has one such thread.

        Args:
            control: agreement between ranks, used by no other thread.
            order: ranks by host.
            hosts: of every rank.
        """
        self.control, self.comm = control, HostComm(control.world.Clone(), order, hosts)
        self._openings_comm = control.world.Clone()
        self.count = 0  # segments so far, in all programs; equal on all ranks
        self.jobs: dict[tuple[int, ...], Job] = {}  # that nobody has waited for yet
        self.events: deque[Event] = deque(maxlen=4096)  # for whom it interests
        self._agreed: set[str] = set()  # plans
        self._openings: dict[int, Opening] = {}  # by ticket, of exchanges that ranks compare
        self._arrived: deque[Job] = deque()
        self._begun: dict[Job, None] = {}  # and not yet summed
        self._turn = 0  # the least of theirs
        self._segments: list[Segment] = []
        self._wake = threading.Condition()
        self._is_ending = self._is_waited_for = False
        self._waited = WaitClock()  # since the last message came or went
        calls = {OPEN: self._open, START: self._start, DONE: self._done, SEND: self._send, COLLECT: self._collect}
        calls[RANK] = self._rank
        for name, function in calls.items():
            host_callbacks.register(name, function, ends_job=True)
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()
        before_mpi_ends(self.stop)

    def stop(self) -> None:
        """End the thread once programs that still run have had their sums, and what is under way has arrived."""
        try:
            jax.effects_barrier()
        finally:  # a program that failed fails here once more
            with self._wake:
                self._is_ending = True
                self._wake.notify()
            self._thread.join()

    # ------------------------------------------------------------ called by programs

    def _rank(self, operands: list, results: list) -> None:
        """Number i32[] of the rank that runs a program, which another one may have traced."""
        results[0][...] = self.comm.mpi.rank

    def _open(self, operands: list, results: list, segments: int, plan: str, what: str) -> None:
        """Ticket u32[]: the number of the exchange's first segment.

        Ranks compare a plan, which is JSON, when it is first used, and `what` at every call, if it is given.
        """
        self._note("open")
        if what:  # first: ranks at different exchanges may have plans that some of them know already
            opening = Opening(what)
            self._openings = {**dict(list(self._openings.items())[-OPENINGS:]), self.count: opening}
            steps = iter([self._compared(opening)])
            self.hand_over(Job(f"the comparison of {what}", np.empty(0), steps, roll=self.control.roll))
        if plan not in self._agreed:
            self.control.compare(fingerprint("the exchange beside a program", json.loads(plan)))
            self._agreed.add(plan)
        results[0][...] = self.count
        self.count = (self.count + segments) % 2**32

    def _start(self, operands: list, results: list, **bucket: Any) -> None:
        """(bucket, ticket) -> (the bucket, which is not ready, ticket)."""
        copy_unless_shared(operands[0], results[0])
        results[1][...] = operands[1]
        self._carry((int(operands[1]), bucket["first"]), results[0], int(operands[1]), **bucket)

    def _done(self, operands: list, results: list, first: int) -> None:
        """(bucket, ticket, what must be there before) -> (sum, ticket); waits."""
        job = self.wait((int(operands[1]), first))
        moved = job.bucket.ctypes.data != operands[0].ctypes.data
        check(not moved, f"XLA has moved {job.label} while it travelled; use --exchange.overlap off, and report this")
        copy_unless_shared(operands[0], results[0])
        results[1][...] = operands[1]

    def _send(self, operands: list, results: list, late: int, **bucket: Any) -> None:
        """(bucket, ticket, number u32[] of this step[, part i32[]]) -> (ticket); a copy travels."""
        x, ticket, number, *part = operands
        self._carry((late, int(number), bucket["first"]), placed(x, self.comm.size, *part), int(ticket), **bucket)
        results[0][...] = ticket

    def _collect(self, operands: list, results: list, late: int, again: int, **bucket: Any) -> None:
        """(bucket, number of its step, ticket of this step, what must be there before) -> (its sum); waits.

        If it is not under way, as after a resume, it is sent now: on all ranks alike. Of a bucket of which each worker
        has one part, the number of that part comes behind the ticket.
        """
        x, number, ticket = operands[:3]
        key = late, int(number), bucket["first"]
        if key not in self.jobs:
            part = operands[3:4] if x.size < results[0].size else []
            self._carry(key, placed(x, self.comm.size, *part), int(ticket) + again, **bucket)
        np.copyto(results[0], self.wait(key).bucket)

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
        turn: int = 0,
    ) -> None:
        total = HostSum.named(strategy, self.comm, half)
        tags = [(number + first + i) % self.control.tags for i in range(total.segments(x.size))]
        job = self.jobs[key] = Job(label, x, total.of(x, tags), self._openings.get(number), turn=turn)
        self._note("start", label)
        self.hand_over(job)

    def hand_over(self, job: Job) -> None:
        """Have the thread begin a job."""
        with self._wake:
            self._arrived.append(job)
            self._wake.notify()

    def wait(self, key: tuple[int, ...]) -> Job:
        """The job of that key, once it is done; it is forgotten."""
        job = self.jobs.pop(key)
        self._note("wait", job.label)
        self._is_waited_for = True
        with spans.span("wait", job.label):
            job.summed.wait()
        self._is_waited_for = False
        self._note("done", job.label)
        return job

    def _note(self, what: str, label: str = "") -> None:
        self.events.append(Event(what, label, time.perf_counter()))

    # ------------------------------------------------------------ the thread's own

    def _run(self) -> None:
        scheduling.flush_subnormals()
        scheduling.take_short_turns()
        with np.errstate(all="ignore"):  # NaN and infinity pass through to all ranks
            while self._take():
                if not self._poll():
                    time.sleep(HURRY_S if self._is_waited_for else CALM_S)

    def _take(self) -> bool:
        """Begin what has arrived, waiting if there is nothing else to do; False at the end."""
        with self._wake:
            while not (self._arrived or self._segments or self._is_ending):
                self._wake.wait()
                self._waited.restart()
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        for job in arrived:
            if job.opening is None or job.opening.is_agreed:
                self.begin(job)
            else:
                job.opening.held.append(job)
        return bool(self._segments or not self._is_ending)

    def _compared(self, opening: Opening) -> Iterator[Requests]:
        """Compare over ranks which exchange each has come to; then buckets that are held begin.

        Raises:
            UsageError: ranks have come to different exchanges.
        """
        what = opening.what.encode()
        mine = hashlib.sha256(what).digest() + what[-WHAT_BYTES:].ljust(WHAT_BYTES)  # the innermost lines come last
        rows = np.empty((self.comm.size, len(mine)), np.uint8)
        with self.control.roll.waiting(BESIDE, opening.what):
            yield [self._openings_comm.Iallgather(np.frombuffer(mine, np.uint8), rows)]
        if (rows != rows[0]).any():
            whats = [row[-WHAT_BYTES:].tobytes().decode(errors="replace").rstrip() for row in rows]
            digests = [row[:4].tobytes().hex() for row in rows]
            is_cut = len(set(whats)) < len(set(digests))
            named = [f"{a} ({b})" for a, b in zip(whats, digests, strict=True)] if is_cut else whats
            raise UsageError(different_calls(dict(enumerate(named))))
        opening.is_agreed = True
        held, opening.held = opening.held, []  # openings are kept for a while, and jobs hold gradients
        for job in held:
            self.begin(job)

    def begin(self, job: Job) -> None:
        """Have up to WINDOW segments of a job under way if it is its turn; it is summed if none is left."""
        if job.summed.is_set():
            return
        self._begun[job] = None
        self._turn = min(other.turn for other in self._begun)
        while job.turn == self._turn and job.under_way < WINDOW and not job.has_all:
            segment = next(job.waiting, None)
            job.has_all = segment is None
            if segment is not None:
                job.under_way += 1
                self._resume(job, segment)
        if job.has_all and job.under_way == 0:
            del self._begun[job]
            self._note("summed", job.label)
            spans.note("travel", job.label, job.start_s, time.perf_counter())
            job.summed.set()
            if self._begun and job.turn < min(other.turn for other in self._begun):
                for other in list(self._begun):
                    self.begin(other)

    def _resume(self, job: Job, segment: Iterator[Requests]) -> None:
        """Go on with a segment, whose messages have come, to its next messages or its end."""
        requests = next(segment, None)
        if requests is not None:
            self._segments.append(Segment(job, segment, requests))
        else:
            job.under_way -= 1

    def _poll(self) -> bool:
        """Look once at all messages; go on with the segments that have theirs. False if nothing has come."""
        if not some_are_complete([request for s in self._segments for request in s.requests]):
            self._check_time()
            return not self._segments
        self._waited.restart()
        ready = [s for s in self._segments if not any(s.requests)]
        self._segments = [s for s in self._segments if any(s.requests)]
        for segment in ready:
            self._resume(segment.job, segment.sum)
        for job in dict.fromkeys(s.job for s in ready):
            self.begin(job)
        return True

    def _check_time(self) -> None:
        """Give up on ranks that do not come; those that do ask each other who is not there."""
        waited_s = self._waited.look()
        if self._segments and (waited_s > TIMEOUT_S or (waited_s > PATIENT_S and self.control.is_asked())):
            late, job = self.control.in_job(self.control.late()), self._segments[0].job
            raise TrainingError(
                f"{job.label} has waited {waited_s:.0f} s for rank {late}; all ranks must exchange "
                f"as often (JAXMPI_EXCHANGE_TIMEOUT_S sets the time){job.roll.where(late) if job.roll else ''}"
            )


def placed(x: np.ndarray, parts: int, part: np.ndarray | None = None) -> np.ndarray:
    """A copy of f32[n]; of one of `parts` equal parts of a vector that vector, zeros but for this part."""
    if part is None:
        return x.copy()
    whole = np.zeros((parts, x.size), x.dtype)
    whole[int(part)] = x
    return whole.reshape(-1)


@functools.cache
def comm_thread() -> CommThread:
    """This process's communication thread; all ranks make the first call together."""
    comm = world()
    assert isinstance(comm, MpiComm)
    return CommThread(comm.processes.apart(), comm.order, comm.hosts)
