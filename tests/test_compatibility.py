"""Options that do not go together: each line of the table refuses, says why, and stands in docs/combining.md."""

import re
from typing import Any

import pytest

from jaxmpi.config.data import Data
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.trainer.callbacks import EarlyStop
from jaxmpi.trainer.compatibility import REFUSALS, check_compatible
from launching import ROOT

APART, H = {"rule": RuleConfig("easgd")}, {"rule": RuleConfig("local_sgd")}
SHRINK = {"on_rank_loss": "shrink"}
# Message and options; one for each line of the table at least.
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("on_nonfinite: got rollback with an asynchronous rule, .*; skip or stop", {"on_nonfinite": "rollback", **APART}),
    ("batch_statistics: got synchronised with an asy.*; averaged or", {"batch_statistics": "synchronised", **APART}),
    (
        "step_mode: got split with an asynchronous rule, whose workers do not meet; auto",
        {"step_mode": "split", **APART},
    ),
    ("callbacks: got .* with an asynchronous rule.*leave EarlyStop", {"callbacks": (EarlyStop(),), **APART}),
    ("data.memory: got partition with an asynchronous rule.*shuffle", {"data": Data(memory="partition"), **APART}),
    (
        r"on_nonfinite: got skip with exchange\.overlap delayed.*use stop or",
        {"on_nonfinite": "skip", "exchange": ExchangeConfig(overlap="delayed")},
    ),
    ("on_nonfinite: got skip with rule local_sgd, whose workers step alone.*use stop", {"on_nonfinite": "skip", **H}),
    ("task: got token-classification with --on-rank-loss", {"task": "token-classification", **SHRINK}),
    ("comm: got xla with --on-rank-loss shrink", {"comm": "xla", **SHRINK}),
    ("devices: got 4 with --on-rank-loss shrink", {"devices": 4, **SHRINK}),
    ("rule.name: got easgd with --on-rank-loss shrink; easgd, asgd and gosgd outlive", {**APART, **SHRINK}),
    ("rule.name: got local_sgd with --on-rank-loss shrink", {**H, **SHRINK}),
    ("exchange.strategy: got lowrank4 with --on-rank-loss", {"exchange": ExchangeConfig("lowrank4"), **SHRINK}),
    ("exchange.strategy: got none with --on-rank-loss shrink", {"exchange": ExchangeConfig("none"), **SHRINK}),
    ("exchange.overlap: got on with --on-rank-loss", {"exchange": ExchangeConfig(overlap="on"), **SHRINK}),
    ("exchange.overlap: got delayed with --on-rank-loss", {"exchange": ExchangeConfig(overlap="delayed"), **SHRINK}),
    ("batch_statistics: got synchronised with --on-rank-loss", {"batch_statistics": "synchronised", **SHRINK}),
    ("data.memory: got partition with --on-rank-loss", {"data": Data(memory="partition"), **SHRINK}),
]


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
        {"exchange": ExchangeConfig(overlap="delayed"), "on_nonfinite": "rollback"},
    ],
)
def test_others_go_together(options):
    check_compatible(Experiment(**options))


def test_each_line_of_the_table_is_tried_and_stands_in_the_docs():
    page = (ROOT / "docs" / "combining.md").read_text().splitlines()
    tried = [(message.split(":")[0], options) for message, options in REFUSED]
    for row in REFUSALS:
        assert any(field == row.field and row.beside(Experiment(**options)) for field, options in tried), row
        flag = f"--{row.field.replace('_', '-')}"
        short = {
            "--comm": "--comm xla",
            "--task": "`token-classification`",
            "--callbacks": "callbacks `EarlyStop`",
            "--rule.name": "`subgd`",
            "--exchange.strategy": "compressors",
        }.get(flag, flag)
        assert any(short in line and re.search("shrink|refused|skip", line) for line in page), row
