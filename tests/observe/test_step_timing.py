"""Parts of a step's time: made-up loops whose answer is known, and the real loop's clock."""

import time

import numpy as np
import pytest

from jaxmpi.observe import step_timing
from jaxmpi.observe.record_format import PARTS, SOURCES
from jaxmpi.observe.step_timing import (
    HEAD,
    LATER,
    LOCAL,
    MOST_ROWS,
    StepTimer,
    StepTimes,
    decompose,
    summary,
    summary_asynchronous,
)
from jaxmpi.runtime.progress import Span


def parts(rows: list[StepTimes], noted: list[Span] | None = None, step_s: float | None = None) -> dict[str, float]:
    """Parts of a window by name."""
    return decompose(rows, step_s, True, noted or []).parts


def row(begin_s: float, data_s: float, end_s: float, ended: tuple[float, float]) -> StepTimes:
    """An iteration that waits for its batch, which then needs no transfer."""
    ready_s = begin_s + data_s
    return StepTimes(1, begin_s, ready_s, ready_s, ready_s, end_s, ended)


def test_a_wait_for_data_counts_only_while_the_device_is_idle():
    busy = parts([row(10.0, 3.0, 15.0, LATER)])
    assert (busy["data"], busy["compute"]) == (0.0, 5.0)
    idle = parts([row(10.0, 3.0, 15.0, (10.0, 10.0))])
    assert (idle["data"], idle["compute"]) == (3.0, 2.0)
    # A step from 10 to 12 lasts 4 s, as the last known one; the wait for the next batch ends 7 s after its start.
    rows = [row(10.0, 0.0, 12.0, (10.0, 10.0)), row(12.0, 7.0, 23.0, (12.0, 19.0))]
    seconds = parts(rows, step_s=4.0)
    assert (seconds["data"], seconds["compute"]) == (5.0, 2.0 + 2.0 + 4.0)  # from 14 to 19
    assert parts(rows)["data"] == 0.0  # nothing known: no more than is sure


def test_transfer_and_gaps():
    seconds = parts([StepTimes(1, 10.0, 11.0, 13.0, 13.0, 20.0, (10.0, 10.0), gap_s=0.5)])
    assert (seconds["data"], seconds["transfer"], seconds["compute"], seconds["other"]) == (1.0, 2.0, 7.0, 0.5)
    compiled = parts([StepTimes(1, 10.0, 11.0, 13.0, 16.0, 20.0, (10.0, 10.0))])
    assert (compiled["other"], compiled["compute"]) == (3.0, 4.0)


def test_waits_for_buckets_are_exchange_and_concurrent_transfers_are_hidden():
    noted = [
        Span("travel", "bucket 1 of 2", 11.0, 14.0),
        Span("travel", "bucket 2 of 2", 12.0, 16.0),
        Span("wait", "bucket 1 of 2", 13.0, 14.0),
        Span("wait", "bucket 2 of 2", 14.0, 16.0),
    ]
    window = decompose([row(10.0, 0.0, 20.0, LATER)], None, True, noted)
    seconds = window.parts
    assert (seconds["exposed"], seconds["hidden"], seconds["compute"]) == (3.0, 2.0, 7.0)
    assert SOURCES[window.source] == "measured"
    computing = [(s.begin_s, s.end_s) for s in window.spans if s.track == "compute"]
    assert step_timing.union(computing) == [(10.0, 13.0), (16.0, 20.0)]


def test_a_step_that_waits_longer_than_the_last_known_one_has_its_compute_in_the_trace():
    """Else the trace shows the compute before its wait as the step's before: the last known step took 3 s."""
    rows = [
        StepTimes(6, 4.0, 4.5, 4.5, 4.5, 14.0, (4.5, 9.0)),
        StepTimes(7, 14.0, 15.0, 15.0, 15.0, 16.0, (14.0, 14.0)),
    ]
    waits = [Span("wait", "bucket 1 of 1", 4.0, 7.0), Span("wait", "bucket 1 of 1", 8.0, 14.0)]
    spans = decompose(rows, 3.0, True, [*waits]).spans
    computing = [span[1:] for span in spans if span.track == "compute"]
    assert computing == [("step 5", 7.0, 7.5), ("step 6", 7.5, 8.0), ("step 7", 15.0, 16.0)]
    rows[1].ended = (14.0, 15.0)  # step 6 ends while the loop waits for the next batch
    assert [span.name for span in decompose(rows, 10.0, True, waits).spans if span.begin_s == 7.5] == ["step 6"]


def test_without_spans_of_buckets_an_exchange_is_part_of_compute():
    nothing = decompose([], None, True, [])  # of a window without steps, as after a death in an evaluation
    assert (nothing.steps, sum(nothing.parts.values())) == (0, 0.0)
    unknown = decompose([row(10.0, 0.0, 15.0, LATER)], None, True, [])
    assert (unknown.exposed.tolist(), SOURCES[unknown.source]) == ([0.0], "unknown")
    assert SOURCES[decompose([row(10.0, 0.0, 15.0, LATER)], None, False, []).source] == "none"


def test_all_parts_but_hidden_add_up():
    rng = np.random.default_rng(0)
    for _ in range(100):
        rows, now = [], 100.0
        for step in range(rng.integers(1, 6)):
            at = (now + np.cumsum(rng.exponential(1.0, 5))).tolist()
            ended = [(now, now), (now, at[0]), LATER][rng.integers(3)]
            rows.append(StepTimes(step, now, at[0], at[1], at[2] if step == 0 else at[1], at[4], ended))
            now = at[4]
        noted = [Span("wait", "b", b, b + d) for b, d in rng.uniform(100, 110, (4, 2)) - [0, 100]]
        seconds = parts(rows, noted, step_s=float(rng.exponential(2)))
        assert sum(v for k, v in seconds.items() if k != "hidden") == pytest.approx(now - 100.0)
        assert all(value >= -1e-9 for value in seconds.values()), seconds


def test_long_windows_are_folded_without_loss():
    rows = [StepTimes(k, 5.0 * k, 5.0 * k, 5.0 * k, 5.0 * k, 5.0 * k + 5.0, LATER) for k in range(1000)]
    waits = [Span("wait", "bucket 1 of 1", 5.0 * k + 1, 5.0 * k + 2) for k in range(1000)]
    window = decompose(rows, None, True, waits)
    assert len(window.exposed) <= MOST_ROWS
    assert window.exposed.sum() == pytest.approx(window.parts["exposed"])
    assert window.parts["exposed"] > 900


# ---------------------------------------------------------------- over ranks


def test_the_last_rank_to_reach_an_exchange_has_not_waited():
    exposed = np.array([[3.0, 1.0], [1.0, 2.0], [2.0, 2.0]])  # rank, step
    rows = np.zeros((3, HEAD + 2))
    rows[:, HEAD:] = exposed
    rows[:, LOCAL.index("exposed")] = exposed.sum(axis=1)
    rows[:, LOCAL.index("compute")] = [4.0, 5.0, 4.0]
    result = summary(rows, 2)
    assert result.table["exchange"] == (1.0, 1.0, 1.0, 0)  # (1 + 1) / 2 steps
    assert result.table["sync"] == (0.5, 1.0, 1.0, 0)
    assert result.table["compute"] == (2.0, 2.0, 2.5, 1)
    assert int(np.argmax(result.own_s)) == 1
    assert result.table.keys() == PARTS.keys()
    assert result.step_s == pytest.approx(8.0 / 2)
    assert dict(zip(PARTS, result.spent.tolist(), strict=True))["sync"] == [2.0, 1.0, 2.0]


def test_workers_that_do_not_keep_step_are_compared_by_step():
    """Worker 1 is gone, worker 2 makes half of the steps of worker 0 in the same time, and waits for the center."""
    spent = {
        "steps": np.array([20.0, 0.0, 10.0]),
        "data": np.array([0.0, 0.0, 1.0]),
        "transfer": np.zeros(3),
        "compute": np.array([8.0, 0.0, 6.0]),
        "exchange": np.array([2.0, 0.0, 2.0]),
        "sync": np.array([0.0, 0.0, 1.0]),
        "other": np.zeros(3),
    }
    result = summary_asynchronous(spent)
    assert (result.steps, result.source) == (15.0, "measured")
    assert result.table["compute"] == (0.4, 0.5, 0.6, 2)
    assert result.table["sync"] == (0.0, 0.05, 0.1, 2)
    assert result.table["hidden"] == (0.0, 0.0, 0.0, 0)
    assert result.own_s == [0.4, 0.0, 0.7]
    assert result.step_s == pytest.approx((0.5 + 1.0) / 2)
    assert result.spent.sum(axis=0).tolist() == [10.0, 0.0, 10.0]  # however unequal their steps, time is the same


# ---------------------------------------------------------------- the loop's clock


class Result:
    """Stands for a step's result on a device that takes `seconds` a step, one after another."""

    free_s = 0.0

    def __init__(self, seconds: float) -> None:
        Result.free_s = self.end_s = max(time.perf_counter(), Result.free_s) + seconds

    def is_ready(self) -> bool:
        return time.perf_counter() >= self.end_s

    def wait(self) -> None:
        time.sleep(max(0.0, self.end_s - time.perf_counter()))


def batches(count: int, seconds: float):
    for i in range(count):
        time.sleep(seconds)
        yield {"image": i}


def test_time_outside_training_is_left_out():
    timer = StepTimer(1)
    for first, pause_s in ((1, 0.0), (2, 0.5), (3, 0.0)):
        time.sleep(pause_s)  # an evaluation
        if pause_s:
            timer.restart()
        for _ in timer.batches(batches(1, 0.0), first):
            timer.started(Result(0.0))
            time.sleep(0.05 * (first == 3))
        timer.pause()
        spent_s = sum(timer.window().parts.values())
        assert spent_s < 0.3
    assert spent_s > 0.04
