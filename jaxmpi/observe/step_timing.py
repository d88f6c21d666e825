"""Breakdown of a step's time from loop events, without extra synchronisation.

An iteration of the loop waits for a batch, hands it to the device and starts the step. Then it reads the loss of the
step before. The device may still run the started step while the loop waits for the next batch. So only time in which
the device is idle counts as data wait. The timer polls `is_ready` and never blocks. If a step ended at an unknown time
within a wait, its end is estimated from the last step of known duration: once a window the loop waits for the device.

Waits for exchanges are measured where a host thread or shared memory carries them out. Elsewhere they are part of a
program whose inside nobody times, and count as compute.
"""

import itertools
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.pytrees import PyTree
from jaxmpi.observe.record_format import EXCHANGE_PARTS, PARTS, SOURCES
from jaxmpi.runtime import progress
from jaxmpi.runtime.progress import Span

Interval = tuple[float, float]
Intervals = list[Interval]
LOCAL = ("data", "transfer", "compute", "exposed", "hidden", "other")  # parts that a process measures alone
OWN = [[*PARTS].index(part) for part in ("data", "transfer", "compute")]
HEAD = len(LOCAL) + 1  # values of a `flat` window before `exposed`
LATER = float("inf"), float("inf")  # than the loop has had its next batch
MOST_SPANS = 1 << 20  # spans of a window; later ones are lost
MOST_ROWS = 128  # rows of a window that ranks compare; in a longer one, several steps together


@dataclass
class StepTimes:
    """An iteration of the loop; seconds of `time.perf_counter`."""

    step: int
    begin_s: float
    batch_s: float = 0.0  # the batch is there
    handed_s: float = 0.0  # it is on the device
    start_s: float = 0.0  # the step starts, compiled
    end_s: float = 0.0
    ended: Interval = (0.0, 0.0)  # bounds on the end of the step before; equal if it is known
    gap_s: float = 0.0  # between the iteration before and this one


class Window(NamedTuple):
    """A process's measurements of the steps since the last window."""

    steps: int
    parts: dict[str, float]  # seconds, by LOCAL
    exposed: np.ndarray  # f64[rows]: seconds of waits for exchanges, of each step or of a few together
    source: int  # into SOURCES
    spans: list[Span]


class StepTimer:
    """Timer of the training loop of this process."""

    def __init__(self, workers: int, to_device: Callable[[PyTree], PyTree] | None = None) -> None:
        """Begin to time the loop of one of so many workers.

        Args:
            to_device: copies a batch to a device with memory of its own; None if there is none.
        """
        self.has_exchange, self.to_device = workers > 1, to_device
        self._rows: list[StepTimes] = []
        self._spans: list[Span] = []  # of a long window so far
        self._result: Any = None  # of the last step
        self._step_s: float | None = None  # last known duration of a step
        self._last_s: float | None = None  # end of the last iteration of this window or the one before
        progress.drain()

    def batches(self, batches: Iterable[PyTree], first_step: int) -> Iterator[PyTree]:
        """Yield the batches, and record the loop's time for each."""
        source = iter(batches)
        for step in itertools.count(first_step):
            now = time.perf_counter()
            if self._rows and not self._rows[-1].end_s:
                self._rows[-1].end_s = now
            if progress.is_crowded() and len(self._spans) < MOST_SPANS:
                self._spans += progress.drain()
            row = StepTimes(step, now, gap_s=now - (self._last_s or now))
            self._last_s, is_idle = None, self._is_idle()
            with progress.span("data", f"batch of step {step}"):
                batch = next(source, None)
            if batch is None:
                return
            row.batch_s = row.handed_s = row.start_s = time.perf_counter()
            row.ended = (row.begin_s, row.begin_s if is_idle else row.batch_s) if self._is_idle() else LATER
            self._rows.append(row)
            if self.to_device is not None:
                with progress.span("transfer", f"batch of step {step}"):
                    batch = self.to_device(batch)
                row.handed_s = row.start_s = time.perf_counter()
            yield batch

    def _is_idle(self) -> bool:
        return self._result is None or self._result.is_ready()

    def started(self, result: Any, compiled: bool = False) -> None:
        """Note that the step has been dispatched to the device.

        Args:
            result: an array that is ready when the step ends.
            compiled: the time until now went into compiling it.
        """
        self._result = result
        if compiled:
            self._rows[-1].start_s = time.perf_counter()

    def pause(self) -> None:
        """Note that the loop has waited until the last step ended."""
        self._result, self._last_s = None, time.perf_counter()
        if self._rows:
            last = self._rows[-1]
            last.end_s = self._last_s
            if last.ended[1] <= last.batch_s:
                self._step_s = last.end_s - last.start_s

    def window(self) -> Window:
        """End a window; called in a pause."""
        rows, self._rows = self._rows, []
        noted, self._spans = self._spans + progress.drain(), []
        return decompose(rows, self._step_s, self.has_exchange, noted)

    def restart(self) -> None:
        """Discard the time since the pause, which was not training."""
        self._last_s = None


def decompose(rows: Sequence[StepTimes], step_s: float | None, has_exchange: bool, noted: list[Span]) -> Window:
    """Split the time of these iterations into idle, busy and waiting seconds.

    Args:
        step_s: duration of a step, if known; gives the end of a step that ended while the loop waited.
        noted: spans of data and of buckets.
    """
    waits = union([(s.begin_s, s.end_s) for s in noted if s.track == "wait"])
    travel = [(s.begin_s, s.end_s) for s in noted if s.track == "travel"]
    source = SOURCES.index("measured" if waits else "unknown") if has_exchange else SOURCES.index("none")
    ends = estimate_ends(rows, step_s)
    following = [(ended_s, row.begin_s) for row, ended_s in zip(rows, ends, strict=True)][1:]
    seconds = []  # by LOCAL
    for row, ended_s, (own_end_s, next_s) in zip(rows, ends, [*following, (0.0, 0.0)][: len(rows)], strict=True):
        data_s = max(0.0, row.batch_s - max(row.begin_s, ended_s))
        transfer_s = max(0.0, row.handed_s - max(row.batch_s, ended_s))
        idle_s = max(0.0, row.start_s - ended_s)
        busy_s = row.end_s - row.begin_s - idle_s
        mine = inside(waits, row.begin_s, row.end_s)
        exposed_s = min(length(mine), busy_s) if has_exchange else 0.0
        other_s = idle_s - data_s - transfer_s + row.gap_s
        seconds.append((data_s, transfer_s, busy_s - exposed_s, exposed_s, 0.0, other_s))
        # Of its own step, what does not lie in the next row; if that step's duration is unknown, all or nothing.
        late_s, idle_from_s = max(0.0, own_end_s - next_s), max(row.begin_s, min(ended_s, row.start_s))
        own_s = max(0.0, step_s - late_s) if step_s is not None else 0.0 if late_s else None
        for step, intervals in busy_intervals(row, idle_from_s, own_s, mine).items():
            noted += [Span("compute", f"step {step}", begin, end) for begin, end in intervals]
    spent = np.array(seconds).reshape(-1, len(LOCAL))
    parts: dict[str, float] = dict(zip(LOCAL, spent.sum(axis=0).tolist(), strict=True))
    if travel and rows:
        parts["hidden"] = length(minus(clipped(travel, rows[0].begin_s, rows[-1].end_s), waits))
    exposed = spent[:, LOCAL.index("exposed")]
    if len(rows) > MOST_ROWS:
        exposed = np.add.reduceat(exposed, np.arange(0, len(rows), -(-len(rows) // MOST_ROWS)))
    return Window(len(rows), parts, exposed, source, noted)


def estimate_ends(rows: Sequence[StepTimes], step_s: float | None) -> list[float]:
    """Known or estimated end of the step before each of these iterations."""
    ends, busy_from = [], 0.0
    for row in rows:
        low, high = row.ended
        ends.append(low if low == high else min(max(busy_from + (step_s or float("inf")), low), high))
        busy_from = row.start_s if row.ended == LATER else max(row.start_s, ends[-1])
    return ends


def busy_intervals(row: StepTimes, idle_from_s: float, own_s: float | None, waits: Intervals) -> dict[int, Intervals]:
    """Intervals of an iteration in which the device computes, by step.

    Args:
        own_s: seconds of its own step, if the device was not idle between the two; None: unknown. If unknown, or if it
            leaves no time for the step before, each step gets half of what is no wait: a step that waits longer than
            the last known one has computed before that wait.
        waits: for exchanges, which are left out.
    """
    computing, own_from = minus([(row.begin_s, row.end_s)], waits), row.end_s
    if own_s is None or own_s >= length(clipped(computing, row.start_s, row.end_s)):
        own_s = length(computing) / 2
    for begin, end in reversed(computing):
        own_from = max(begin, end - own_s)
        own_s -= end - own_from
        if own_s <= 0:
            break
    own_from = max(row.start_s, own_from)
    before_to, own_from = (idle_from_s, row.start_s) if idle_from_s < row.start_s else (own_from, own_from)
    return {
        row.step - 1: clipped(computing, row.begin_s, before_to),
        row.step: clipped(computing, own_from, row.end_s),
    }


# ---------------------------------------------------------------- intervals of time


def union(spans: Intervals) -> Intervals:
    """Intervals that cover what the given ones cover, in order, without overlap."""
    merged: Intervals = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > begin:
            merged.append((begin, end))
    return merged


def clipped(spans: Intervals, begin: float, end: float) -> Intervals:
    """The parts of intervals that lie in [begin, end]."""
    return [(max(b, begin), min(e, end)) for b, e in spans if b < end and e > begin]


def inside(merged: Intervals, begin: float, end: float) -> Intervals:
    """`clipped`, in logarithmic time, for intervals that `union` has returned."""
    first = bisect_right(merged, begin, key=lambda one: one[1])
    return clipped(merged[first : bisect_left(merged, end, lo=first, key=lambda one: one[0])], begin, end)


def length(spans: Intervals) -> float:
    """Seconds that intervals cover, overlaps counted once."""
    return sum(end - begin for begin, end in union(spans))


def minus(spans: Intervals, holes: Intervals) -> Intervals:
    """Intervals without the parts that holes cover."""
    pieces, merged = [], union(holes)
    for begin, end in union(spans):
        for hole_begin, hole_end in inside(merged, begin, end):
            pieces.append((begin, hole_begin))
            begin = hole_end
        pieces.append((begin, end))
    return [(begin, end) for begin, end in pieces if end > begin]


# ---------------------------------------------------------------- over ranks


class Summary(NamedTuple):
    """A window over all ranks; seconds a step, except `spent`."""

    steps: float  # under asynchronous rules the workers' mean
    source: str  # a name from SOURCES
    table: dict[str, tuple[float, float, float, int]]  # known parts: least, median, most, the rank that has the most
    means: dict[str, float]  # part: mean over ranks
    own_s: list[float]  # seconds of every rank, without waits for other ranks or their messages
    step_s: float  # mean over ranks
    spent: np.ndarray  # f64[PARTS, ranks], seconds of all steps; zeros for a worker that has left


def flat(window: Window) -> np.ndarray:
    """A window as f64[n]; ranks with equal steps have the same n."""
    return np.concatenate([[window.parts[part] for part in LOCAL], [window.source], window.exposed])


def summary(rows: np.ndarray, steps: int) -> Summary:
    """Summarise the `flat` windows of all ranks, f64[ranks, n].

    sync_r = sum_k (e_rk - min_r e_rk), with e_rk the wait of rank r in step k: the last rank waits for no other.
    """
    local: dict[str, np.ndarray] = dict(zip(LOCAL, rows[:, : len(LOCAL)].T, strict=True))
    exposed, source = rows[:, HEAD:], SOURCES[int(rows[:, len(LOCAL)].max())]
    local["sync"] = (exposed - exposed.min(axis=0)).sum(axis=1)
    local["exchange"] = local.pop("exposed") - local["sync"]
    return over_ranks(local, np.full(len(rows), max(steps, 1)), steps, source)


def summary_asynchronous(spent: dict[str, np.ndarray]) -> Summary:
    """Summarise asynchronous workers from `steps` and seconds by part, f64[workers] each.

    Workers that made no step in this window count only in `own_s`, as 0, and in `spent`.
    """
    counts = spent["steps"]
    return over_ranks(spent | {"hidden": np.zeros(len(counts))}, counts, float(counts[counts > 0].mean()), "measured")


def over_ranks(parts: dict[str, np.ndarray], counts: np.ndarray, steps: float, source: str) -> Summary:
    """Summarise f64[ranks] seconds of each part, in which each rank made `counts` steps."""
    spent = np.array([parts[part] for part in PARTS])
    per_step, ranks = spent / np.maximum(counts, 1), np.flatnonzero(counts > 0)
    by_rank = per_step[:, ranks]
    columns = by_rank.min(axis=1), np.median(by_rank, axis=1), by_rank.max(axis=1), ranks[by_rank.argmax(axis=1)]
    table = dict(zip(PARTS, zip(*(column.tolist() for column in columns), strict=True), strict=True))
    if source == "unknown":
        table = {part: row for part, row in table.items() if part not in EXCHANGE_PARTS}
    means = dict(zip(PARTS, by_rank.mean(axis=1).tolist(), strict=True))
    step_s = sum(value for part, value in means.items() if part != "hidden")
    return Summary(steps, source, table, means, per_step[OWN].sum(axis=0).tolist(), step_s, spent)
