"""Signals that ask to leave, grouped into requests; Ctrl-C during imports.

Imports next to nothing itself, so as to come first.
"""

import os
import signal
import time

INTERRUPTED = 128 + signal.SIGINT  # the exit code of a shell
# Within this time a second signal is part of the first: GNU `timeout` sends two, to its command and to the group.
ONE_REQUEST_S = 0.5
ONE_CTRL_C_S = 0.05  # a key may be typed twice in less


class Requests:
    """Requests to leave that a process was sent, in order."""

    def __init__(self) -> None:
        """Begin with none."""
        self.heard: list[int] = []
        self._last_s = 0.0

    def add(self, number: int) -> bool:
        """Add a signal; return False if it belongs to the last request."""
        if number == signal.SIGHUP and self.heard:  # a closed terminal sends it twice, by its shell and by the kernel
            return False
        now_s, window_s = time.monotonic(), ONE_CTRL_C_S if number == signal.SIGINT else ONE_REQUEST_S
        is_new = self.heard[-1:] != [number] or now_s - self._last_s > window_s
        if is_new:
            self.heard.append(number)
            self._last_s = now_s
        return is_new


def leave_on_interrupt() -> None:
    """Have Ctrl-C end this process with one line until a run begins."""
    signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: object) -> None:
    os.write(2, b"jaxmpi: interrupted\n")
    os._exit(INTERRUPTED)
