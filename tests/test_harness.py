"""scripts/harness.py: turns, tables, and jobs that call a function on every rank."""

import importlib
import os
import sys

import pytest

from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
harness = importlib.import_module("harness")
ENV = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    "JAX_PLATFORMS": "cpu",
}  # jobs find the functions of this file


def of_all_ranks(word: str, numbers: list[int]) -> list[list]:
    """Job of two ranks: what each was called with."""
    control = harness.control()
    return control.allgather_object([control.rank, word, *numbers])


def own_variable(name: str) -> str | None:
    """Job of a single process."""
    print("no part of the program's tables")
    return os.environ.get(name)


def host_names() -> list[str]:
    """Job of two ranks: their hosts."""
    return harness.control().allgather_object(os.uname().nodename)


def failing() -> None:
    """Job that ends with an error."""
    raise SystemExit(3)


def test_runs_take_turns_and_the_first_rounds_do_not_count():
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) or len(calls) for name in ("a", "b")}
    assert harness.take_turns(runs, rounds=2, warm_up=1, clock=harness.result) == {"a": [3, 5], "b": [4, 6]}
    assert "".join(calls) == "ababab"
    calls.clear()
    assert harness.take_turns(runs, rounds=2, warm_up=1, clock=harness.result, swap=True) == {"a": [3, 6], "b": [4, 5]}
    assert "".join(calls) == "baabba"


def test_a_table_is_its_head_and_rows():
    head = "| strategy | s |\n|---|---|"
    assert harness.table(("strategy", "s")) == head
    assert harness.table(("strategy", "s"), [["ring32", 0.5]]) == f"{head}\n{harness.row(['ring32', 0.5])}"
    assert harness.row(["ring32", 0.5]) == "| ring32 | 0.5 |"


@pytest.mark.e2e
def test_the_result_of_a_process_of_its_own(capfd):
    assert harness.on_ranks(own_variable, "OF_THE_JOB", env=ENV | {"OF_THE_JOB": "given"}) == "given"
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "no part of the program's tables\n")


@pytest.mark.e2e
def test_a_job_that_fails_ends_the_program_with_its_name():
    with pytest.raises(harness.JobFailed, match=r"failing\(\) ended with code 3; its message is above"):
        harness.on_ranks(failing, env=ENV)


@pytest.mark.e2e
def test_rank_0_returns_the_result():
    expected = [[0, "word", 1, 2], [1, "word", 1, 2]]
    assert harness.on_ranks(of_all_ranks, "word", [1, 2], ranks=2, env=ENV) == expected


@pytest.mark.e2e
def test_ranks_on_emulated_hosts():
    try:
        names = harness.on_ranks(host_names, ranks=2, rate="200mbit", env=ENV)
    except harness.JobFailed as error:
        if error.code != harness.NOT_PERMITTED:
            raise
        pytest.skip("no emulated cluster here")
    assert names == ["node0", "node1"]
