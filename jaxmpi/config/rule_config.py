"""Settings of the rule: how workers combine what they learn."""

from dataclasses import dataclass

from jaxmpi.config.validate import check_fields

FAR = "beyond 1 a worker would end on the far side of the center, at 0 they would never meet"


@dataclass(frozen=True)
class RuleConfig:
    """When workers exchange, and what."""

    name: str = "gradients"  # when workers exchange, and what: docs/rules.md
    average_momentum: bool = False  # awagd: average the optimizer's moments as well as the params
    force: bool = False  # run an optimizer that is not linear in the gradient under a rule that expects one
    alpha: float = 0.5  # easgd: share of its distance to the center that a worker goes at an exchange, in (0, 1]
    server_alpha: float = 0.0  # easgd: share of it that the center goes, in (0, 1]; 0 = alpha
    tau: int = 1  # easgd, asgd: steps between a worker's exchanges
    p: float = 0.01  # gosgd: probability that a worker sends its params to another after a step, in [0, 1]
    staleness: int = 0  # easgd, asgd: steps a worker may be ahead of the slowest before it waits; 0 = no bound
    servers: int = 0  # easgd, asgd: last ranks, which only keep the center; 0 = a thread of rank 0 does
    momentum: float = 0.0  # easgd: Nesterov momentum delta of EAMSGD, in [0, 1), over optimizer sgd
    local_steps: int = 50  # local_sgd, diloco: H, steps from one exchange to the next
    outer_lr: float = 0.7  # diloco: eta of the outer optimizer; take optim.lr lower, a seventh to a third
    outer_momentum: float = 0.9  # diloco: Nesterov momentum mu of the outer optimizer, in [0, 1)
    noise_scale: bool = True  # gradients: record variance between workers and noise scale, if there are several

    def __post_init__(self) -> None:
        check_fields(
            self,
            "rule.",
            alpha=f"(0, 1]: {FAR}",
            server_alpha=f"[0, 1]: {FAR}; 0 is alpha",
            p="[0, 1]: it is a probability",
            momentum="[0, 1): at 1 it never forgets",
            tau=">= 1: it counts steps from one exchange to the next",
            local_steps=">= 1: it counts steps from one exchange to the next",
            staleness=">= 0: nobody can be ahead of the slowest by less; 0 is no bound",
            servers=">= 0: with 0 a thread of rank 0 keeps the center",
            outer_lr="(0, inf): at 0 nothing that workers learn would stay",
            outer_momentum="[0, 1): at 1 it never forgets",
        )
