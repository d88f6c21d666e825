"""Mean of gradients: workers step like a single one on all examples."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxmpi.allreduce.zero import Zero
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.sharding import MASTERS, OF_TX
from jaxmpi.rules.base import (
    Exchange,
    Rule,
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
    With `exchange.zero` each worker steps its shard of params and holds that shard of tx's state:
    w_c <- w_c + tx_c(g_c) ;  w = all w_c ;  tx treats each entry, or each tensor, by itself.
    Communicates: one mean of the gradients a step. Learning rate: that of one worker on the effective batch.
    """
    if exchange.zero:
        return sharded(tx, exchange.zero, exchange.jit)
    step = jit_optimizer_step(tx, exchange.jit)
    if exchange.gradients:
        return compressed(tx, exchange.gradients, step)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return step(exchange.mean(grads), state, params)

    rule = Rule(tx.init, update, state_is_replicated=True)
    return rule._replace(update_with_squares=update_with_squares(tx, exchange)) if noise else rule


def update_with_squares(tx: optax.GradientTransformation, exchange: Exchange) -> Callable:
    """`update` that gives |g|^2 too: (grads, state, params) -> (params, state, f32[])."""
    descend = optimizer_step(tx)

    def step(mean: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        return *descend(mean, state, params), square(mean)

    step = step_in_place(step, exchange.jit)
    return lambda grads, state, params: step(exchange.mean(grads), state, params)


def sharded(tx: optax.GradientTransformation, zero: Zero, jit: Callable[..., Callable]) -> Rule:
    """The same with the optimizer between the halves of the exchange.

    With masters m, which stay in 32 bits: m_c <- m_c + tx_c(g_c) ;  w <- w + wire(all m_c - w_c).
    """
    descend = optimizer_step(tx)
    # Traces tx once a worker, so not before it is needed: a rule may be built for a look at its shapes.
    sharding_of_state = functools.cache(lambda: zero.sharding.with_state_of(tx))

    def step_of_shard(mean: PyTree, state: PyTree, params: PyTree, index: jax.Array) -> tuple[PyTree, PyTree]:
        sharding = sharding_of_state()
        if not zero.keeps_masters:
            return sharding.step(descend, index, mean, state, sharding.shard(params, index))
        masters, tx_state = sharding.step(descend, index, mean, state[OF_TX], state[MASTERS])
        return sharding.changes(params, masters, index), {OF_TX: tx_state, MASTERS: masters}

    def add_changes(params: PyTree, changes: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, params, changes)

    step, add = jit(step_of_shard, donate_argnums=(0, 1)), jit(add_changes, donate_argnums=(0,))

    def update_with_squares(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        mean, squares = zero.scatter(grads)
        shard, state = step(mean, state, params, zero.shard_index())
        if zero.keeps_masters:
            return add(params, zero.gather(shard, params, zero.gather_wire)), state, squares
        return zero.gather_params(shard, params), state, squares

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return update_with_squares(grads, state, params)[:2]

    def init(params: PyTree) -> PyTree:
        return {OF_TX: tx.init(params), MASTERS: params} if zero.keeps_masters else tx.init(params)

    def init_shard(params: PyTree, index: jax.Array) -> PyTree:
        tx_state = sharding_of_state().init(tx, params, index)
        return {OF_TX: tx_state, MASTERS: zero.sharding.shard(params, index)} if zero.keeps_masters else tx_state

    return Rule(
        init,
        update,
        state_is_replicated=False,
        update_with_squares=update_with_squares if zero.gives_square else None,
        sharding=Sharding(zero, sharding_of_state, init_shard),
    )


def compressed(tx: optax.GradientTransformation, mean: optax.GradientTransformation, step: Callable) -> Rule:
    """The same with a compressor, which keeps a residual."""

    def init(params: PyTree) -> PyTree:
        return mean.init(params), tx.init(params)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        residual, inner = state
        grads, residual = mean.update(grads, residual)
        params, inner = step(grads, inner, params)
        return params, (residual, inner)

    return Rule(init, update, state_is_replicated=False)
