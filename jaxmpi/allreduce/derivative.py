"""The derivative of an exchange: exchanges of tangents and of cotangents.

A mean over w workers is its own transpose, since every worker's loss depends on all workers' leaves:
y_j = (1/w) sum_i x_i for all j, so d(sum_j loss_j)/d x_i = (1/w) sum_j d loss_j / d y_j. A sum is likewise its own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import UsageError

NOT_MAPPED = (
    "jax.vmap cannot map an exchange over MPI ranks, which is one message for all; exchange what is mapped, as in "
    "exchange(jax.vmap(f)(xs)): a mean over workers is taken entry by entry, so it is the same"
)


class LinearExchange(Protocol):
    """A linear exchange of leaves, hashable."""

    @property
    def comm(self) -> Comm:
        """The workers that exchange."""
        ...

    def of(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """The leaves' sums or means over workers."""
        ...

    def in_f32(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """The same through the comm's own sum, in 32 bits."""
        ...


# One equation, which JAX can transpose: it can neither `jax.custom_jvp` inside jit nor the messages of which the
# exchange is made. `program` is the exchange that has been traced, and so has its number and is agreed between ranks;
# without one it is traced when it is lowered, as the exchange of tangents and cotangents is.
_exchange_p = jax.extend.core.Primitive("jaxmpi_exchange")
_exchange_p.multiple_results = True


@_exchange_p.def_effectful_abstract_eval
def _abstract(*leaves: Any, exchange: LinearExchange, program: ClosedJaxpr | None) -> tuple[list, Any]:
    if program:
        return program.out_avals, program.effects
    assert isinstance(exchange.comm, MpiComm)
    return [ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves], {exchange.comm.effect}


@_exchange_p.def_impl
def _now(*leaves: jax.Array, exchange: LinearExchange, program: ClosedJaxpr | None) -> list[jax.Array]:
    return _compiled(program)(*leaves) if program else exchange.of(list(leaves))


@functools.lru_cache(64)
def _compiled(program: ClosedJaxpr) -> Callable[..., list[jax.Array]]:
    """One program, for a traced function that JAX evaluates equation by equation."""
    return jax.jit(jaxpr_as_fun(program))


def _lower(ctx: Any, *leaves: Any, exchange: LinearExchange, program: ClosedJaxpr | None) -> Sequence[Any]:
    run = jaxpr_as_fun(program) if program else lambda *arrays: exchange.of(list(arrays))
    return mlir.lower_fun(run)(ctx, *leaves)


def _exchange_floats(
    leaves: Sequence[Any], given: Sequence[Any], like: Sequence[Any], exchange: LinearExchange
) -> list[Any]:
    """The exchange of floats' tangents or cotangents; zeros for others. `leaves` and `like` are shapes and dtypes."""
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    out: list[Any] = [ad.Zero(each.to_tangent_aval()) for each in like]
    values = [ad.instantiate_zeros(given[i]) for i in floats]
    exchanged = _exchange_p.bind(*values, exchange=exchange, program=None) if floats else []
    for i, x in zip(floats, exchanged, strict=True):
        out[i] = x.astype(like[i].dtype)
    return out


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, exchange: LinearExchange, program: ClosedJaxpr | None
) -> tuple[list, list]:
    results = _exchange_p.bind(*primals, exchange=exchange, program=program)
    shapes, like = list(map(jax.typeof, primals)), list(map(jax.typeof, results))
    return results, _exchange_floats(shapes, tangents, like, exchange)


def _transpose(cotangents: Sequence[Any], *leaves: Any, exchange: LinearExchange, program: Any) -> list[Any]:
    shapes = [leaf.aval if ad.is_undefined_primal(leaf) else jax.typeof(leaf) for leaf in leaves]
    return _exchange_floats(shapes, cotangents, shapes, exchange)


def _refuse_to_map(*_: Any, **__: Any) -> tuple:
    raise UsageError(NOT_MAPPED)


mlir.register_lowering(_exchange_p, _lower, cacheable=False)
ad.primitive_jvps[_exchange_p] = _jvp
ad.primitive_transposes[_exchange_p] = _transpose
batching.primitive_batchers[_exchange_p] = _refuse_to_map


def differentiable(exchange: LinearExchange, leaves: list[jax.Array], run: Callable[[list], list]) -> list[jax.Array]:
    """`run(leaves)` with the derivative of an exchange, not of `run`.

    Integers have none.
    """
    held = [jax.lax.stop_gradient(leaf) for leaf in leaves]
    if isinstance(exchange.comm, MpiComm) and any(isinstance(leaf, Tracer) for leaf in held):
        program = jax.make_jaxpr(run)(held)
        return _exchange_p.bind(*leaves, exchange=exchange, program=program)
    results = run(held)
    smooth = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    given = _with_tangents(exchange, [leaves[i] for i in smooth], [results[i] for i in smooth])
    for i, result in zip(smooth, given, strict=True):
        results[i] = result
    return results


def _take_results(exchange: LinearExchange, leaves: list[jax.Array], results: list[jax.Array]) -> list[jax.Array]:
    """The results, whose derivative goes by the leaves."""
    return results


_with_tangents = jax.custom_jvp(_take_results, nondiff_argnums=(0,))


@_with_tangents.defjvp
def _tangents(exchange: LinearExchange, primals: tuple, tangents: tuple) -> tuple[list, list]:
    is_over_mpi = isinstance(exchange.comm, MpiComm)
    if is_over_mpi:
        along = _exchange_p.bind(*map(ad.instantiate_zeros, tangents[0]), exchange=exchange, program=None)
    else:
        along = exchange.in_f32(tangents[0])
    return primals[1], [t.astype(jnp.result_type(y)) for t, y in zip(along, primals[1], strict=True)]
