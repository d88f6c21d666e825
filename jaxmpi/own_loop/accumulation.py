"""Gradients of several batches for one exchange and one optimizer step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from jaxmpi.allreduce.api import exchange
from jaxmpi.comm.base import Comm
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, cast_like, in_32_bits, named_leaves
from jaxmpi.core.to_jax import to_jax


class Accumulated(NamedTuple):
    """State between updates."""

    count: jax.Array  # i32[]: batches since the last step
    total: PyTree  # sum of their gradients, times weights, in 32 bits at least: in 16, 1 + 256 is 256
    inner: PyTree
    weight: Any  # f32[]: the sum of their weights; None without weights


def accumulate_gradients(
    inner: optax.GradientTransformation, every: int, *, weighted: bool = False, comm: Comm | None = None
) -> optax.GradientTransformationExtraArgs:
    """Apply `inner` to mean gradients of `every` batches; otherwise update nothing.

    In `optax.MultiSteps` the inner transformation runs at every batch; here only when it is due, so that
    `accumulate_gradients(optax.chain(exchange_gradients(), ...), 4)` exchanges once in four batches.

    Gradients are summed in 32 bits at least; their mean and the updates have the dtypes of params. Arguments beyond
    params go to `inner`, those of the batch at which it runs.

    With `weighted`, `update(grads, state, params, weight=n)` takes the weight of each batch: the number of tokens or
    examples that its loss is the mean of. With g_rb the gradient and n_rb the weight of batch b on rank r, the mean
    over ranks that `inner` exchanges is

    sum_rb n_rb g_rb / sum_rb n_rb ;  that of one process with all the tokens.

    A batch of weight 0 does not matter, though its gradient is NaN. If all weights are 0, the gradient is 0.

    Args:
        inner: exchanges by the mean, as `exchange_gradients()` and `sharded` do, if there are several ranks.
        every: how many batches, on all ranks alike.
        weighted: whether batches have weights.
        comm: the ranks over which weights are summed: those over which `inner` exchanges.

    Communicates: what `inner` does, on all ranks at the same updates; with `weighted` one float before it.

    Raises:
        UsageError: `every` is below 1; a gradient is masked, or float0, as those of integers are (path); `weighted`
            without a weight, or one that is no single number from 0 on.
    """
    is_whole = isinstance(every, int | np.integer) and not isinstance(every, bool) and every >= 1
    check(is_whole, f"accumulate_gradients: every: got {every}; expected a whole number >= 1")
    with_more = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> Accumulated:
        total, weight = jax.tree.map(jnp.zeros_like, in_32_bits(params)), jnp.zeros((), jnp.float32)
        return Accumulated(jnp.zeros((), jnp.int32), total, inner.init(params), weight if weighted else None)

    def update(
        updates: PyTree, state: Accumulated, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Accumulated]:
        arrays = [
            to_jax(f"accumulate_gradients: {name or '(the tree itself)'}", x) for name, x in named_leaves(updates)
        ]
        updates = jax.tree.unflatten(jax.tree.structure(updates), arrays)
        like = updates if params is None else params
        added, weight = jax.tree.map(lambda x, total: x.astype(total.dtype), updates, state.total), None
        if weighted:
            this = _as_weight(extra_args.pop("weight", None))
            # The mean loss of a batch without a token is 0/0, and so is its gradient, which times 0 would be NaN.
            added = jax.tree.map(lambda x: jnp.where(this > 0, x * this.astype(x.dtype), 0), added)
            weight = state.weight + this
        total = jax.tree.map(jnp.add, state.total, added)

        def due() -> tuple[PyTree, Accumulated]:
            if weighted:
                # `inner` divides by the number of ranks, and so does this mean of the ranks' weights.
                mean_weight = exchange(weight, comm=comm)
                divisor = jnp.where(mean_weight > 0, mean_weight, 1)
                means = jax.tree.map(lambda x: x / divisor.astype(x.dtype), total)
            else:
                means = jax.tree.map(lambda x: x / every, total)
            stepped, inner_state = with_more.update(cast_like(means, like), state.inner, params, **extra_args)
            total_0, weight_0 = jax.tree.map(jnp.zeros_like, (total, weight))
            return cast_like(stepped, like), Accumulated(jnp.zeros_like(state.count), total_0, inner_state, weight_0)

        def not_yet() -> tuple[PyTree, Accumulated]:
            return jax.tree.map(jnp.zeros_like, like), Accumulated(state.count + 1, total, state.inner, weight)

        return lax.cond(state.count + 1 == every, due, not_yet)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType] # Optax's protocol


def _as_weight(weight: Any) -> jax.Array:
    """The weight of a batch as f32[]."""
    is_traced = isinstance(weight, Tracer)
    if weight is None or np.shape(weight) != () or not (is_traced or 0 <= weight < np.inf):
        raise UsageError(
            f"accumulate_gradients: weight: got {weight}; expected the number of tokens or examples of this batch: "
            "update(grads, state, params, weight=n)"
        )
    return jnp.asarray(weight, jnp.float32)
