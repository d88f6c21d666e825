"""The thread of a process that carries started operations on while programs compute.

Each operation is a generator that yields requests of mpi4py to wait for, on a communicator of its own. The thread is
the process's own: it starts without other ranks. Buckets of exchanges have a thread in C
(`allreduce.comm_thread`).
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxmpi.allreduce.comm_thread import call_row, refuse_calls
from jaxmpi.allreduce.host_engine import TIMEOUT_S, late_error
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.diagnosis import BESIDE
from jaxmpi.comm.polling import WaitClock
from jaxmpi.core import scheduling
from jaxmpi.core.errors import TrainingError
from jaxmpi.runtime import progress
from jaxmpi.runtime.failures import call_before_finalize

Requests = list[Any]  # requests of mpi4py
THREAD = "jaxmpi operations"
# Between two looks at messages that have not come: beside a computation, whose time each look takes, and when somebody
# waits.
CALM_S, HURRY_S = 0.002, 0.0003
PATIENT_S = 0.5  # without a message before a rank looks whether another has given up


@dataclass(eq=False)
class PendingOperation:
    """A started operation."""

    label: str
    bucket: np.ndarray  # its result, the thread's to change until it is there
    steps: Iterator[Requests] = field(default_factory=lambda: iter(()))  # messages to wait for, one after another
    after: "PendingOperation | None" = None  # which must have ended before this one begins, such as a comparison
    control: MpiProcesses | None = None  # control plane of the ranks that all take part; it says who is late
    lost: Callable[[], TrainingError] | None = None  # error of a message, in which two ranks take part
    start_s: float = field(default_factory=time.perf_counter)
    followers: list["PendingOperation"] = field(default_factory=list)  # that wait for this one to end
    ended: threading.Event = field(default_factory=threading.Event)


class OperationThread:
    """The thread: it sees to messages under way, on any communicator."""

    def __init__(self) -> None:
        """Start the thread; each process has one."""
        self.unclaimed: dict[tuple[int, ...], PendingOperation] = {}  # that nobody has waited for yet
        self._arrived: deque[PendingOperation] = deque()
        self._begun: dict[PendingOperation, None] = {}  # and not yet ended
        self._requests: dict[PendingOperation, Requests] = {}  # for which they wait
        self._wake = threading.Condition()
        self._is_ending = self._is_waited_for = False
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

    def hand_over(self, pending: PendingOperation) -> None:
        """Have the thread begin an operation."""
        with self._wake:
            self._arrived.append(pending)
            self._wake.notify()

    def wait(self, key: tuple[int, ...]) -> PendingOperation:
        """The operation of that key, once it is done; it is forgotten."""
        pending = self.unclaimed.pop(key)
        self._is_waited_for = True
        with progress.span("wait", pending.label):
            pending.ended.wait()
        self._is_waited_for = False
        return pending

    # ------------------------------------------------------------ the thread's own

    def _run(self) -> None:
        scheduling.flush_subnormals()
        scheduling.take_short_turns()
        with np.errstate(all="ignore"):  # NaN and infinity pass through to all ranks
            while self._take():
                if self._poll():
                    self._waited.restart()
                    continue
                if self._requests:
                    time.sleep(HURRY_S if self._is_waited_for else CALM_S)
                self._check_time()

    def _take(self) -> bool:
        """Begin what has arrived, waiting if idle; False at the end."""
        with self._wake:
            while not (self._arrived or self._begun or self._is_ending):
                self._wake.wait()
                self._waited.restart()
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        for pending in arrived:
            if pending.after is None or pending.after.ended.is_set():
                self._begin(pending)
            else:
                pending.after.followers.append(pending)
        return bool(self._begun or not self._is_ending)

    def _begin(self, pending: PendingOperation) -> None:
        self._begun[pending], pending.after = None, None
        self._resume(pending)

    def _resume(self, pending: PendingOperation) -> None:
        """Go on to the next messages or the end."""
        requests = next(pending.steps, None)
        if requests is None:
            self._end(pending)
        else:
            self._requests[pending] = requests

    def _end(self, pending: PendingOperation) -> None:
        """Note that an operation has ended, and begin those that follow it."""
        del self._begun[pending]
        progress.record_span("travel", pending.label, pending.start_s, time.perf_counter())
        pending.ended.set()
        followers, pending.followers = pending.followers, []
        for follower in followers:
            self._begin(follower)

    def _poll(self) -> bool:
        """Go on with operations whose messages have come; False if none have."""
        if not some_are_complete([request for requests in self._requests.values() for request in requests]):
            return False
        for pending in [pending for pending, requests in self._requests.items() if not any(requests)]:
            del self._requests[pending]
            self._resume(pending)
        return True

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
    row = call_row(what)
    rows = np.empty((control.size, len(row)), np.uint8)
    with control.waits.waiting(BESIDE, what):
        yield [mpi.Iallgather(row, rows)]
    if (rows != rows[0]).any():
        refuse_calls(rows, control.numbers)


@functools.cache
def operation_thread() -> OperationThread:
    """This process's thread; other ranks need not start theirs."""
    return OperationThread()
