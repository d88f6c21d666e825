"""GoSGD: workers send weighted params to random others."""

import numpy as np
import optax

from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.errors import check
from jaxmpi.rules.base import Asynchronous, Exchange, Rule, ScheduledPush, jit_optimizer_step


def gosgd(tx: optax.GradientTransformation, exchange: Exchange, config: RuleConfig) -> Rule:
    """After each step, workers push params to random others with probability p.

    sender: alpha_s <- alpha_s / 2, then sends (w_s, alpha_s)
    receiver: w <- (alpha w + alpha_s w_s) / (alpha + alpha_s) ;  alpha <- alpha + alpha_s

    State: tx's, each worker's own. Communicates: p K bytes a step and worker, expected; nobody waits.
    The weights alpha, 1/k at first, sum to 1 with those of messages under way. Blot et al. 2016, algorithms 3 and 4.
    """

    def serve(center: np.ndarray, sent: np.ndarray, seen: np.ndarray) -> None:
        center += sent

    def meet(w: np.ndarray, base: np.ndarray, sent: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return w, base

    def gossip(worker: int, workers: int, seed: int, weight: float) -> RandomGossip:
        return RandomGossip(worker=worker, workers=workers, p=config.p, seed=seed, weight=weight)

    deposit = Asynchronous(lambda w, base: w, serve, meet, gossip=gossip)  # alpha w of all, at the end of a run
    return Rule(tx.init, jit_optimizer_step(tx, exchange.jit), False, asynchronous=deposit)


def check_gossip(config: RuleConfig, workers: int) -> None:
    """Refuse a worker that has nobody to push to.

    Raises:
        UsageError: one worker.
    """
    check(workers >= 2, f"rule gosgd: got {workers} worker; expected 2 or more")


class RandomGossip:
    """One worker's weight, and whom it pushes to."""

    def __init__(self, worker: int, workers: int, p: float, seed: int, weight: float = 0.0) -> None:
        """Begin with weight 1/workers, or with what an earlier run left.

        Args:
            p: probability of a push after a step, in [0, 1].
            seed: of the draws; workers differ.
        """
        self.worker, self.workers, self.p = worker, workers, p
        self.weight = weight or 1 / workers
        self._rng = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, worker], np.uint64)))

    def draw(self, is_shut: frozenset[int] = frozenset()) -> ScheduledPush | None:
        """With probability p halve the weight and draw another worker, else None.

        Workers in `is_shut` are not drawn.
        """
        others = [rank for rank in range(self.workers) if rank != self.worker and rank not in is_shut]
        if not others or self._rng.random() >= self.p:
            return None
        self.weight /= 2
        return ScheduledPush(others[self._rng.integers(len(others))], self.weight)

    def merge(self, w: np.ndarray, sent: np.ndarray, share: float) -> np.ndarray:
        """The weighted mean of params, f32[n]; the weight grows by the share."""
        total = self.weight + share
        mean = np.float32(self.weight / total) * w + np.float32(share / total) * sent
        self.weight = total
        return mean
