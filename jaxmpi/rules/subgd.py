"""SUBGD: the sum of all workers' updates (`cdd` in Theano-MPI)."""

import optax

from jaxmpi.core.pytrees import PyTree
from jaxmpi.rules.base import Exchange, Rule, jit_optimizer_updates


def subgd(tx: optax.GradientTransformation, exchange: Exchange) -> Rule:
    """Workers sum their updates before anybody applies them.

    v_i <- mu v_i - eta g_i ;  w <- w + sum_i v_i

    State: tx's, each worker's own. Communicates: one sum of the updates a step.
    Learning rate: summing k updates is already k times one worker's, so eta is not scaled.
    With SGD and momentum equal to AWAGD at k eta. Ma et al. 2016, section 3.3.
    """
    descent = jit_optimizer_updates(tx, exchange.jit)
    apply = exchange.jit(optax.apply_updates, donate_argnums=(0,))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = descent(grads, state, params)
        return apply(params, exchange.sum(updates)), state

    return Rule(tx.init, update, state_is_replicated=False)
