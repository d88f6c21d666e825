"""Options that do not go together: each line of the table refuses, says why, and stands in docs/combining.md."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optax
import pytest

from jaxmpi.allreduce.api import exchange_gradients
from jaxmpi.config.data import Data
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.rules import base, registry
from jaxmpi.trainer.callbacks import EarlyStop, ReduceOnPlateau
from jaxmpi.trainer.compatibility import REFUSALS, check_compatible, markdown
from launching import ROOT

APART, H = {"rule": RuleConfig("easgd")}, {"rule": RuleConfig("local_sgd")}
SHRINK = {"on_rank_loss": "shrink"}
SEVERAL = {"devices": 2}  # of each of two ranks
SHARDED = {"exchange": ExchangeConfig(shard_update="on")}
BUDDY = {"exchange": ExchangeConfig(shard_update="on", buddy=1)}
# Message and options; one for each line of the table at least.
MADE = Optim("mine", transform=optax.sgd(0.1))  # with its rate
STREAM = Data("grain", train=lambda worker, workers: iter([]))
HELD_OUT = Data("mixture", train=(([1], 1.0),), validation=STREAM)
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("on_nonfinite: got rollback with an asynchronous rule, .*; skip or stop", {"on_nonfinite": "rollback", **APART}),
    ("batch_statistics: got synchronised with an asy.*; averaged or", {"batch_statistics": "synchronised", **APART}),
    (
        "step_mode: got split with an asynchronous rule, whose workers do not meet; auto",
        {"step_mode": "split", **APART},
    ),
    ("callbacks: got .* with an asynchronous rule.*leave EarlyStop", {"callbacks": (EarlyStop(),), **APART}),
    ("data.memory: got partition with an asynchronous rule.*shuffle", {"data": Data(memory="partition"), **APART}),
    ("data.source: got grain with an IterDataset and an asynchronous rule", {"data": STREAM, **APART}),
    ("data.source: got grain with an IterDataset and --on-rank-loss shrink", {"data": STREAM, **SHRINK}),
    (
        "data.memory: got partition with an IterDataset of Grain",
        {"data": Data("grain", train=STREAM.train, memory="partition")},
    ),
    ("data.source: got mixture with an IterDataset and --on-rank-loss shrink", {"data": HELD_OUT, **SHRINK}),
    ("data.on_error: got skip with an IterDataset of Grain.*filter", {"data": replace(STREAM, on_error="skip")}),
    ("continue_from: got run with an IterDataset of Grain", {"data": STREAM, "continue_from": "run"}),
    (
        r"on_nonfinite: got skip with exchange\.overlap delayed.*use stop or",
        {"on_nonfinite": "skip", "exchange": ExchangeConfig(overlap="delayed")},
    ),
    (
        r"on_nonfinite: got skip with exchange\.gather late.*use stop or",
        {"on_nonfinite": "skip", "exchange": ExchangeConfig(shard_update="on", gather="late")},
    ),
    ("on_nonfinite: got skip with rule local_sgd, whose workers step alone.*use stop", {"on_nonfinite": "skip", **H}),
    ("callbacks: got .* with --on-rank-loss shrink; an evaluation", {"callbacks": (ReduceOnPlateau(),), **SHRINK}),
    (
        "batch_statistics: got synchronised with several ranks of several devices.*comm xla",
        {"batch_statistics": "synchronised", **SEVERAL},
    ),
    ("exchange.strategy: got topk1 with several ranks of sev", {"exchange": ExchangeConfig("topk1"), **SEVERAL}),
    ("task: got token-classification with --on-rank-loss", {"task": "token-classification", **SHRINK}),
    ("optim.lr: got 0.5 with an optimizer of one's own.*; leave it out, or", {"optim": replace(MADE, lr=0.5)}),
    ("optim.lr_scaling: got sqrt with an optimizer of one's own", {"optim": replace(MADE, lr_scaling="sqrt")}),
    ("schedule.decay: got cosine with an optimizer of one's own", {"optim": MADE, "schedule": Schedule("cosine")}),
    ("schedule.warmup: got 1ep with an optimizer of one's own", {"optim": MADE, "schedule": Schedule(warmup="1ep")}),
    ("schedule.rate: got .* with an optimizer of one's own", {"optim": MADE, "schedule": Schedule(rate=lambda k: 1)}),
    ("comm: got xla with --on-rank-loss shrink", {"comm": "xla", **SHRINK}),
    ("devices: got 4 with --on-rank-loss shrink", {"devices": 4, **SHRINK}),
    ("rule.name: got easgd with --on-rank-loss shrink; easgd, asgd and gosgd outlive", {**APART, **SHRINK}),
    ("rule.name: got local_sgd with --on-rank-loss shrink", {**H, **SHRINK}),
    ("exchange.strategy: got lowrank4 with --on-rank-loss", {"exchange": ExchangeConfig("lowrank4"), **SHRINK}),
    ("exchange.strategy: got none with --on-rank-loss shrink", {"exchange": ExchangeConfig("none"), **SHRINK}),
    ("rule.name: got subgd with exchange.shard_update on", {"rule": RuleConfig("subgd"), **SHARDED}),
    ("exchange.shard_update: got on with --on-rank-loss shrink without.*add --exchange.buddy 1", {**SHARDED, **SHRINK}),
    ("exchange.buddy: got 1 with --on-rank-loss end", BUDDY),
    (
        "exchange.overlap: got delayed with exchange.shard_update on.*use auto, on or off",
        {"exchange": ExchangeConfig(overlap="delayed", shard_update="on")},
    ),
    ("exchange.overlap: got on with --on-rank-loss", {"exchange": ExchangeConfig(overlap="on"), **SHRINK}),
    ("exchange.overlap: got delayed with --on-rank-loss", {"exchange": ExchangeConfig(overlap="delayed"), **SHRINK}),
    ("batch_statistics: got synchronised with --on-rank-loss", {"batch_statistics": "synchronised", **SHRINK}),
    ("data.memory: got partition with --on-rank-loss", {"data": Data(memory="partition"), **SHRINK}),
]


@pytest.fixture(autouse=True)
def two_ranks(no_launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's word for it."""
    for name, value in (("RANK", "0"), ("SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)


@pytest.mark.parametrize(("message", "options"), REFUSED)
def test_options_that_do_not_go_together_are_refused_with_a_way_out(message, options):
    with pytest.raises(UsageError, match=message):
        check_compatible(Experiment(**options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        SHRINK,
        {"on_nonfinite": "skip", **APART},
        {"on_nonfinite": "rollback", **H},
        {"on_nonfinite": "skip"},
        {**SEVERAL, **SHARDED},
        {"comm": "xla", **SEVERAL, **SHARDED},
        {**BUDDY, **SHRINK},
        {"batch_statistics": "synchronised", "comm": "xla", **SEVERAL},
        {"exchange": ExchangeConfig(overlap="delayed"), "on_nonfinite": "rollback"},
    ],
)
def test_others_go_together(options):
    check_compatible(Experiment(**options))


def test_each_line_of_the_table_is_tried():
    tried = [(message.split(":")[0], options) for message, options in REFUSED]
    for row in REFUSALS:
        assert any(field == row.field and row.beside(Experiment(**options)) for field, options in tried), row


PAGE = (ROOT / "docs" / "combining.md").read_text()


def test_the_page_has_the_table_as_it_is():
    block = re.search(r"<!-- table: refusals -->\n\n(.*?)\n<!-- end -->", PAGE, re.DOTALL)
    assert block, "docs/combining.md: expected the marks of the table"
    assert block[1] == markdown(), f"docs/combining.md: put this between the marks:\n{markdown()}"


def with_rule(**options: Any) -> Callable[[str], None]:
    return lambda rule: check_compatible(Experiment(rule=RuleConfig(rule), **options))


def with_setting(**setting: Any) -> Callable[[str], None]:
    return lambda rule: registry.check_settings(RuleConfig(rule, **setting))


def with_compressor(rule: str) -> None:
    exchanged = base.Exchange(lambda tree: tree, lambda tree: tree, gradients=exchange_gradients("lowrank2"))
    registry.build(RuleConfig(rule), optax.sgd(0.1), exchanged, optimizer="sgd", linear=True)


# Lines of the table by rule: who refuses what they name.
BY_RULE: dict[str, Callable[[str], None]] = {
    "`--optim.lr-scaling linear`, `sqrt`": lambda rule: registry.scale_lr(rule, "linear", 4) and None,
    "compressors (`lowrank4`, `topk1`)": with_compressor,
    "`--exchange.overlap delayed`": with_compressor,  # a mean with a state, too
    "`--exchange.shard-update on`": with_rule(exchange=ExchangeConfig(shard_update="on")),
    "`--step-mode split`": with_rule(step_mode="split"),
    "`--batch-statistics synchronised`": with_rule(batch_statistics="synchronised"),
    "`--data.memory partition`": with_rule(data=Data(memory="partition")),
    "`--on-nonfinite skip`": with_rule(on_nonfinite="skip"),
    "`--on-nonfinite rollback`": with_rule(on_nonfinite="rollback"),
    "`--on-rank-loss shrink`": with_rule(on_rank_loss="shrink"),
    "`--rule.servers`, `--rule.staleness`": with_setting(servers=1),
    "`--rule.momentum`": with_setting(momentum=0.9),
}


def refused_by(cell: str) -> set[str]:
    """Rules that a cell names as refused; all is a cell that begins with the word."""
    if cell.startswith("refused"):
        return set(registry.RULES)
    return {rule for rules in re.findall(r"((?:`\w+`(?:, )?)+) refused", cell) for rule in re.findall(r"\w+", rules)}


@pytest.mark.parametrize("option", BY_RULE)
def test_the_page_s_table_by_rule_says_who_refuses(option):
    table = PAGE.partition("\nBy rule. ")[2].split("\n\n")[1]
    head, _, *lines = [line.removeprefix("| ").split(" | ") for line in table.splitlines()]
    columns = [re.findall(r"\w+", cell) for cell in head[1:]]
    assert {rule for column in columns for rule in column} == set(registry.RULES)
    (cells,) = (line[1:] for line in lines if line[0] == option)
    for column, cell in zip(columns, cells, strict=True):
        for rule in column:
            refuses = pytest.raises(UsageError) if rule in refused_by(cell) else contextlib.nullcontext()
            with refuses:
                BY_RULE[option](rule)
