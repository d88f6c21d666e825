"""EASGD with EAMSGD, ASGD and GoSGD: the arithmetic of worker and center, or of two workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.pytrees import PyTree
from jaxmpi.rules.base import Asynchronous, Exchange, Rule, jit_optimizer_step, step_in_place


def easgd(tx: optax.GradientTransformation, exchange: Exchange, config: RuleConfig) -> Rule:
    """Every tau steps a worker and the center move towards each other.

    w_i <- w_i - alpha (w_i - c) ;  c <- c + alpha_s (w_i - c), both from the old pair

    With momentum delta it is EAMSGD: v <- delta v - eta g(w + delta v) ;  w <- w + v, and w is what is pushed.

    State: tx's, each worker's own, not exchanged; with momentum also v. Gradients are then taken at
    `params` = w + delta v. Communicates: K bytes to the center and K back every tau steps, at the same time.
    With alpha_s = alpha the sum of workers and center is conserved. Zhang et al. 2015, sections 3, 4; Ma et al. 2016.
    """
    alpha, server_alpha = np.float32(config.alpha), np.float32(config.server_alpha or config.alpha)

    def apply(center: np.ndarray, pushed: np.ndarray, seen: np.ndarray) -> None:
        center += server_alpha * (pushed - seen)

    def pull(w: np.ndarray, base: np.ndarray, pushed: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return w - alpha * (pushed - seen), base

    elastic = Asynchronous(lambda w, base: w, apply, pull)
    if not config.momentum:
        return Rule(tx.init, jit_optimizer_step(tx, exchange.jit), False, asynchronous=elastic)
    return eamsgd(tx, exchange, config.momentum, elastic)


def eamsgd(tx: optax.GradientTransformation, exchange: Exchange, delta: float, elastic: Asynchronous) -> Rule:
    """The local half of EAMSGD, on y = w + delta v.

    v' = delta v + tx(g(y)) ;  y' = (y - delta v) + (1 + delta) v'
    """

    def init(params: PyTree) -> PyTree:
        return tx.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        inner, v = state
        updates, inner = tx.update(grads, inner, params)
        new_v = jax.tree.map(lambda v, u: delta * v + u, v, updates)
        params = jax.tree.map(lambda y, old, new: (y - delta * old) + (1 + delta) * new, params, v, new_v)
        return params, (inner, new_v)

    to_center = jax.jit(lambda params, state: jax.tree.map(lambda y, v: y - delta * v, params, state[1]))
    from_center = jax.jit(lambda tree, state: jax.tree.map(lambda w, v: w + delta * v, tree, state[1]))
    elastic = elastic._replace(to_center=to_center, from_center=from_center)
    return Rule(init, step_in_place(update, exchange.jit), False, asynchronous=elastic)


def asgd(tx: optax.GradientTransformation, exchange: Exchange, config: RuleConfig) -> Rule:
    """Workers step alone; every tau steps they add updates to the center.

    d = sum_t v_t ;  c <- c + d ;  w <- c ;  d <- 0

    The worker's next d has the part of d that a wire's rounding keeps from the center. `rule.staleness` bounds how many
    steps a worker may be ahead of the slowest.

    State: tx's, each worker's own. Communicates: K bytes to the center and K back every tau steps, at the same time.
    Learning rate: k workers' updates are all added, so eta is not scaled. Dean et al. 2012, section 4.1 (Downpour);
    Ho et al. 2013, section 3 (the bound); Ma et al. 2016.
    """

    def apply(center: np.ndarray, pushed: np.ndarray, seen: np.ndarray) -> None:
        center += pushed

    def pull(w: np.ndarray, base: np.ndarray, pushed: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return seen + (w - base), seen + pushed

    downpour = Asynchronous(lambda w, base: w - base, apply, pull, starts_at_center=True)
    return Rule(tx.init, jit_optimizer_step(tx, exchange.jit), False, asynchronous=downpour)


# ---------------------------------------------------------------- gossip


def gosgd(tx: optax.GradientTransformation, exchange: Exchange, config: RuleConfig) -> Rule:
    """After each step, workers push params to random others with probability p.

    sender: alpha_s <- alpha_s / 2, then pushes (w_s, alpha_s)
    receiver: w <- (alpha w + alpha_s w_s) / (alpha + alpha_s) ;  alpha <- alpha + alpha_s

    State: tx's, each worker's own. Communicates: p K bytes a step and worker, expected; nobody waits.
    The weights alpha, 1/k at first, sum to 1 with those of pushes on their way. Blot et al. 2016, algorithms 3 and 4.
    """

    def apply(center: np.ndarray, pushed: np.ndarray, seen: np.ndarray) -> None:
        center += pushed  # alpha w of every worker, at the end of a run

    def gossip(worker: int, workers: int, seed: int, weight: float) -> RandomGossip:
        return RandomGossip(worker=worker, workers=workers, p=config.p, seed=seed, weight=weight)

    meeting = Asynchronous(lambda w, base: w, apply, lambda w, base, pushed, seen: (w, base), gossip=gossip)
    return Rule(tx.init, jit_optimizer_step(tx, exchange.jit), False, asynchronous=meeting)


class RandomGossip:
    """One worker's weight alpha, and whom it pushes to.

    Weights of all workers, and shares of pushes on their way, sum to 1: their weighted mean is the run's result.
    """

    def __init__(self, worker: int, workers: int, p: float, seed: int, weight: float = 0.0) -> None:
        """Begin with weight 1/workers, or with what an earlier run left.

        Args:
            p: probability of a push after a step, in [0, 1].
            seed: of the draws; workers differ.
        """
        self.worker, self.workers, self.p = worker, workers, p
        self.weight = weight or 1 / workers
        self._rng = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, worker], np.uint64)))

    def draw(self, unreachable: frozenset[int] = frozenset()) -> tuple[int, float] | None:
        """With probability p halve the weight; whom to push to, none of `unreachable`, and the share; else None."""
        others = [rank for rank in range(self.workers) if rank != self.worker and rank not in unreachable]
        if not others or self._rng.random() >= self.p:
            return None
        self.weight /= 2
        return others[self._rng.integers(len(others))], self.weight

    def merge(self, w: np.ndarray, pushed: np.ndarray, share: float) -> np.ndarray:
        """The weighted mean of params, f32[n]; the weight grows by the share."""
        total = self.weight + share
        mean = np.float32(self.weight / total) * w + np.float32(share / total) * pushed
        self.weight = total
        return mean
