"""scripts/harness.py: turns, tables, and jobs that call a function on every rank; scripts/same_bits.py."""

import importlib
import sys
from pathlib import Path

import pytest

from launching import PATH, ROOT

sys.path.insert(0, str(ROOT / "scripts"))
harness = importlib.import_module("harness")
same_bits = importlib.import_module("same_bits")
ENV = {
    "PYTHONPATH": f"{PATH}:{ROOT / 'tests'}:{Path(__file__).parent}",
    "JAX_PLATFORMS": "cpu",
}  # jobs find the functions of this file


def of_all_ranks(word: str, numbers: list[int]) -> list[list]:
    """Job of two ranks: what each was called with."""
    control = harness.control()
    return control.allgather_object([control.rank, word, *numbers])


def failing() -> None:
    """Job that ends with an error."""
    raise SystemExit(3)


def test_runs_take_turns_and_warm_up_rounds_do_not_count():
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) or len(calls) for name in ("a", "b")}
    assert harness.take_turns(runs, rounds=2, warm_up=1, clock=harness.result) == {"a": [3, 5], "b": [4, 6]}
    assert "".join(calls) == "ababab"
    calls.clear()
    assert harness.take_turns(runs, rounds=2, warm_up=1, clock=harness.result, swap=True) == {"a": [3, 6], "b": [4, 5]}
    assert "".join(calls) == "baabba"


@pytest.mark.e2e
def test_a_job_that_fails_ends_the_program_with_its_name():
    with pytest.raises(harness.JobFailed, match=r"failing\(\) ended with code 3; its message is above"):
        harness.on_ranks(failing, env=ENV)


@pytest.mark.e2e
def test_rank_0_returns_the_result():
    expected = [[0, "word", 1, 2], [1, "word", 1, 2]]
    assert harness.on_ranks(of_all_ranks, "word", [1, 2], ranks=2, env=ENV) == expected


def ended(params: str, loss: str = "2.5"):
    """A run that ended well."""
    values = {"params": {"common.bin params/w": params}, "rule's state": {}, "losses": {"loss 0 of step 1": loss}}
    return same_bits.Outcome(0, values=values)


NO, OTHERWISE, CRASHED = (same_bits.Outcome(*each) for each in ((2, "no shm"), (2, "no rule"), (1, "code 1")))


@pytest.mark.parametrize(
    ("here", "there", "kind", "details"),
    [
        (ended("a"), ended("a"), "same", ""),
        (ended("a"), ended("b"), "differs", "1 of 1 params, first common.bin params/w"),
        (NO, NO, "refused by both", "no shm"),
        (NO, OTHERWISE, "differs", "here: no shm / there: no rule"),
        (ended("a"), NO, "not compared", "only the commit refuses it: no shm"),
        (ended("a"), CRASHED, "differs", "here: ends well / there: code 1"),
    ],
)
def test_two_versions_are_the_same_if_all_their_values_or_refusals_are(here, there, kind, details):
    assert same_bits.verdict(here, there) == (kind, details)
