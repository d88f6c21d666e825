"""Signals that ask a run to save and leave."""

import signal
from types import FrameType

from jaxmpi.runtime import failures, interrupts, launchers


class PreemptionNotice:
    """Requests to this process to save and leave: SIGTERM, SIGUSR1, Ctrl-C's SIGINT, and SIGHUP, unless under nohup."""

    def __init__(self) -> None:
        """Install the handlers; outside the main thread Python cannot, and signals keep the ones they have."""
        self.given = self.is_interrupt = False
        self._requests = interrupts.Requests()
        try:
            heard = {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT}
            for number in (signal.SIGHUP, signal.SIGINT):  # nohup, or a shell's job in the background
                heard -= {number} if signal.getsignal(number) == signal.SIG_IGN else set()
            self._before = {number: signal.signal(number, self._hear) for number in heard}
        except ValueError:
            self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._requests.add(number):
            return
        if self.given:  # asked twice: at once
            failures.write_error(f"jaxmpi: {failures.who()}: asked twice to leave: not saved\n")
            failures.end_job(128 + number)
        self.given, self.is_interrupt = True, number == signal.SIGINT
        if self.is_interrupt and launchers.my_rank() == 0:
            failures.write_error(f"jaxmpi: {failures.INTERRUPT_NOTE}\n")

    def close(self) -> None:
        """Restore the handlers of before; the default ones if a C library had set them, since Python cannot set those
        again.
        """
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
