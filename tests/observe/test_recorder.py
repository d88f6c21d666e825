"""Lines of the record: on disk at once, with speed, parts of a step and the slowest rank; a full disk."""

import dataclasses
import io
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxmpi import data
from jaxmpi.comm.topology import gather_workers
from jaxmpi.config import Data, Experiment
from jaxmpi.data.sources.arrays import FieldSource
from jaxmpi.experiments.digits import experiment as digits
from jaxmpi.models.gpt import gpt_tiny
from jaxmpi.observe import record_reader, report_page
from jaxmpi.observe.flops import BESIDE_LOAD, Peak, Work
from jaxmpi.observe.record_format import PARTS, SOURCES
from jaxmpi.observe.recorder import MOST_RANKS, Recorder, Unit, cut_record
from jaxmpi.observe.report_data import charts, report_data
from jaxmpi.observe.step_timing import HEAD, LOCAL, Summary, summary
from jaxmpi.observe.terminal import Plain
from jaxmpi.runtime.progress import Span
from jaxmpi.trainer.plan import make_plan
from jaxmpi.trainer.run import unit_of
from launching import small_disk, train, train_here
from line_task import LINE
from runs import TINY

TRAIN = {
    **{"step": 3, "total_steps": 10, "epoch": 0.3, "examples": 96},
    **{"loss": 1.23456789, "lr": 0.1, "wait_s": 0.25, "skipped": 0},
}
EVALUATION = {"step": 3, "epoch": 1.0, "examples": 96, "eval_count": 7, "eval_loss": 0.5, "eval_top1": 3 / 7}


def arrays(source) -> Data:
    return Data("array", train=source, validation=source)


def rows(folder: Path, kind: str = "") -> list[dict]:
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [row for row in lines if not kind or row["kind"] == kind]


def recorder(folder: Path | None, **kwargs) -> tuple[Recorder, io.StringIO]:
    out = io.StringIO()
    return Recorder(folder, terminal=Plain(out, line_s=0.0), **kwargs), out


def window(compute: list[float], exposed: list[float], source: str = "measured", steps: int = 10) -> Summary:
    """A window of ranks that compute and wait for so many seconds a step."""
    flat = np.zeros((len(compute), HEAD + steps))
    flat[:, LOCAL.index("compute")] = steps * np.array(compute)
    flat[:, HEAD:] = np.array(exposed)[:, None]
    flat[:, LOCAL.index("exposed")] = flat[:, HEAD:].sum(axis=1)
    flat[:, len(LOCAL)] = SOURCES.index(source)
    return summary(flat, steps)


# One rank computes half as long again, and the others wait for it.
UNEQUAL = window([1.0, 1.0, 1.5, 1.0], [0.75, 0.75, 0.25, 0.75])


def test_lines_have_what_the_terminal_shows(tmp_path):
    record, out = recorder(tmp_path)
    record.train(**TRAIN)
    [row] = rows(tmp_path)  # on disk at once
    names = ["kind", "step", "epoch", "examples", "elapsed_s", "loss", "images_per_s", "lr", "wait_s", "skipped"]
    assert list(row) == [*names, "gradient_norm"]
    assert (row["kind"], row["step"], row["loss"]) == ("train", 3, 1.23457)
    record.evaluation(**EVALUATION)
    record.evaluation(step=1, epoch=1.0, examples=1, eval_count=0)
    evaluated, nothing = rows(tmp_path, "eval")
    assert [*evaluated][5:] == ["eval_count", "eval_loss", "eval_top1"]
    assert "eval_loss" not in nothing
    for shown in ("loss 1.2346", "loss 0.5000  top-1 42.86 %", "evaluation on 0: no examples"):
        assert shown in out.getvalue()
    record.close()


def test_a_record_drops_repeated_steps_and_a_truncated_line(tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_text('{"kind": "run"}\n{"kind": "train", "step": 5}\n{"kind": "train", "step": 10}\n{"kind": "tr')
    cut_record(path, 5)
    assert path.read_text() == '{"kind": "run"}\n{"kind": "train", "step": 5}\n'
    record, _ = recorder(tmp_path)
    record.train(**{**TRAIN, "step": 9})
    record.go_back(6)  # the run goes on in the same file
    record.write("rollback", step=6, loss=math.nan, norm=np.float64(123456789.0))
    record.close()
    assert rows(tmp_path)[1:] == [
        {"kind": "train", "step": 5},
        {"kind": "rollback", "step": 6, "loss": None, "norm": 123457000.0},
    ]
    cut_record(tmp_path / "none.jsonl", 5)
    assert not (tmp_path / "none.jsonl").exists()


# ---------------------------------------------------------------- speed


def test_images_per_s_are_those_since_the_last_line(tmp_path):
    record, _ = recorder(tmp_path)
    begin = time.monotonic()
    record.start_window(1000)
    time.sleep(0.05)
    record.train(**{**TRAIN, "examples": 1100})
    took_s = time.monotonic() - begin  # more than the window, which is more than the sleep
    record.train(**{**TRAIN, "examples": 1100})
    first, second = rows(tmp_path)
    assert 100 / took_s * (1 - 5e-6) <= first["images_per_s"] <= 100 / 0.05  # written with 6 digits
    assert second["images_per_s"] == 0
    record.close()


def speeds_drawn(folder: Path) -> list[str]:
    return [chart.title for chart in charts([record_reader.read(folder)]) if chart.section == "speed"]


@pytest.mark.parametrize(("unit", "shown"), [(Unit("tokens", 8, 20), "tokens/s"), (Unit("examples"), "examples/s")])
def test_the_speed_of_text_is_in_tokens_and_bytes_and_that_of_other_examples_in_examples(unit, shown, tmp_path):
    record, out = recorder(tmp_path, unit=unit)
    for k in (1, 2, 3):
        record.train(**{**TRAIN, "examples": k * 5120}, anatomy=UNEQUAL)
    record.close()
    *_, row = rows(tmp_path)
    assert "images" not in out.getvalue()
    assert f" {shown}  " in out.getvalue()
    assert "images_per_s" not in row
    if unit.bytes_each:
        assert row["bytes_per_s"] == pytest.approx(20 / 8 * row["tokens_per_s"], rel=1e-5)
    headlines = report_page.headlines(record_reader.read(tmp_path), [])
    assert [headline.value[0].isdigit() for headline in headlines if headline.name == shown] == [True]
    assert speeds_drawn(tmp_path)[0] == f"Speed, {shown}"


def test_the_unit_of_speed_suits_the_task_and_the_data(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.txt").write_text("x" * 100)
    numbers, tokens = np.zeros((4, 3), np.float32), np.zeros((4, 16), np.int32)
    cases = [
        (digits, {}, Unit("images")),
        (gpt_tiny(), {"data": arrays(data.ArraySource(tokens, tokens))}, Unit("tokens", 16)),
        (gpt_tiny(), {"data": Data("text", dir=str(tmp_path), window=16)}, Unit("tokens", 16, 16)),
        (None, {"data": arrays(FieldSource({"x": numbers, "y": numbers})), "task": LINE}, Unit("examples")),
    ]
    for model, changed, expected in cases:
        base = model if isinstance(model, Experiment) else Experiment(model=model)
        experiment = dataclasses.replace(base, local_batch=2, effective_batch=0, **changed)
        assert unit_of(experiment, make_plan(experiment, gather_workers(1)).feed) == expected


def test_model_flops_are_of_examples_that_were_seen_and_mfu_of_the_peak(tmp_path):
    record, out = recorder(tmp_path)
    for peak in (Peak(4e9, "measured"), None, Peak(4e9, BESIDE_LOAD)):
        record.train(**TRAIN, work=Work(3.2e6, 32, peak))
        record.start_window(0)
    record.close()
    measured, unknown, _ = rows(tmp_path)
    assert measured["flops_per_step"] == 3.2e6
    assert measured["model_flops_per_s"] == pytest.approx(1e5 * measured["images_per_s"], rel=1e-5)
    assert measured["mfu"] == pytest.approx(measured["model_flops_per_s"] / 4e9, rel=1e-5)
    assert "mfu" not in unknown
    first, second, third = (line for line in out.getvalue().splitlines() if line.startswith("step"))
    assert "FLOP/s (mfu ~" in first
    assert "FLOP/s  lr" in second
    assert "FLOP/s (mfu <" in third
    assert speeds_drawn(tmp_path) == ["Speed, images/s", "Model FLOP/s", "Model FLOPs utilisation"]


# ---------------------------------------------------------------- parts of a step


def test_goodput_counts_the_time_of_a_restart_and_no_step_that_is_repeated(tmp_path, monkeypatch):
    clock = iter([1000.0, 1010.0, 1020.0, 1100.0, 1110.0])
    monkeypatch.setattr("jaxmpi.observe.recorder.time.time", clock.__next__)
    record, _ = recorder(tmp_path)
    record.write("run", began_ms=record.began_ms)
    for step in (10, 20):  # 11.25 s of computation each
        record.train(**{**TRAIN, "step": step}, anatomy=UNEQUAL)
    record.close()
    cut_record(tmp_path / "record.jsonl", 10)
    resumed, _ = recorder(tmp_path)
    resumed.train(**{**TRAIN, "step": 20}, anatomy=UNEQUAL)
    resumed.close()
    assert [row["goodput"] for row in rows(tmp_path, "train")] == [
        1.125,
        pytest.approx(22.5 / 110, rel=1e-5),
    ]  # six digits are kept


def test_a_window_names_its_worst_rank(tmp_path):
    record, out = recorder(tmp_path, hosts=["a", "a", "node07", "b"])
    noted = [Span("travel", "bucket 1 of 1 (w)", 0.0, 2.0), Span("wait", "bucket 1 of 1 (w)", 1.0, 2.0)]
    record.train(**TRAIN, gradient_norm=2.5, anatomy=UNEQUAL, noted=noted)
    record.evaluation(**EVALUATION)
    record.close()
    [train_row], [exchange] = rows(tmp_path, "train"), rows(tmp_path, "exchange")
    assert train_row["anatomy"].keys() == PARTS.keys()
    assert train_row["anatomy"]["compute"] == [1.0, 1.0, 1.5, 2]
    assert train_row["anatomy"]["sync"] == [0.0, 0.5, 0.5, 0]
    assert train_row["anatomy"]["exchange"] == [0.25, 0.25, 0.25, 0]
    assert (train_row["exchange_time"], train_row["gradient_norm"], train_row["step_s"]) == ("measured", 2.5, 1.75)
    assert (train_row["own_s"], train_row["slowest"]) == ([1.0, 1.0, 1.5, 1.0], "rank 2 on node07")
    assert "slowest rank 2 on node07" in out.getvalue()
    assert "compute 64 %" in out.getvalue()
    assert exchange["buckets"] == [["bucket 1 of 1 (w)", 0.2, 0.1]]


def test_similar_ranks_have_no_slowest_and_many_are_listed_in_blocks(tmp_path):
    record, _ = recorder(tmp_path, hosts=["a"] * 4)
    record.train(**TRAIN, anatomy=UNEQUAL._replace(own_s=[1.0, 1.01, 1.05, 1.0]))
    record.train(**TRAIN, anatomy=UNEQUAL._replace(own_s=[float(i) for i in range(1, 1000)]))
    record.close()
    alike, many_ranks = rows(tmp_path)
    assert (alike["slowest"], alike["own_s"]) == ("", [1.0, 1.01, 1.05, 1.0])
    assert len(many_ranks["own_s"]) <= MOST_RANKS
    assert (many_ranks["own_s"][-1], many_ranks["own_ranks"]) == (999.0, -(-999 // MOST_RANKS))


def test_an_unknown_time_is_not_reported_as_zero(tmp_path):
    record, out = recorder(tmp_path)
    for k, source in enumerate(["unknown", "unknown", "measured", "measured"], 1):
        exposed = 0.5 if source == "measured" else 0.0
        record.train(**{**TRAIN, "examples": k * 5120}, anatomy=window([1.0, 1.0], [exposed, exposed], source))
    record.close()
    _, unknown, mixed, measured = rows(tmp_path)
    assert not {"exchange", "sync", "hidden"} & unknown["anatomy"].keys()
    assert mixed["anatomy"]["exchange"] == measured["anatomy"]["exchange"] == [0.5, 0.5, 0.5, 0]
    assert "compute+exchange 100 %" in out.getvalue()
    assert "compute 67 % exchange 33 %" in out.getvalue()
    drawn = record_reader.read(tmp_path)
    [run_data] = report_data([drawn])["runs"]
    assert run_data["parts"]["y"]["exchange"] == [0, 0.5, 0.5]
    assert run_data["isLate"]


# ---------------------------------------------------------------- sinks


def test_every_line_reaches_every_sink_and_a_failing_sink_does_not_end_the_run(tmp_path, capsys):
    class Leaky(list):
        def __call__(self, row: dict) -> None:
            self.append(row)

        def close(self) -> None:
            raise OSError("gone")

    def full(row: dict) -> None:
        raise OSError("the disk is full")

    def leaving(row: dict) -> None:
        sys.exit(3)

    leaky = Leaky()
    record, _ = recorder(tmp_path, sinks=[full, leaving, leaky])
    record.write("run", workers=2)
    record.train(**TRAIN)
    record.close()
    assert leaky == rows(tmp_path)
    errors = capsys.readouterr().err
    assert all(errors.count(f"jaxmpi: sink {name} failed") == 1 for name in ("full", "leaving", "Leaky"))
    assert "OSError: the disk is full" in errors


# ---------------------------------------------------------------- whole runs

FILLING = """
import os
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.models.cnn import digits_cnn_tiny

def fill(row):
    if os.environ.get("FILL_AT") == f"{row['kind']} {row.get('step')}":
        with open(os.environ["DISK"] + "/fill", "ab", buffering=0) as file:
            while file.write(b"x" * 4096):  # ends with OSError, and the run drops this sink
                pass

data = Data("digits", channels=1, mean=(0.305,), std=(0.376,))
experiment = Experiment(digits_cnn_tiny(), data=data, effective_batch=60, log_every=1, train_for="20st", sinks=(fill,))
"""


@pytest.mark.e2e
def test_a_full_disk_ends_a_run_with_the_file_and_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "filling.py").write_text(FILLING)
    with small_disk(tmp_path / "disk", "4m") as disk:
        folder, env = disk / "run", {"DISK": str(disk)}
        line = (str(tmp_path / "filling.py"), "--run-dir", str(folder), "--quiet")
        ended = train(1, *line, "--checkpoint-every", "0st", env=env | {"FILL_AT": "train 5"})
        assert ended.code == 1, ended.out
        assert "Traceback" not in ended.out
        assert f"error: '{folder / 'record.jsonl'}' cannot be written: No space left on device; " in ended.out
        assert f"--resume --run-dir {folder}\n" in ended.out
        assert not list(folder.glob("*.tmp"))
        (disk / "fill").unlink()
        monkeypatch.setenv("DISK", str(disk))
        resumed = train_here(*line, "--resume")
        assert resumed.code == 0, resumed.out
        assert [row["step"] for row in rows(folder, "train")] == [*range(1, 21)]


@pytest.mark.e2e
def test_a_quiet_run_with_profile_and_tensorboard_says_nothing_and_writes_both(tmp_path):
    pytest.importorskip("tensorboardX")
    steps = ("--train-for", "8st", "--log-every", "4", "--eval-every", "0st", "--checkpoint-every", "0st")
    more = ("--quiet", "--sinks", "tensorboard", "--profile", "3:5", "--exchange.strategy", "ring32")
    (tmp_path / "tiny.py").write_text(TINY)
    ended = train(1, str(tmp_path / "tiny.py"), *steps, *more, "--run-dir", str(tmp_path / "run"))
    assert (ended.code, ended.out.strip()) == (0, "")
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == [1, 4, 8]
    [profile] = (tmp_path / "run" / "profile" / "rank_00000").rglob("*.xplane.pb")
    assert profile.stat().st_size > 1000
    [events] = (tmp_path / "run" / "tensorboard").iterdir()
    assert events.stat().st_size > 500
