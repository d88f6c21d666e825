"""The examples of data-parallel functions: each asserts that it gives what one worker gives."""

import sys

import pytest

from launching import ROOT, mpirun, run

FOLDER = ROOT / "experiments" / "functions"
NAMES = ("sgd", "lbfgs", "evaluate", "running_statistics", "resnet")
CPU = {"JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_workers_give_what_one_gives(name):
    ended = run([sys.executable, str(FOLDER / f"{name}.py")], timeout_s=200, env=CPU)
    assert ended.code == 0, ended.out[-3000:]
    assert "what one " in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_under_mpirun_too(name):
    ended = mpirun(3, str(FOLDER / f"{name}.py"), timeout_s=200, env=CPU)
    assert ended.code == 0, ended.out[-3000:]
    assert ended.out.count("3 workers") == 1
