"""The thread of a process that carries started operations on while programs compute.

Each operation is a generator, which the thread resumes until it ends; a `yield` lets the others go on. A collective
first compares over ranks which operation each has come to, one comparison after another, and only then has MPI begin
it: so all ranks begin operations in one order, and none with another's numbers. It travels on communicators that
nothing else uses. The thread is the process's own: it starts without other ranks. Buckets of exchanges have a thread in
C (`allreduce.comm_thread`).
"""

import functools
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxmpi.allreduce.host_engine import TIMEOUT_S, late_error
from jaxmpi.collectives.call import MpiCall
from jaxmpi.collectives.table import mpi_op, neutral
from jaxmpi.comm.agreement import different_calls
from jaxmpi.comm.diagnosis import BESIDE
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.comm.polling import WaitClock
from jaxmpi.core import scheduling
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.runtime import progress
from jaxmpi.runtime.failures import call_before_finalize

THREAD = "jaxmpi operations"
# Between two looks at messages that have not come: beside a computation, whose time each look takes, and when somebody
# waits.
CALM_S, HURRY_S = 0.002, 0.0003
TEXT_BYTES = 256  # of the end of an operation's text, which names innermost lines, for messages; a digest is compared
PATIENT_S = 0.5  # without an end before a rank looks whether another has given up


@dataclass(eq=False)
class Operation:
    """A started operation."""

    label: str
    steps: Iterator[None]
    result: np.ndarray  # the thread's to change until the end
    late: Callable[[float], TrainingError | None]  # the error after so many seconds without an end, if it is one
    start_s: float = field(default_factory=time.perf_counter)
    ended: threading.Event = field(default_factory=threading.Event)


class OperationThread:
    """The thread: it sees to messages under way, on any communicator."""

    def __init__(self) -> None:
        """Start the thread; each process has one."""
        self._operations: list[Operation] = []
        self._wake = threading.Condition()
        self._is_ending = self._is_waited_for = False
        self._waited = WaitClock()  # since the last operation ended
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

    def add(self, operation: Operation) -> Operation:
        """Have the thread carry out an operation."""
        with self._wake:
            self._operations.append(operation)
            self._wake.notify()
        return operation

    def wait(self, operation: Operation) -> np.ndarray:
        """The result of an operation, once it is there."""
        self._is_waited_for = True
        with progress.span("wait", operation.label):
            operation.ended.wait()
        self._is_waited_for = False
        return operation.result

    def _run(self) -> None:
        scheduling.flush_subnormals()
        scheduling.take_short_turns()
        with np.errstate(all="ignore"):  # NaN and infinity pass through to all ranks
            while True:
                with self._wake:
                    while not (self._operations or self._is_ending):
                        self._wake.wait()
                        self._waited.restart()
                    operations = [*self._operations]
                if not operations:
                    return
                if ended := [operation for operation in operations if self._has_ended(operation)]:
                    with self._wake:
                        self._operations = [each for each in self._operations if each not in ended]
                    self._waited.restart()
                    continue
                time.sleep(HURRY_S if self._is_waited_for else CALM_S)
                self._check_time()

    def _has_ended(self, operation: Operation) -> bool:
        """Go on with an operation as far as it goes now."""
        for _ in operation.steps:
            return False
        progress.record_span("travel", operation.label, operation.start_s, time.perf_counter())
        operation.ended.set()
        return True

    def _check_time(self) -> None:
        """Give up if nothing has ended for too long."""
        if (waited_s := self._waited.look()) > PATIENT_S:
            for operation in [*self._operations]:
                if error := operation.late(waited_s):
                    raise error


@functools.cache
def operation_thread() -> OperationThread:
    """This process's thread; other ranks need not start theirs."""
    return OperationThread()


def until_complete(requests: Sequence[Any]) -> Iterator[None]:
    """Yield until all requests of mpi4py, or alike, are complete."""
    while not all([request.Test() for request in requests]):  # a list: all of them move
        yield


class StartQueue:
    """Operations started on one communicator, each begun once ranks have compared it."""

    def __init__(self, comm: MpiComm) -> None:
        """Make two communicators; all ranks of `comm`, and no others, take part."""
        self.control = comm.processes.on_own_communicator()
        self.mpi = self.control.clone()
        self._lock = threading.Lock()
        self._last_compared = threading.Event()
        self._last_compared.set()

    def start(self, call: MpiCall, what: str, xs: list[np.ndarray], ys: list[np.ndarray]) -> Operation:
        """Start a collective; its y is filled at the end.

        Communicates: 288 bytes to each rank for the comparison, then as the operation.

        Raises, in the thread:
            UsageError: ranks have come to different calls, which it names.
            TrainingError: who is late, which ranks that wait find out together.
        """
        control = self.control

        def steps(before: threading.Event, compared: threading.Event) -> Iterator[None]:
            while not before.is_set():
                yield
            text = what.encode()
            row = np.frombuffer(hashlib.sha256(text).digest() + text[-TEXT_BYTES:].ljust(TEXT_BYTES), np.uint8)
            rows = np.empty((control.size, len(row)), np.uint8)
            with control.waits.waiting(BESIDE, what):
                yield from until_complete([control.world.Iallgather(row, rows)])
            if (rows != rows[0]).any():
                texts = [row[-TEXT_BYTES:].tobytes().decode(errors="replace").rstrip() for row in rows]
                raise UsageError(different_calls(dict(zip(control.numbers, texts, strict=True))))
            requests = begin(call, self.mpi, xs, ys)
            compared.set()  # behind `begin`, so that ranks begin in one order
            yield from until_complete(requests)
            if call.operation == "exscan" and self.mpi.rank == 0:
                ys[0][...] = neutral(call.op, ys[0].dtype)

        def late(waited_s: float) -> TrainingError | None:
            is_late = waited_s > TIMEOUT_S or control.is_asked()
            return late_error(control, what, waited_s, control) if is_late else None

        with self._lock:
            before, self._last_compared = self._last_compared, threading.Event()
            result = ys[0] if ys else np.empty(0)
            return operation_thread().add(Operation(what, steps(before, self._last_compared), result, late))


def queue_for(comm: MpiComm) -> StartQueue:
    """This communicator's; all its ranks call it together for its first operation."""
    return comm.cached("started operations", lambda: StartQueue(comm))


def begin(call: MpiCall, mpi: Any, xs: list[np.ndarray], ys: list[np.ndarray]) -> list[Any]:
    """Begin a collective by mpi4py; its requests, after which y is filled."""
    if call.operation == "barrier":
        return [mpi.Ibarrier()]
    [x], [y], root, is_root = xs, ys, call.root, call.is_root
    function = getattr(mpi, "Ireduce_scatter_block" if call.operation == "reduce_scatter" else f"I{call.operation}")
    if call.operation in ("bcast", "reduce") or (call.operation == "gather" and not is_root):
        y[...] = x
    if call.operation == "reduce":
        return [function(x, y if is_root else None, mpi_op(call.op), root)]
    if call.op:
        return [function(x, y, mpi_op(call.op))]
    if call.operation == "bcast":
        return [function(y, root)]
    if call.operation == "gather":
        return [function(x, y if is_root else None, root)]
    if call.operation == "scatter":
        return [function(x if is_root else None, y, root)]
    if call.counts:
        width, rank = math.prod(x.shape[1:]), mpi.rank
        counts = [rows[rank] * width for rows in call.counts]
        sent = x if call.operation == "allgatherv" else [x, [n * width for n in call.counts[rank]]]
        return [function(sent, [y, counts])]
    return [function(x, y)]
