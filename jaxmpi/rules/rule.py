"""The contract of a rule: when workers talk, and about what."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

PyTree = Any


class Exchange(NamedTuple):
    """`exchange` with its strategy and workers chosen."""

    mean: Callable[[PyTree], PyTree]
    sum: Callable[[PyTree], PyTree]
    jit: Callable[..., Callable] = jax.jit  # for the pieces without communication
    gradients: optax.GradientTransformation | None = None  # a mean of gradients with a state, instead of `mean`


class Squares(NamedTuple):
    """Of gradients: the sums of squared entries, f32[]."""

    local: jax.Array  # |g_i|^2
    mean: jax.Array  # |g|^2


class Rule(NamedTuple):
    """Two pure functions. A rule returns params, not updates: p + (mean - p) would not be exact.

    `init(params) -> state`; `update(grads, state, params) -> (params, state)`, where grads are this worker's.
    Called outside jit, `update` runs the jitted pieces it is made of one by one.

    A rule may have more. `eval_params(params, state) -> params` are those that are evaluated; it may communicate.
    `measured` is an `update` that gives `Squares` as well, for the noise scale.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    state_is_replicated: bool  # whether all workers hold the same state
    eval_params: Callable[[PyTree, PyTree], PyTree] | None = None
    params_are_replicated: bool = True  # whether all workers hold the same params after each step
    measured: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, Squares]] | None = None


def descend(
    tx: optax.GradientTransformation, jit: Callable[..., Callable]
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """One optimizer step, jitted: (grads, state, params) -> (params, state); state and params are donated."""

    def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jit(step, donate_argnums=(1, 2))
