"""Width of the terminal that shows a process's output."""

import os
from typing import Any

from jaxmpi.core.process_stat import stat_of
from jaxmpi.runtime import launchers


def terminal_columns(out: Any) -> int:
    """Columns of the terminal that a stream leads to; else 0.

    Open MPI gives every rank a terminal of its own. It passes on what is written there to wherever mpirun's own output
    goes. So under a launcher the first process above that writes elsewhere is asked.
    """
    if not out.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return 0
    if launchers.launched() is None:
        return os.get_terminal_size(out.fileno()).columns or 80
    mine, above = output_of(os.getpid()), os.getppid()
    while above > 1 and output_of(above) == mine:
        above = parent_of(above)
    return columns_at(output_of(above)) if above > 1 else 0


def output_of(process: int) -> str:
    """The file behind a process's stdout; empty if that cannot be known."""
    try:
        return os.readlink(f"/proc/{process}/fd/1")
    except OSError:
        return ""


def parent_of(process: int) -> int:
    """The process that started this one; 0 if that cannot be known."""
    try:
        return int(stat_of(process)[1])
    except (OSError, ValueError, IndexError):
        return 0


def columns_at(path: str) -> int:
    """Columns of a terminal by its path, 0 if it is none."""
    if not path.startswith(("/dev/pts/", "/dev/tty")):
        return 0
    try:
        with open(path, "rb") as terminal:
            return os.get_terminal_size(terminal.fileno()).columns or 80
    except OSError:
        return 0
