"""Mean of gradients: one optimizer on what a single worker would see on the whole batch."""

from collections.abc import Callable
from typing import Any

import optax

from jaxmpi.rules.rule import Exchange, Rule, descend

PyTree = Any


def gradients(tx: optax.GradientTransformation, exchange: Exchange) -> Rule:
    """Every worker steps with the mean gradient; any optimizer.

    g = (1/k) sum_i g_i ;  w <- w + tx(g)

    State: tx's, equal on all workers. Communicates: one mean of the gradients a step.
    Learning rate: that of one worker on the effective batch.
    With `exchange.late` the g of a step is that of the step before, 0 in the first; see `overlap.delayed_gradients`.
    """
    step = descend(tx, exchange.jit)
    if exchange.late is not None:
        return one_step_late(tx, exchange.late, step)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return step(exchange.mean(grads), state, params)

    return Rule(tx.init, update, state_is_replicated=True)


def one_step_late(tx: optax.GradientTransformation, late: optax.GradientTransformation, step: Callable) -> Rule:
    """The mean of gradients of the step before. State: tx's, equal on all workers, and that of `late`, each one's own.

    g_t = (1/k) sum_i g_i(w_(t-1)), g_1 = 0 ;  w <- w + tx(g_t)
    """

    def update(grads: PyTree, state: tuple[PyTree, Any], params: PyTree) -> tuple[PyTree, PyTree]:
        mean, waiting = late.update(grads, state[1])
        params, own = step(mean, state[0], params)
        return params, (own, waiting)

    return Rule(lambda params: (tx.init(params), late.init(params)), update, state_is_replicated=False)
