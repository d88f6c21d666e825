"""The contract of a rule: when workers exchange, and what.

Workers may average gradients at every step, or average params every so many steps. They may also exchange with a center
or with each other without waiting. Each of these is a `Rule`: two pure functions, so that the trainer has one step for
all. A rule returns params, not updates as Optax does: a mean written as p + (mean - p) is not exact in floating point.
Its exchange is an argument, so a rule knows neither strategy nor wire. Asynchronous rules give the arithmetic of both
ends in NumPy, apart from the messages; so tests can run random schedules without MPI.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxmpi.allreduce.zero import Zero
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.sharding import ElementSharding, TensorSharding


class Exchange(NamedTuple):
    """`exchange` with its strategy and workers chosen."""

    mean: Callable[[PyTree], PyTree]
    sum: Callable[[PyTree], PyTree]
    jit: Callable[..., Callable] = jax.jit  # for the pieces without communication
    gradients: optax.GradientTransformation | None = None  # a mean of gradients with a state, instead of `mean`
    zero: Zero | None = None  # instead of `mean`, if each worker is to step its shard only


class Sharding(NamedTuple):
    """How a rule's state is sharded over workers."""

    zero: Zero
    with_state: Callable[[], ElementSharding | TensorSharding]  # the sharding that knows the optimizer's state
    init: Callable[[PyTree, Any], PyTree]  # (params, index of a shard) -> the state of that shard


class Rule(NamedTuple):
    """Two pure functions. A rule returns params, not updates as in Optax.

    `init(params) -> state`; `update(grads, state, params) -> (params, state)`, with this worker's grads.
    Called outside jit, `update` runs the jitted pieces it is made of one by one.

    A rule may have more. `eval_params(params, state) -> params` are those that are evaluated; it may communicate.
    `update_with_squares` is an `update` that gives |g|^2 as well, f32[], g the mean gradient: for the noise scale.
    `distance(state) -> f32[]` is the L2 of this worker from the mean or center at the last meeting.
    `sharding` says how its state is sharded over workers.
    `asynchronous` says how workers exchange without waiting for each other; `update` then communicates nothing.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    state_is_replicated: bool  # True if all workers hold the same state
    eval_params: Callable[[PyTree, PyTree], PyTree] | None = None
    params_are_replicated: bool = True  # True if all workers hold the same params after each step
    update_with_squares: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, jax.Array]] | None = None
    asynchronous: "Asynchronous | None" = None
    distance: Callable[[PyTree], Any] | None = None
    sharding: Sharding | None = None  # `init` then gives the whole state, for its shapes


class Asynchronous(NamedTuple):
    """How workers exchange with a center or each other, in NumPy on f32[n].

    `pushed` is what a worker sent, as the wire left it, and `seen` the center before that; both ends know both.
    """

    push: Callable[[np.ndarray, np.ndarray], np.ndarray]  # (w, base) -> what the worker pushes
    # (center, pushed, seen): changes the center in place, entry by entry: it is called on segments of f32[n]
    apply: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    # (w, base, pushed, seen) -> (w, base), the worker's after the exchange
    pull: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    # (worker, workers, seed, weight or 0) -> its part, if workers push to each other and not to a center
    gossip: Callable[[int, int, int, float], Any] | None = None  # `RandomGossip`
    starts_at_center: bool = False  # if a run is resumed
    to_center: Callable[[PyTree, PyTree], PyTree] = lambda params, state: params  # the tree that is pushed
    from_center: Callable[[PyTree, PyTree], PyTree] = lambda tree, state: tree  # its inverse

    @property
    def is_gossip(self) -> bool:
        """Return True if workers push to each other, not to a center."""
        return self.gossip is not None


def square(tree: PyTree) -> jax.Array:
    """The sum of the squares of all entries, f32[]."""
    return sum((jnp.square(leaf.astype(jnp.float32)).sum() for leaf in jax.tree.leaves(tree)), jnp.zeros(()))


def l2(tree: PyTree) -> jax.Array:
    """The root of the sum of squares of all entries, f32[]."""
    return jnp.sqrt(square(tree))


def cond(is_due: Any, branch: Callable[..., tuple], *operands: PyTree) -> tuple:
    """`branch(*operands)` if due, else the operands; inside jit both are compiled."""
    if isinstance(is_due, Tracer):
        return jax.lax.cond(is_due, branch, lambda *unchanged: unchanged, *operands)
    return branch(*operands) if np.all(is_due) else operands  # devices of one process count alike


def step_in_place(
    step: Callable[..., tuple], jit: Callable[..., Callable], donates: tuple[int, ...] = (1, 2)
) -> Callable[..., tuple]:
    """Jit a step that writes state and params where they lie.

    JAX gives each result, in order, the first donated array of its shape. So inside the program the results come in the
    order of the arguments. Else new params take the place of a moment, and XLA copies both.

    Args:
        step: (grads, state, params) -> (params, or updates, and state, ...).
        donates: its state, and params unless they are still needed.
    """

    @functools.wraps(step)
    def state_first(grads: PyTree, state: PyTree, params: PyTree) -> tuple:
        params, state, *extra = step(grads, state, params)
        return state, params, *extra

    jitted = jit(state_first, donate_argnums=donates)

    def step_of_arguments(grads: PyTree, state: PyTree, params: PyTree) -> tuple:
        state, params, *extra = jitted(grads, state, params)
        return params, state, *extra

    return step_of_arguments


def optimizer_step(tx: optax.GradientTransformation) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """An optimizer's step: (grads, state, params) -> (params, state)."""

    def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def jit_optimizer_step(
    tx: optax.GradientTransformation, jit: Callable[..., Callable]
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Jit one optimizer step: (grads, state, params) -> (params, state), both donated."""
    return step_in_place(optimizer_step(tx), jit)


def jit_optimizer_updates(
    tx: optax.GradientTransformation, jit: Callable[..., Callable]
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Jit an optimizer's updates: (grads, state, params) -> (updates, state), state donated."""
    return step_in_place(tx.update, jit, donates=(1,))
