"""Gradients of several batches for one exchange and one optimizer step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree, cast_like, in_32_bits, named_leaves
from jaxmpi.core.to_jax import check_not_float0


class Accumulated(NamedTuple):
    """State between updates."""

    count: jax.Array  # i32[]: batches since the last step
    total: PyTree  # sum of their gradients, in 32 bits at least: in 16, 1 + 256 is 256
    inner: PyTree


def accumulate_gradients(inner: optax.GradientTransformation, every: int) -> optax.GradientTransformationExtraArgs:
    """Apply `inner` to mean gradients of `every` batches; otherwise update nothing.

    In `optax.MultiSteps` the inner transformation runs at every batch; here only when it is due, so that
    `accumulate_gradients(optax.chain(exchange_gradients(), ...), 4)` exchanges once in four batches.

    Gradients are summed in 32 bits at least; their mean and the updates have the dtypes of params. Arguments beyond
    params go to `inner`, those of the batch at which it runs.

    Communicates: what `inner` does, on all ranks at the same updates.

    Raises:
        UsageError: `every` is below 1; a gradient is float0, as those of integers are (path).
    """
    is_whole = isinstance(every, int | np.integer) and every >= 1
    check(is_whole, f"accumulate_gradients: every: got {every}; expected a whole number >= 1")
    with_more = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> Accumulated:
        return Accumulated(
            jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, in_32_bits(params)), inner.init(params)
        )

    def update(
        updates: PyTree, state: Accumulated, params: PyTree | None = None, **more: Any
    ) -> tuple[PyTree, Accumulated]:
        like = updates if params is None else params
        for name, leaf in named_leaves(updates):
            check_not_float0(f"accumulate_gradients: {name or '(the tree itself)'}", leaf)
        total = jax.tree.map(lambda total, x: total + x.astype(total.dtype), state.total, updates)

        def due() -> tuple[PyTree, Accumulated]:
            means = cast_like(jax.tree.map(lambda x: x / every, total), like)
            stepped, inner_state = with_more.update(means, state.inner, params, **more)
            return cast_like(stepped, like), Accumulated(
                jnp.zeros_like(state.count), jax.tree.map(jnp.zeros_like, total), inner_state
            )

        def not_yet() -> tuple[PyTree, Accumulated]:
            return jax.tree.map(jnp.zeros_like, like), Accumulated(state.count + 1, total, state.inner)

        return lax.cond(state.count + 1 == every, due, not_yet)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType] # Optax's protocol
