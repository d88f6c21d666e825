"""Statistics of a batch that is spread over workers."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmpi.core.pytrees import PyTree

FILLER_WEIGHT = 2.0**-30  # nothing beside a real example; if there is none, the mean of the fillers, not 0 / 0
Mean = Callable[[PyTree], PyTree]


class StatisticsScope(NamedTuple):
    """The axis of `batch_mean` beside the examples at hand."""

    mean: Mean | None = None
    real: jax.Array | None = None


_OVER: contextvars.ContextVar[StatisticsScope | None] = contextvars.ContextVar("_OVER", default=None)
_is_traced = threading.Event()  # set once a trace has a batch mean in it


@contextlib.contextmanager
def statistics_over(mean: Mean | None = None, real: jax.Array | None = None) -> Iterator[None]:
    """The meaning of `batch_mean` for models that are called within this context.

    Models see neither workers nor weights. The context acts while a model is traced, so it belongs inside the function
    that is compiled, around `apply`.

    Args:
        mean: tree -> mean over all workers, in 32 bits (`exchange(tree, "asa32")`): every batch mean is then that of
            the examples of all workers. None: of this worker's.
        real: bool[batch], false if an example only fills the batch up and must not count. None: all count.
    """
    token = _OVER.set(StatisticsScope(mean, real))
    try:
        yield
    finally:
        _OVER.reset(token)


def batch_mean(tree: PyTree) -> PyTree:
    """The mean over examples for a layer's statistics: f32[batch, ...] -> f32[...].

    sum_j w_j x_j / sum_j w_j over the local batch, w_j = 1; under `statistics_over(real=...)` w_j = 2^-30 for fillers,
    and under `statistics_over(mean=...)` j runs over the examples of all workers.

    The derivative is that of the mean of all workers' losses: what the others' losses owe to this worker's examples is
    in its gradients.

    Communicates: nothing, or two means over workers. The first is of the sums and sum_j w_j, the second of their
    cotangents in the backward pass. All workers must then call it equally often, in the same order.
    """
    _is_traced.set()
    over = _OVER.get() or StatisticsScope()
    examples = jax.tree.leaves(tree)[0].shape[0]
    weights = jnp.ones(examples) if over.real is None else jnp.where(over.real, 1.0, FILLER_WEIGHT)

    def weighted(x: jax.Array) -> jax.Array:
        return (x * weights.astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))).sum(0)

    total: Any = jax.tree.map(weighted, tree), weights.sum()
    sums, count = total if over.mean is None else _over_workers(over.mean, total)
    return jax.tree.map(lambda x: x / count.astype(x.dtype), sums)


def forget_traces() -> None:
    """Have jits that may have a batch mean in them traced anew: JAX does not see that its context has changed.

    JAX can forget all traces or none, and the user's are among them: none are where no batch mean was traced.
    """
    if _is_traced.is_set():
        jax.clear_caches()
        _is_traced.clear()


def _take(mean: Mean, tree: PyTree) -> PyTree:
    return mean(tree)


def _over_workers_forward(mean: Mean, tree: PyTree) -> tuple[PyTree, None]:
    return mean(tree), None


def _over_workers_backward(mean: Mean, _: None, cotangents: PyTree) -> tuple[PyTree]:
    # L = (1/w) sum_i L_i(s), s = (1/w) sum_j x_j. Worker j's gradients are those of w L: at x_j, (1/w) sum_i dL_i/ds.
    return (mean(cotangents),)


_over_workers = jax.custom_vjp(_take, nondiff_argnums=(0,))
_over_workers.defvjp(_over_workers_forward, _over_workers_backward)
