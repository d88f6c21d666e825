"""Rules in lock step whose workers keep params or optimizers of their own between exchanges.

SUBGD and AWAGD exchange after each step, local SGD, DiLoCo and synchronous EASGD every so many steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.rules.base import Exchange, Rule, cond, jit_optimizer_step, jit_optimizer_updates, l2


def subgd(tx: optax.GradientTransformation, exchange: Exchange) -> Rule:
    """Workers sum their updates before anybody applies them (`cdd` in Theano-MPI).

    v_i <- mu v_i - eta g_i ;  w <- w + sum_i v_i

    State: tx's, each worker's own. Communicates: one sum of the updates a step.
    Learning rate: summing k updates is already k times one worker's, so eta is not scaled.
    With SGD and momentum equal to AWAGD at k eta. Ma et al. 2016, section 3.3.
    """
    descend = jit_optimizer_updates(tx, exchange.jit)
    apply = exchange.jit(optax.apply_updates, donate_argnums=(0,))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = descend(grads, state, params)
        return apply(params, exchange.sum(updates)), state

    return Rule(tx.init, update, state_is_replicated=False)


def awagd(tx: optax.GradientTransformation, exchange: Exchange, average_momentum: bool = False) -> Rule:
    """Workers step alone, then take the mean of their weights (`avg` in Theano-MPI).

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


# ---------------------------------------------------------------- local steps


def local_sgd(tx: optax.GradientTransformation, exchange: Exchange, config: RuleConfig) -> Rule:
    """Every H steps workers take the mean of their weights; any optimizer.

    w_i <- w_i + tx(g_i), H times ;  w <- w' - (1/k) sum_i (w' - w_i), w' what all had before

    State: tx's, each worker's own, and w'. Evaluated: the mean of the workers' weights.
    Communicates: one mean of w' - w_i every H steps, of which a coarse wire keeps more than it would of w_i.
    At H = 1 it is AWAGD. Stich 2019, arXiv:1805.09767, section 1.1.
    """
    return periodic_rule(config.local_steps, tx, exchange, optax.sgd(1.0))


def diloco(tx: optax.GradientTransformation, exchange: Exchange, config: RuleConfig) -> Rule:
    """Every H steps an outer Nesterov optimizer applies the workers' mean change.

    w_i <- w_i + tx(g_i), H times ;  D = (1/k) sum_i (w' - w_i) ;  v <- mu v + D ;  w <- w' - eta (mu v + D)

    eta = rule.outer_lr, mu = rule.outer_momentum, H = rule.local_steps.
    State: tx's, each worker's own and not exchanged; w' and v, equal on all. Evaluated: the mean of the w_i.
    Communicates: one mean of w' - w_i every H steps.
    With eta = 1 and mu = 0 it is local SGD. Douillard et al. 2023, arXiv:2311.08105, algorithm 1 and section 3.
    """
    outer = optax.sgd(config.outer_lr, momentum=config.outer_momentum or None, nesterov=config.outer_momentum > 0)
    return periodic_rule(config.local_steps, tx, exchange, outer)


class LocalState(NamedTuple):
    """State of local SGD and DiLoCo on a worker."""

    steps: Any  # i32[]: so far
    agreed: PyTree  # w', the weights that all had when they met last
    outer: PyTree  # state of the outer optimizer, equal on all workers
    inner: PyTree  # state of the inner one, this worker's
    distance: Any  # f32[]: L2 of this worker's weights from the mean, when they met last


def periodic_rule(
    period: int, tx: optax.GradientTransformation, exchange: Exchange, outer: optax.GradientTransformation
) -> Rule:
    """Workers step alone by `tx`; every `period` steps all step by `outer`.

    `outer` steps from w', the params that all had when they met last. Its gradient is the mean of all workers'
    w' - w_i. Inside jit both ways are compiled, and all workers take the same one. Outside, Python chooses.
    """
    step, step_outer = jit_optimizer_step(tx, exchange.jit), jit_optimizer_step(outer, exchange.jit)
    subtract = exchange.jit(lambda a, b: jax.tree.map(jnp.subtract, a, b))
    copy = exchange.jit(lambda tree: jax.tree.map(jnp.copy, tree))  # the next step donates its params
    distance_between = exchange.jit(lambda a, b: l2(jax.tree.map(jnp.subtract, a, b)))

    def init(params: PyTree) -> PyTree:
        return LocalState(
            steps=np.zeros((), np.int32),
            agreed=jax.tree.map(jnp.array, params),
            outer=outer.init(params),
            inner=tx.init(params),
            distance=np.zeros((), np.float32),
        )

    def meet(params: PyTree, agreed: PyTree, state: PyTree, _: PyTree) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        change = subtract(agreed, params)
        mean = exchange.mean(change)
        distance = distance_between(change, mean)
        agreed, state = step_outer(mean, state, agreed)
        return copy(agreed), agreed, state, distance

    def update(grads: PyTree, state: LocalState, params: PyTree) -> tuple[PyTree, PyTree]:
        params, inner = step(grads, state.inner, params)
        steps = state.steps + 1
        operands = params, state.agreed, state.outer, state.distance
        params, agreed, outer, distance = cond(steps % period == 0, meet, *operands)
        return params, LocalState(steps=steps, agreed=agreed, outer=outer, inner=inner, distance=distance)

    def mean_params(params: PyTree, state: LocalState) -> PyTree:
        return subtract(state.agreed, exchange.mean(subtract(state.agreed, params)))

    return Rule(init, update, False, mean_params, params_are_replicated=False, distance=lambda state: state.distance)


# ---------------------------------------------------------------- synchronous EASGD


class ElasticState(NamedTuple):
    """State of synchronous EASGD on a worker."""

    steps: Any  # i32[]: so far
    center: PyTree  # equal on all workers
    inner: PyTree  # state of the optimizer, this worker's
    distance: Any  # f32[]: L2 of this worker's weights from the center, when they met last


def easgd_sync(tx: optax.GradientTransformation, exchange: Exchange, config: RuleConfig) -> Rule:
    """Every tau steps all workers exchange with the center, from old values.

    w_i <- w_i + tx(g_i) - alpha (w_i - c) ;  c <- c + alpha sum_i (w_i - c)

    State: tx's, this worker's; the center and the count of steps, which are the same on all. Evaluated: the center.
    Communicates: one sum of alpha (w_i - c) every tau steps. Needs k alpha <= 1, or the center overshoots the workers'
    mean. Zhang et al. 2015, equations 5 and 6.
    """
    descend = jit_optimizer_updates(tx, exchange.jit)
    scaled_distance = exchange.jit(lambda w, c: jax.tree.map(lambda w, c: config.alpha * (w - c), w, c))
    add = exchange.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    subtract = exchange.jit(lambda a, b: jax.tree.map(jnp.subtract, a, b))
    length = exchange.jit(lambda pulls: l2(pulls) / config.alpha)

    def init(params: PyTree) -> PyTree:
        center = jax.tree.map(jnp.array, params)
        return ElasticState(np.zeros((), np.int32), center, tx.init(params), np.zeros((), np.float32))

    def meet(params: PyTree, center: PyTree, _: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        pulls = scaled_distance(params, center)
        return subtract(params, pulls), add(center, exchange.sum(pulls)), length(pulls)

    def update(grads: PyTree, state: ElasticState, params: PyTree) -> tuple[PyTree, PyTree]:
        steps, center, inner, distance = state
        updates, inner = descend(grads, inner, params)
        params, center, distance = cond(steps % config.tau == 0, meet, params, center, distance)
        return add(params, updates), ElasticState(steps + 1, center, inner, distance)

    return Rule(
        init,
        update,
        state_is_replicated=False,
        params_are_replicated=False,
        eval_params=lambda params, state: state.center,
        distance=lambda state: state.distance,
    )


def check_stable(config: RuleConfig, workers: int) -> None:
    """Raise `UsageError` if k alpha > 1: the center would overshoot the workers' mean."""
    if workers * config.alpha > 1:
        raise UsageError(
            f"rule.alpha: got {config.alpha} with {workers} workers in rule easgd_sync; expected at most 1/{workers} = "
            f"{1 / workers:.4g}, or the center overshoots the workers' mean"
        )
