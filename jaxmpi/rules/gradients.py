"""Mean of gradients: one optimizer on what a single worker would see on the whole batch."""

from collections.abc import Callable
from typing import Any

import optax

from jaxmpi.rules.rule import Exchange, Rule, descend

PyTree = Any


def gradients(tx: optax.GradientTransformation, exchange: Exchange) -> Rule:
    """Every worker steps with the mean gradient; any optimizer.

    g = (1/k) sum_i g_i ;  w <- w + tx(g)

    State: tx's, equal on all workers; with a compressor also its own, of which a part is each worker's.
    Communicates: one mean of the gradients a step. Learning rate: that of one worker on the effective batch.
    """
    step = descend(tx, exchange.jit)
    if exchange.compressor:
        return compressed(tx, exchange.compressor, step)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return step(exchange.mean(grads), state, params)

    return Rule(tx.init, update, state_is_replicated=True)


def compressed(tx: optax.GradientTransformation, compressor: optax.GradientTransformation, step: Callable) -> Rule:
    """The same with a mean that has a state."""

    def init(params: PyTree) -> PyTree:
        return compressor.init(params), tx.init(params)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        owed, inner = state
        mean, owed = compressor.update(grads, owed)
        params, inner = step(mean, inner, params)
        return params, (owed, inner)

    return Rule(init, update, state_is_replicated=False)
