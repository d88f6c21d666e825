"""Sinks by word: known before the first step, sent every line, never in the way of a run."""

import csv
import json
import sqlite3
import sys
import threading
import time

import pytest

from jaxmpi.core.errors import UsageError
from jaxmpi.observe.recorder import Recorder
from jaxmpi.observe.sinks import base
from jaxmpi.observe.sinks.base import Background
from jaxmpi.observe.sinks.registry import SINKS, SinkSpec, check_sinks, open_sinks
from jaxmpi.runtime import failures
from launching import run

TRAIN = {"total_steps": 10, "epoch": 0.3, "lr": 0.1, "wait_s": 0.0, "skipped": 0}


def table(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def record(folder, sinks=()) -> Recorder:
    """A recorder with a line of step 3 and one of step 6."""
    recorder = Recorder(folder, sinks=open_sinks(sinks, folder))
    for step in (3, 6):
        recorder.train(**TRAIN, step=step, examples=32 * step, loss=1 / step)
    return recorder


# ---------------------------------------------------------------- which


def test_an_unknown_sink_and_a_missing_package_are_refused(monkeypatch):
    with pytest.raises(UsageError, match="did you mean 'wandb'"):
        check_sinks(("csv", "wandbb"))
    monkeypatch.setitem(SINKS, "mine", SinkSpec(lambda run_dir: print, "", "no_such_package", "no-such-package"))
    with pytest.raises(UsageError, match=r"mine.*no_such_package.*no-such-package"):
        check_sinks(("mine",))


def test_a_custom_sink_is_opened_in_the_run_directory(tmp_path, monkeypatch):
    lines: list[dict] = []
    monkeypatch.setitem(SINKS, "mine", SinkSpec(lambda run_dir: lambda row: lines.append({**row, "at": run_dir}), ""))
    others: list[dict] = []
    check_sinks(("mine", others.append))
    record(tmp_path, ("mine", others.append)).close()
    assert [row["step"] for row in lines] == [row["step"] for row in others] == [3, 6]
    assert {row["at"] for row in lines} == {tmp_path}


# ---------------------------------------------------------------- in the background


def test_a_run_waits_neither_for_a_slow_sink_nor_loses_its_lines(monkeypatch):
    monkeypatch.setattr(base, "GATHER_S", 0.01)
    got: list[int] = []
    is_open, flushes = threading.Event(), []

    class Slow:
        def __call__(self, row):
            got.append(row["step"])

        def flush(self):
            flushes.append(len(got))

        def close(self):
            got.append(-1)

    def opened():
        is_open.wait(30)
        return Slow()

    sink = Background("slow", opened)
    begin = time.perf_counter()
    for step in range(1000):
        sink({"kind": "train", "step": step})
    assert got == []
    assert time.perf_counter() - begin < 5
    is_open.set()
    sink.begin_to_close(has_failed=False)
    sink.close()
    assert got == [*range(1000), -1]
    assert flushes[-1] == 1000
    assert len(flushes) < 10  # lines that wait go together


@pytest.mark.parametrize("in_background", [True, False])
def test_a_sink_that_cannot_be_opened_is_reported_once_and_ends_no_run(tmp_path, monkeypatch, capsys, in_background):
    monkeypatch.setattr(base, "GATHER_S", 0.01)

    def broken(run_dir):
        raise OSError("no such server")

    monkeypatch.setitem(SINKS, "mine", SinkSpec(broken, "", in_background=in_background))
    for at_once in (True, False):
        sinks = open_sinks(("mine",), tmp_path)
        if in_background and not at_once:
            sinks[0]._thread.join(30)  # type: ignore[attr-defined]
        recorder = Recorder(tmp_path, sinks=sinks)
        for _ in range(2 - at_once):
            recorder.write("note")
        recorder.close()
        errors = capsys.readouterr().err
        assert errors.count("jaxmpi: sink mine") == 1
        assert "OSError: no such server" in errors
    assert len((tmp_path / "record.jsonl").read_text().splitlines()) == 3


def test_a_sink_that_hangs_is_abandoned_and_one_that_lags_gets_no_more_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(base, "CLOSE_S", 0.1)
    monkeypatch.setattr(base, "MOST_WAITING", 3)
    is_over = threading.Event()

    def opened(run_dir):
        is_over.wait(30)
        return [].append

    monkeypatch.setitem(SINKS, "mine", SinkSpec(opened, "", in_background=True))
    for lines, expected in ((1, "1 lines or its end wait after 0 s"), (9, "3 lines wait for it")):
        recorder = Recorder(tmp_path, sinks=open_sinks(("mine",), tmp_path))
        for _ in range(lines):
            recorder.write("note")
        recorder.close()
        errors = capsys.readouterr().err
        assert errors.count("TimeoutError") == 1
        assert expected in errors
    is_over.set()


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("has_fail", [True, False])
def test_sinks_distinguish_failed_runs_from_finished_ones(tmp_path, monkeypatch, in_background, has_fail):
    ends: list[str] = []

    class Ending:
        def __init__(self, run_dir):
            self.close = lambda: ends.append("close")
            if has_fail:
                self.fail = lambda: ends.append("fail")

        def __call__(self, row):
            pass

    monkeypatch.setitem(SINKS, "mine", SinkSpec(Ending, "", in_background=in_background))
    with Recorder(tmp_path, sinks=open_sinks(("mine",), tmp_path)):
        pass
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path, sinks=open_sinks(("mine",), tmp_path)):
        raise ZeroDivisionError
    assert ends == ["close", "fail" if has_fail else "close"]


@pytest.mark.parametrize("in_background", [True, False])
def test_a_thread_that_a_sink_has_started_ends_no_run_and_any_other_does(tmp_path, monkeypatch, capsys, in_background):
    ended: list[BaseException | None] = []
    monkeypatch.setattr(failures, "fail", lambda error, trace: ended.append(error))
    monkeypatch.setattr(threading, "excepthook", failures.fail_in_thread)
    threads: list[threading.Thread] = []
    is_opening, may_go_on = threading.Event(), threading.Event()

    def raising(owner):
        raise OSError(f"thread of {owner}")

    def start(target, *args):
        threads.append(threading.Thread(target=target, args=args))
        threads[-1].start()

    def threaded(row):
        start(raising, f"a library, {in_background}")

    def opened(run_dir):
        start(start, raising, f"a library, {in_background}")
        is_opening.set()
        if in_background:
            may_go_on.wait(30)
        return threaded

    monkeypatch.setitem(SINKS, "threaded", SinkSpec(opened, "", in_background=in_background))
    recorder = Recorder(tmp_path, sinks=open_sinks(("threaded",), tmp_path))
    assert is_opening.wait(30)
    start(raising, "the trainer")  # while the sink is being opened, if that is in the background
    may_go_on.set()
    recorder.write("note")
    recorder.close()
    for thread in threads:
        thread.join(30)
    assert [str(error) for error in ended] == ["thread of the trainer"]
    errors = capsys.readouterr().err
    assert errors.count("jaxmpi: sink threaded failed in a thread of its own, and may lack lines; the run goes on") == 1


# ---------------------------------------------------------------- tables


def test_csv_has_the_lines_of_the_record_and_no_others(tmp_path):
    recorder = record(tmp_path, ("csv",))
    path = tmp_path / "csv" / "train.csv"
    assert [row["loss"] for row in table(path)] == ["0.333333", "0.166667"]
    recorder.train(**TRAIN, step=7, examples=224, loss=0.1, distance=0.5)  # a new column
    assert [row["distance"] for row in table(path)] == ["", "", "0.5"]
    recorder.go_back(3)
    recorder.write("rollback", step=3, failed=7, why="a test")
    assert [row["step"] for row in table(path)] == ["3"]
    recorder.evaluation(step=3, epoch=1.0, examples=96, eval_count=7, eval_loss=0.5, eval_top1=0.25)
    recorder.close()
    assert table(tmp_path / "csv" / "eval.csv")[0]["eval_top1"] == "0.25"
    resumed = Recorder(tmp_path, sinks=open_sinks(("csv",), tmp_path))  # of a resumed run
    resumed.train(**TRAIN, step=4, examples=128, loss=0.2)
    resumed.close()
    assert [row["step"] for row in table(path)] == ["3", "4"]


def test_custom_lines_cannot_use_a_kind_of_the_trainer_or_a_path(tmp_path):
    recorder = record(tmp_path, ("csv",))
    for kind in ("train", "a/b", "..", ""):
        with pytest.raises(UsageError, match="write: got kind"):
            recorder.note(kind, step=6, value=1.0)
    recorder.note("of-mine", step=6, value=1.0, anatomy={"compute": "a text"})
    recorder.close()
    assert table(tmp_path / "csv" / "of-mine.csv") == [{"step": "6", "value": "1.0"}]
    assert base.numbers({"kind": "of-mine", "value": 1.0, "anatomy": {"compute": None}}) == {"of-mine/value": 1.0}


# ---------------------------------------------------------------- trackers


SAMPLES = {"picture": ".png", "words": ".txt"}  # with the ending of MLflow's files
TWICE = """
import contextlib
import sqlite3
import sys
from pathlib import Path
import numpy as np
from jaxmpi.config import Experiment
from jaxmpi.config.flags import to_json
from jaxmpi.observe.recorder import Recorder, cut_record
from jaxmpi.observe.sinks.registry import SINKS, open_sinks
from jaxmpi.observe.terminal import Terminal

folder, hooks = Path(sys.argv[1]), (sys.excepthook, sys.exit)
for steps in ((1, 2, 4), (5, 6)):
    cut_record(folder / "record.jsonl", 4)
    made = Recorder(folder, terminal=Terminal(), sinks=open_sinks(tuple(SINKS), folder))
    made.write("run", experiment=to_json(Experiment()), workers=1)
    for step in steps:
        made.train(total_steps=6, epoch=1.0, lr=0.1, wait_s=0, skipped=0, step=step, examples=step, loss=1 / step)
    made.sample(steps[0], "words", "a & b")
    made.sample(steps[0], "picture", np.eye(8, dtype=bool))
    made.close(has_failed=steps[0] == 1)
    with contextlib.closing(sqlite3.connect(folder.parent / "mlflow.db")) as database:
        [(status,)] = database.execute("select status from runs").fetchall()
    assert status == ("FAILED" if steps[0] == 1 else "FINISHED"), status
assert (sys.excepthook, sys.exit) == hooks
"""


@pytest.mark.e2e
def test_a_run_and_its_resumption_are_one_run_at_every_tracker_and_say_nothing(tmp_path):
    """Weights & Biases offline, MLflow in a database, where a run that has failed is failed until it is resumed."""
    env = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    env |= {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    ended = run([sys.executable, "-c", TWICE, str(run_dir)], timeout_s=240, env=env, cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "")
    record = [json.loads(text) for text in (run_dir / "record.jsonl").read_text().splitlines()]
    losses = [(row["step"], row["loss"]) for row in record if row["kind"] == "train"]
    assert [step for step, _ in losses] == [1, 2, 4, 5, 6]

    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        [(run_id, status, artifacts)] = database.execute("select run_uuid, status, artifact_uri from runs").fetchall()
        metrics = database.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()
        params = dict(database.execute("select key, value from params").fetchall())
    database.close()
    assert (status, metrics) == ("FINISHED", losses)
    assert (params["experiment.optim.name"], params["workers"]) == (record[0]["experiment"]["optim"]["name"], "1")

    first, second = sorted(path for path in (run_dir / "wandb").glob("offline-run-*"))
    wandb_id = json.loads((run_dir / "sinks.json").read_text())["wandb"]
    for folder in (first, second):
        [log] = folder.glob("run-*.wandb")
        assert log.name == f"run-{wandb_id}.wandb"
        assert b"train/loss" in log.read_bytes()
        suffixes = {path.suffix for path in (folder / "files" / "media").rglob("*.*")}
        assert suffixes == {".png", ".html"}
    assert json.loads((run_dir / "sinks.json").read_text())["mlflow"] == run_id
    names = [path.name for path in sorted((tmp_path / artifacts.removeprefix("file://") / "samples").iterdir())]
    assert names == [f"{name}_0000000{step}{end}" for name, end in SAMPLES.items() for step in (1, 5)]
    events = b"".join(path.read_bytes() for path in sorted((run_dir / "tensorboard").iterdir()))
    assert b"a & b" in events
    assert b"sample/picture" in events
    assert [row["name"] for row in table(run_dir / "csv" / "sample.csv")] == ["words", "picture"] * 2
    assert [row["step"] for row in table(run_dir / "csv" / "train.csv")] == [str(step) for step, _ in losses]
    assert len(list((run_dir / "tensorboard").iterdir())) == 2
