"""Signals that ask a run to save and leave."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from jaxmpi.runtime import failures, process

JUST_NOW_S = 1.0  # between the SIGCONT and the SIGTERM by which mpirun ends its ranks: a quarter of a second


class PreemptionNotice:
    """Requests to save and leave: SIGTERM, SIGUSR1, SIGINT, and SIGHUP without nohup."""

    def __init__(self) -> None:
        """Install the handlers in the main thread; elsewhere signals keep theirs."""
        self.is_given = self.is_interrupt = False
        self.launcher_ends = False  # Open MPI's mpirun, which was asked to end, ends its ranks
        self._requests, self._woken_s = failures.Requests(), 0.0
        failures.job.is_asked_to_leave = lambda: self.is_given
        try:
            heard = {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGCONT}
            for number in (signal.SIGHUP, signal.SIGINT):  # nohup, or a shell's job in the background
                heard -= {number} if signal.getsignal(number) == signal.SIG_IGN else set()
            self._before = {number: signal.signal(number, self._hear) for number in heard}
        except ValueError:
            self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCONT:
            self._woken_s = time.monotonic()
            return
        if not self._requests.add(number):
            return
        if self.is_given:  # asked twice: at once
            failures.write_error(f"jaxmpi: {failures.describe_rank()}: asked twice to leave: not saved\n")
            failures.end_job(128 + number)
        self.is_given, self.is_interrupt = True, number == signal.SIGINT
        self.launcher_ends = number == signal.SIGTERM and time.monotonic() - self._woken_s < JUST_NOW_S
        if self.is_interrupt and process.my_rank() == 0:
            failures.write_error(f"jaxmpi: {failures.INTERRUPT_NOTE}\n")

    def say_saved(self, say: Callable[[str], None], step: int, folder: Path) -> None:
        """Report the saved step and how to continue; all ranks call it.

        An mpirun that ends its ranks forwards no more of their output. So rank 0 writes to the standard error of mpirun
        as well.
        """
        why = "interrupted" if self.is_interrupt else "asked to leave"
        text = f"{why}: saved at step {step}; go on with --resume --run-dir {folder}"
        say(text)
        if self.launcher_ends and process.my_rank() == 0 and process.launched_workers() > 1:
            with contextlib.suppress(OSError):  # on another host, or a socket
                above = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
                os.write(above, f"{text}\n".encode(errors="backslashreplace"))
                os.close(above)

    def close(self) -> None:
        """Restore the earlier handlers, but defaults in place of a C library's.

        Python cannot set a handler of a C library again.
        """
        failures.job.is_asked_to_leave = lambda: False
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
