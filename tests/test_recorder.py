import io
import json
import math
import time

import numpy as np
import pytest

from jaxmpi.recorder import Recorder, cut_record, jsonable

TRAIN = {
    "step": 3,
    "total_steps": 10,
    "epoch": 0.3,
    "examples": 96,
    "loss": 1.23456789,
    "lr": 0.1,
    "wait_s": 0.25,
    "skipped": 0,
}


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def recorder(folder, **kwargs) -> tuple[Recorder, io.StringIO]:
    out = io.StringIO()
    return Recorder(folder, out=out, **kwargs), out


def test_train_lines(tmp_path):
    record, out = recorder(tmp_path)
    record.train(**TRAIN)
    [row] = rows(tmp_path)  # on disk at once
    names = ["kind", "step", "epoch", "examples", "elapsed_s", "loss", "images_per_s", "lr", "wait_s", "skipped"]
    assert list(row) == names
    assert (row["kind"], row["step"], row["loss"]) == ("train", 3, 1.23457)
    assert "step 3/10  epoch 0.30  loss 1.2346" in out.getvalue()
    record.close()


def test_evaluation_lines(tmp_path):
    record, out = recorder(tmp_path)
    record.evaluation(step=3, epoch=1.0, examples=96, eval_count=7, eval_loss=0.5, eval_top1=3 / 7, eval_top5=1.0)
    [row] = rows(tmp_path)
    names = ["kind", "step", "epoch", "examples", "elapsed_s", "eval_count", "eval_loss", "eval_top1", "eval_top5"]
    assert list(row) == names
    assert "evaluation on 7: loss 0.5000  top-1 42.86 %  top-5 100.00 %" in out.getvalue()
    record.close()


def test_an_evaluation_of_nothing_says_so(tmp_path):
    record, out = recorder(tmp_path)
    record.evaluation(step=1, epoch=1.0, examples=1, eval_count=0)
    assert "evaluation on 0: no examples" in out.getvalue()
    assert "eval_loss" not in rows(tmp_path)[0]
    record.close()


def test_images_per_s_are_those_since_the_last_line(tmp_path):
    record, _ = recorder(tmp_path)
    record.start_window(1000)
    begin = time.monotonic()
    time.sleep(0.05)
    record.train(**{**TRAIN, "examples": 1100})
    took = time.monotonic() - begin
    assert 100 / took * 0.999 <= rows(tmp_path)[0]["images_per_s"] <= 100 / 0.05
    record.train(**{**TRAIN, "examples": 1100})
    assert rows(tmp_path)[1]["images_per_s"] == 0
    record.close()


def test_a_resumed_run_goes_on_in_the_same_file_and_time(tmp_path):
    for elapsed_s in (0.0, 100.0):
        record, _ = recorder(tmp_path, elapsed_s=elapsed_s)
        record.train(**TRAIN)
        record.close()
    first, second = rows(tmp_path)
    assert first["elapsed_s"] < 100 <= second["elapsed_s"] < 160


def test_other_ranks_write_and_say_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record, out = recorder(None)
    record.train(**TRAIN)
    record.say("hello")
    record.write("note", text="x")
    record.close()
    assert out.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


VALUES = [
    (1.23456789, 1.23457),
    (123456789.0, 123457000.0),
    (math.nan, None),
    (math.inf, None),
    (-math.inf, None),
    (np.float64(0.1), 0.1),
    (3, 3),
    ("x", "x"),
    (None, None),
    (True, True),
]


@pytest.mark.parametrize(("value", "expected"), VALUES)
def test_jsonable(value, expected):
    assert jsonable(value) == expected
    assert json.loads(json.dumps(jsonable(value))) == expected


def test_a_resumed_record_drops_what_is_done_again_and_a_torn_line(tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_text('{"kind": "run"}\n{"kind": "train", "step": 5}\n{"kind": "train", "step": 10}\n{"kind": "tr')
    cut_record(path, 5)
    assert path.read_text() == '{"kind": "run"}\n{"kind": "train", "step": 5}\n'
    cut_record(tmp_path / "none.jsonl", 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["record.jsonl"]
