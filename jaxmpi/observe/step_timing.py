"""Where the time of a step goes, from what the training loop sees anyway: nothing is waited for on its account.

An iteration of the loop waits for a batch, hands it to the device, starts the step and looks at the loss of the step
before, on which the device may still be at work while the loop waits for the next batch. Only time in which the device
stands idle is data wait; whether it does is asked, not waited for. Where a step has ended somewhere within a wait, its
end is reckoned from the last step whose time is known, which is one a window: there the loop waits for the device.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime import spans
from jaxmpi.runtime.spans import Span, clipped, inside, length, minus

Interval = tuple[float, float]
# Parts of a step's time; all but `hidden` add up to it.
PARTS = {
    "data": "the device is idle for want of a batch",
    "transfer": "idle while a batch is handed to it; on CPUs it has nowhere to go",
    "compute": "forward, backward, update; and the exchange, where nothing tells it apart",
    "exchange": "waits for an exchange, beyond what the last rank to come to it has waited",
    "hidden": "an exchange goes on behind the computation",
    "sync": "waits for ranks that come later to the exchange",
    "other": "the loop's own: log, and what the first step compiles",
}
LOCAL = ("data", "transfer", "compute", "exposed", "hidden", "other")  # what a process knows by itself
OWN = [[*PARTS].index(part) for part in ("data", "transfer", "compute")]
LATER = float("inf"), float("inf")  # than the loop has had its next batch
MOST_SPANS = 1 << 20  # of a window; later ones are lost
MOST_ROWS = 128  # of a window that ranks compare; of a longer one, several steps together
# How the time of an exchange is known.
SOURCES = ("none", "unknown", "estimated", "measured")
OF_EXCHANGE = ("exchange", "hidden", "sync")  # parts that nobody knows if their source is "unknown"
ESTIMATED = ("compute", "exchange", "sync")  # parts that are estimates if their source is "estimated"


@dataclass
class StepTimes:
    """An iteration of the loop; seconds of `time.perf_counter`."""

    step: int
    begin_s: float
    batch_s: float = 0.0  # the batch is there
    handed_s: float = 0.0  # it is on the device
    start_s: float = 0.0  # the step starts, compiled
    end_s: float = 0.0
    ended: Interval = (0.0, 0.0)  # when the step before ended: no earlier, no later; the same where it is known
    gap_s: float = 0.0  # before, between two iterations


class Window(NamedTuple):
    """What a process knows of the steps since the last window."""

    steps: int
    parts: np.ndarray  # f64[LOCAL], seconds
    exposed: np.ndarray  # f64[rows]: seconds of waits for exchanges, of each step or of a few together
    source: int  # into SOURCES
    spans: list[Span]


class StepTimer:
    """Follows the training loop of this process."""

    def __init__(self, workers: int, to_device: Callable[[PyTree], PyTree] | None = None) -> None:
        """Of a job of so many workers.

        Args:
            to_device: takes a batch to a device with memory of its own; None: there is none.
        """
        self.has_exchange, self.to_device = workers > 1, to_device
        self._lone_s: deque[float] = deque(maxlen=3)  # of steps without exchange
        self._rows: list[StepTimes] = []
        self._noted: list[Span] = []  # of a long window
        self._under_way: Any = None  # a result of the last step
        self._step_s: float | None = None  # of a step, as last known
        self._last_s: float | None = None  # end of the last iteration of this window or the one before
        spans.drain()

    def batches(self, batches: Iterable[PyTree], first_step: int) -> Iterator[PyTree]:
        """The batches, with the time that the loop spends on each."""
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
        """The step has been handed to the device.

        Args:
            result: an array that is ready when the step is through.
            compiled: the time until now went into compiling it.
        """
        self._under_way = result
        if compiled:
            self._rows[-1].start_s = time.perf_counter()

    def pause(self) -> None:
        """The device has come to the end of the last step, and the loop knows."""
        self._under_way, self._last_s = None, time.perf_counter()
        if self._rows:
            last = self._rows[-1]
            last.end_s = self._last_s
            if last.ended[1] <= last.batch_s:
                self._step_s = last.end_s - last.start_s

    def window(self) -> Window:
        """End a window, in a pause."""
        rows, self._rows = self._rows, []
        noted, self._noted = self._noted + spans.drain(), []
        lone_s = float(np.median(self._lone_s)) if self._lone_s else None
        return taken_apart(rows, self._step_s, lone_s, self.has_exchange, noted)

    def lone(self, seconds: float) -> None:
        """A step without exchange has taken so long."""
        self._lone_s.append(seconds)

    def restart(self) -> None:
        """What has been since the pause was no training."""
        self._last_s = None


def taken_apart(
    rows: Sequence[StepTimes], step_s: float | None, lone_s: float | None, has_exchange: bool, noted: list[Span]
) -> Window:
    """Idle, busy and waiting seconds of these iterations.

    Args:
        step_s: of a step, where known; settles when a step ended that did so while the loop waited.
        lone_s: of a step without exchange.
        noted: spans of the data's way, and of buckets.
    """
    waits = spans.union([(s.begin_s, s.end_s) for s in noted if s.track == "wait"])
    travel = [(s.begin_s, s.end_s) for s in noted if s.track == "travel"]
    source = 0 if not has_exchange else 3 if waits else 1 if lone_s is None else 2
    each, ends = [], ends_of(rows, step_s)
    for row, ended_s, after_s in zip(rows, ends, [*ends[1:], 0.0], strict=True):
        idle = (ended_s, row.start_s)
        data, transfer = (shared(part, idle) for part in waits_of(row))
        idle_s = max(0.0, row.start_s - ended_s)
        busy_s = row.end_s - row.begin_s - idle_s
        mine = inside(waits, row.begin_s, row.end_s) if waits else []
        out = min(length(mine), busy_s) if source == 3 else max(0.0, busy_s - (lone_s or busy_s)) * (source == 2)
        each.append((data, transfer, busy_s - out, out, 0.0, idle_s - data - transfer + row.gap_s))
        is_through = after_s <= row.end_s  # with its own step, too
        pieces = pieces_of(row, max(row.begin_s, min(ended_s, row.start_s)), step_s if is_through else 0.0)
        noted += compute_spans(pieces, mine)
    spent = np.array(each).reshape(-1, len(LOCAL))
    parts = spent.sum(axis=0)
    if travel:
        behind = minus(clipped(travel, rows[0].begin_s, rows[-1].end_s) if rows else [], waits)
        parts[LOCAL.index("hidden")] = length(behind)
    return Window(len(rows), parts, folded(spent[:, LOCAL.index("exposed")]), source, noted)


def ends_of(rows: Sequence[StepTimes], step_s: float | None) -> list[float]:
    """When the step before each of these iterations ended, as far as that is known."""
    ends, busy_from = [], 0.0
    for row in rows:
        low, high = row.ended
        ends.append(low if low == high else min(max(busy_from + (step_s or float("inf")), low), high))
        busy_from = row.start_s if row.ended == LATER else max(row.start_s, ends[-1])
    return ends


def shared(a: Interval, b: Interval) -> float:
    """Seconds that two intervals have in common."""
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))


def waits_of(row: StepTimes) -> tuple[Interval, Interval]:
    """When an iteration waited for its batch, and handed it over."""
    return (row.begin_s, row.batch_s), (row.batch_s, row.handed_s)


def pieces_of(row: StepTimes, idle_from_s: float, own_s: float | None) -> list[tuple[int, Interval]]:
    """When the device was at work in an iteration, and at which step: the one before it, then its own.

    Args:
        own_s: at its end, of its own step, where it was not idle between; None: unknown. What leaves the step before
            nothing is no good: then each has half.
    """
    if own_s is None or own_s >= row.end_s - row.start_s:
        own_s = (row.end_s - row.begin_s) / 2
    own_from = max(row.start_s, row.end_s - own_s)
    before_to, own_from = (idle_from_s, row.start_s) if idle_from_s < row.start_s else (own_from, own_from)
    return [(row.step - 1, (row.begin_s, before_to)), (row.step, (own_from, row.end_s))]


def compute_spans(pieces: list[tuple[int, Interval]], waits: list[Interval]) -> list[Span]:
    """Pieces of steps, without waits for buckets."""
    left = [(step, at) for step, piece in pieces for at in (minus([piece], waits) if waits else [piece])]
    return [Span("compute", f"step {step}", begin, end) for step, (begin, end) in left if begin < end]


def folded(values: np.ndarray) -> np.ndarray:
    """Sums of neighbours, so that at most MOST_ROWS are left."""
    per = -(-len(values) // MOST_ROWS) or 1
    return np.add.reduceat(values, np.arange(0, len(values), per)) if per > 1 else values


class ComputeOnlyStep(NamedTuple):
    """A step that exchanges nothing; what it gives is thrown away."""

    step: Callable[[PyTree, PyTree], Any]  # (state, batch); may donate its state
    is_compiled: bool  # by the first step of the run

    def seconds(self, state: PyTree, batch: PyTree) -> float:
        """Of such a step, on a copy of the state."""
        seconds = 0.0
        for _ in range(1 if self.is_compiled else 2):
            with spans.span("other", "step without exchange"):
                scratch = jax.block_until_ready(jax.tree.map(copied, state))
                begin = time.perf_counter()
                jax.block_until_ready(self.step(scratch, batch))
                seconds = time.perf_counter() - begin
        return seconds


def copied(array: jax.Array) -> jax.Array:
    """A copy on the same devices; of an array over several processes, each copies its own part.

    `jnp.copy` is a program for every shape: seconds of compiling if ranks share cores. `jax.device_put` of the whole
    array refuses one that other processes hold a part of.
    """
    parts = [jax.device_put(part.data, part.device, may_alias=False) for part in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


class ComputeOnlyProbe:
    """Has a step made without exchange now and then, where nothing else tells the time of one."""

    def __init__(self, lone: ComputeOnlyStep | None, start: int, every: int, log_every: int) -> None:
        """Of a run that begins after step `start`.

        Args:
            lone: None: none is ever made.
            every: steps; 0: none.
            log_every: steps between two looks at the time.
        """
        self.lone, self.every, self.due = lone, every, float("inf")
        if lone is not None and every:
            self.due = start + (min(every, log_every + 1) if lone.is_compiled else every)

    def now(self, anatomy: StepTimer, step: int, source: str, state: PyTree, batch: PyTree) -> None:
        """Make one where it is due; `source` is how the time of exchanges was known last."""
        if self.lone is not None and step >= self.due and source in ("unknown", "estimated"):
            anatomy.lone(self.lone.seconds(state, batch))
            anatomy.restart()
            self.due = step + self.every


# ---------------------------------------------------------------- over ranks


Spread = tuple[float, float, float, int]  # least, median, most, the rank that has the most


class Summary(NamedTuple):
    """A window over all ranks; seconds a step, but for `spent`."""

    steps: float  # where workers do not keep step, their mean
    source: str  # of SOURCES: how the time of exchanges is known
    table: dict[str, Spread]  # by part; those that are known
    means: dict[str, float]  # part: mean over ranks
    own_s: list[float]  # of every rank: what it neither waited for others nor for their messages
    step_s: float  # mean over ranks
    spent: np.ndarray  # f64[PARTS, ranks], seconds of all steps; zeros of a worker that is gone


def by_name(window: Window) -> dict[str, float]:
    """Seconds of a process's window by part, of LOCAL."""
    return dict(zip(LOCAL, window.parts.tolist(), strict=True))


def flat(window: Window) -> np.ndarray:
    """A window as f64[n]; ranks with as many steps have as many numbers."""
    return np.concatenate([window.parts, [window.source], window.exposed])


def summary(rows: np.ndarray, steps: int) -> Summary:
    """What `flat` gave on every rank, f64[ranks, n], as a whole.

    sync_r = sum_k (e_rk - min_r e_rk), where e_rk is what rank r waits in step k: who comes last waits for nobody.
    """
    local: dict[str, np.ndarray] = dict(zip(LOCAL, rows[:, : len(LOCAL)].T, strict=True))
    exposed = rows[:, len(LOCAL) + 1 :]
    shared = exposed.min(axis=0)
    local["sync"] = (exposed - shared).sum(axis=1)
    local["exchange"] = local.pop("exposed") - local["sync"]
    spent = np.array([local[part] for part in PARTS])
    return over_ranks(spent, np.full(len(rows), max(steps, 1)), steps, SOURCES[int(rows[:, len(LOCAL)].max())])


def summary_apart(spent: dict[str, np.ndarray]) -> Summary:
    """The same of workers that do not keep step: f64[workers] each, `steps` of a worker and seconds of its parts.

    Those that made no step in this window count in nothing but `own_s`, as 0, and `spent`.
    """
    steps = spent["steps"]
    parts = np.array([spent.get(part, np.zeros(len(steps))) for part in PARTS])
    return over_ranks(parts, steps, float(steps[steps > 0].mean()), "measured")


def over_ranks(spent: np.ndarray, made: np.ndarray, steps: float, source: str) -> Summary:
    """Of f64[PARTS, ranks] seconds in which each rank has made so many steps."""
    each = spent / np.maximum(made, 1)
    means = dict(zip(PARTS, each[:, made > 0].mean(axis=1).tolist(), strict=True))
    step_s = sum(value for part, value in means.items() if part != "hidden")
    table = known(spreads(each, made > 0), source)
    return Summary(steps, source, table, means, own_of(each).tolist(), step_s, spent)


def known(table: dict[str, Spread], source: str) -> dict[str, Spread]:
    """The table without parts that nobody knows: their seconds are in `compute`."""
    return {part: row for part, row in table.items() if source != "unknown" or part not in OF_EXCHANGE}


def spreads(each: np.ndarray, counted: np.ndarray) -> dict[str, Spread]:
    """By part, of f64[PARTS, ranks], over the ranks that are counted."""
    ranks = np.flatnonzero(counted)
    n, seen = len(ranks), each[:, ranks]
    ordered = np.sort(seen, axis=1)
    middle = (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2
    columns = ordered[:, 0], middle, ordered[:, -1], ranks[seen.argmax(axis=1)]
    return dict(zip(PARTS, zip(*(column.tolist() for column in columns), strict=True), strict=True))


def own_of(each: np.ndarray) -> np.ndarray:
    """Of f64[PARTS, ranks], what each rank neither waited for others nor for their messages."""
    return each[OWN].sum(axis=0)
