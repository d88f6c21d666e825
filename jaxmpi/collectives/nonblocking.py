"""Nonblocking operations: a program starts them, computes concurrently, and waits for them.

    h = start(allreduce, x)
    ...                       # is computed meanwhile
    y = wait(h)

`start` hands the arrays to a thread of the process and returns at once; `wait` returns the results. The thread carries
all that was started on while programs compute. Each operation is a generator, which the thread resumes until it ends; a
`yield` lets the others go on. Collectives begin in the order of the program, the same on all ranks: each first compares
over ranks which operation they have come to, and only then has MPI begin it, on communicators that nothing else uses. A
message between two ranks begins at once, and is compared by its header; other ranks take no part. Buckets of exchanges
have a thread in C (`allreduce.comm_thread`).
"""

import dataclasses
import functools
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax._src.interpreters.partial_eval import DynamicJaxprTrace

from jaxmpi.allreduce.api import is_traced
from jaxmpi.allreduce.call_order import caller
from jaxmpi.allreduce.host_engine import TIMEOUT_S, late_error
from jaxmpi.collectives import api, messages
from jaxmpi.collectives.call import NOBODY, MpiCall, from_mpi_dtype, shape_of, to_mpi_dtype
from jaxmpi.collectives.primitive import call_p, describe_call, intercept_calls, operation_of
from jaxmpi.collectives.table import OPERATIONS, mpi_op, neutral
from jaxmpi.comm.agreement import different_calls, fingerprint
from jaxmpi.comm.diagnosis import BESIDE
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.comm.polling import WaitClock
from jaxmpi.core import scheduling
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime import host_callbacks, progress
from jaxmpi.runtime.failures import call_before_finalize

START, WAIT = "jaxmpi: an operation starts", "jaxmpi: an operation is waited for"

# ---------------------------------------------------------------- while a program is traced


@dataclass(eq=False)
class Handle:
    """An operation under way, for `wait`, in the program that started it."""

    operation: Callable[..., PyTree]
    args: tuple
    kwargs: dict[str, Any]
    line: str
    numbers: list[int] = field(default_factory=list)  # of its calls, one for each array
    is_waited: bool = False
    trace: Any = field(default_factory=lambda: _traced_function())

    def __str__(self) -> str:
        return f"the {self.operation.__name__} that started at {self.line}"

    def lower(self, call: MpiCall, operands: Sequence[Any]) -> Callable[..., list[jax.Array]]:
        """What a program runs to begin a call of this operation; all its ranks come here together.

        Raises:
            UsageError: nobody waits for it, or it cannot run beside a program.
        """
        text, is_message = describe_call(call, operands), operation_of(call).is_message
        if not self.is_waited:
            raise UsageError(f"start: {text} is never waited for; expected y = wait(h) in the function that starts it")
        may_overlap = call.comm.processes.may_overlap
        reason = "MPI has no MPI_THREAD_MULTIPLE" if not may_overlap else is_message and messages.unavailable_reason()
        if reason:
            raise UsageError(f"start: {text} cannot run beside a program: {reason}; call {call.operation} itself")
        operation_thread()
        results = _as_sent(call, operation_of(call).results(call, *operands))
        call = dataclasses.replace(call, handle=None)  # which has arrays of a trace
        if is_message:
            begin = functools.partial(_message_steps, call, messages.open_message(call, text, *operands))
        else:
            queue: StartQueue = call.comm.cached("started operations", lambda: StartQueue(call.comm))
            begin = functools.partial(queue.start, call, text)
        _started[call.number] = text, results, begin  # a program of a communicator that is freed ends the job
        call.comm.cached("starts", ExitStack).callback(_started.pop, call.number)

        def run(*arrays: jax.Array) -> list[jax.Array]:
            operands = [x if is_message else to_mpi_dtype(x) for x in arrays]  # a message's header names its dtype
            return host_callbacks.call(START, operands, [], effect=call.comm.effect, call=call.number)

        return run


def _traced_function() -> Any:
    """JAX's innermost trace to a jaxpr, skipping those of derivatives and maps."""
    trace = core.trace_ctx.trace
    while not isinstance(trace, DynamicJaxprTrace) and hasattr(trace, "parent_trace"):
        trace = trace.parent_trace
    return trace


def start(operation: Callable[..., PyTree], *args: Any, **kwargs: Any) -> Handle:
    """Begin a `jaxmpi.collectives` operation inside jit, concurrently with the program: `start(allreduce, x, "max")`.

    Arrays are copied. Several may be under way; ranks start them in the same order. Each handle is waited for once, in
    the function that started it. All ranks of the communicator compile the same starts; of a message its two ranks do.

    Communicates: as the operation, on a thread of its own.

    Raises:
        UsageError: what is no operation; outside jit; MPI or this JAX cannot send while a program computes; a handle
            that is never waited for, when the program is compiled; under `jax.grad` or `jax.vmap`.
    """
    name = getattr(operation, "__name__", "")
    if name not in OPERATIONS or operation is not getattr(api, name):
        expected = 'expected an operation of jaxmpi.collectives, as start(allreduce, x, "max"): arguments after it'
        raise UsageError(f"start: got {operation}; {expected}")
    handle = Handle(operation, args, kwargs, caller())
    if not is_traced(()):
        raise UsageError(f"start: got a call outside jax.jit, {handle.line}; expected one in a compiled program")

    def begin(call: MpiCall, *operands: jax.Array) -> list[jax.Array]:
        handle.numbers.append(next(_numbers))
        call_p.bind(*operands, call=dataclasses.replace(call, handle=handle, number=handle.numbers[-1]))
        return [jnp.zeros(result.shape, result.dtype) for result in operation_of(call).results(call, *operands)]

    with intercept_calls(begin):
        operation(*args, **kwargs)
    return handle


def wait(handle: Handle, after: PyTree = ()) -> PyTree:
    """The results of a started operation, once they have come.

    Args:
        after: arrays that are to be computed before this waits. XLA knows no other order: without them it may wait
            first, and compute then.

    Raises:
        UsageError: it was waited for before; this is another loop body, branch or compiled function; the operation has
            failed on this rank or another.
    """
    if handle.is_waited:
        raise UsageError(f"wait: {handle} is waited for twice, {caller()}; expected once: keep the result")
    if handle.trace is not _traced_function():
        raise UsageError(
            f"wait: {handle} is waited for in another function that JAX traces, as a loop body or a branch, {caller()};"
            " expected y = wait(h) in the function that starts it: it runs as often"
        )
    handle.is_waited, numbers = True, iter(handle.numbers)

    def finish(call: MpiCall, *operands: jax.Array) -> list[jax.Array]:
        results = operation_of(call).results(call, *operands)
        before = [_one_entry(jax.lax.stop_gradient(x)) for x in jax.tree.leaves(after)]
        came = host_callbacks.call(WAIT, before, _as_sent(call, results), effect=call.comm.effect, call=next(numbers))
        return [from_mpi_dtype(y, result.dtype) for y, result in zip(came, results, strict=True)]

    with intercept_calls(finish):  # trace the operation again, now with its results
        return handle.operation(*handle.args, **handle.kwargs)


def _as_sent(call: MpiCall, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of arrays as they are sent."""
    form = shape_of if operation_of(call).is_message else lambda x: shape_of(jax.eval_shape(to_mpi_dtype, x))
    return [form(shape_of(x)) for x in arrays]


def _one_entry(x: jax.Array) -> jax.Array:
    """Return x or, to copy less, one entry that waits for x."""
    if not (host_callbacks.sees_copies() and jnp.size(x)):
        return x
    x = jnp.asarray(x)
    return jax.lax.slice(jax.lax.optimization_barrier(x), [0] * x.ndim, [1] * x.ndim)


# ---------------------------------------------------------------- the thread

# Between two looks at messages that have not come: beside a computation, whose time each look takes, and when somebody
# waits.
CALM_S, HURRY_S = 0.002, 0.0003
PATIENT_S = 0.5  # of a wait before a rank looks whether another has given up


@dataclass(eq=False)
class Operation:
    """A started operation."""

    label: str
    steps: Iterator[None]
    result: np.ndarray  # the thread's to change until the end
    start_s: float = field(default_factory=time.perf_counter)
    ended: threading.Event = field(default_factory=threading.Event)

    def advance(self) -> bool:
        """Go on as far as messages have come; True at the end."""
        for _ in self.steps:
            return False
        progress.record_span("travel", self.label, self.start_s, time.perf_counter())
        self.ended.set()
        return True


class OperationThread:
    """The process's thread that carries started operations on; it starts without other ranks."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._wake = threading.Condition()
        self._is_ending = self._is_waited_for = False
        self._thread = threading.Thread(target=self._run, name="jaxmpi operations", daemon=True)
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
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._operations or self._is_ending)
                operations = [*self._operations]
            if not operations:
                return
            if ended := [operation for operation in operations if operation.advance()]:
                with self._wake:
                    self._operations = [running for running in self._operations if running not in ended]
            else:
                time.sleep(HURRY_S if self._is_waited_for else CALM_S)


@functools.cache
def operation_thread() -> OperationThread:
    """This process's, to which programs turn by START and WAIT."""
    host_callbacks.register(START, _start, ends_job=True)
    host_callbacks.register(WAIT, _wait, ends_job=True)
    return OperationThread()


def _until_complete(requests: Sequence[Any], late: Callable[[float], TrainingError | None]) -> Iterator[None]:
    """Yield until all requests of mpi4py, or alike, are complete; `late` gives the error after so many seconds."""
    waited = WaitClock()
    while not all([request.Test() for request in requests]):  # a list: all of them move
        if (waited_s := waited.look()) > PATIENT_S and (error := late(waited_s)):
            raise error
        yield


# ---------------------------------------------------------------- collectives


class StartQueue:
    """Operations started on one communicator, each begun once ranks have compared it."""

    def __init__(self, comm: MpiComm) -> None:
        """Make two communicators; all ranks of `comm`, and no others, take part."""
        self.control = comm.processes.on_own_communicator()
        self.mpi = self.control.clone()
        self._to_begin: deque[object] = deque()  # calls in the order of the program

    def start(self, call: MpiCall, text: str, xs: list[np.ndarray], ys: list[np.ndarray]) -> Iterator[None]:
        """Steps of a collective; its y is filled at the end.

        Communicates: 32 bytes to each rank for the comparison, then as the operation.

        Raises, in the thread:
            UsageError: ranks have come to different calls, which it names.
            TrainingError: who is late, which ranks that wait find out together.
        """
        mine = object()
        self._to_begin.append(mine)
        return self._steps(mine, call, text, xs, ys)

    def _steps(self, mine: object, call: MpiCall, text: str, xs: list, ys: list) -> Iterator[None]:
        def late(waited_s: float) -> TrainingError | None:
            is_late = waited_s > TIMEOUT_S or control.is_asked()
            return late_error(control, text, waited_s) if is_late else None

        control = self.control
        while self._to_begin[0] is not mine:
            yield
        digest = np.frombuffer(fingerprint(text, None).digest, np.uint8)
        digests = np.empty((control.size, len(digest)), np.uint8)
        with control.waits.waiting(BESIDE, text):
            yield from _until_complete([control.world.Iallgather(digest, digests)], late)
        if (digests != digests[0]).any():
            raise UsageError(different_calls(dict(zip(control.numbers, control.allgather_object(text), strict=True))))
        requests = begin(call, self.mpi, xs, ys)
        self._to_begin.popleft()  # behind `begin`, so that ranks begin in one order
        yield from _until_complete(requests, late)
        if call.operation == "exscan" and self.mpi.rank == 0:
            ys[0][...] = neutral(call.op, ys[0].dtype)


def begin(call: MpiCall, mpi: Any, xs: list[np.ndarray], ys: list[np.ndarray]) -> list[Any]:
    """Begin a collective by mpi4py; its requests, after which y is filled."""
    if call.operation == "barrier":
        return [mpi.Ibarrier()]
    [x], [y], root, is_root = xs, ys, call.root, call.is_root
    function = getattr(mpi, "Ireduce_scatter_block" if call.operation == "reduce_scatter" else f"I{call.operation}")
    if call.operation in ("bcast", "reduce") or (call.operation == "gather" and not is_root):
        y[...] = x
    if call.operation == "bcast":
        return [function(y, root)]
    if call.counts:
        width, rank = math.prod(x.shape[1:]), mpi.rank
        counts = [rows[rank] * width for rows in call.counts]
        send_buffer = x if call.operation == "allgatherv" else [x, [n * width for n in call.counts[rank]]]
        return [function(send_buffer, [y, counts])]
    if root is not None and not is_root:  # x alone counts there, or y alone
        x, y = (None, y) if call.operation == "scatter" else (x, None)
    return [function(x, y, *([mpi_op(call.op)] if call.op else []), *([] if root is None else [root]))]


# ---------------------------------------------------------------- what programs call


# Starts in programs, which know them by number: text, results, and what begins them: (x, y) -> steps.
_started: dict[int, tuple[str, list[jax.ShapeDtypeStruct], Callable[[list, list], Iterator[None]]]] = {}


_numbers = itertools.count()
# By number, that nobody has waited for yet: one at most, since JAX orders starts and waits of all programs.
_unclaimed: dict[int, Operation] = {}


def _start(operands: list[np.ndarray], results: list[np.ndarray], call: int) -> None:
    """Begin a started call; copies of the arrays are sent."""
    if (started := _started.get(call)) is None:
        raise UsageError("start: got a program of a communicator that was freed; compile it for another one")
    text, shapes, begin = started
    xs, ys = [x.copy() for x in operands], [np.empty(shape.shape, shape.dtype) for shape in shapes]
    _unclaimed[call] = operation_thread().add(Operation(text, begin(xs, ys), next(iter(ys), np.empty(0))))


def _message_steps(call: MpiCall, number: int, xs: list[np.ndarray], ys: list[np.ndarray]) -> Iterator[None]:
    """Begin a message at once: the program's next one to or from that rank comes behind it."""
    if call.source == NOBODY and ys:
        np.copyto(ys[0], xs[-1])
        messages.fill_status(call.status, NOBODY, -1, 0)
    request = messages.MessageRequest(number, next(iter(xs), None), next(iter(ys), None))
    return _until_complete([request], lambda waited_s: messages.lost_message(number) if waited_s > TIMEOUT_S else None)


def _wait(operands: list[np.ndarray], results: list[np.ndarray], call: int) -> None:
    """(what must be there before) -> the results of a started call, once they have come."""
    came = operation_thread().wait(_unclaimed.pop(call))
    for result in results:
        np.copyto(result, came)
