"""Spans of time, noted during work for recorder, trace and watchdog.

Times are seconds of `time.perf_counter`, which a change of the wall clock does not move.
"""

import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

# Tracks, and the activity that each one's spans record.
TRACKS = {
    "data": "the loop waits for a batch",
    "transfer": "a batch is handed to the device",
    "compute": "the device works on a step",
    "travel": "a bucket is on its way, from its start to its sum",
    "wait": "the step waits for a bucket",
    "other": "evaluation, checkpoint, log",
    "shuffle": "records of data in memory move between workers",
}
MOST = 1 << 15  # kept if nobody reads them


class Span(NamedTuple):
    """Something that took time."""

    track: str  # a key of TRACKS
    name: str
    begin_s: float
    end_s: float


_spans: deque[Span] = deque(maxlen=MOST)
_open: dict[int, Span] = {}  # by a number of their own; not yet ended
# (read, track, name) of handlers in C: `read` gives spans that have ended, and since when one is under way.
_sources: list[tuple[Callable[[], tuple[list[Span], float | None]], str, str]] = []


def record_span(track: str, name: str, begin_s: float, end_s: float) -> None:
    """Keep a span, from any thread."""
    _spans.append(Span(track, name, begin_s, end_s))


@contextmanager
def span(track: str, name: str) -> Iterator[None]:
    """Note what happens inside; while it lasts, it is among `open_spans`."""
    begin_s, key = time.perf_counter(), threading.get_ident()
    before = _open.get(key)
    _open[key] = Span(track, name, begin_s, begin_s)
    try:
        yield
    finally:
        if before is None:
            del _open[key]
        else:
            _open[key] = before
        record_span(track, name, begin_s, time.perf_counter())


def add_source(read: Callable[[], tuple[list[Span], float | None]], track: str, name: str) -> None:
    """Take spans from code that does not call Python: those that have ended, and since when one is under way."""
    _sources.append((read, track, name))


def _collect() -> list[Span]:
    """Take what has ended; return what is under way."""
    is_open = []
    for read, track, name in _sources:
        ended, since_s = read()
        _spans.extend(ended)
        is_open += [Span(track, name, since_s, since_s)] if since_s else []
    return is_open


def open_spans() -> list[Span]:
    """Spans under way, by thread; their ends are not known yet."""
    return [*_open.values(), *_collect()]


def is_crowded() -> bool:
    """Return True if the oldest will soon be dropped."""
    _collect()
    return len(_spans) > MOST // 2


def drain() -> list[Span]:
    """All spans since the last call, and forget them."""
    _collect()
    return [_spans.popleft() for _ in range(len(_spans))]


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals that cover what the given ones cover, in order, without overlap."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > begin:
            merged.append((begin, end))
    return merged


def clipped(spans: list[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """The parts of intervals that lie in [begin, end]."""
    return [(max(b, begin), min(e, end)) for b, e in spans if b < end and e > begin]


def inside(merged: list[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """`clipped`, of many intervals that `union` has given."""
    first = bisect_right(merged, begin, key=lambda one: one[1])
    return clipped(merged[first : bisect_left(merged, end, lo=first, key=lambda one: one[0])], begin, end)


def length(spans: list[tuple[float, float]]) -> float:
    """Seconds that intervals cover, what lies in several of them counted once."""
    return sum(end - begin for begin, end in union(spans))


def minus(spans: list[tuple[float, float]], holes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals without the parts that holes cover."""
    left, merged = [], union(holes)
    for begin, end in union(spans):
        for hole_begin, hole_end in inside(merged, begin, end):
            left.append((begin, hole_begin))
            begin = hole_end
        left.append((begin, end))
    return [(begin, end) for begin, end in left if end > begin]
