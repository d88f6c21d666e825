"""Mean of gradients: one optimizer on what a single worker would see on the whole batch."""

from typing import Any

import optax

from jaxmpi.rules.rule import Exchange, Rule, descend

PyTree = Any


def gradients(tx: optax.GradientTransformation, exchange: Exchange) -> Rule:
    """Every worker steps with the mean gradient; any optimizer.

    g = (1/k) sum_i g_i ;  w <- w + tx(g)

    State: tx's, equal on all workers. Communicates: one mean of the gradients a step.
    Learning rate: that of one worker on the effective batch.
    """
    step = descend(tx, exchange.jit)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return step(exchange.mean(grads), state, params)

    return Rule(tx.init, update, state_is_replicated=True)
