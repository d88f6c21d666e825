"""Mean of gradients: one optimizer on what a single worker would see on the whole batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.slices import slices_of
from jaxmpi.rules.base import Exchange, Halves, Rule, Sharding, descend


def gradients(tx: optax.GradientTransformation, exchange: Exchange, noise: bool = False) -> Rule:
    """Every worker steps with the mean gradient; any optimizer.

    g = (1/k) sum_i g_i ;  w <- w + tx(g)

    Args: noise: measure |g|^2 as well, in the program that steps.
    State: tx's, equal on all workers; with `exchange.gradients` also that one's, of which a part is each worker's.
    With `exchange.shards` each worker steps its slices of params and holds that slice of tx's state:
    w_c <- w_c + tx_c(g_c) ;  w = all w_c ;  tx treats each entry by itself.
    Communicates: one mean of the gradients a step. Learning rate: that of one worker on the effective batch.
    """
    if exchange.shards:
        return sharded(tx, exchange.shards, exchange.jit)
    step = descend(tx, exchange.jit)
    if exchange.gradients:
        return with_state(tx, exchange.gradients, step)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return step(exchange.mean(grads), state, params)

    rule = Rule(tx.init, update, state_is_replicated=True)
    return rule._replace(measured=measured(tx, exchange)) if noise else rule


def measured(tx: optax.GradientTransformation, exchange: Exchange) -> Callable:
    """`update` that gives |g|^2 too: (grads, state, params) -> (params, state, f32[])."""

    def step(mean: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        updates, state = tx.update(mean, state, params)
        return optax.apply_updates(params, updates), state, square(mean)

    step = exchange.jit(step, donate_argnums=(1, 2))
    return lambda grads, state, params: step(exchange.mean(grads), state, params)


def sharded(tx: optax.GradientTransformation, shards: Halves, jit: Callable[..., Callable]) -> Rule:
    """The same with the optimizer between the halves of the exchange."""

    def of_slice(mean: PyTree, state: PyTree, params: PyTree, chunk: jax.Array) -> tuple[PyTree, PyTree]:
        own = slices_of(params, chunk, shards.size)
        updates, state = tx.update(mean, state, own)
        return optax.apply_updates(own, updates), state

    step = jit(of_slice, donate_argnums=(0, 1))

    def measured(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        mean, squares = shards.scatter(grads)
        own, state = step(mean, state, params, shards.chunk())
        return shards.gather(own, params), state, squares

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return measured(grads, state, params)[:2]

    def init_slice(params: PyTree, chunk: jax.Array) -> PyTree:
        return tx.init(slices_of(params, chunk, shards.size))

    return Rule(
        tx.init,
        update,
        state_is_replicated=False,
        measured=measured if shards.gives_square else None,
        sharding=Sharding(shards.chunks, init_slice),
    )


def square(tree: PyTree) -> jax.Array:
    """The sum of the squares of all entries, f32[]."""
    return sum((jnp.square(leaf.astype(jnp.float32)).sum() for leaf in jax.tree.leaves(tree)), jnp.zeros(()))


def with_state(tx: optax.GradientTransformation, mean: optax.GradientTransformation, step: Callable) -> Rule:
    """The same with a mean that has a state: compressed, or one step late."""

    def init(params: PyTree) -> PyTree:
        return mean.init(params), tx.init(params)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        kept, inner = state
        grads, kept = mean.update(grads, kept)
        params, inner = step(grads, inner, params)
        return params, (kept, inner)

    return Rule(init, update, state_is_replicated=False)
