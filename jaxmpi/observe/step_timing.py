"""Breakdown of a step's time from loop events, without extra synchronisation.

An iteration of the loop waits for a batch, hands it to the device and starts the step. Then it reads the loss of the
step before. The device may still run the started step while the loop waits for the next batch. So only time in which
the device is idle counts as data wait. The timer polls `is_ready` and never blocks. If a step ended at an unknown time
within a wait, its end is estimated from the last step of known duration: once a window the loop waits for the device.

If no exchange is measured, a step without exchange is timed now and then. The rest of a step counts as exchange. That
holds as long as steps take as long as those beside the timed one: the first steps of a run, for instance, are slower
than all that follow. Other steps have no estimate until another one is timed.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.pytrees import PyTree
from jaxmpi.observe.record_format import OF_EXCHANGE, PARTS, SOURCES
from jaxmpi.runtime import spans
from jaxmpi.runtime.spans import Span, clipped, inside, length, minus

Interval = tuple[float, float]
LOCAL = ("data", "transfer", "compute", "exposed", "hidden", "other")  # parts that a process measures alone
OWN = [[*PARTS].index(part) for part in ("data", "transfer", "compute")]
HEAD = len(LOCAL) + 3  # values of a `flat` window before `exposed`
LATER = float("inf"), float("inf")  # than the loop has had its next batch
MOST_SPANS = 1 << 20  # spans of a window; later ones are lost
MOST_ROWS = 128  # rows of a window that ranks compare; in a longer one, several steps together
NEIGHBOURS = 10  # steps whose median duration is compared with that beside a probe
ALIKE = 1.25  # ratio of such durations up to which an estimate holds
SAMPLES = 3  # steps without exchange whose median counts
FIRST_GAP = 4  # progress lines between the first ones and the next; each further one is twice as far away


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
    parts: np.ndarray  # f64[LOCAL], seconds
    exposed: np.ndarray  # f64[rows]: seconds of waits for exchanges, of each step or of a few together
    source: int  # into SOURCES
    spans: list[Span]
    durations_s: tuple[float, ...] = ()  # seconds of the last NEIGHBOURS steps on the device, exchange included
    probed_s: float = 0.0  # their median beside the last steps without exchange; 0 if there were none


class ComputeOnlyTimes(NamedTuple):
    """Times of steps without exchange, of one phase of a run."""

    seconds: tuple[float, ...] = ()  # durations of the last SAMPLES of them
    step_s: float = 0.0  # median duration of the steps with exchange beside them


class StepTimer:
    """Timer of the training loop of this process."""

    def __init__(self, workers: int, to_device: Callable[[PyTree], PyTree] | None = None) -> None:
        """Begin to time the loop of one of so many workers.

        Args:
            to_device: copies a batch to a device with memory of its own; None if there is none.
        """
        self.has_exchange, self.to_device = workers > 1, to_device
        self._compute_only = ComputeOnlyTimes()
        self._durations_s: tuple[float, ...] = ()  # durations of the last steps, of earlier windows, too
        self._rows: list[StepTimes] = []
        self._noted: list[Span] = []  # spans of a long window so far
        self._under_way: Any = None  # a result of the last step
        self._step_s: float | None = None  # last known duration of a step
        self._last_s: float | None = None  # end of the last iteration of this window or the one before
        spans.drain()

    def batches(self, batches: Iterable[PyTree], first_step: int) -> Iterator[PyTree]:
        """Yield the batches, and record the loop's time for each."""
        source, step = iter(batches), first_step
        while True:
            row = self._begin(step)
            is_idle = self._is_idle()
            with spans.span("data", f"batch of step {step}"):
                batch = next(source, None)
            if batch is None:
                return
            row.batch_s = row.handed_s = row.start_s = time.perf_counter()
            row.ended = (row.begin_s, row.begin_s) if is_idle else (row.begin_s, row.batch_s)
            if not self._is_idle():
                row.ended = LATER
            self._rows.append(row)
            step += 1
            if self.to_device is not None:
                with spans.span("transfer", f"batch of step {row.step}"):
                    batch = self.to_device(batch)
                row.handed_s = row.start_s = time.perf_counter()
            yield batch

    def _begin(self, step: int) -> StepTimes:
        now = time.perf_counter()
        if self._rows and not self._rows[-1].end_s:
            self._rows[-1].end_s = now
        if spans.is_crowded() and len(self._noted) < MOST_SPANS:
            self._noted += spans.drain()
        row = StepTimes(step, now, gap_s=now - (self._last_s or now))
        self._last_s = None
        return row

    def _is_idle(self) -> bool:
        return self._under_way is None or self._under_way.is_ready()

    def started(self, result: Any, compiled: bool = False) -> None:
        """Note that the step has been dispatched to the device.

        Args:
            result: an array that is ready when the step ends.
            compiled: the time until now went into compiling it.
        """
        self._under_way = result
        if compiled:
            self._rows[-1].start_s = time.perf_counter()

    def pause(self) -> None:
        """Note that the loop has waited until the last step ended."""
        self._under_way, self._last_s = None, time.perf_counter()
        if self._rows:
            last = self._rows[-1]
            last.end_s = self._last_s
            if last.ended[1] <= last.batch_s:
                self._step_s = last.end_s - last.start_s

    def window(self) -> Window:
        """End a window; called in a pause."""
        rows, self._rows = self._rows, []
        noted, self._noted = self._noted + spans.drain(), []
        compute_only_s = median(self._compute_only.seconds) if self._compute_only.seconds else None
        window = decompose(rows, self._step_s, compute_only_s, self.has_exchange, noted)
        self._durations_s = (*self._durations_s, *window.durations_s)[-NEIGHBOURS:]
        return window._replace(durations_s=self._durations_s, probed_s=self._compute_only.step_s)

    def add_compute_only(self, seconds: Sequence[float], is_new_phase: bool) -> None:
        """Add durations of steps without exchange, which follow the last window.

        Args:
            seconds: of each.
            is_new_phase: those before are of steps that took another time.
        """
        before = () if is_new_phase else self._compute_only.seconds
        self._compute_only = ComputeOnlyTimes((*before, *seconds)[-SAMPLES:], median(self._durations_s))

    def restart(self) -> None:
        """Discard the time since the pause, which was not training."""
        self._last_s = None


def decompose(
    rows: Sequence[StepTimes], step_s: float | None, compute_only_s: float | None, has_exchange: bool, noted: list[Span]
) -> Window:
    """Split the time of these iterations into idle, busy and waiting seconds.

    Args:
        step_s: duration of a step, if known; gives the end of a step that ended while the loop waited.
        compute_only_s: duration of a step without exchange, if known.
        noted: spans of data and of buckets.
    """
    waits = spans.union([(s.begin_s, s.end_s) for s in noted if s.track == "wait"])
    travel = [(s.begin_s, s.end_s) for s in noted if s.track == "travel"]
    source = 0 if not has_exchange else 3 if waits else 1 if compute_only_s is None else 2
    each, ends = [], estimate_ends(rows, step_s)
    pieces = [
        # Its own step has ended, too, if the end of that is known to lie before the row's.
        busy_intervals(row, max(row.begin_s, min(ended_s, row.start_s)), step_s if after_s <= row.end_s else 0.0)
        for row, ended_s, after_s in zip(rows, ends, [*ends[1:], 0.0][: len(ends)], strict=True)
    ]
    durations = step_durations(rows, pieces)
    for row, ended_s, own, device_s in zip(rows, ends, pieces, durations, strict=True):
        idle = (ended_s, row.start_s)
        data, transfer = (overlap_s(part, idle) for part in wait_intervals(row))
        idle_s = max(0.0, row.start_s - ended_s)
        busy_s = row.end_s - row.begin_s - idle_s
        mine = inside(waits, row.begin_s, row.end_s) if waits else []
        out = (
            min(length(mine), busy_s)
            if source == 3
            else max(0.0, device_s - (compute_only_s or device_s)) * (source == 2)
        )
        each.append((data, transfer, busy_s - out, out, 0.0, idle_s - data - transfer + row.gap_s))
        noted += compute_spans(own, mine)
    spent = np.array(each).reshape(-1, len(LOCAL))
    parts = spent.sum(axis=0)
    if travel:
        behind = minus(clipped(travel, rows[0].begin_s, rows[-1].end_s) if rows else [], waits)
        parts[LOCAL.index("hidden")] = length(behind)
    exposed = fold_rows(spent[:, LOCAL.index("exposed")])
    return Window(
        steps=len(rows),
        parts=parts,
        exposed=exposed,
        source=source,
        spans=noted,
        durations_s=tuple(durations[-NEIGHBOURS:]),
    )


def estimate_ends(rows: Sequence[StepTimes], step_s: float | None) -> list[float]:
    """Known or estimated end of the step before each of these iterations."""
    ends, busy_from = [], 0.0
    for row in rows:
        low, high = row.ended
        ends.append(low if low == high else min(max(busy_from + (step_s or float("inf")), low), high))
        busy_from = row.start_s if row.ended == LATER else max(row.start_s, ends[-1])
    return ends


def overlap_s(a: Interval, b: Interval) -> float:
    """Seconds of the intersection of two intervals."""
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))


def wait_intervals(row: StepTimes) -> tuple[Interval, Interval]:
    """Intervals in which an iteration waited for its batch, and transferred it."""
    return (row.begin_s, row.batch_s), (row.batch_s, row.handed_s)


def busy_intervals(row: StepTimes, idle_from_s: float, own_s: float | None) -> list[tuple[int, Interval]]:
    """Busy intervals of the device in an iteration, with their steps.

    Args:
        own_s: seconds of its own step, if the device was not idle between the two; None: unknown. If unknown, or if it
            leaves no time for the step before, each step gets half.
    """
    if own_s is None or own_s >= row.end_s - row.start_s:
        own_s = (row.end_s - row.begin_s) / 2
    own_from = max(row.start_s, row.end_s - own_s)
    before_to, own_from = (idle_from_s, row.start_s) if idle_from_s < row.start_s else (own_from, own_from)
    return [(row.step - 1, (row.begin_s, before_to)), (row.step, (own_from, row.end_s))]


def step_durations(rows: Sequence[StepTimes], pieces: Sequence[list[tuple[int, Interval]]]) -> list[float]:
    """Device seconds of each row's step; they add up to busy time."""
    seconds = {row.step: 0.0 for row in rows}
    for step, (begin, end) in chain.from_iterable(pieces):
        seconds[max(step, rows[0].step)] += max(0.0, end - begin)
    return [seconds[row.step] for row in rows]


def compute_spans(pieces: list[tuple[int, Interval]], waits: list[Interval]) -> list[Span]:
    """Pieces of steps, without waits for buckets."""
    left = [(step, at) for step, piece in pieces for at in (minus([piece], waits) if waits else [piece])]
    return [Span("compute", f"step {step}", begin, end) for step, (begin, end) in left if begin < end]


def median(values: Sequence[float]) -> float:
    """The median; 0 of none."""
    return float(np.median(values)) if values else 0.0


def fold_rows(values: np.ndarray) -> np.ndarray:
    """Sums of neighbours, so that at most MOST_ROWS are left."""
    per = -(-len(values) // MOST_ROWS) or 1
    return np.add.reduceat(values, np.arange(0, len(values), per)) if per > 1 else values


# ---------------------------------------------------------------- over ranks


Spread = tuple[float, float, float, int]  # least, median, most, the rank that has the most


class Summary(NamedTuple):
    """A window over all ranks; seconds a step, except `spent`."""

    steps: float  # under asynchronous rules the workers' mean
    source: str  # a name from SOURCES
    table: dict[str, Spread]  # by part; those that are known
    means: dict[str, float]  # part: mean over ranks
    own_s: list[float]  # seconds of every rank, without waits for other ranks or their messages
    step_s: float  # mean over ranks
    spent: np.ndarray  # f64[PARTS, ranks], seconds of all steps; zeros for a worker that has left


def by_name(window: Window) -> dict[str, float]:
    """Seconds of a process's window by part, of LOCAL."""
    return dict(zip(LOCAL, window.parts.tolist(), strict=True))


def flat(window: Window) -> np.ndarray:
    """A window as f64[n]; ranks with equal steps have the same n."""
    head = [window.source, median(window.durations_s), window.probed_s]
    return np.concatenate([window.parts, head, window.exposed])


def summary(rows: np.ndarray, steps: int) -> Summary:
    """Summarise the `flat` windows of all ranks, f64[ranks, n].

    sync_r = sum_k (e_rk - min_r e_rk), with e_rk the wait of rank r in step k: the last rank waits for no other.
    An estimate from a time when steps took longer or shorter is none: then waits count as compute.
    """
    local: dict[str, np.ndarray] = dict(zip(LOCAL, rows[:, : len(LOCAL)].T, strict=True))
    exposed, source = rows[:, HEAD:], SOURCES[int(rows[:, len(LOCAL)].max())]
    now_s, then_s = rows[:, len(LOCAL) + 1 : HEAD].mean(axis=0).tolist()
    if source == "estimated" and max(now_s, then_s) > ALIKE * min(now_s, then_s):
        source = "unknown"
        local["compute"], local["exposed"] = local["compute"] + local["exposed"], np.zeros(len(rows))
        exposed = np.zeros_like(exposed)
    shared = exposed.min(axis=0)
    local["sync"] = (exposed - shared).sum(axis=1)
    local["exchange"] = local.pop("exposed") - local["sync"]
    spent = np.array([local[part] for part in PARTS])
    return over_ranks(spent, np.full(len(rows), max(steps, 1)), steps, source)


def summary_asynchronous(spent: dict[str, np.ndarray]) -> Summary:
    """Summarise asynchronous workers from `steps` and seconds by part, f64[workers] each.

    Workers that made no step in this window count only in `own_s`, as 0, and in `spent`.
    """
    steps = spent["steps"]
    parts = np.array([spent.get(part, np.zeros(len(steps))) for part in PARTS])
    return over_ranks(parts, steps, float(steps[steps > 0].mean()), "measured")


def over_ranks(spent: np.ndarray, made: np.ndarray, steps: float, source: str) -> Summary:
    """Summarise f64[PARTS, ranks] seconds in which each rank made so many steps."""
    each = spent / np.maximum(made, 1)
    means = dict(zip(PARTS, each[:, made > 0].mean(axis=1).tolist(), strict=True))
    step_s = sum(value for part, value in means.items() if part != "hidden")
    table = known_parts(spreads(each, made > 0), source)
    return Summary(steps, source, table, means, own_seconds(each).tolist(), step_s, spent)


def known_parts(table: dict[str, Spread], source: str) -> dict[str, Spread]:
    """The table without unknown parts, whose seconds are in `compute`."""
    return {part: row for part, row in table.items() if source != "unknown" or part not in OF_EXCHANGE}


def spreads(each: np.ndarray, counted: np.ndarray) -> dict[str, Spread]:
    """Spread by part of f64[PARTS, ranks], over the counted ranks."""
    ranks = np.flatnonzero(counted)
    n, seen = len(ranks), each[:, ranks]
    ordered = np.sort(seen, axis=1)
    middle = (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2
    columns = ordered[:, 0], middle, ordered[:, -1], ranks[seen.argmax(axis=1)]
    return dict(zip(PARTS, zip(*(column.tolist() for column in columns), strict=True), strict=True))


def own_seconds(each: np.ndarray) -> np.ndarray:
    """Each rank's time without waits for other ranks, from f64[PARTS, ranks]."""
    return each[OWN].sum(axis=0)
