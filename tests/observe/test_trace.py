"""A trace is what Perfetto reads, on one clock, with overlap to be seen."""

import itertools
import json
from pathlib import Path

import pytest

from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.observe.trace import Tracer, UncoordinatedTrace, merge_events, select_steps
from jaxmpi.runtime.progress import Span
from launching import train
from runs import column, record
from traces import check_schema

DIGITS = "experiments/digits.py"


def test_clocks_are_aligned():
    """Rank 1's clock is 100 s ahead; both did the same at the same time."""
    noted = [[Span("data", "batch of step 1", 5.0 + off, 6.0 + off)] for off in (0.0, 100.0)]
    events = check_schema({"traceEvents": merge_events(noted, [0.0, 100.0], ["a", "b"]), "displayTimeUnit": "ms"}, 2)
    assert [(e["pid"], e["ts"], e["dur"]) for e in events] == [(0, 0.0, 1e6), (1, 0.0, 1e6)]


def test_steps_are_selected():
    noted = [Span("compute", f"step {k}", float(k), k + 0.9) for k in range(1, 31)]
    noted += [Span("travel", "bucket 1 of 1 (w)", b, b + 0.3) for b in (8.5, 9.8, 12.5, 25.5)]
    spans = select_steps(noted, (10, 20))
    assert sorted(span.begin_s for span in spans) == [9.8, *map(float, range(10, 13)), 12.5, *map(float, range(13, 21))]
    assert select_steps(noted, (40, 50)) == []


def test_a_run_without_the_traced_steps_says_so_and_leaves_the_previous_trace(tmp_path):
    """A restart overwrote it with one of no spans."""
    path = tmp_path / "trace.json"
    path.write_text("of the run before")
    tracer = Tracer((10, 20), SoloProcesses(), ["a"], path)
    assert tracer.add([], 5, is_end=True) == "no trace: the run ends at step 5, before step 10"
    behind = Tracer((10, 20), SoloProcesses(), ["a"], path)
    assert behind.add([Span("data", "batch of step 501", 1.0, 2.0)], 510, False) == ""
    assert behind.add([Span("data", "batch of step 511", 2.0, 3.0)], 520, True) == ""
    assert path.read_text() == "of the run before"
    assert tracer.add([Span("compute", "step 12", 1.0, 2.0)], 12, is_end=True).startswith("trace of steps 10 to 12")
    check_schema(json.loads(path.read_text()), 1)


def test_asynchronous_workers_write_traces_that_one_merges(tmp_path):
    """The second makes no step that is asked for, the third dies before it has written."""
    path, noted = tmp_path / "trace.json", [Span("compute", f"step {k}", float(k), k + 0.9) for k in range(1, 31)]
    workers = [UncoordinatedTrace((10, 20), SoloProcesses(), path) for _ in range(3)]
    workers[0].offsets, workers[0].hosts = [0.0, 100.0, 0.0], ["a", "b", "c"]
    workers[0].add(noted[:15], 0, 15)
    assert not list(tmp_path.iterdir())
    workers[0].add(noted[15:], 0, 30)
    workers[0].add(noted, 0, 60)  # too late
    workers[1].add([], 1, 5, is_end=True)
    assert workers[0].merge(3) == f"trace of steps 10 to 20 of each worker: {path}"
    events = check_schema(json.loads(path.read_text()), 3)
    assert [(e["pid"], e["name"]) for e in events] == [(0, f"step {k}") for k in range(10, 21)]
    assert list(tmp_path.iterdir()) == [path]
    nobody = UncoordinatedTrace((10, 20), SoloProcesses(), tmp_path / "none.json")
    assert nobody.merge(1) == "no trace: no worker came to step 10"
    assert UncoordinatedTrace((0, 0), SoloProcesses(), path).merge(1) == ""


def traced(folder: Path, ranks: int) -> list[dict]:
    """The events of ten steps, with buckets sent during the backward pass."""
    args = ("--exchange.strategy", "ring32", "--exchange.overlap", "on", "--exchange.bucket-bytes", "40000")
    steps = ("--train-for", "20st", "--eval-every", "0st", "--checkpoint-every", "0st", "--trace", "6:15")
    ended = train(ranks, DIGITS, *args, *steps, "--run-dir", str(folder / "run"), timeout_s=200)
    assert ended.code == 0, ended.out
    assert f"trace of steps 6 to 15: {folder / 'run' / 'trace.json'}" in ended.out
    return check_schema(json.loads((folder / "run" / "trace.json").read_text()), ranks)


@pytest.mark.e2e
def test_a_trace_of_all_ranks(tmp_path):
    ranks = 2
    events = traced(tmp_path, ranks)
    for rank in range(ranks):
        mine = [e for e in events if e["pid"] == rank]
        assert {f"batch of step {k}" for k in range(6, 16)} <= {e["name"] for e in mine if e["cat"] == "data"}
        assert {f"step {k}" for k in range(6, 16)} <= {e["name"] for e in mine if e["cat"] == "compute"}
        sends = [e for e in mine if e["cat"] == "travel"]
        labels = {e["name"] for e in sends}
        assert len(labels) >= 3
        assert all(len([e for e in sends if e["name"] == label]) >= 10 for label in labels)
    # A sum ends on no rank before the last rank has started it, so on one clock it overlaps with itself on each other
    # rank. Those at the ends may be of the step before or after: see `select_steps`.
    label = min(e["name"] for e in events if e["cat"] == "travel")
    sums = [
        sorted((e["ts"], e["ts"] + e["dur"]) for e in events if (e["pid"], e["cat"], e["name"]) == (r, "travel", label))
        for r in range(ranks)
    ]
    for mine, others in itertools.permutations(sums, 2):
        for begin, end in mine[1:-1]:  # a ping-pong finds the clocks of one host, which are one, to microseconds
            assert any(b < end + 500 and e > begin - 500 for b, e in others)
    last = record(tmp_path / "run", "train")[-1]
    assert last["exchange_time"] == "measured"
    assert last["anatomy"]["exchange"][1] > 0
    assert column(tmp_path / "run", "exchange", "buckets")[-1]
