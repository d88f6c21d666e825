"""When a run compares, logs, evaluates, saves and leaves, in steps or by the clock.

Progress of workers in lock step grows by one. That of asynchronous workers jumps, as it counts examples of all of them.
So an event is due if a multiple of its period lies behind one progress and not behind the next.

Clocks of ranks differ, so what is due by the clock is decided by rank 0. The vote on the step tells the others, in a
number that it sends anyway (`recover.decisions`).
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

TIMED = ("compare", "log", "evaluate", "save", "stop")  # events that may be due by the clock; one bit each in a vote


class DueEvents(NamedTuple):
    """Events that are due after a step, in order of execution."""

    compare: bool = False
    log: bool = False
    evaluate: bool = False
    save: bool = False
    leave: bool = False


class Timetable(NamedTuple):
    """Periods in steps, each at least 1."""

    compare_every: int
    log_every: int
    eval_every: int
    save_every: int
    total_steps: int
    periods_s: Mapping[str, float] = {}  # by the clock, of events in TIMED

    def between(
        self, done: int, now: int, *, is_first: bool = False, leaving: bool = False, timed: Collection[str] = ()
    ) -> DueEvents:
        """Events of the steps done + 1 to now.

        Args:
            done: steps for which all has been done that was due.
            now: steps made, at least `done`.
            is_first: a run starts with a progress line.
            leaving: the run ends after this step, to be resumed later.
            timed: events that are due by the clock; `stop` makes this step the last.
        """
        is_last = now == self.total_steps > done or "stop" in timed
        save = now // self.save_every > done // self.save_every or is_last or leaving or "save" in timed
        return DueEvents(
            compare=now // self.compare_every > done // self.compare_every or save or "compare" in timed,
            log=now // self.log_every > done // self.log_every or is_last or is_first or "log" in timed,
            evaluate=now // self.eval_every > done // self.eval_every or is_last or "evaluate" in timed,
            save=save,
            leave=leaving,
        )

    def most_saves(self, done: int) -> float:
        """Checkpoints after this step at most; infinite if the clock counts. One on request is the last."""
        if {"save", "stop"} & self.periods_s.keys():
            return math.inf
        return -(-self.total_steps // self.save_every) - done // self.save_every


class Clock:
    """What is due by the clock, on rank 0; nothing ever is on the others."""

    def __init__(self, periods_s: Mapping[str, float], elapsed_s: Callable[[], float], *, is_first: bool) -> None:
        """Take periods by event, and how long the run has taken, what was before it was resumed included."""
        self._elapsed_s, self._periods_s = elapsed_s, periods_s if is_first else {}
        now = elapsed_s()
        self._next_s = {event: (now // period + 1) * period for event, period in self._periods_s.items()}

    def due(self) -> int:
        """Bits of the events of which a period has ended since the last call."""
        now, bits = self._elapsed_s(), 0
        for event, period in self._periods_s.items():
            if now >= self._next_s[event]:
                self._next_s[event] = (now // period + 1) * period
                bits |= 1 << TIMED.index(event)
        return bits


def timed_events(bits: int) -> list[str]:
    """Events by the bits of a vote."""
    return [event for i, event in enumerate(TIMED) if bits >> i & 1]
