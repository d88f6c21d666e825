"""EASGD: workers and a center approach each other; EAMSGD; synchronous EASGD."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree
from jaxmpi.rules.base import (
    Asynchronous,
    Exchange,
    Rule,
    cond,
    jit_optimizer_step,
    jit_optimizer_updates,
    l2,
    step_in_place,
)


def easgd(tx: optax.GradientTransformation, exchange: Exchange, config: RuleConfig) -> Rule:
    """Every tau steps a worker and the center move towards each other.

    w_i <- w_i - alpha (w_i - c) ;  c <- c + alpha_s (w_i - c), both from the old pair

    With momentum delta it is EAMSGD: v <- delta v - eta g(w + delta v) ;  w <- w + v, and w is what travels.

    State: tx's, each worker's own, not exchanged; with momentum also v. Gradients are then taken at
    `params` = w + delta v. Communicates: K bytes to the center and K back every tau steps, at the same time.
    With alpha_s = alpha the sum of workers and center is conserved. Zhang et al. 2015, sections 3, 4; Ma et al. 2016.
    """
    alpha, server_alpha = np.float32(config.alpha), np.float32(config.server_alpha or config.alpha)

    def serve(center: np.ndarray, sent: np.ndarray, seen: np.ndarray) -> None:
        center += server_alpha * (sent - seen)

    def meet(w: np.ndarray, base: np.ndarray, sent: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return w - alpha * (sent - seen), base

    spring = Asynchronous(lambda w, base: w, serve, meet)
    if not config.momentum:
        return Rule(tx.init, jit_optimizer_step(tx, exchange.jit), False, asynchronous=spring)
    return nesterov(tx, exchange, config.momentum, spring)


def nesterov(tx: optax.GradientTransformation, exchange: Exchange, delta: float, spring: Asynchronous) -> Rule:
    """The local half of EAMSGD, on y = w + delta v.

    v' = delta v + tx(g(y)) ;  y' = (y - delta v) + (1 + delta) v'
    """

    def init(params: PyTree) -> PyTree:
        return tx.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        inner, v = state
        steps, inner = tx.update(grads, inner, params)
        faster = jax.tree.map(lambda v, u: delta * v + u, v, steps)
        params = jax.tree.map(lambda y, old, new: (y - delta * old) + (1 + delta) * new, params, v, faster)
        return params, (inner, faster)

    to_center = jax.jit(lambda params, state: jax.tree.map(lambda y, v: y - delta * v, params, state[1]))
    from_center = jax.jit(lambda tree, state: jax.tree.map(lambda w, v: w + delta * v, tree, state[1]))
    travelling = spring._replace(to_center=to_center, from_center=from_center)
    return Rule(init, step_in_place(update, exchange.jit), False, asynchronous=travelling)


class Elastic(NamedTuple):
    """State of a worker beside its weights, in the synchronous form."""

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
    descent = jit_optimizer_updates(tx, exchange.jit)
    pull = exchange.jit(lambda params, center: jax.tree.map(lambda w, c: config.alpha * (w - c), params, center))
    add = exchange.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    less = exchange.jit(lambda a, b: jax.tree.map(jnp.subtract, a, b))

    length = exchange.jit(lambda pulls: l2(pulls) / config.alpha)

    def init(params: PyTree) -> PyTree:
        center = jax.tree.map(jnp.array, params)
        return Elastic(np.zeros((), np.int32), center, tx.init(params), np.zeros((), np.float32))

    def meet(params: PyTree, center: PyTree, _: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        pulls = pull(params, center)
        return less(params, pulls), add(center, exchange.sum(pulls)), length(pulls)

    def update(grads: PyTree, state: Elastic, params: PyTree) -> tuple[PyTree, PyTree]:
        steps, center, inner, distance = state
        updates, inner = descent(grads, inner, params)
        params, center, distance = cond(steps % config.tau == 0, meet, params, center, distance)
        return add(params, updates), Elastic(steps + 1, center, inner, distance)

    return Rule(
        init,
        update,
        state_is_replicated=False,
        params_are_replicated=False,
        eval_params=lambda params, state: state.center,
        distance=lambda state: state.distance,
    )


def check_stable(config: RuleConfig, workers: int) -> None:
    """Refuse a center that overshoots the workers' mean.

    Raises:
        UsageError: k alpha > 1.
    """
    check(
        workers * config.alpha <= 1,
        f"rule.alpha: got {config.alpha} with {workers} workers in rule easgd_sync; expected at most 1/{workers} = "
        f"{1 / workers:.4g}, or the center overshoots the workers' mean",
    )
