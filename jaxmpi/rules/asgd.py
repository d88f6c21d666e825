"""ASGD (Downpour): workers add updates to a center without waiting for others."""

import numpy as np
import optax

from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.rules.base import Asynchronous, Exchange, Rule, jit_optimizer_step


def asgd(tx: optax.GradientTransformation, exchange: Exchange, config: RuleConfig) -> Rule:
    """Workers step alone; every tau steps they add updates to the center.

    d = sum_t v_t ;  c <- c + d ;  w <- c ;  d <- 0

    The worker's next d has the part of d that a wire's rounding keeps from the center. `rule.staleness` bounds how many
    steps a worker may be ahead of the slowest.

    State: tx's, each worker's own. Communicates: K bytes to the center and K back every tau steps, at the same time.
    Learning rate: k workers' updates are all added, so eta is not scaled. Dean et al. 2012, section 4.1 (Downpour);
    Ho et al. 2013, section 3 (the bound); Ma et al. 2016.
    """

    def serve(center: np.ndarray, sent: np.ndarray, seen: np.ndarray) -> None:
        center += sent

    def meet(w: np.ndarray, base: np.ndarray, sent: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return seen + (w - base), seen + sent

    push = Asynchronous(lambda w, base: w - base, serve, meet, starts_at_center=True)
    return Rule(tx.init, jit_optimizer_step(tx, exchange.jit), False, asynchronous=push)
