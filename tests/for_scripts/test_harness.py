"""Jobs of scripts/harness.py, which call a function on every rank."""

import importlib
import sys
from pathlib import Path

import pytest

from launching import PATH, ROOT

sys.path.insert(0, str(ROOT / "scripts"))
harness = importlib.import_module("harness")
# Jobs import the functions of this file by its name.
ENV = {"PYTHONPATH": f"{PATH}:{ROOT / 'tests'}:{Path(__file__).parent}", "JAX_PLATFORMS": "cpu"}


def arguments_of_ranks(word: str, numbers: list[int]) -> list[list]:
    """Job of several ranks: what each was called with."""
    control = harness.control()
    return control.allgather_object([control.rank, word, *numbers])


def fail() -> None:
    """Job that ends with an error."""
    raise SystemExit(3)


@pytest.mark.e2e
def test_rank_0_returns_the_result_and_a_job_that_fails_is_named():
    expected = [[0, "word", 1, 2], [1, "word", 1, 2]]
    assert harness.on_ranks(arguments_of_ranks, "word", [1, 2], ranks=2, env=ENV) == expected
    with pytest.raises(harness.JobFailed, match=r"fail\(\) ended with code 3"):
        harness.on_ranks(fail, env=ENV)
