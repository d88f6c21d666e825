"""Local SGD: workers step alone H times, then take their weights' mean."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.pytrees import PyTree
from jaxmpi.rules.base import Exchange, Rule, cond, jit_optimizer_step, l2


def local_sgd(tx: optax.GradientTransformation, exchange: Exchange, config: RuleConfig) -> Rule:
    """Every H steps workers take the mean of their weights; any optimizer.

    w_i <- w_i + tx(g_i), H times ;  w <- w' - (1/k) sum_i (w' - w_i), w' what all had before

    State: tx's, each worker's own, and w'. Evaluated: the mean of the workers' weights.
    Communicates: one mean of w' - w_i every H steps, of which a coarse wire keeps more than it would of w_i.
    At H = 1 it is AWAGD. Stich 2019, arXiv:1805.09767, section 1.1.
    """
    return local_steps(config.local_steps, tx, exchange, optax.sgd(1.0))


class LocalState(NamedTuple):
    """State of a worker beside its weights."""

    steps: Any  # i32[]: so far
    agreed: PyTree  # w', the weights that all had when they met last
    outer: PyTree  # state of the outer optimizer, equal on all workers
    inner: PyTree  # state of the inner one, this worker's
    distance: Any  # f32[]: L2 of this worker's weights from the mean, when they met last


def local_steps(
    period: int, tx: optax.GradientTransformation, exchange: Exchange, outer: optax.GradientTransformation
) -> Rule:
    """Workers step alone by `tx`; every `period` steps all step by `outer`.

    `outer` steps from w', the params that all had before. Its gradient is the mean over workers of w' - w_i. Inside jit
    both ways are compiled, and all workers take the same one. Outside, Python chooses.
    """
    step, step_outer = jit_optimizer_step(tx, exchange.jit), jit_optimizer_step(outer, exchange.jit)
    gone = exchange.jit(lambda agreed, params: jax.tree.map(jnp.subtract, agreed, params))
    copy = exchange.jit(lambda tree: jax.tree.map(jnp.copy, tree))  # the next step donates its params
    between = exchange.jit(lambda mine, mean: l2(jax.tree.map(jnp.subtract, mine, mean)))

    def init(params: PyTree) -> PyTree:
        agreed, far = jax.tree.map(jnp.array, params), np.zeros((), np.float32)
        return LocalState(
            steps=np.zeros((), np.int32), agreed=agreed, outer=outer.init(params), inner=tx.init(params), distance=far
        )

    def meet(params: PyTree, agreed: PyTree, state: PyTree, _: PyTree) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        mine = gone(agreed, params)
        mean = exchange.mean(mine)
        distance = between(mine, mean)
        agreed, state = step_outer(mean, state, agreed)
        return copy(agreed), agreed, state, distance

    def update(grads: PyTree, state: LocalState, params: PyTree) -> tuple[PyTree, PyTree]:
        params, inner = step(grads, state.inner, params)
        steps = state.steps + 1
        is_due, held = steps % period == 0, (state.agreed, state.outer, state.distance)
        params, agreed, outer, distance = cond(is_due, meet, params, *held)
        return params, LocalState(steps=steps, agreed=agreed, outer=outer, inner=inner, distance=distance)

    def mean(params: PyTree, state: LocalState) -> PyTree:
        return gone(state.agreed, exchange.mean(gone(state.agreed, params)))

    return Rule(init, update, False, mean, params_are_replicated=False, distance=lambda state: state.distance)
