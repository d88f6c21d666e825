"""The derivative of an exchange: exchanges of tangents and of cotangents.

A mean over w workers is its own transpose, since every worker's loss depends on all workers' leaves:
y_j = (1/w) sum_i x_i for all j, so d(sum_j loss_j)/d x_i = (1/w) sum_j d loss_j / d y_j. A sum is likewise its own.

An exchange is `choice`: hashable, with its `comm`, and `choice.tangents(leaves)` is that of tangents or cotangents.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import UsageError


def differentiable(choice: Any, leaves: list[jax.Array], run: Callable[[list], list]) -> list[jax.Array]:
    """`run(leaves)` with the derivative of an exchange, not of `run`.

    Integers have none.
    """
    constant = [jax.lax.stop_gradient(leaf) for leaf in leaves]
    if isinstance(choice.comm, MpiComm) and any(isinstance(leaf, Tracer) for leaf in constant):
        return _exchange_p.bind(*leaves, choice=choice, program=jax.make_jaxpr(run)(constant))
    results = run(constant)
    smooth = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    for i, x in zip(
        smooth, _with_tangents(choice, *([xs[i] for i in smooth] for xs in (leaves, results))), strict=True
    ):
        results[i] = x
    return results


# ---------------------------------------------------------------- along an axis, and outside jit


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_tangents(choice: Any, leaves: list[jax.Array], results: list[jax.Array]) -> list[jax.Array]:
    """The results, whose derivative goes by the leaves."""
    return results


@_with_tangents.defjvp
def _tangents(choice: Any, primals: tuple, tangents: tuple) -> tuple[list, list]:
    if isinstance(choice.comm, MpiComm):
        exchanged_tangents = _exchange_p.bind(*map(ad.instantiate_zeros, tangents[0]), choice=choice, program=None)
    else:
        exchanged_tangents = choice.tangents(tangents[0])
    return primals[1], [t.astype(jnp.result_type(y)) for t, y in zip(exchanged_tangents, primals[1], strict=True)]


# ---------------------------------------------------------------- over MPI, in a program

# One equation, which JAX can transpose: it can neither `jax.custom_jvp` inside jit nor the messages of which the
# exchange is made. `program` is the exchange that has been traced, and so has its number and is agreed between ranks;
# without one it is traced when it is lowered, as the exchange of tangents and cotangents is.
_exchange_p = jax.extend.core.Primitive("jaxmpi_exchange")
_exchange_p.multiple_results = True


@_exchange_p.def_effectful_abstract_eval
def _abstract(*leaves: Any, choice: Any, program: ClosedJaxpr | None) -> tuple[list, Any]:
    if program:
        return program.out_avals, program.effects
    return [ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves], {choice.comm.effect}


@_exchange_p.def_impl
def _evaluate(*leaves: jax.Array, choice: Any, program: ClosedJaxpr | None) -> list[jax.Array]:
    return _compiled(program)(*leaves) if program else choice.tangents(list(leaves))


@functools.lru_cache(64)
def _compiled(program: ClosedJaxpr) -> Callable[..., list[jax.Array]]:
    """One program, for a traced function that JAX evaluates equation by equation."""
    return jax.jit(jaxpr_as_fun(program))


def _lower(ctx: Any, *leaves: Any, choice: Any, program: ClosedJaxpr | None) -> Sequence[Any]:
    run = jaxpr_as_fun(program) if program else lambda *arrays: choice.tangents(list(arrays))
    return mlir.lower_fun(run)(ctx, *leaves)


def _linear(leaves: Sequence[Any], tangents: Sequence[Any], like: Sequence[Any], choice: Any) -> list[Any]:
    """The exchange of floats' tangents or cotangents; zeros for others. `leaves` and `like` are shapes and dtypes."""
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    results: list[Any] = [ad.Zero(shape.to_tangent_aval()) for shape in like]
    values = [ad.instantiate_zeros(tangents[i]) for i in floats]
    for i, x in zip(floats, _exchange_p.bind(*values, choice=choice, program=None) if floats else [], strict=True):
        results[i] = x.astype(like[i].dtype)
    return results


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, choice: Any, program: Any) -> tuple[list, list]:
    results = _exchange_p.bind(*primals, choice=choice, program=program)
    return results, _linear([*map(jax.typeof, primals)], tangents, [*map(jax.typeof, results)], choice)


def _transpose(cotangents: Sequence[Any], *leaves: Any, choice: Any, program: Any) -> list[Any]:
    shapes = [leaf.aval if ad.is_undefined_primal(leaf) else jax.typeof(leaf) for leaf in leaves]
    return _linear(shapes, cotangents, shapes, choice)


def _refuse_to_map(*_: Any, **__: Any) -> tuple:
    raise UsageError(
        "jax.vmap cannot map an exchange over MPI ranks, which is one message for all; exchange what is mapped, as in "
        "exchange(jax.vmap(f)(xs)): a mean over workers is taken entry by entry, so it is the same"
    )


mlir.register_lowering(_exchange_p, _lower, cacheable=False)
ad.primitive_jvps[_exchange_p] = _jvp
ad.primitive_transposes[_exchange_p] = _transpose
batching.primitive_batchers[_exchange_p] = _refuse_to_map


# ---------------------------------------------------------------- without a derivative


def block_transforms(leaf: jax.Array, comm: Comm) -> jax.Array:
    """The leaf, which refuses derivatives and, over MPI, `jax.vmap`."""
    return _blocked_p.bind(leaf, allows_vmap=not isinstance(comm, MpiComm) or comm.size == 1)


_blocked_p = jax.extend.core.Primitive("jaxmpi_without_transforms")
_blocked_p.def_impl(lambda x, allows_vmap: x)
_blocked_p.def_abstract_eval(lambda x, allows_vmap: x)


def _refuse(*_: Any, **__: Any) -> tuple:
    raise UsageError(
        "an exchange by a compressor or beside a program cannot be differentiated; take jax.grad first, then exchange "
        "the gradients, or differentiate jaxmpi.exchange"
    )


def _map(xs: Sequence[Any], axes: Sequence[Any], *, allows_vmap: bool) -> tuple:
    return (_blocked_p.bind(*xs, allows_vmap=True), axes[0]) if allows_vmap else _refuse_to_map()


mlir.register_lowering(_blocked_p, lambda ctx, x, allows_vmap: [x])
ad.primitive_jvps[_blocked_p] = ad.primitive_transposes[_blocked_p] = _refuse
batching.primitive_batchers[_blocked_p] = _map
