"""The communication thread of a process, for messages while programs compute.

It carries the buckets of exchanges (`comm_thread_programs`) and started operations (`jaxmpi.collectives`), each on a
communicator of its own. The thread itself is the process's own: it starts without other ranks.

Sums of buckets are C's (`host_engine`). All else, such as started operations, is Python's: generators that yield
messages to wait for.
"""

import functools
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.allreduce import host_engine
from jaxmpi.allreduce.host_engine import TIMEOUT_S, HostSum, late_error
from jaxmpi.comm.agreement import different_calls
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.diagnosis import BESIDE
from jaxmpi.comm.polling import WaitClock
from jaxmpi.core import scheduling
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.runtime import progress
from jaxmpi.runtime.failures import call_before_finalize

Requests = list[Any]  # requests of mpi4py
THREAD = "jaxmpi exchange"
# Between two looks at messages that have not come: beside a computation, whose time each look takes, and when somebody
# waits. Enough is under way to keep a link busy meanwhile.
CALM_S, HURRY_S, HURRY_IN_C_S = 0.002, 0.0003, 0.00005
YIELDS_IN_C = 20  # looks before the first pause, if somebody waits
WHAT_BYTES = 256  # bytes of an exchange's name, for messages; ranks compare its digest, too
PATIENT_S = 0.5  # without a message before a rank looks whether another has given up
MOST_IN_C_S = 0.1  # for which C carries sums on by itself


@dataclass(eq=False)
class PendingExchange:
    """A bucket that is being exchanged, or a started operation."""

    label: str
    bucket: np.ndarray  # f32[n], the thread's to change until it is summed
    steps: Iterator[Requests] = field(default_factory=lambda: iter(()))  # messages to wait for, one after another
    after: "PendingExchange | None" = None  # which must have ended before this one begins, such as a comparison
    control: MpiProcesses | None = None  # control plane of the ranks that all take part; it says who is late
    lost: Callable[[], TrainingError] | None = None  # error of a message, in which two ranks take part
    begin_sum: Callable[[], HostSum] | None = None  # in place of steps
    sum: HostSum | None = None  # while it is under way
    start_s: float = field(default_factory=time.perf_counter)
    followers: list["PendingExchange"] = field(default_factory=list)  # that wait for this one to end
    summed: threading.Event = field(default_factory=threading.Event)


class Event(NamedTuple):
    """Events of buckets, with their times."""

    what: str  # open | start | summed | wait | done
    label: str
    time_s: float  # seconds of time.perf_counter


class CommThread:
    """The communication thread: it sees to messages under way, on any communicator."""

    def __init__(self) -> None:
        """Start the thread; each process has one."""
        self.unclaimed: dict[tuple[int, ...], PendingExchange] = {}  # that nobody has waited for yet
        self.events: deque[Event] = deque(maxlen=4096)  # for whom it interests
        self._arrived: deque[PendingExchange] = deque()
        self._begun: dict[PendingExchange, None] = {}  # and not yet summed
        self._requests: dict[PendingExchange, Requests] = {}  # for which they wait
        self._wake = threading.Condition()
        self._is_ending = self._is_waited_for = False
        self._pace = host_engine.Pace(pause_us=int(1e6 * CALM_S))
        self._waited = WaitClock()  # since the last message came or went
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()
        call_before_finalize(self.stop)

    def stop(self) -> None:
        """Wait for running programs and messages under way, then end the thread."""
        try:
            jax.effects_barrier()
        finally:  # a program that failed fails here once more
            with self._wake:
                self._is_ending = True
                self._wake.notify()
            self._thread.join()

    # ------------------------------------------------------------ called by handlers

    def hand_over(self, pending: PendingExchange) -> None:
        """Have the thread begin an exchange."""
        with self._wake:
            self._arrived.append(pending)
            self._pace.is_woken = 1
            self._wake.notify()

    def wait(self, key: tuple[int, ...]) -> PendingExchange:
        """The exchange of that key, once it is done; it is forgotten."""
        pending = self.unclaimed.pop(key)
        self.note("wait", pending.label)
        self._be_waited_for(True)
        with progress.span("wait", pending.label):
            pending.summed.wait()
        self._be_waited_for(False)
        self.note("done", pending.label)
        return pending

    def _be_waited_for(self, is_waited_for: bool) -> None:
        self._is_waited_for = is_waited_for
        self._pace.yields, pause_s = (YIELDS_IN_C, HURRY_IN_C_S) if is_waited_for else (0, CALM_S)
        self._pace.pause_us = int(1e6 * pause_s)

    def note(self, what: str, label: str = "") -> None:
        """Keep an event."""
        self.events.append(Event(what, label, time.perf_counter()))

    # ------------------------------------------------------------ the thread's own

    def _run(self) -> None:
        scheduling.flush_subnormals()
        scheduling.take_short_turns()
        with np.errstate(all="ignore"):  # NaN and infinity pass through to all ranks
            while self._take():
                has_moved, pause_s = self._poll(), HURRY_S if self._is_waited_for else CALM_S
                if any(pending.sum for pending in self._begun):
                    has_moved |= self._carry_on(pause_s if self._requests else MOST_IN_C_S)
                elif self._requests and not has_moved:
                    time.sleep(pause_s)
                if has_moved:
                    self._waited.restart()
                else:
                    self._check_time()

    def _take(self) -> bool:
        """Begin what has arrived, waiting if idle; False at the end."""
        with self._wake:
            while not (self._arrived or self._begun or self._is_ending):
                self._wake.wait()
                self._waited.restart()
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
            self._pace.is_woken = 0
        for pending in arrived:
            if pending.after is None or pending.after.summed.is_set():
                self._begin(pending)
            else:
                pending.after.followers.append(pending)
        return bool(self._begun or not self._is_ending)

    def _begin(self, pending: PendingExchange) -> None:
        self._begun[pending], pending.after = None, None
        if pending.begin_sum:
            pending.sum = pending.begin_sum()
        else:
            self._resume(pending)

    def _resume(self, pending: PendingExchange) -> None:
        """Go on to the next messages or the end."""
        requests = next(pending.steps, None)
        if requests is None:
            self._end(pending)
        else:
            self._requests[pending] = requests

    def _end(self, pending: PendingExchange) -> None:
        """Say that an exchange is summed, and begin those that follow it."""
        del self._begun[pending]
        self.note("summed", pending.label)
        progress.record_span("travel", pending.label, pending.start_s, time.perf_counter())
        pending.summed.set()
        followers, pending.followers = pending.followers, []
        for follower in followers:
            self._begin(follower)

    def _poll(self) -> bool:
        """Go on with exchanges whose messages have come; False if none have."""
        if not some_are_complete([request for requests in self._requests.values() for request in requests]):
            return False
        for pending in [pending for pending, requests in self._requests.items() if not any(requests)]:
            del self._requests[pending]
            self._resume(pending)
        return True

    def _carry_on(self, most_s: float) -> bool:
        """Go on with sums in C; False if no message moves."""
        has_moved = host_engine.go_on(most_s, self._pace)
        for pending in [pending for pending in self._begun if pending.sum and pending.sum.has_ended()]:
            pending.sum = pending.begin_sum = None
            self._end(pending)
        return has_moved

    def _check_time(self) -> None:
        """Give up if no message has come for too long.

        Ranks that wait find out together who is late.

        Raises:
            TrainingError: who is late, if all of a communicator take part; else the message that has not come.
        """
        waited_s = self._waited.look()
        if waited_s <= PATIENT_S:
            return
        for pending in self._begun:
            if pending.control and (waited_s > TIMEOUT_S or pending.control.is_asked()):
                raise late_error(pending.control, pending.label, waited_s, pending.control)
            if pending.lost and waited_s > TIMEOUT_S:
                raise pending.lost()


def some_are_complete(requests: Requests) -> bool:
    """Look once whether any are complete; those that are become false."""
    return any([request.Test() for request in requests if request])


def same_calls(mpi: Any, control: MpiProcesses, what: str) -> Iterator[Requests]:
    """Compare over ranks which call each has reached.

    Communicates: 288 bytes to each rank, on a communicator of mpi4py that nothing else uses.

    Raises:
        UsageError: ranks have come to different calls, which it names.
    """
    text = what.encode()
    mine = hashlib.sha256(text).digest() + text[-WHAT_BYTES:].ljust(WHAT_BYTES)  # the innermost lines come last
    rows = np.empty((control.size, len(mine)), np.uint8)
    with control.waits.waiting(BESIDE, what):
        yield [mpi.Iallgather(np.frombuffer(mine, np.uint8), rows)]
    if (rows != rows[0]).any():
        whats = [row[-WHAT_BYTES:].tobytes().decode(errors="replace").rstrip() for row in rows]
        digests = [row[:4].tobytes().hex() for row in rows]
        is_cut = len(set(whats)) < len(set(digests))
        named = [f"{a} ({b})" for a, b in zip(whats, digests, strict=True)] if is_cut else whats
        raise UsageError(different_calls(dict(zip(control.numbers, named, strict=True))))


@functools.cache
def comm_thread() -> CommThread:
    """This process's communication thread; other ranks need not start theirs."""
    return CommThread()
