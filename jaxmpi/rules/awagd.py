"""AWAGD: the mean of workers' weights after each step (Theano-MPI's `avg`)."""

import jax
import jax.numpy as jnp
import optax

from jaxmpi.core.pytrees import PyTree
from jaxmpi.rules.base import Exchange, Rule, jit_optimizer_step


def awagd(tx: optax.GradientTransformation, exchange: Exchange, average_momentum: bool = False) -> Rule:
    """Workers step alone, then take the mean of their weights.

    v_i <- mu v_i - eta g_i ;  w_i <- w + v_i ;  w <- (1/k) sum_i w_i

    Args: average_momentum: take the mean of the floating-point leaves of the optimizer's state as well.
    State: tx's, each worker's own (equal on all if momentum is averaged).
    Communicates: one mean of the params a step.
    Learning rate: k eta equals SUBGD at eta, with SGD and momentum. Ma et al. 2016, section 3.3.
    """
    step = jit_optimizer_step(tx, exchange.jit)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        params, state = step(grads, state, params)
        if not average_momentum:
            return exchange.mean(params), state
        leaves, structure = jax.tree.flatten(state)
        moments = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        params, mean = exchange.mean((params, [leaves[i] for i in moments]))
        for i, leaf in zip(moments, mean, strict=True):
            leaves[i] = leaf
        return params, jax.tree.unflatten(structure, leaves)

    return Rule(tx.init, update, state_is_replicated=average_momentum)
