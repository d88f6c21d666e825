"""scripts/study.py: a tiny grid for real, stopped and gone on with; and the numbers of its table."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmpi.config import Experiment
from jaxmpi.config.flags import flags
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
script = importlib.import_module("study")

GRID = ("--workers", "2", "--vary", "local-batch=8", "train-for=3st", "eval-every=1st", "rule.name=gradients,local_sgd")


def run(out: Path, *args: str) -> subprocess.CompletedProcess:
    line = [sys.executable, str(ROOT / "scripts" / "study.py"), *GRID, "--out", str(out), *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=240, cwd=ROOT)


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped(tmp_path):
    out, png = tmp_path / "study.jsonl", tmp_path / "study.png"
    first = run(out, "--seeds", "1")
    assert first.returncode == 0, first.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["cell"]["rule.name"], row["seed"]) for row in rows] == [("gradients", 0), ("local_sgd", 0)]
    assert [len(row["curve"]) for row in rows] == [3, 3]
    out.write_text(out.read_text().splitlines()[0] + "\n" + '{"cut off')
    second = run(out, "--seeds", "2", "--png", str(png))
    assert second.returncode == 0, second.stderr
    assert "rule.name gradients: seeds [1]" in second.stderr
    assert "rule.name local_sgd: seeds [0, 1]" in second.stderr
    assert second.stdout.count("| 2 |") == 2
    assert png.stat().st_size > 1000
    third = run(out, "--seeds", "2", "--show")
    assert (third.stdout, third.stderr) == (second.stdout, "")


@pytest.mark.slow
def test_a_study_goes_on_past_runs_that_diverge(tmp_path):
    """No step at a rate of 1e38 is finite. Every such run is a line, which says why; none is run again."""
    out = tmp_path / "study.jsonl"
    args = ("--vary", "local-batch=8", "train-for=4st", "optim.lr=1e38,0.02", "schedule.warmup=0st")
    first = run(out, "--seeds", "2", *args)
    assert first.returncode == 0, first.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    failed = {(row["cell"]["optim.lr"], row["seed"]) for row in rows if "not finite" in row.get("failed", "")}
    assert failed == {("1e38", 0), ("1e38", 1)}
    assert {(row["cell"]["optim.lr"], row["seed"]) for row in rows if "eval_top1" in row} == {("0.02", 0), ("0.02", 1)}
    assert "| optim.lr 1e38 | 0, 2 failed |" in first.stdout
    again = run(out, "--seeds", "2", *args)
    assert (again.returncode, again.stderr, again.stdout) == (0, "", first.stdout)


def rows(study, errors: list[list[float]]) -> list[dict]:
    cells = zip(study.cells(), errors, strict=True)
    return [
        {
            "experiment": study.experiment, "cell": cell, "seed": seed, "eval_top1": 1 - error / 100, "elapsed_s": 1.0,
            "curve": [[1.0, error], [2.0, error / 2]],
        }
        for cell, of_cell in cells
        for seed, error in enumerate(of_cell)
    ]  # fmt: skip


STUDY = script.Study("Q?", "x.py", [script.Grid({"optim.lr": ("1", "2")}, {"workers": "2"})])


def test_differences_are_taken_seed_by_seed():
    made = script.summaries(STUDY, rows(STUDY, [[1.0, 5.0, 3.0], [1.5, 5.5, 3.8]]))
    assert [row.title for row in made] == ["optim.lr 1", "optim.lr 2"]
    assert made[0].mean == pytest.approx(3.0)
    assert made[0].error == pytest.approx(2 / math.sqrt(3))
    assert made[1].difference == pytest.approx(0.6)
    assert made[1].difference_error == pytest.approx(math.sqrt(0.03) / math.sqrt(3))  # of .5 .5 .8, not of errors
    assert made[1].within == "no"
    single = script.summaries(STUDY, rows(STUDY, [[1.0], [2.0]]))
    assert (single[1].difference_error, single[1].within) == (math.inf, "unknown")


@pytest.mark.parametrize("name", script.STUDIES)
def test_named_studies_have_flags_and_experiments_that_exist(name):
    study = script.STUDIES[name]
    assert (ROOT / study.experiment).is_file()
    known = flags(Experiment())
    for cell in study.cells():
        assert set(cell) - {"workers"} <= set(known)
    titles = [script.title(cell, study) for cell in study.cells()]
    assert len(set(titles)) == len(titles)
