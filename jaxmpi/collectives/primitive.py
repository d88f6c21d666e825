"""One JAX primitive for all operations, with its derivatives, mapping and lowering.

Ranks compare a call when it is lowered. By then JAX has applied all transformations: shapes are final, and calls that
only a derivative makes are compared like any other. A call outside jit is compared by a message whenever it is made.
"""

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from jaxmpi.allreduce.call_order import compared, in_turn, number_of, one_thread
from jaxmpi.allreduce.dispatch import MPI_COUNTS
from jaxmpi.collectives.call import NOBODY, MpiCall, shape_of
from jaxmpi.collectives.table import OPERATIONS, Operation
from jaxmpi.comm.agreement import Fingerprint, fingerprint
from jaxmpi.comm.diagnosis import comparison_of
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree


class NoForwardMode(UsageError, RuntimeError):
    """A Jacobian in forward mode, for which mpi4jax raises RuntimeError."""


_call_p = jax.extend.core.Primitive("jaxmpi_call")
_call_p.multiple_results = True


class _Interceptor(threading.local):
    make: Callable[..., list[jax.Array]] | None = None
    agreed: list[Any] | None = None


_interceptor = _Interceptor()


@contextmanager
def intercept_calls(make: Callable[..., list[jax.Array]], agreed: list[Any]) -> Iterator[None]:
    """Have another function make this thread's calls: (call, *operands) -> results.

    `agreed` keeps what ranks exchange while the operation is traced, which is traced twice.
    """
    _interceptor.make, _interceptor.agreed = make, agreed
    try:
        yield
    finally:
        _interceptor.make = _interceptor.agreed = None


def agree_once(exchange: Callable[[], list[Any]]) -> list[Any]:
    """Return what ranks tell each other; for a started operation, which `wait` traces again, they do so once."""
    if _interceptor.agreed is None:
        return exchange()
    if not _interceptor.agreed:
        _interceptor.agreed.append(exchange())
    return _interceptor.agreed[0]


def bind(call: MpiCall, *operands: jax.Array) -> list[jax.Array]:
    """Results of a call on this rank, inside or outside jit."""
    if _interceptor.make:
        return _interceptor.make(call, *operands)
    return _call_p.bind(*operands, call=call)


def operation_of(call: MpiCall) -> Operation:
    """The operation's row of the table."""
    return OPERATIONS[call.operation]


@_call_p.def_effectful_abstract_eval
def _abstract(*operands: Any, call: MpiCall) -> tuple[list, set]:
    if call.is_identity:
        return list(operands), set()
    results = operation_of(call).results(call, *operands)
    return [ShapedArray(result.shape, result.dtype) for result in results], {call.comm.effect}


# ---------------------------------------------------------------- comparison


def facts(call: MpiCall, operands: Sequence[Any], is_traced: bool) -> Fingerprint:
    """Facts of a call that ranks compare.

    Its place is among them, unless lines may differ.
    """
    shared = {f"shape of argument {i}": list(operation_of(call).shared(call, x)) for i, x in enumerate(operands)}
    options: dict[str, Any] = {"op": call.op, "mean of": call.mean_of, "root": call.root, "reversed": call.is_reversed}
    if is_logged():
        options["MPI4JAX_DEBUG"] = "on"
    options |= shared | {"dtypes": dtypes_of(call, operands), "counts": call.counts}
    if call.operation != "allreduce":  # its transpose sends nothing: a rank's part of a loss may be constant
        out = (
            "give what depends on the differentiated input on all ranks, a template too, as 0 * x; of a second "
            "derivative take a loss whose first depends on it on all"
        )
        options["differentiated"] = "yes" if call.is_differentiated else f"no: {out}"
    if is_tree(call):
        options["leaf"] = {path: f"{leaf.dtype.name}{list(leaf.shape)}" for path, leaf in call.given.items()}
    what = f"{call.operation} in a program" if is_traced else call.operation
    if call.may_differ:
        return fingerprint(what, options)
    if not is_traced:
        return fingerprint(what, options)
    return fingerprint(f"{call.operation}, {call.line}", {**options, "lines": call.lines})


def is_logged() -> bool:
    """Return True if mpi4jax prints its calls (`MPI4JAX_DEBUG`, `set_logging`): then it makes them."""
    bridge = sys.modules.get("mpi4jax._src.xla_bridge")
    return bridge is not None and bridge.get_logging()


def is_tree(call: MpiCall) -> bool:
    """Return True for the first call of a tree, not an array."""
    return bool(call.given) and list(call.given) != [""]


def dtypes_of(call: MpiCall, operands: Sequence[Any]) -> list[str]:
    """Dtypes as sent; before them a single array's own, if it differs."""
    sent = [x.dtype.name for x in operands]
    given = [] if is_tree(call) else [leaf.dtype.name for leaf in call.given.values()]
    return [*given, *(f"sent as {name}" for name in sent)] if given and given != sent else sent


def describe_call(call: MpiCall, operands: Sequence[Any]) -> str:
    """Describe a call alike on all ranks, without shapes that may differ."""
    return call.describe(*(shape_of(x, operation_of(call).shared(call, x)) for x in operands))


def check_counts(call: MpiCall, operands: Sequence[Any]) -> None:
    """Refuse what MPI, whose counts are C's int, cannot send at once."""
    most = max((x.size for x in operands), default=0)
    check(
        operation_of(call).is_message or most < MPI_COUNTS,
        f"{call.describe(*operands)}: got {most:,} numbers; expected fewer than 2^31, to which MPI counts: cut it up",
    )


# ---------------------------------------------------------------- outside jit, and into a program


@_call_p.def_impl
def _run_outside_jit(*operands: jax.Array, call: MpiCall) -> list[jax.Array]:
    """The call outside jit."""
    if call.is_identity:
        return list(operands)
    check_counts(call, operands)
    with one_thread(call.comm, call.operation):
        if not operation_of(call).is_message:
            call.comm.assert_same(facts(call, operands, is_traced=False))
        return _program(call)(list(operands))


def _program(call: MpiCall) -> Callable[[PyTree], PyTree]:
    return call.comm.cached(call, lambda: in_turn(lambda operands: operation_of(call).run(call, *operands)))


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, call: MpiCall) -> Sequence[Any]:
    if call.is_identity:
        return operands
    check_counts(call, ctx.avals_in)
    number = None
    if not operation_of(call).is_message:
        with one_thread(call.comm, call.operation) as is_part:
            call.comm.assert_same(facts(call, ctx.avals_in, is_traced=True))
            if call.is_reversed:
                call.comm.meet_in_reverse()
            number = None if is_part else number_of(call.comm, describe_call(call, ctx.avals_in))
            if number is not None and operation_of(call).is_one_call:
                comparison_of(call.comm).share_slots()

    def run(*arrays: jax.Array) -> list[jax.Array]:
        if number is not None and operation_of(call).is_one_call and not call.is_reversed and not is_logged():
            if compiled := comparison_of(call.comm).compiled(number):
                compiled.begin(has_array=bool(arrays))
                return operation_of(call).run(call, *arrays, mpi=compiled)
        with compared(call.comm, number):
            return operation_of(call).run(call, *arrays)

    return mlir.lower_fun(run)(ctx, *operands)


mlir.register_lowering(_call_p, _lower, cacheable=False)  # each call has a mark of its own


# ---------------------------------------------------------------- derivatives


def _check_linear(call: MpiCall, operands: Sequence[Any]) -> None:
    row = operation_of(call)
    check(
        row.adjoint is not None and call.op in ("", "sum"),
        f"{call.describe(*operands)} has no derivative; expected a linear operation: "
        + ("sendrecv" if row.is_message else "a sum, or jax.lax.stop_gradient around x"),
    )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: MpiCall) -> tuple[list, list]:
    results = _call_p.bind(*primals, call=dataclasses.replace(call, is_differentiated=True))
    _check_linear(call, primals)
    tangents_call = dataclasses.replace(call, is_of_tangents=True)
    return results, _call_p.bind(*map(ad.instantiate_zeros, tangents), call=tangents_call)


def _transpose(cotangents: Sequence[Any], *operands: Any, call: MpiCall) -> list:
    avals = [operand.aval if ad.is_undefined_primal(operand) else jax.typeof(operand) for operand in operands]
    _check_linear(call, avals)
    adjoint, cotangent, [x, *place] = operation_of(call).adjoint, ad.instantiate_zeros(cotangents[0]), avals
    assert adjoint is not None
    mine = adjoint(bind, call, cotangent, x)
    kept = call.source == NOBODY  # then a sendrecv gives its second operand
    return [mine, *(cotangent if kept else ad.Zero(aval.to_tangent_aval()) for aval in place)]


ad.primitive_jvps[_call_p] = _jvp
ad.primitive_transposes[_call_p] = _transpose


# ---------------------------------------------------------------- mapping


def _batched(operands: Sequence[jax.Array], axes: Sequence[int | None], *, call: MpiCall) -> tuple[list, list]:
    """Make one call with the mapped axis as part of the array.

    All ranks move the axis to one place, wherever each maps its own. That place is the first, as in most programs. It
    is the last if the operation takes rows, which are the first axis.
    """
    if call.is_of_tangents and call.operation != "allreduce":
        raise NoForwardMode(
            f"{call.describe(*operands)}: got forward-mode derivatives of every input at once, as by jax.jacfwd or "
            "jax.hessian; each rank's basis vectors would meet those of the others, and give their sum; expected "
            "jax.jacrev, or jax.jvp along one direction"
        )
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    place = 0 if operation_of(call).is_elementwise else -1
    moved = [
        jnp.repeat(jnp.expand_dims(x, place), size, place) if axis is None else jnp.moveaxis(x, axis, place)
        for x, axis in zip(operands, axes, strict=True)
    ]
    results = _call_p.bind(*moved, call=call)
    return results, [place % result.ndim for result in results]


batching.primitive_batchers[_call_p] = _batched
