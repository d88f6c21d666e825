import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmpi.checkpoint import run_directory
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.files import write_whole
from jaxmpi.observe.sinks.base import read_state, write_state
from launching import PATH, Ended, mpirun_line, run, train_here

HOLD = """
import sys
from pathlib import Path
from jaxmpi.checkpoint import run_directory
with run_directory.locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def claim(resume: bool = False, run_dir: str = "") -> Path:
    with contextlib.ExitStack() as stack:
        return run_directory.claim(Experiment(resume=resume, run_dir=run_dir), "digits", stack).path


@pytest.mark.e2e
def test_two_jobs_never_share_a_run_directory(tmp_path):
    (tmp_path / "record.jsonl").write_text("")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(UsageError, match=f"in use by process {other.pid} on "):
            claim(resume=True, run_dir=str(tmp_path))
        (tmp_path / "lock").unlink()  # whoever removes it admits nobody
        with pytest.raises(UsageError, match="in use by another job"):
            claim(resume=True, run_dir=str(tmp_path))
        other.kill()
        other.wait(10)
        assert claim(resume=True, run_dir=str(tmp_path)) == tmp_path


def test_the_newest_run_of_this_experiment_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="'runs/digits-' is no run directory"):
        claim(resume=True)
    with pytest.raises(UsageError, match=r"is no run directory, it has no record\.jsonl"):
        claim(resume=True, run_dir=str(tmp_path))
    stamps = ("20260102-030405", "20260102-030405-2", "20260102-030405-10", "20251231-235959-11")
    for name in (*(f"digits-{stamp}" for stamp in stamps), "digits-2-20270101-000000", "digits-9", "x"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "record.jsonl").write_text("")
    Path("runs", "digits-20270101-000000").mkdir()  # of a start that was refused
    assert claim(resume=True) == Path("runs", "digits-20260102-030405-10")


def test_a_run_directory_that_holds_a_run_is_named(tmp_path):
    record, checkpoint = tmp_path / "record.jsonl", tmp_path / "checkpoints" / "step_00000003"
    for _ in range(2):  # a run that came to no step may be started again
        assert claim(run_dir=str(tmp_path)) == tmp_path
        record.write_text('{"kind": "run"}\n')
    record.write_text('{"kind": "run"}\n{"kind": "train", "step": 1}\n')
    with pytest.raises(UsageError, match=f"run directory '{tmp_path}' holds a run already"):
        claim(run_dir=str(tmp_path))
    record.unlink()
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match=f"run directory '{tmp_path}' holds a run already"):
        claim(run_dir=str(tmp_path))


def assert_explained(ended: Ended) -> None:
    assert ended.code == 2, ended.out
    assert "Traceback" not in ended.out
    assert re.search(r"error: .*(cannot be used|is no run directory).*--run-dir", ended.out), ended.out


@pytest.mark.e2e
def test_an_unusable_run_directory_is_explained(tmp_path):
    (tmp_path / "file").touch()
    line = ["experiments/digits.py", "--run-dir"]
    assert_explained(train_here(*line, "/dev/null/x", "--resume"))
    for place in (str(tmp_path / "file"), str(tmp_path / ("x" * 300))):
        assert_explained(train_here(*line, place))
    tool = [sys.executable, "-m", "jaxmpi.tools.cli", "train", "--restarts", "1"]  # by the supervisor
    assert_explained(run([*tool, *line, str(tmp_path / "file")], timeout_s=60))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("lock", "link"), ("record.jsonl", "pipe"), ("config.json", "link"), ("checkpoints", "folder link")],
)
def test_nothing_is_written_through_links_or_pipes_in_a_run_directory(tmp_path, name, kind):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        outside.mkdir() if kind == "folder link" else outside.write_text("precious")
        (folder / name).symlink_to(outside)
    for resume in (False, True):
        if name != "record.jsonl":
            (folder / "record.jsonl").touch()
        with pytest.raises(UsageError, match="run"):
            claim(resume=resume, run_dir=str(folder))
    assert outside.is_dir() or kind == "pipe" or outside.read_text() == "precious"


# ---------------------------------------------------------------- a directory that goes away while a run is in it

LOSES = """
import dataclasses, glob, os, shutil, sys, time
from jaxmpi.experiments.digits import experiment as digits
from jaxmpi.models.cnn import digits_cnn_tiny

is_saved = lambda: glob.glob("run/checkpoints/step_*[0-9]/manifest.json")

def lose(row):  # once a checkpoint is whole; asynchronous workers write theirs between such lines
    while row["kind"] == "train" and row["step"] == 7 and "asgd" not in sys.argv and not is_saved():
        time.sleep(0.01)
    if row["kind"] == "train" and row["step"] >= 7 and is_saved():
        {do}

experiment = dataclasses.replace(
    digits, model=digits_cnn_tiny(), sinks=(lose,), run_dir="run", train_for="20st", eval_every="0st",
    checkpoint_every="5st", log_every=1,
)
"""
WAYS = {  # what others do
    "removed": "shutil.rmtree('run')",
    "moved": "os.rename('run', 'there')",
    "replaced": "os.rename('run', 'there'); os.mkdir('run'); open('run/record.jsonl', 'w').close()",
}


OPTIONS = "--rule.name asgd --rule.tau 1 --local-batch 16 --train-for 600st --checkpoint-every 150st"
GONE = [
    pytest.param("moved", 1, (), marks=pytest.mark.slow),
    ("replaced", 1, ()),
    pytest.param("removed", 1, (), marks=pytest.mark.slow),
    pytest.param("removed", 2, tuple(OPTIONS.split()), marks=pytest.mark.slow),
]


@pytest.mark.e2e
@pytest.mark.parametrize(("loss", "ranks", "rule"), GONE)
def test_a_run_whose_directory_disappears_ends_with_an_error(loss, ranks, rule, tmp_path):
    """It was made anew in silence, without the record: the next job there resumed from this one's params."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "loses.py").write_text(LOSES.format(do=WAYS[loss]))
    env = {"PYTHONPATH": PATH}
    line = [sys.executable, "-m", "jaxmpi.train", "experiments/loses.py", *rule]
    start = mpirun_line(ranks) if ranks > 1 else []
    ended = run([*start, *line], timeout_s=100, env=env, cwd=tmp_path)
    assert ended.code == 1, ended.out
    message = "run directory 'run' has been removed, moved or replaced while the run went on: nothing is saved at step "
    assert message in ended.out
    assert "Traceback" not in ended.out
    assert os.listdir(tmp_path / "run") == ["record.jsonl"] if loss == "replaced" else not (tmp_path / "run").exists()


# ---------------------------------------------------------------- checkpoints that are lost

SAVED = '{"kind": "train", "step": 3}\n{"kind": "checkpoint", "step": 3}\n{"kind": "chec'


def test_resume_does_not_restart_a_run_whose_checkpoints_are_lost(tmp_path):
    """It began at step 0 and cut the record there."""
    record, checkpoints = tmp_path / "record.jsonl", tmp_path / "checkpoints"
    record.write_text('{"kind": "train", "step": 3}\n')
    assert claim(resume=True, run_dir=str(tmp_path)) == tmp_path  # it never saved: nothing is lost
    record.write_text(SAVED)
    with pytest.raises(UsageError, match=r"has checkpoints up to step 3, and .*/checkpoints' has none: .*--from-start"):
        claim(resume=True, run_dir=str(tmp_path))
    assert record.read_text() == SAVED
    for number in (1, 2):
        checkpoints.mkdir()
        write_state(tmp_path, "wandb", f"run {number}")
        with contextlib.ExitStack() as stack:
            run_directory.claim(Experiment(from_start=True, run_dir=str(tmp_path)), "digits", stack)
        assert record.read_text() == ""
        assert (tmp_path / f"checkpoints.{number}").is_dir()
        assert read_state(tmp_path) == {}  # it begins anew at the services of sinks, too
        assert f"run {number}" in (tmp_path / f"sinks.{number}.json").read_text()
        record.write_text(SAVED)
    assert (tmp_path / "record.1.jsonl").read_text() == SAVED
    with pytest.raises(UsageError, match="got resume and from_start"):
        Experiment(resume=True, from_start=True)


def test_a_file_is_written_atomically(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_whole(path, b"old")

    def full(file, raw):
        file.write(raw[:1])
        raise OSError("no space left")

    monkeypatch.setattr("jaxmpi.core.files.write_all", full)
    with pytest.raises(TrainingError, match="no space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["config.json"]
