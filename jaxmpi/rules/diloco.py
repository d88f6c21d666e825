"""DiLoCo: local steps by any optimizer, and an outer Nesterov optimizer."""

import optax

from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.rules.base import Exchange, Rule
from jaxmpi.rules.local_sgd import local_steps


def diloco(tx: optax.GradientTransformation, exchange: Exchange, config: RuleConfig) -> Rule:
    """Every H steps an outer Nesterov optimizer applies the workers' mean change.

    w_i <- w_i + tx(g_i), H times ;  D = (1/k) sum_i (w' - w_i) ;  v <- mu v + D ;  w <- w' - eta (mu v + D)

    eta = rule.outer_lr, mu = rule.outer_momentum, H = rule.local_steps.
    State: tx's, each worker's own and not exchanged; w' and v, equal on all. Evaluated: the mean of the w_i.
    Communicates: one mean of w' - w_i every H steps.
    With eta = 1 and mu = 0 it is local SGD. Douillard et al. 2023, arXiv:2311.08105, algorithm 1 and section 3.
    """
    outer = optax.sgd(config.outer_lr, momentum=config.outer_momentum or None, nesterov=config.outer_momentum > 0)
    return local_steps(config.local_steps, tx, exchange, outer)
