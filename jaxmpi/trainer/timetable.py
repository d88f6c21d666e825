"""When a run compares, logs, evaluates, saves and leaves, in steps.

Progress of workers in lock step grows by one. That of asynchronous workers jumps, as it counts examples of all of them.
So an event is due if a multiple of its period lies behind one progress and not behind the next.
"""

from typing import NamedTuple


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

    def between(self, done: int, now: int, *, is_first: bool = False, leaving: bool = False) -> DueEvents:
        """Events of the steps done + 1 to now.

        Args:
            done: steps for which all has been done that was due.
            now: steps made, at least `done`.
            is_first: a run starts with a progress line.
            leaving: the run ends after this step, to be resumed later.
        """
        is_last = now == self.total_steps > done
        save = now // self.save_every > done // self.save_every or is_last or leaving
        return DueEvents(
            compare=now // self.compare_every > done // self.compare_every or save,
            log=now // self.log_every > done // self.log_every or is_last or is_first,
            evaluate=now // self.eval_every > done // self.eval_every or is_last,
            save=save,
            leave=leaving,
        )
