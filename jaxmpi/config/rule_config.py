"""Settings of the rule: how workers combine what they learn."""

import math
from dataclasses import dataclass

from jaxmpi.config.choices import use_python_numbers
from jaxmpi.core.errors import check


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
        use_python_numbers(self)
        shares = {"alpha": (0, 1), "p": (0, 1)} | ({"server_alpha": (0, 1)} if self.server_alpha else {})
        far = "beyond 1 a worker would end on the far side of the center, at 0 they would never meet"
        for name in shares:
            value = getattr(self, name)
            is_open = name != "p"
            check(
                0 <= value <= 1 and not (is_open and value == 0),
                f"rule.{name}: got {value}; expected "
                + (f"(0, 1]: {far}" if is_open else "[0, 1]: it is a probability"),
            )
        check(0 <= self.momentum < 1, f"rule.momentum: got {self.momentum}; expected [0, 1): at 1 it never forgets")
        for name, least, why in (
            ("tau", 1, "it counts steps from one exchange to the next"),
            ("local_steps", 1, "it counts steps from one exchange to the next"),
            ("staleness", 0, "nobody can be ahead of the slowest by less; 0 is no bound"),
            ("servers", 0, "with 0 a thread of rank 0 keeps the center"),
        ):
            got = getattr(self, name)
            check(got >= least, f"rule.{name}: got {got}; expected >= {least}: {why}")
        check(
            self.outer_lr > 0 and math.isfinite(self.outer_lr),
            f"rule.outer_lr: got {self.outer_lr}; expected > 0: at 0 nothing that workers learn would stay",
        )
        check(
            0 <= self.outer_momentum < 1,
            f"rule.outer_momentum: got {self.outer_momentum}; expected [0, 1): at 1 it never forgets",
        )
