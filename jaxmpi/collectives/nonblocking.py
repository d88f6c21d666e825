"""Nonblocking operations: a program starts them, computes concurrently, and waits for them.

    h = start(allreduce, x)
    ...                       # is computed meanwhile
    y = wait(h)

`start` hands the arrays to the thread of `operation_thread` and returns at once; `wait` returns the results.
Collectives start in the order of the program, the same on all ranks. A message between two ranks begins at once, in the
program's order, and is compared by its header; other ranks take no part.
"""

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from jaxmpi.allreduce.api import is_traced
from jaxmpi.allreduce.call_order import caller, one_thread
from jaxmpi.allreduce.comm_thread import TICKET
from jaxmpi.collectives import api, messages
from jaxmpi.collectives.call import NOBODY, MpiCall, at_least_8_bits, from_mpi_dtype, shape_of, to_mpi_dtype
from jaxmpi.collectives.operation_thread import (
    TIMEOUT_S,
    Operation,
    StartQueue,
    operation_thread,
    queue_for,
    until_complete,
)
from jaxmpi.collectives.primitive import assert_same, describe_call, intercept_calls, operation_of
from jaxmpi.collectives.table import OPERATIONS
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime import host_callbacks

START, WAIT = "jaxmpi: an operation starts", "jaxmpi: an operation is waited for"


# ---------------------------------------------------------------- while a program is traced


@dataclass(eq=False)
class Handle:
    """An operation under way, for `wait`, in the program that started it."""

    operation: Callable[..., PyTree]
    args: tuple
    kwargs: dict[str, Any]
    line: str
    tickets: list[jax.Array] = dataclasses.field(default_factory=list)  # of its calls, one for each array
    is_waited: bool = False
    trace: Any = dataclasses.field(default_factory=lambda: _traced_function())

    def __str__(self) -> str:
        return f"the {self.operation.__name__} that started at {self.line}"


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

    Communicates: as the operation, on the communication thread.

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
        handle.tickets += _start_p.bind(*operands, call=call, handle=handle)
        return [jnp.zeros(result.shape, result.dtype) for result in operation_of(call).results(call, *operands)]

    with intercept_calls(begin):
        operation(*args, **kwargs)
    return handle


def wait(handle: Handle, after: PyTree = ()) -> PyTree:
    """The results of a started operation, once they have come.

    Args:
        handle: of `start`.
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
    handle.is_waited, tickets = True, iter(handle.tickets)

    def finish(call: MpiCall, *operands: jax.Array) -> list[jax.Array]:
        results = operation_of(call).results(call, *operands)
        before = [next(tickets), *(_one_entry(jax.lax.stop_gradient(x)) for x in jax.tree.leaves(after))]
        came = host_callbacks.call(WAIT, before, _as_sent(call, results), effect=call.comm.effect)
        return [from_mpi_dtype(y, result.dtype) for y, result in zip(came, results, strict=True)]

    with intercept_calls(finish):  # trace the operation again, now with its results
        return handle.operation(*handle.args, **handle.kwargs)


def _sent_form(call: MpiCall) -> Callable[[jax.Array], jax.Array]:
    """How an array is sent; a message's header names its dtype."""
    return at_least_8_bits if operation_of(call).is_message else to_mpi_dtype


def _as_sent(call: MpiCall, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of arrays as they are sent."""
    return [shape_of(jax.eval_shape(_sent_form(call), shape_of(x))) for x in arrays]


def _one_entry(x: jax.Array) -> jax.Array:
    """Return x or, to copy less, one entry that waits for x."""
    if not (host_callbacks.sees_copies() and jnp.size(x)):
        return x
    x = jnp.asarray(x)
    return jax.lax.slice(jax.lax.optimization_barrier(x), [0] * x.ndim, [1] * x.ndim)


_start_p = jax.extend.core.Primitive("jaxmpi_start")
_start_p.multiple_results = True


@_start_p.def_effectful_abstract_eval
def _abstract(*operands: Any, call: MpiCall, handle: Handle) -> tuple[list, set]:
    return [ShapedArray(TICKET.shape, TICKET.dtype)], {call.comm.effect}


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, call: MpiCall, handle: Handle) -> Sequence[Any]:
    what, is_message = describe_call(call, ctx.avals_in), operation_of(call).is_message
    if not handle.is_waited:
        raise UsageError(f"start: {what} is never waited for; expected y = wait(h) in the function that starts it")
    may_overlap = call.comm.processes.may_overlap
    reason = "MPI has no MPI_THREAD_MULTIPLE" if not may_overlap else is_message and messages.unavailable_reason()
    if reason:
        raise UsageError(f"start: {what} cannot run beside a program: {reason}; call {call.operation} itself")
    _register_handlers()
    with one_thread(call.comm, call.operation):
        assert_same(call, ctx.avals_in, is_traced=True)
        queue = None if is_message else queue_for(call.comm)
    results = _as_sent(call, operation_of(call).results(call, *ctx.avals_in))
    opened = messages.open_message(call, what, *_as_sent(call, ctx.avals_in)) if is_message else -1
    with _lock:
        _started.append(Started(call, results, what, queue, opened))
        number = len(_started) - 1

    def run(*arrays: jax.Array) -> list[jax.Array]:
        sent = [_sent_form(call)(x) for x in arrays]
        return host_callbacks.call(START, sent, [TICKET], effect=call.comm.effect, call=number)

    return mlir.lower_fun(run)(ctx, *operands)


def _refuse(*_: Any, call: MpiCall, **__: Any) -> tuple:
    raise UsageError(f"start: {call.describe()} has neither derivative nor mapping; take {call.operation} itself there")


mlir.register_lowering(_start_p, _lower, cacheable=False)
ad.primitive_jvps[_start_p] = batching.primitive_batchers[_start_p] = _refuse

# ---------------------------------------------------------------- in the process


class Started(NamedTuple):
    """A start in a program, which knows it by number."""

    call: MpiCall
    results: list[jax.ShapeDtypeStruct]
    what: str
    queue: StartQueue | None  # of a collective
    message: int  # number of a message


_started: list[Started] = []
_lock = threading.Lock()  # of this list: several threads may compile
_tickets = itertools.count()
_unclaimed: dict[int, Operation] = {}  # by ticket, that nobody has waited for yet


@functools.cache
def _register_handlers() -> None:
    """Register handlers, and start the thread."""
    host_callbacks.register(START, _start, ends_job=True)
    host_callbacks.register(WAIT, _wait, ends_job=True)
    operation_thread()


def _start(operands: list[np.ndarray], results: list[np.ndarray], call: int) -> None:
    """(arrays) -> ticket u32[]; copies are sent."""
    started, ticket = _started[call], next(_tickets) % 2**32
    xs, ys = [x.copy() for x in operands], [np.empty(shape.shape, shape.dtype) for shape in started.results]
    results[0][...] = ticket
    if started.queue:
        _unclaimed[ticket] = started.queue.start(started.call, started.what, xs, ys)
    else:
        _unclaimed[ticket] = _start_message(started, xs, ys)


def _start_message(started: Started, xs: list[np.ndarray], ys: list[np.ndarray]) -> Operation:
    """Begin a message at once: the program's next one to or from that rank comes behind it."""
    if started.call.source == NOBODY and ys:
        np.copyto(ys[0], xs[-1])
        messages.fill_status(started.call.status, NOBODY, -1, 0)
    x, y = next(iter(xs), None), next(iter(ys), None)
    steps = until_complete([messages.MessageRequest(started.message, x, y)])

    def late(waited_s: float) -> TrainingError | None:
        return messages.lost_message(started.message) if waited_s > TIMEOUT_S else None

    return operation_thread().add(Operation(started.what, steps, np.empty(0) if y is None else y, late))


def _wait(operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    """(ticket, what must be there before) -> (results); waits."""
    came = operation_thread().wait(_unclaimed.pop(int(operands[0])))
    for result in results:
        np.copyto(result, came)
