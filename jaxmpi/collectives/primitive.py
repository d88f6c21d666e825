"""One JAX primitive for all operations, with its derivatives, mapping and lowering.

Ranks compare a call when it is lowered. By then JAX has applied all transformations: shapes are final, and calls that
only a derivative makes are compared like any other. A call outside jit is compared by a message whenever it is made.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from jaxmpi.allreduce.call_order import compare_when_run, jit_in_turn, joint_call, number_of
from jaxmpi.allreduce.dispatch import MPI_COUNTS
from jaxmpi.collectives.call import NOBODY, MpiCall, is_logged, shape_of
from jaxmpi.collectives.table import OPERATIONS, Operation, has_slots_for, run_by_mpi, run_in_c
from jaxmpi.comm.agreement import Fingerprint, fingerprint
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree


class NoForwardMode(UsageError, RuntimeError):
    """A Jacobian in forward mode, for which mpi4jax raises RuntimeError."""


call_p = jax.extend.core.Primitive("jaxmpi_call")
call_p.multiple_results = True


_interceptor = threading.local()


@contextmanager
def intercept_calls(make: Callable[..., list[jax.Array]]) -> Iterator[None]:
    """Have another function make this thread's calls: (call, *operands) -> results."""
    _interceptor.make = make
    try:
        yield
    finally:
        _interceptor.make = None


def bind(call: MpiCall, *operands: jax.Array) -> list[jax.Array]:
    """Results of a call on this rank, inside or outside jit."""
    if make := getattr(_interceptor, "make", None):
        return make(call, *operands)
    return call_p.bind(*operands, call=call)


def operation_of(call: MpiCall) -> Operation:
    """The operation's row of the table."""
    return OPERATIONS[call.operation]


@call_p.def_effectful_abstract_eval
def _abstract(*operands: Any, call: MpiCall) -> tuple[list, set]:
    if call.is_identity:
        return list(operands), set()
    results = [] if call.handle else operation_of(call).results(call, *operands)
    return [ShapedArray(result.shape, result.dtype) for result in results], {call.comm.effect}


# ---------------------------------------------------------------- comparison


def assert_same(call: MpiCall, operands: Sequence[Any], is_traced: bool) -> None:
    """Compare a call over ranks, and refuse what MPI cannot send at once; a message is compared by its header.

    Raises:
        UsageError: rank, got, expected; 2^31 numbers or more, as counts of MPI are C's ints.
    """
    if operation_of(call).is_message:
        return
    if max((x.size for x in operands), default=0) >= MPI_COUNTS:
        raise UsageError(
            f"{call.describe(*operands)}: got {max(x.size for x in operands):,} numbers; expected fewer than 2^31, to "
            "which MPI counts: cut it up"
        )
    call.comm.assert_same(_facts(call, operands, is_traced))


def _facts(call: MpiCall, operands: Sequence[Any], is_traced: bool) -> Fingerprint:
    sent_dtypes, is_tree = [x.dtype.name for x in operands], list(call.given) not in ([], [""])
    leaf_dtypes = [] if is_tree else [leaf.dtype.name for leaf in call.given.values()]
    options: dict[str, Any] = {
        **{"op": call.op, "root": call.root},
        **({"MPI4JAX_DEBUG": "on"} if is_logged() else {}),
        **{f"shape of argument {i}": list(operation_of(call).shared(call, x)) for i, x in enumerate(operands)},
        "dtypes": [*leaf_dtypes, *(f"sent as {name}" for name in sent_dtypes)]
        if leaf_dtypes not in ([], sent_dtypes)
        else sent_dtypes,
        "counts": call.counts,
    }
    if call.operation != "allreduce":  # its transpose sends nothing: a rank's part of a loss may be constant
        way_out = (
            "give what depends on the differentiated input on all ranks, a template too, as 0 * x; of a second "
            "derivative take a loss whose first depends on it on all"
        )
        options["differentiated"] = "yes" if call.is_differentiated else f"no: {way_out}"
    if is_tree:
        options["leaf"] = {path: f"{leaf.dtype.name}{list(leaf.shape)}" for path, leaf in call.given.items()}
    if is_traced and not call.may_differ:
        return fingerprint(f"{call.operation}, {call.line}", {**options, "lines": call.lines})
    return fingerprint(f"{call.operation} in a program" if is_traced else call.operation, options)


def describe_call(call: MpiCall, operands: Sequence[Any]) -> str:
    """Describe a call alike on all ranks, without shapes that may differ."""
    return call.describe(*(shape_of(x, operation_of(call).shared(call, x)) for x in operands))


# ---------------------------------------------------------------- outside jit, and into a program


@call_p.def_impl
def _run_outside_jit(*operands: jax.Array, call: MpiCall) -> list[jax.Array]:
    if call.is_identity:
        return list(operands)
    with joint_call(call.comm, call.operation, is_compared=not operation_of(call).is_message):
        assert_same(call, operands, is_traced=False)
        program: Callable[[PyTree], PyTree] = call.comm.cached(
            call, lambda: jit_in_turn(lambda operands: operation_of(call).run(call, *operands))
        )
        return program(list(operands))


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, call: MpiCall) -> Sequence[Any]:
    if call.is_identity:
        return operands
    row, number, run = operation_of(call), None, functools.partial(operation_of(call).run, call)
    with nullcontext() if row.is_message else joint_call(call.comm, call.operation) as is_nested:
        assert_same(call, ctx.avals_in, is_traced=True)
        if call.handle:
            return mlir.lower_fun(call.handle.lower(call, ctx.avals_in))(ctx, *operands)
        if not (row.is_message or is_nested):
            number = number_of(call.comm, describe_call(call, ctx.avals_in))
        if number is not None and row.run is run_by_mpi and not is_logged():
            if has_slots_for(call, ctx.avals_in[0]):
                return mlir.lower_fun(functools.partial(run_in_c, call, number))(ctx, *operands)

    def compare(*arrays: jax.Array) -> list[jax.Array]:
        with compare_when_run(call.comm, number):
            return run(*arrays)

    return mlir.lower_fun(compare)(ctx, *operands)


mlir.register_lowering(call_p, _lower, cacheable=False)  # each call has a number


# ---------------------------------------------------------------- derivatives and mapping


def _check_not_started(call: MpiCall, operands: Sequence[Any]) -> None:
    if call.handle:
        raise UsageError(
            f"start: {call.describe(*operands)} has neither derivative nor mapping; take {call.operation} itself there"
        )


def _check_linear(call: MpiCall, operands: Sequence[Any]) -> None:
    _check_not_started(call, operands)
    row = operation_of(call)
    if row.adjoint is None or call.op not in ("", "sum"):
        way_out = "sendrecv" if row.is_message else "a sum, or jax.lax.stop_gradient around x"
        raise UsageError(f"{call.describe(*operands)} has no derivative; expected a linear operation: {way_out}")


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: MpiCall) -> tuple[list, list]:
    _check_not_started(call, primals)
    # Ranks compare whether they differentiate: one that gives a constant has no transposed call, for which the others
    # would wait.
    results = call_p.bind(*primals, call=dataclasses.replace(call, is_differentiated=True))
    _check_linear(call, primals)
    tangents_call = dataclasses.replace(call, is_of_tangents=True)
    return results, call_p.bind(*map(ad.instantiate_zeros, tangents), call=tangents_call)


def _transpose(cotangents: Sequence[Any], *operands: Any, call: MpiCall) -> list:
    avals = [operand.aval if ad.is_undefined_primal(operand) else jax.typeof(operand) for operand in operands]
    _check_linear(call, avals)
    adjoint, cotangent, [x, *place] = operation_of(call).adjoint, ad.instantiate_zeros(cotangents[0]), avals
    assert adjoint is not None
    from_nobody = call.source == NOBODY  # then a sendrecv gives its second operand
    return [
        adjoint(bind, call, cotangent, x),
        *(cotangent if from_nobody else ad.Zero(aval.to_tangent_aval()) for aval in place),
    ]


ad.primitive_jvps[call_p] = _jvp
ad.primitive_transposes[call_p] = _transpose


def _batched(operands: Sequence[jax.Array], axes: Sequence[int | None], *, call: MpiCall) -> tuple[list, list]:
    """Make one call with the mapped axis as part of the array.

    All ranks move the axis to one place, wherever each has it: the first, as in most programs, or the last if the
    operation takes rows, which are the first axis.
    """
    _check_not_started(call, operands)
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
    results = call_p.bind(*moved, call=call)
    return results, [place % result.ndim for result in results]


batching.primitive_batchers[call_p] = _batched
