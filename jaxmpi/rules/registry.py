"""The table of rules, and the checks of what fits each.

A wrong combination trains, but something else than the paper's method. A rule that sums updates, with a rate scaled by
the workers, counts them twice. Some rules equal no single worker if the optimizer is not linear in the gradient.
Weights that travel with 8 bits lose small updates. So each row of `RULES` states such facts once, and the trainer, the
launcher and the checks here read them. A user's own rule is a row that is added to the table (docs/extending.md).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import optax

from jaxmpi.allreduce.wires import is_coarse
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.rules.asynchronous.rules import asgd, easgd, gosgd
from jaxmpi.rules.base import Exchange, Rule
from jaxmpi.rules.gradients import gradients
from jaxmpi.rules.synchronous import awagd, check_stable, diloco, easgd_sync, local_sgd, subgd

Build = Callable[[optax.GradientTransformation, Exchange, RuleConfig], Rule]


@dataclass(frozen=True)
class RuleSpec:
    """A rule, its learning-rate contract, and facts for trainer and launcher."""

    build: Build
    _: KW_ONLY
    sums_updates: bool = False  # workers' updates are added: w workers make w times the step of one at the same lr
    any_optimizer: bool = False  # else only optimizers linear in the gradient: with others it equals no single worker
    is_periodic: bool = False  # exchanges every so many steps, nothing in between
    is_asynchronous: bool = False  # workers do not wait for each other
    settings: tuple[str, ...] | None = None  # fields of its config that it uses; None: all that its own class adds
    takes_compressors: bool = False  # it exchanges means of gradients, of which a compressor may keep something back
    sends_params: bool = (
        False  # params are what the wire left of them: one of 8 bits, which would lose steps, is refused
    )
    check: Callable[[RuleConfig, int], None] = lambda config, workers: None  # raises UsageError

    def uses(self, setting: str) -> bool:
        """Return True if a config field matters; `name` and `force` always do."""
        is_used = setting not in COMMON if self.settings is None else setting in self.settings
        return is_used or setting in ("name", "force")


COMMON = {field.name for field in dataclasses.fields(RuleConfig)}
CENTER_SETTINGS = ("tau", "staleness", "servers")
RULES: dict[str, RuleSpec] = {
    "gradients": RuleSpec(
        lambda tx, x, c: gradients(tx, x, c.noise_scale),
        any_optimizer=True,
        settings=("noise_scale",),
        takes_compressors=True,
    ),
    "subgd": RuleSpec(lambda tx, x, c: subgd(tx, x), sums_updates=True, settings=()),
    "awagd": RuleSpec(
        lambda tx, x, c: awagd(tx, x, c.average_momentum),
        settings=("average_momentum",),
        sends_params=True,
    ),
    "local_sgd": RuleSpec(local_sgd, any_optimizer=True, is_periodic=True, settings=("local_steps",)),
    "diloco": RuleSpec(
        diloco, any_optimizer=True, is_periodic=True, settings=("local_steps", "outer_lr", "outer_momentum")
    ),
    "easgd": RuleSpec(easgd, is_asynchronous=True, settings=("alpha", "server_alpha", "momentum", *CENTER_SETTINGS)),
    "easgd_sync": RuleSpec(easgd_sync, is_periodic=True, settings=("alpha", "tau"), check=check_stable),
    "asgd": RuleSpec(asgd, sums_updates=True, is_asynchronous=True, settings=CENTER_SETTINGS),
    "gosgd": RuleSpec(gosgd, is_asynchronous=True, settings=("p",)),
}


def check_settings(config: RuleConfig) -> None:
    """Raise `UsageError` for changed settings that the rule does not use; it names the rules that do."""
    row = lookup(RULES, config.name, "rule")
    for field in dataclasses.fields(config):
        got, default = getattr(config, field.name), field.default
        if callable(field.default_factory):
            default = field.default_factory()
        if not row.uses(field.name) and got != default:
            able = " or ".join(name for name, other in RULES.items() if other.uses(field.name))
            raise UsageError(
                f"rule.{field.name}: got {got} with rule {config.name}, which does not use it; leave it out, or use "
                f"{able or 'a rule with it in `settings` of its RuleSpec'}"
            )


def is_asynchronous(config: RuleConfig) -> bool:
    """Return True if workers run on without waiting for each other."""
    return lookup(RULES, config.name, "rule").is_asynchronous


def is_periodic(config: RuleConfig) -> bool:
    """Return True if workers exchange only every so many steps."""
    return lookup(RULES, config.name, "rule").is_periodic


def check_rule(config: RuleConfig, size: int) -> None:
    """Raise `UsageError` for settings, or a number of ranks, with which a rule makes no sense."""
    check_settings(config)
    row, name = RULES[config.name], config.name
    workers = size - config.servers * row.is_asynchronous
    if row.is_asynchronous and size == 1:
        raise UsageError(
            f"rule {name} needs at least 2 ranks; got one rank: start several (mpirun -n 4, jaxmpi train -n 4), or use "
            "rule gradients"
        )
    if workers < 1:
        raise UsageError(
            f"rule.servers: got {config.servers} of {size} ranks; expected at most {size - 1}: at least one rank must "
            "train"
        )
    row.check(config, workers)


def build(
    config: RuleConfig, tx: optax.GradientTransformation, exchange: Exchange, *, optimizer: str, linear: bool
) -> Rule:
    """The configured rule.

    Args:
        tx: what every worker runs.
        optimizer: its name, for the error.
        linear: whether its updates are linear in the gradients it is given.

    Raises:
        UsageError: an unknown rule; one that equals no single worker with this optimizer; or a mean with a state for a
            rule that exchanges no gradients.
    """
    row = lookup(RULES, config.name, "rule")
    if exchange.gradients and not row.takes_compressors:
        raise UsageError(
            f"rule {config.name!r} exchanges no gradients, which compressors are for; use rule gradients, or no "
            "compressor"
        )
    if not (row.any_optimizer or linear or config.force):
        raise UsageError(
            f"rule {config.name!r} with {optimizer} equals no single worker on the whole batch: {optimizer} is not "
            "linear in the gradient, and its state is each worker's own, not averaged. Use rule gradients, an "
            "optimizer out of sgd, momentum, nesterov without clipping, or --rule.force"
        )
    return row.build(tx, exchange, config)


def check_wire(config: RuleConfig, strategy: str) -> None:
    """Raise `UsageError` if params would be sent by a coarse wire, such as `8` or `bf16`, unless forced."""
    row, wire = lookup(RULES, config.name, "rule"), strategy.partition(":")[2]
    if row.sends_params and is_coarse(wire) and not config.force:
        raise UsageError(
            f"rule {config.name} sends weights, and wire {wire} keeps 8 bits of them: small updates would be rounded "
            "away. Use wire 32 or 16, rule gradients, or --rule.force"
        )
