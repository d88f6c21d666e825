"""The examples of data-parallel functions: each asserts that it gives what one worker gives."""

import sys
from typing import Any

import pytest

from launching import ROOT, mpirun, run

FOLDER = ROOT / "experiments" / "functions"
NAMES = ("sgd", "lbfgs", "evaluate", "running_statistics", "resnet")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [0, 3], ids=["forked", "mpirun"])
def test_all_workers_give_what_one_gives(ranks, name):
    script = str(FOLDER / f"{name}.py")
    options: Any = {"timeout_s": 200, "env": {"JAX_PLATFORMS": "cpu"}}
    ended = mpirun(ranks, script, **options) if ranks else run([sys.executable, script], **options)
    assert ended.code == 0, ended.out[-3000:]
    assert "what one " in ended.out
    assert not ranks or ended.out.count(f"{ranks} workers") == 1
