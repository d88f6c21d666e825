"""Grids of runs with several seeds."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmpi.core.errors import UsageError
from jaxmpi.tools import sweep
from runs import TINY

FLAGS = ("--train-for=12st", "--eval-every=0st")


@pytest.fixture
def tiny(tmp_path) -> str:
    (tmp_path / "tiny.py").write_text(TINY)
    return str(tmp_path / "tiny.py")


def run(file: str, *argv: str, cwd: Path) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "jaxmpi.tools.cli", "sweep", file, *FLAGS, *argv]
    return subprocess.run(line, capture_output=True, text=True, timeout=240, cwd=cwd)


def lines(folder):
    return [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]


@pytest.mark.e2e
def test_a_stopped_sweep_trains_only_what_is_missing(tiny, tmp_path):
    """One of the runs diverges, which leaves the other alone."""
    ended = run(tiny, "--vary", "optim.lr=1e9,0.05", "--out", "sweep", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [("failed" in row, row["seed"]) for row in lines(tmp_path / "sweep")] == [(True, 0), (False, 0)]
    assert (tmp_path / "sweep" / "report" / "index.html").is_file()
    resumed = run(tiny, "--vary", "optim.lr=0.05", "--seeds", "2", "--out", "sweep", cwd=tmp_path)
    assert [line for line in resumed.stdout.splitlines() if line[:1].isdigit()] == ["2/2 optim.lr=0.05,seed=1"]
    _, first, second = lines(tmp_path / "sweep")
    assert (second["seed"], "failed" in second) == (1, False)
    assert first["eval_loss"] != second["eval_loss"]


def test_a_table_has_means_and_differences_of_equal_seeds(tmp_path):
    cells = sweep.grid({"optim.lr": ["1", "2"], "n": ["4"]})
    losses = {"1": [1.0, 2.0, 6.0], "2": [2.0, 4.0]}
    rows = [
        {"run": "", "cell": cell, "seed": seed, "metric": "eval_loss", "eval_loss": loss, "elapsed_s": 3.0}
        for cell in cells
        for seed, loss in enumerate(losses[cell["optim.lr"]])
    ]
    rows.append({"run": "", "cell": cells[1], "seed": 2, "failed": "exit code 1"})
    (tmp_path / "sweep.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chosen = sweep.Sweep(["digits"], cells, range(3), tmp_path)
    first, second = sweep.summaries(chosen)
    assert first.mean == (3.0, pytest.approx(math.sqrt(7 / 3)))
    assert (second.mean[0], *second.difference) == (3.0, 1.5, pytest.approx(0.5))
    assert (second.seeds, second.failed) == (2, 1)
    with pytest.raises(UsageError, match="eval_loss"):
        sweep.summaries(chosen, "eval_top1")


def test_ranks_and_ranges_vary():
    assert sweep.setting("rule.tau=2..4") == ("rule.tau", ["2", "3", "4"])
    words = sweep.train_words(["digits", "--seed=1"], {"n": "4", "optim.lr": "-1e-3"})
    assert words == ["-n", "4", "digits", "--seed=1", "--optim.lr=-1e-3"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--vary", "optim.lr=fast"],
        ["--vary", "no.field=1"],
        ["--run-dir", "x", "--vary", "optim.lr=1"],
        ["--vary", "seed=1,2"],
    ],
)
def test_a_line_that_train_refuses_is_refused_before_the_first_run(argv, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UsageError, SystemExit)):
        sweep.main([tiny, *FLAGS, *argv, "--out", "sweep"])
    assert not (tmp_path / "sweep").exists()
