"""Every model takes three steps under mpirun, at tiny size, in one job: by the script that does it at full size."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launching import run
from models import MODELS

TINY = [name for name in MODELS if name.endswith("_tiny")]


DEEP = ("vgg19_tiny", "resnet101_tiny", "resnet152_tiny")  # of families that others stand for, long to compile
QUICK = [name for name in TINY if name not in DEEP]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, Any]:
    """By model: what its two ranks wrote."""
    return steps_of(QUICK, tmp_path_factory.mktemp("zoo") / "rows.json")


def steps_of(names: Sequence[str], out: Path) -> dict[str, Any]:
    line = [sys.executable, "scripts/zoo_steps.py", "-n", "2", "--tiny", "--models", *names, "--json", str(out)]
    ended = run(line, timeout_s=290)
    assert ended.code == 0, ended.out[-4000:]
    return json.loads(out.read_text())


def test_every_model_has_a_tiny_variant():
    assert {name.removesuffix("_tiny") for name in TINY} == {name.removesuffix("_tiny") for name in MODELS}


@pytest.mark.parametrize("name", QUICK)
def test_three_steps_on_two_ranks(name, rows):
    check_steps(name, rows)


@pytest.mark.slow
def test_three_steps_of_deep_ones(tmp_path):
    rows = steps_of(DEEP, tmp_path / "rows.json")
    for name in DEEP:
        check_steps(name, rows)


def check_steps(name: str, rows: dict[str, Any]) -> None:
    one, two = rows[name]["ranks"]
    assert one["losses"] == two["losses"]
    assert len(one["losses"]) == 3
    assert all(math.isfinite(loss) for loss in one["losses"])
    assert one["params"] == two["params"]  # SHA-256 at the start and after every step
    assert len(set(one["params"])) == 4
