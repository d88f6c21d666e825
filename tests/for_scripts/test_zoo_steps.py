"""Every model takes three steps under mpirun, at tiny size, in one job: by the script that does it at full size."""

import json
import math
import sys

import pytest

from jaxmpi.models import MODELS
from launching import run

TINY = [name for name in MODELS if name.endswith("_tiny")]


def test_every_model_has_a_tiny_variant():
    assert {name.removesuffix("_tiny") for name in TINY} == {name.removesuffix("_tiny") for name in MODELS}


@pytest.mark.slow  # each model alone is run by other tests; two minutes of compiling
def test_three_steps_on_two_ranks(tmp_path):
    out = tmp_path / "rows.json"
    line = [sys.executable, "scripts/zoo_steps.py", "-n", "2", "--tiny", "--json", str(out)]
    ended = run(line, timeout_s=290)
    assert ended.code == 0, ended.out[-4000:]
    rows = json.loads(out.read_text())
    assert list(rows) == TINY
    for name in TINY:
        one, two = rows[name]["ranks"]
        assert one["losses"] == two["losses"], name
        assert len(one["losses"]) == 3
        assert all(math.isfinite(loss) for loss in one["losses"]), name
        assert one["params"] == two["params"], name  # SHA-256 at the start and after every step
        assert len(set(one["params"])) == 4, name
