"""Every model takes three steps under mpirun, at tiny size, in one job: by the script that does it at full size."""

import json
import math
import sys
from typing import Any

import pytest

from launching import run
from models import MODELS

TINY = [name for name in MODELS if name.endswith("_tiny")]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, Any]:
    """By model: what its two ranks wrote."""
    out = tmp_path_factory.mktemp("zoo") / "rows.json"
    line = [sys.executable, "scripts/zoo_steps.py", "-n", "2", "--tiny", "--json", str(out)]
    ended = run(line, timeout_s=290)
    assert ended.code == 0, ended.out[-4000:]
    return json.loads(out.read_text())


def test_every_model_has_a_tiny_variant():
    assert {name.removesuffix("_tiny") for name in TINY} == {name.removesuffix("_tiny") for name in MODELS}


@pytest.mark.parametrize("name", TINY)
def test_three_steps_on_two_ranks(name, rows):
    one, two = rows[name]["ranks"]
    assert one["losses"] == two["losses"]
    assert len(one["losses"]) == 3
    assert all(math.isfinite(loss) for loss in one["losses"])
    assert one["params"] == two["params"]  # SHA-256 at the start and after every step
    assert len(set(one["params"])) == 4
