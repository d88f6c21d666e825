import contextlib
import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxmpi.checkpoint import run_directory
from jaxmpi.checkpoint.held_folder import HeldFolder
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.files import write_whole
from jaxmpi.data import ArraySource
from jaxmpi.models.cnn import digits_cnn_tiny
from jaxmpi.observe.recorder import Recorder
from jaxmpi.observe.sinks.base import read_state, write_state
from jaxmpi.trainer import lock_step, main
from launching import PATH, Ended, mpirun_line, run, small_disk, train_here

HOLD = """
import sys
from pathlib import Path
from jaxmpi.checkpoint import run_directory
with run_directory.locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def claim(resume: bool = False, run_dir: str = "") -> Path:
    with contextlib.ExitStack() as held:
        return run_directory.claim(Experiment(resume=resume, run_dir=run_dir), "digits", held).path


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


def test_a_disk_that_is_full_before_the_run_is_said_with_the_file(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        (disk / "fill").write_bytes(b"x" * shutil.disk_usage(disk).free)
        with pytest.raises(UsageError, match=r"No space left on device: '.*/disk/run/lock'; name another"):
            claim(run_dir=str(disk / "run"))


@pytest.mark.parametrize("name", [*run_directory.FILES, "checkpoints"])
def test_a_run_directory_that_holds_another_kind_of_thing_is_refused(tmp_path, name):
    """A folder named config.tmp ended a run with a traceback, after its record had been cut."""
    (tmp_path / name).mkdir() if name != "checkpoints" else (tmp_path / name).touch()
    with pytest.raises(UsageError, match=f"{name}': got a (file|folder); expected a .* or nothing: remove it"):
        claim(run_dir=str(tmp_path))
    assert [*os.listdir(tmp_path)] == [name]


def said_in_a_sentence(ended: Ended) -> None:
    assert ended.code == 2, ended.out
    assert "Traceback" not in ended.out
    assert re.search(r"error: .*(cannot be used|is no run directory).*--run-dir", ended.out), ended.out


@pytest.mark.e2e
def test_a_place_where_no_run_directory_can_be_is_said_in_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    line = ["experiments/digits.py", "--run-dir"]
    said_in_a_sentence(train_here(*line, "/dev/null/x", "--resume"))
    for place in (str(tmp_path / "file"), str(tmp_path / ("x" * 300))):
        said_in_a_sentence(train_here(*line, place))
    tool = [sys.executable, "-m", "jaxmpi.tools.cli", "train", "--restarts", "1"]  # by the supervisor
    said_in_a_sentence(run([*tool, *line, str(tmp_path / "file")], timeout_s=60))


def test_the_digest_of_an_array_sees_labels_and_images():
    images, labels = np.zeros((40, 4, 4), np.uint8), [0] * 40
    changed, other = images.copy(), [*labels[:-1], 1]
    changed[7, 0, 0] = 1
    digests = {ArraySource(i, j).digest() for i, j in ((images, labels), (changed, labels), (images, other))}
    assert len(digests) == 3
    assert ArraySource(images.copy(), labels).digest() in digests
    ArraySource(np.zeros((0, 4, 4), np.uint8), []).digest()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("lock", "link"), ("record.jsonl", "pipe"), ("config.json", "link"), ("checkpoints", "folder link")],
)
def test_nothing_is_written_through_what_a_stranger_has_laid_in_a_run_directory(tmp_path, name, kind):
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


def test_a_record_and_a_lock_that_are_no_text(tmp_path):
    (tmp_path / "record.jsonl").write_bytes(b"\xff\xfe")
    run_directory.begin_record(tmp_path)
    with run_directory.locked(tmp_path):
        (tmp_path / "lock").write_bytes(b"\xff\x1b]0;")
        with pytest.raises(UsageError, match=r"is in use by .*xff.x1b\]0;"), run_directory.locked(tmp_path):
            pass


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
WAYS = {  # what others do, and what is said of it
    "removed": ("shutil.rmtree('run')", "has been removed while the run went on"),
    "moved": ("os.rename('run', 'there')", "has been moved to '{}/there' while the run went on"),
    "replaced": (
        "os.rename('run', 'there'); os.mkdir('run'); open('run/record.jsonl', 'w').close()",
        "has been moved to '{}/there' while the run went on",
    ),
}


OPTIONS = "--rule.name asgd --rule.tau 1 --local-batch 16 --train-for 600st --checkpoint-every 150st"
GONE = [
    pytest.param("moved", 1, (), marks=pytest.mark.slow),
    ("replaced", 1, ()),
    pytest.param("removed", 1, (), marks=pytest.mark.slow),
    pytest.param("removed", 2, tuple(OPTIONS.split()), marks=pytest.mark.slow),
]


@pytest.mark.e2e
@pytest.mark.parametrize(("way", "ranks", "rule"), GONE)
def test_a_run_whose_directory_goes_away_ends_and_says_so(way, ranks, rule, tmp_path):
    """It was made anew in silence, without the record: the next job there resumed from this one's params."""
    do, said = WAYS[way]
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "loses.py").write_text(LOSES.format(do=do))
    env = {"PYTHONPATH": PATH}
    line = [sys.executable, "-m", "jaxmpi.train", "experiments/loses.py", *rule]
    start = mpirun_line(ranks) if ranks > 1 else []
    ended = run([*start, *line], timeout_s=100, env=env, cwd=tmp_path)
    assert ended.code == 1, ended.out
    assert f"run directory 'run' {said.format(tmp_path)}: nothing is saved at step " in ended.out
    assert "Traceback" not in ended.out
    assert os.listdir(tmp_path / "run") == ["record.jsonl"] if way == "replaced" else not (tmp_path / "run").exists()


# ---------------------------------------------------------------- checkpoints that are lost

SAVED = '{"kind": "train", "step": 3}\n{"kind": "checkpoint", "step": 3}\n{"kind": "chec'


def test_a_run_whose_checkpoints_are_lost_is_not_begun_again_by_resume(tmp_path):
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
        with contextlib.ExitStack() as held:
            run_directory.claim(Experiment(from_start=True, run_dir=str(tmp_path)), "digits", held)
        assert record.read_text() == ""
        assert (tmp_path / f"checkpoints.{number}").is_dir()
        assert read_state(tmp_path) == {}  # it begins anew at the services of sinks, too
        assert f"run {number}" in (tmp_path / f"sinks.{number}.json").read_text()
        record.write_text(SAVED)
    assert (tmp_path / "record.1.jsonl").read_text() == SAVED
    with pytest.raises(UsageError, match="got resume and from_start"):
        Experiment(resume=True, from_start=True)


def test_newer_checkpoints_than_those_that_are_there_are_lost(tmp_path):
    """Older ones have gone by `--keep-checkpoints`."""
    steps = [2, 4, 6, 8]
    (tmp_path / "record.jsonl").write_text("".join(f'{{"kind": "checkpoint", "step": {k}}}\n' for k in steps))
    (tmp_path / "checkpoints" / "step_00000004").mkdir(parents=True)
    assert [path.name for path in run_directory.lost(tmp_path)] == ["step_00000006", "step_00000008"]
    (tmp_path / "checkpoints" / "step_00000008").mkdir()
    assert run_directory.lost(tmp_path) == []


def left_alone(folder: Path) -> Any:
    """The run of a rank that is the first of those that are left, as `take_over_record` sees it."""
    shrinking, feed = SimpleNamespace(recorder=None), SimpleNamespace(model=None, example=dict)
    return SimpleNamespace(
        shrinking=shrinking,
        folder=folder,
        recorder=Recorder(None),
        plan=SimpleNamespace(experiment=Experiment(), feed=feed),
        home=HeldFolder(folder),
        hosts=["host"],
    )


def test_a_rank_that_gets_the_run_directory_keeps_its_lock_where_folders_have_none(tmp_path, monkeypatch):
    (tmp_path / "record.jsonl").write_text("")
    monkeypatch.setattr(HeldFolder, "try_lock", lambda home: False)  # as on NFS
    run = left_alone(tmp_path)
    with contextlib.ExitStack() as ends:
        assert lock_step.take_over_record(run, 0, ends) is run.shrinking.recorder
        assert run.home.fate() == ""
        (tmp_path / "lock").unlink()
        assert run.home.fate() == "has lost its file `lock`, so another job may be in it"


def no_lock(file: object, operation: int) -> None:
    raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("way", ["held by another job", "no locks to be had", "gone"])
def test_a_run_directory_that_is_not_handed_over_ends_a_run_that_nobody_misused(tmp_path, monkeypatch, way):
    folder = tmp_path / "run"
    folder.mkdir()
    run, held = left_alone(folder), contextlib.ExitStack()
    if way == "held by another job":
        held.enter_context(run_directory.locked(folder))
    elif way == "gone":
        folder.rmdir()
    else:
        monkeypatch.setattr(fcntl, "flock", no_lock)
    with held, pytest.raises(TrainingError, match="the run directory cannot be used any more: "):
        lock_step.take_over_record(run, 0, held)


@pytest.mark.e2e
def test_a_rollback_in_a_run_directory_without_its_record_ends_the_run(tmp_path, no_launcher):
    def remove(row: dict) -> None:
        if row["kind"] == "train" and row["step"] == 4:
            (tmp_path / "record.jsonl").unlink()

    data = Data("digits", channels=1, mean=(0.305,), std=(0.376,))
    rest = {"effective_batch": 60, "train_for": "9st", "checkpoint_every": "2st", "log_every": 1, "sinks": (remove,)}
    back = {"on_nonfinite": "rollback", "inject": ("nan:rank=0,step=6",), "run_dir": str(tmp_path)}
    with pytest.raises(TrainingError, match=r"cannot be used any more: .*record\.jsonl"):
        main.train(Experiment(digits_cnn_tiny(), data=data, **rest, **back), "digits")
    assert not (tmp_path / "record.jsonl").exists()  # none is begun anew, as if nothing had been before


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_whole(path, b"old")

    def full(self, raw):
        with open(self, "wb") as file:
            file.write(raw[:1])
        raise OSError("no space left")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(TrainingError, match="no space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["config.json"]
