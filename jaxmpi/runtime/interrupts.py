"""Ctrl-C while a command is imported, which takes a second. Imports next to nothing itself, so as to come first."""

import os
import signal

INTERRUPTED = 128 + signal.SIGINT  # the exit code of a shell


def leave_on_interrupt() -> None:
    """Have Ctrl-C end this process with one line, until a run takes it over: there is nothing to save yet."""
    signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: object) -> None:
    os.write(2, b"jaxmpi: interrupted\n")
    os._exit(INTERRUPTED)
