"""Phases in which a job shows no step, such as a compilation.

A job imports, waits for other ranks, traces and compiles before its first step, each for seconds or minutes. Whoever
does such a thing opens a phase. Rank 0 prints its name whenever it has been silent for SILENCE_S; on a terminal the
panel shows it instead. Imports next to nothing, so as to come first.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TextIO

SILENCE_S = 4.0


class Phase(NamedTuple):
    """Something that takes time."""

    name: str
    begin_s: float  # seconds of time.monotonic

    def __str__(self) -> str:
        return f"{self.name}: {time.monotonic() - self.begin_s:.0f} s so far"


_open: list[Phase] = []  # the last is inside of those before
_said_s = time.monotonic()  # when something was shown last
_narrators: list[threading.Event] = []  # at most one, with what ends it


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Open a phase for the block; inside another it shows in brackets."""
    mine = Phase(name, time.monotonic())
    _open.append(mine)
    try:
        yield
    finally:
        _open.remove(mine)


def current() -> Phase | None:
    """This process's phase, with the innermost in brackets; None outside phases."""
    at = [*_open]  # another thread may ask
    if len(at) < 2:
        return at[0] if at else None
    return at[0]._replace(name=f"{at[0].name} ({at[-1].name})")


def note_output() -> None:
    """Note that something was shown, so that the next line can wait."""
    global _said_s
    _said_s = time.monotonic()


def start_progress(out: TextIO | None = None, silence_s: float = SILENCE_S) -> None:
    """Print the phase whenever `silence_s` have passed without output, until `stop_progress`.

    A thread prints it, because the one that works blocks while it imports or compiles.
    """
    if _narrators:
        return
    over = threading.Event()
    _narrators.append(over)

    def watch() -> None:
        while not over.wait(silence_s / 8):
            at, now = current(), time.monotonic()
            if at and now - _said_s >= silence_s and now - at.begin_s >= silence_s / 8:
                with suppress(OSError, ValueError):  # nobody reads it, or it is closed
                    print(f"{at}\n", end="", file=out, flush=True)  # one write: other lines come beside it
                note_output()

    threading.Thread(target=watch, name="jaxmpi phases", daemon=True).start()


def stop_progress() -> None:
    """Stop `start_progress`: phases are shown elsewhere, or are not wanted."""
    while _narrators:
        _narrators.pop().set()
