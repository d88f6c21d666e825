"""Options that do not go together: each row of the table refuses, says why, and stands in docs/combining.md."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import optax
import pytest

from jaxmpi.config.data import Data
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.flags import flags
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.rules import base, registry
from jaxmpi.rules.averaged import averaged, schedule_free
from jaxmpi.trainer.callbacks import EarlyStop, ReduceOnPlateau
from jaxmpi.trainer.conflicts import REFUSALS, TIMED_FIELDS, check_compatible
from launching import ROOT

EASGD, H = {"rule": RuleConfig("easgd")}, {"rule": RuleConfig("local_sgd")}
SHRINK = {"on_rank_loss": "shrink"}
SEVERAL = {"devices": 2}  # of each of two ranks
SHARDED = {"exchange": ExchangeConfig(shard_update="on")}
# Options; one row for each of the table at least.
MADE = Optim("mine", transform=optax.sgd(0.1))  # with its rate
STREAM = Data("grain", train=lambda worker, workers: iter([]))
HELD_OUT = Data("mixture", train=(([1], 1.0),), validation=STREAM)
REFUSED: list[dict[str, Any]] = [
    {"on_nonfinite": "rollback", **EASGD},
    {"batch_statistics": "synchronised", **EASGD},
    {"callbacks": (EarlyStop(),), **EASGD},
    {"data": Data(memory="partition"), **EASGD},
    {"data": STREAM, **EASGD},
    {"data": STREAM, **SHRINK},
    {"data": Data("grain", train=STREAM.train, memory="partition")},
    {"data": HELD_OUT, **SHRINK},
    {"data": replace(STREAM, on_error="skip")},
    {"on_nonfinite": "skip", **H},
    {"callbacks": (ReduceOnPlateau(),), **SHRINK},
    {"batch_statistics": "synchronised", **SEVERAL},
    {"exchange": ExchangeConfig("topk1"), **SEVERAL},
    {"task": "token-classification", **SHRINK},
    {"optim": replace(MADE, lr=0.5)},
    {"optim": replace(MADE, lr_for_batch=256)},
    {"optim": Optim(lr_for_batch=256), "rule": RuleConfig("subgd")},
    {"optim": MADE, "schedule": Schedule("cosine")},
    {"optim": MADE, "schedule": Schedule(warmup="1ep")},
    {"optim": MADE, "schedule": Schedule(rate=lambda k: 1)},
    {"comm": "xla", **SHRINK},
    {"devices": 4, **SHRINK},
    {**EASGD, **SHRINK},
    {**H, **SHRINK},
    {"exchange": ExchangeConfig("lowrank4"), **SHRINK},
    {"exchange": ExchangeConfig("none"), **SHRINK},
    {"rule": RuleConfig("subgd"), **SHARDED},
    {"exchange": ExchangeConfig(overlap="on"), **SHRINK},
    {"batch_statistics": "synchronised", **SHRINK},
    {"data": Data(memory="partition"), **SHRINK},
    {"devices": 2, **EASGD},
    {"comm": "xla", **EASGD},
    *({name: "2min", **EASGD} for name in TIMED_FIELDS),
    {"rule": RuleConfig("easgd", momentum=0.9)},
    {"exchange": ExchangeConfig("none"), **EASGD},
    {"exchange": ExchangeConfig("lowrank4"), **EASGD},
]


@pytest.fixture(autouse=True)
def two_ranks(no_launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's word for it."""
    for name, value in (("RANK", "0"), ("SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        SHRINK,
        {"on_nonfinite": "skip", **EASGD},
        {"comm": "xla", **SEVERAL, **SHARDED},
        {"batch_statistics": "synchronised", "comm": "xla", **SEVERAL},
    ],
)
def test_others_go_together(options):
    check_compatible(Experiment(**options))


def test_each_row_of_the_table_is_tried_with_all_its_words():
    said = []
    for options in REFUSED:
        with pytest.raises(UsageError) as refusal:
            check_compatible(Experiment(**options))
        said.append(str(refusal.value))
    for row in REFUSALS:
        words = f"{row.field}: got {{got}} with {row.words}; {row.instead}"
        pattern = re.sub(r"\\{.*?\\}", ".+", re.escape(words))
        assert any(re.fullmatch(pattern, text) for text in said), row


# ---------------------------------------------------------------- docs/combining.md


def built(rule: RuleConfig, linear: bool = True, **parts: Any) -> base.Rule:
    talk = base.Exchange(lambda tree: tree, lambda tree: tree, **parts)
    return registry.build(rule, optax.sgd(0.1), talk, optimizer="sgd", linear=linear)


def averages_itself(rule: RuleConfig) -> base.Rule:
    takes = registry.RULES[rule.name].takes_compressors
    return schedule_free(built(rule), jax.jit, rule.name, exchanges_gradients=takes)


# Options beside a rule: fields of the experiment, or the part that refuses them.
BESIDE_A_RULE: dict[str, dict[str, Any] | Callable[[RuleConfig], Any]] = {
    "an optimizer that is not linear in the gradient, clipping": lambda rule: built(rule, linear=False),
    "`--optim.ema`": lambda rule: averaged(built(rule), 0.9, jax.jit, rule.name),
    "a schedule-free optimizer": averages_itself,
    "`--optim.lr-for-batch`": {"optim": Optim(lr_for_batch=256)},
    "wires `8`, `bf16`": lambda rule: registry.check_wire(rule, "asa:8"),
    "a compressor": lambda rule: built(rule, gradients=optax.identity()),
    "`--exchange.strategy none`": {"exchange": ExchangeConfig("none")},
    "`--exchange.shard-update on`": SHARDED,
    "`--devices K`": {"devices": 2},
    "`--comm xla`": {"comm": "xla"},
    "`--batch-statistics synchronised`": {"batch_statistics": "synchronised"},
    "`--data.memory partition`": {"data": Data(memory="partition")},
    "`--on-nonfinite skip`": {"on_nonfinite": "skip"},
    "`--on-nonfinite rollback`": {"on_nonfinite": "rollback"},
    "`--on-rank-loss shrink`": SHRINK,
    "`--rule.servers`, `--rule.staleness`": lambda rule: registry.check_settings(replace(rule, servers=1)),
    "`--rule.momentum`": lambda rule: registry.check_settings(replace(rule, momentum=0.9)),
}


def answer(option: dict[str, Any] | Callable[[RuleConfig], Any], rule: str) -> str:
    for config, word in ((RuleConfig(rule), "yes"), (RuleConfig(rule, force=True), "force")):
        with contextlib.suppress(UsageError):
            check_compatible(Experiment(rule=config, **option)) if isinstance(option, dict) else option(config)
            return word
    return "no"


def by_rule() -> Iterator[Sequence[str]]:
    yield "option", *(f"`{rule}`" for rule in registry.RULES)
    for words, option in BESIDE_A_RULE.items():
        yield words, *(answer(option, rule) for rule in registry.RULES)


def shown(text: str) -> str:
    text = re.sub(r"\{.*?\}", "…", text)
    return re.sub(r"--[\w.-]+( (end|mpi|shrink|xla))?|\S*<\w+>", r"`\g<0>`", text)


def by_pair() -> Iterator[Sequence[str]]:
    known = flags(Experiment())
    yield "option", "values", "not with", "way out"
    for row in REFUSALS:
        flag = row.field.replace("_", "-")
        yield f"`--{flag}`" if flag in known else f"`{row.field}=`", row.values, shown(row.words), shown(row.instead)


@pytest.mark.parametrize("table", [by_rule, by_pair])
def test_the_page_has_the_tables_as_they_are(table):
    head, *rows = table()
    lines = "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))
    page, mark = (ROOT / "docs" / "combining.md").read_text(), f"<!-- table: {table.__name__} -->"
    got = page.partition(f"{mark}\n\n")[2].partition("\n<!-- end -->")[0]
    assert got == lines, f"docs/combining.md: put this behind {mark}:\n{lines}"
