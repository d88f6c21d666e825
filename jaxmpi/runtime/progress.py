"""What a process is doing: phases without a step, and spans of time.

A job imports, waits for other ranks, traces and compiles before its first step. Whoever does such a thing opens a
`phase`, and rank 0 prints its name whenever it has been silent for SILENCE_S. A `span` is time that recorder, trace and
watchdog read later. This module imports next to nothing, so that phases can begin before JAX is imported.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TextIO

SILENCE_S = 4.0


class Phase(NamedTuple):
    """Something that takes time before or between steps."""

    name: str
    begin_s: float  # seconds of time.monotonic

    def __str__(self) -> str:
        return f"{self.name}: {time.monotonic() - self.begin_s:.0f} s so far"


_phases: list[Phase] = []  # open ones; each is inside of those before
_shown_s = time.monotonic()  # when something was last shown
_narrators: list[threading.Event] = []  # at most one, with what ends it


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Open a phase for the block; inside another it shows in brackets."""
    entered = Phase(name, time.monotonic())
    _phases.append(entered)
    try:
        yield
    finally:
        _phases.remove(entered)


def current() -> Phase | None:
    """This process's phase, with the innermost in brackets; None outside phases."""
    entered = [*_phases]  # another thread may change it meanwhile
    if len(entered) < 2:
        return entered[0] if entered else None
    return entered[0]._replace(name=f"{entered[0].name} ({entered[-1].name})")


def note_output() -> None:
    """Note that something was shown, so that the next line can wait."""
    global _shown_s
    _shown_s = time.monotonic()


def start_progress(out: TextIO | None = None, silence_s: float = SILENCE_S) -> None:
    """Print the phase whenever `silence_s` have passed without output, until `stop_progress`."""
    if _narrators:
        return
    over = threading.Event()
    _narrators.append(over)

    def narrate() -> None:
        while not over.wait(silence_s / 8):
            at, now_s = current(), time.monotonic()
            if at and now_s - _shown_s >= silence_s and now_s - at.begin_s >= silence_s / 8:
                with suppress(OSError, ValueError):  # nobody reads it, or it is closed
                    print(f"{at}\n", end="", file=out, flush=True)  # one write, since other threads print lines too
                note_output()

    # A thread, since the one that works blocks while it imports or compiles.
    threading.Thread(target=narrate, name="jaxmpi phases", daemon=True).start()


def stop_progress() -> None:
    """Stop `start_progress`: phases are shown elsewhere, or are not wanted."""
    while _narrators:
        _narrators.pop().set()


# ---------------------------------------------------------------- spans, in seconds of time.perf_counter

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
MOST = 1 << 15  # spans kept if nobody reads them


class Span(NamedTuple):
    """Something that took time."""

    track: str  # a key of TRACKS
    name: str
    begin_s: float
    end_s: float


_spans: deque[Span] = deque(maxlen=MOST)
_running: dict[int, Span] = {}  # by thread
_readers: list[Callable[[], tuple[list[Span], list[Span]]]] = []  # of code that calls no Python: spans ended, running


def record_span(track: str, name: str, begin_s: float, end_s: float) -> None:
    """Keep a span, from any thread."""
    _spans.append(Span(track, name, begin_s, end_s))


@contextmanager
def span(track: str, name: str) -> Iterator[None]:
    """Record the block as a span; while it lasts, it is among `open_spans`."""
    begin_s, thread = time.perf_counter(), threading.get_ident()
    outer = _running.get(thread)
    _running[thread] = Span(track, name, begin_s, begin_s)
    try:
        yield
    finally:
        if outer is None:
            del _running[thread]
        else:
            _running[thread] = outer
        record_span(track, name, begin_s, time.perf_counter())


def add_reader(read: Callable[[], tuple[list[Span], list[Span]]]) -> None:
    """Take spans from code that calls no Python: those that ended since the last call, and those under way."""
    _readers.append(read)


def _read() -> list[Span]:
    running = []
    for read in _readers:
        ended, under_way = read()
        _spans.extend(ended)
        running += under_way
    return running


def open_spans() -> list[Span]:
    """Spans under way; their ends are not known yet."""
    return [*_running.values(), *_read()]


def is_crowded() -> bool:
    """Return True if the oldest spans will soon be dropped."""
    _read()
    return len(_spans) > MOST // 2


def drain() -> list[Span]:
    """Return and forget all spans since the last call."""
    _read()
    return [_spans.popleft() for _ in range(len(_spans))]
