"""Mean of gradients: workers step like a single one on all examples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.slices import MASTERS, OF_TX
from jaxmpi.rules.base import (
    Exchange,
    Rule,
    ShardedMean,
    Sharding,
    jit_optimizer_step,
    optimizer_step,
    square,
    step_in_place,
)


def gradients(tx: optax.GradientTransformation, exchange: Exchange, noise: bool = False) -> Rule:
    """Every worker steps with the mean gradient; any optimizer.

    g = (1/k) sum_i g_i ;  w <- w + tx(g)

    Args: noise: measure |g|^2 as well, in the program that steps.
    State: tx's, equal on all workers; with `exchange.gradients` also that one's, of which a part is each worker's.
    With `exchange.shards` each worker steps its slices of params and holds that slice of tx's state:
    w_c <- w_c + tx_c(g_c) ;  w = all w_c ;  tx treats each entry, or each tensor, by itself.
    Communicates: one mean of the gradients a step. Learning rate: that of one worker on the effective batch.
    """
    if exchange.shards:
        return sharded(tx, exchange.shards, exchange.jit)
    step = jit_optimizer_step(tx, exchange.jit)
    if exchange.gradients:
        return with_state(tx, exchange.gradients, step)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return step(exchange.mean(grads), state, params)

    rule = Rule(tx.init, update, state_is_replicated=True)
    return rule._replace(measured=measured(tx, exchange)) if noise else rule


def measured(tx: optax.GradientTransformation, exchange: Exchange) -> Callable:
    """`update` that gives |g|^2 too: (grads, state, params) -> (params, state, f32[])."""
    descended = optimizer_step(tx)

    def step(mean: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        return *descended(mean, state, params), square(mean)

    step = step_in_place(step, exchange.jit)
    return lambda grads, state, params: step(exchange.mean(grads), state, params)


def sharded(tx: optax.GradientTransformation, shards: ShardedMean, jit: Callable[..., Callable]) -> Rule:
    """The same with the optimizer between the halves of the exchange.

    With masters m, which stay in 32 bits: m_c <- m_c + tx_c(g_c) ;  w <- w + wire(all m_c - w_c).
    """
    cut, descended = shards.cut, optimizer_step(tx)

    def of_slice(mean: PyTree, state: PyTree, params: PyTree, chunk: jax.Array) -> tuple[PyTree, PyTree]:
        if not shards.keeps_masters:
            return cut.step(tx, descended, chunk, mean, state, cut.own(params, chunk))
        masters, of_tx = cut.step(tx, descended, chunk, mean, state[OF_TX], state[MASTERS])
        return cut.lacking(params, masters, chunk), {OF_TX: of_tx, MASTERS: masters}

    def added(params: PyTree, changes: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, params, changes)

    step, add = jit(of_slice, donate_argnums=(0, 1)), jit(added, donate_argnums=(0,))

    def measured(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        mean, squares = shards.scatter(grads)
        own, state = step(mean, state, params, shards.chunk())
        if shards.keeps_masters:
            return add(params, shards.gather(own, params, shards.gather_wire)), state, squares
        return shards.renewed(own, params), state, squares

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return measured(grads, state, params)[:2]

    def init(params: PyTree) -> PyTree:
        return {OF_TX: tx.init(params), MASTERS: params} if shards.keeps_masters else tx.init(params)

    def init_slice(params: PyTree, chunk: jax.Array) -> PyTree:
        of_tx = cut.init(tx, params, chunk)
        return {OF_TX: of_tx, MASTERS: cut.own(params, chunk)} if shards.keeps_masters else of_tx

    return Rule(
        init,
        update,
        state_is_replicated=False,
        measured=measured if shards.gives_square else None,
        sharding=Sharding(shards, tx, init_slice),
    )


def with_state(tx: optax.GradientTransformation, mean: optax.GradientTransformation, step: Callable) -> Rule:
    """The same with a compressor, which keeps a residual."""

    def init(params: PyTree) -> PyTree:
        return mean.init(params), tx.init(params)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        kept, inner = state
        grads, kept = mean.update(grads, kept)
        params, inner = step(grads, inner, params)
        return params, (kept, inner)

    return Rule(init, update, state_is_replicated=False)
