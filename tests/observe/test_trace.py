"""A trace is what Perfetto reads, on one clock; tests/trainer/test_train.py has one of a run."""

import json

from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.observe.trace import Tracer, UncoordinatedTrace, merge_events, select_steps
from jaxmpi.runtime.progress import Span
from traces import check_schema


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
