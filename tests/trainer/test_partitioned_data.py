"""Whole runs with the data in the memory of the workers: the same as from files, in every bit."""

import json
import re
from pathlib import Path

import pytest

from jaxmpi.data import command
from jaxmpi.observe import record_reader
from jaxmpi.observe.report_data import charts
from launching import Ended, train, train_here
from runs import TINY, checkpoint_files, record

PARTITION = ("--data.memory", "partition")
SLOW = pytest.mark.slow
pytestmark = pytest.mark.timeout(1200)  # each job has a limit of its own


def run(folder: Path, until: str, *args: str, ranks: int = 2, timeout_s: float = 300) -> Ended:
    experiment = folder.parent / "tiny.py"
    experiment.write_text(TINY)
    line = (str(experiment), "--exchange.strategy", "ring16", "--run-dir", str(folder), "--train-for", until)
    line += ("--eval-every", "100st", "--log-every", "5", "--checkpoint-every", "1ep")
    return train(ranks, *line, *args, timeout_s=timeout_s) if ranks > 1 else train_here(*line, *args)


@pytest.fixture
def packed(tmp_path: Path) -> tuple[str, ...]:
    command.main(["pack", "digits", str(tmp_path / "packed"), "--quality", "0"])
    return ("--data.source", "packed", "--data.dir", str(tmp_path / "packed"))


@pytest.mark.slow  # three runs; test_group_order.py proves the batches
def test_a_run_from_memory_is_that_from_files(tmp_path, packed):
    """An epoch is 24 steps; what moved is told wherever a run is seen."""
    for name, args in (("files", ()), ("memory", (*PARTITION, "--trace", "9:30"))):
        ended = run(tmp_path / name, "50st", *packed, *args)
        assert ended.code == 0, ended.out
    files = checkpoint_files(tmp_path / "files", 50)
    assert sorted(files) == ["common.bin", "worker_00000.bin", "worker_00001.bin"]
    assert checkpoint_files(tmp_path / "memory", 50) == files
    assert "evaluation on 360" in ended.out
    said = r"training data in memory, 0\.\d MB a worker: groups of 2 workers .*, shuffled every epoch"
    assert re.search(said, ended.out), ended.out
    assert re.search(r"step \d+/50 .* shuffles? [\d.e-]+ s [\d.]+ [kM]B", ended.out), ended.out
    [loaded] = record(tmp_path / "memory", "memory")
    assert (loaded["group_size"], loaded["examples"]) == (2, 1437)
    assert 0 < loaded["worker_bytes"] < 400_000
    moved = record(tmp_path / "memory", "shuffle")
    assert [row["shuffle"] for row in moved] == [1, 2, 3]
    assert all(0 < row["moved_bytes"] < 2 * loaded["worker_bytes"] and row["shuffle_s"] > 0 for row in moved)
    drawn = charts([record_reader.read(tmp_path / "memory")])
    assert {"Shuffles of data in memory", "What shuffles move"} <= {chart.title for chart in drawn}
    events = json.loads((tmp_path / "memory" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event.get("cat") == "shuffle"} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("group", ["2", "4"])
def test_resume_in_the_middle_of_an_epoch_is_bit_exact(tmp_path, packed, group):
    """From memory, then from files, beside a run from files alone."""
    args = (*packed, "--checkpoint-every", "30st")
    memory = (*args, *PARTITION, "--data.group-size", group)
    for folder, until, more in (
        ("whole", "60st", args),
        ("parts", "30st", memory),
        ("parts", "50st", (*memory, "--resume")),
        ("parts", "60st", (*args, "--resume")),
    ):
        ended = run(tmp_path / folder, until, *more, ranks=4)
        assert ended.code == 0, ended.out
    assert "resumed at step 50" in ended.out
    assert checkpoint_files(tmp_path / "parts", 60) == checkpoint_files(tmp_path / "whole", 60)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("ranks", "on_error"), [(1, "stop"), *(pytest.param(2, on_error, marks=SLOW) for on_error in ("stop", "skip"))]
)
def test_a_damaged_record_ends_the_job_or_is_counted(tmp_path, packed, ranks, on_error):
    shard = tmp_path / "packed" / "train" / "shard-00000.bin"
    raw = bytearray(shard.read_bytes())
    raw[-5] ^= 1
    shard.write_bytes(raw)
    ended = run(tmp_path / "run", "48st", *packed, *PARTITION, "--data.on-error", on_error, ranks=ranks)
    if on_error == "stop":
        assert ended.code != 0
        assert re.search(r"shard-00000\.bin\[1436\] \(example 1436\) is corrupt: its checksum", ended.out), ended.out
    else:
        assert ended.code == 0, ended.out
        assert "skipped 2" in ended.out  # once an epoch
    assert not ended.timed_out
