"""The examples of data-parallel functions: each asserts that it gives what one worker gives."""

import difflib
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


def test_every_example_is_run():
    assert {file.stem for file in FOLDER.glob("*.py")} == {*NAMES, "sgd_before"}


def test_only_the_lines_that_are_marked_change():
    """The paper's appendix: before and after."""
    before, after = ((FOLDER / f"{name}.py").read_text() for name in ("sgd_before", "sgd"))
    old, new = (text[text.index("import jax") : text.index("if __name__")].splitlines() for text in (before, after))
    lines = [line for line in difflib.ndiff(old, new) if line[2:].strip()]
    added = [line for line in lines if line.startswith("+ ")]
    assert added
    assert all(line.endswith("# changed") for line in added), added
    assert len([line for line in lines if line.startswith("- ")]) <= len(added)
