"""Comparison of the exchange that each rank has come to, before anything moves.

Messages between ranks have no names: of two programs with equal shapes, run in another order on another rank, each
would take the other's numbers for its own. So an exchange gets a number when ranks trace it, which they do together,
and a call in the program compares that number over ranks whenever it runs: on one host in shared memory, a wait for the
slowest rank that the exchange would have had to make anyway; between hosts by a message of 32 bytes a rank.
"""

import functools
import hashlib
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from jaxmpi.allreduce.comm_thread_calls import mpi_effect
from jaxmpi.comm.agreement import Fingerprint
from jaxmpi.comm.base import Comm
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.comm.shared_sync import TIMEOUT_S, SharedCompare
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import host_callbacks

NAME = "jaxmpi: the same exchange on all ranks"
LIBRARIES = ("jax", "jaxlib", "jaxmpi", "optax", "flax", "equinox", "functools", "contextlib", "threading")


# ---------------------------------------------------------------- in a program


def check_in_program(comm: Comm, what: str) -> None:
    """Let the program being traced compare, wherever it comes to this place, which exchange its ranks have come to.

    Ranks that differ end the job, with the exchange that each of them has come to. Nothing if there is one worker,
    one program for all of them, or no CPU: a call from a GPU's program would wait for all its work.

    Args:
        comm: who exchanges; all have agreed on what is traced.
        what: is exchanged, for the message.
    """
    if isinstance(comm, MpiComm) and comm.size > 1 and not host_callbacks.why_not():
        number = next(roll_call(comm.processes).numbers)
        text = f"exchange {number} of the job ({what}, {caller()})"
        host_callbacks.call(NAME, [], [], effect=mpi_effect(comm), number=number, what=text)


class CallComparison:
    """How the ranks of a job compare which exchange they have come to."""

    def __init__(self, processes: MpiProcesses) -> None:
        """All ranks come here together."""
        self.numbers = itertools.count(1)
        self._control = processes.apart()
        self._control.may_overlap = True  # it speaks from programs, and so must not wait for their end
        self._roll = self._map(processes)
        self._lock = threading.Lock()
        host_callbacks.register(NAME, self._compare, ends_job=True)

    def _map(self, processes: MpiProcesses) -> SharedCompare | None:
        if len(set(processes.hosts)) > 1:
            return None
        try:
            return SharedCompare(processes)
        except UsageError:  # on all ranks alike: no room, or containers that share no memory
            return None

    def _compare(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int, what: str) -> None:
        """Handler that programs call."""
        with self._lock:
            if self._roll is None or not self._roll.same(number):
                mine = Fingerprint(what, number, hashlib.sha256(str(number).encode()).digest())
                self._control.compare(mine, TIMEOUT_S)


@functools.cache
def roll_call(processes: MpiProcesses) -> CallComparison:
    """This job's; all ranks come here together for the first time, as they trace."""
    return CallComparison(processes)


def callers() -> str:
    """The user's lines from the function being traced to this exchange, as `train.py:12 in step, loss.py:3 in mean`.

    They tell apart programs of equal shapes without a number, which ranks that trace alone could not agree on. Lines
    outside the traced function are left out: ranks may call it from different ones. So are values of the function's
    own: ranks may have others, such as their rank.
    """
    return ", ".join(map(line_of, users_frames()))


def columns() -> list[str]:
    """Where in its line each of `callers` is, and in which module: for two functions of one line, files of one name."""
    found = []
    for frame in users_frames():
        places = list(frame.f_code.co_positions())
        column = places[frame.f_lasti // 2][2] if frame.f_lasti // 2 < len(places) else None
        found.append(f"{module_of(frame)}:{column}")
    return found


def users_frames() -> list[FrameType]:
    """Frames of the user's, from the outermost function that JAX traces to this exchange.

    A jit made anew at each call hides nothing so, and a `lax.scan` outside jit ends the walk, too. Left out are
    libraries and code that has no file, as decorators make it: names of such differ from process to process.
    """
    stack: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame:
        stack.insert(0, frame)
        frame = frame.f_back
    traced = [i for i, frame in enumerate(stack) if module_of(frame).startswith("jax._src.")]
    return [frame for frame in stack[traced[0] if traced else 0 :] if is_users(frame)]


def module_of(frame: FrameType) -> str:
    """Name of the module whose code a frame runs."""
    return frame.f_globals.get("__name__", "")


def is_users(frame: FrameType) -> bool:
    """Return True if a frame runs neither a library nor code without a file."""
    name = frame.f_code.co_filename
    is_made = name.startswith("<") and not name.startswith(("<string>", "<stdin>", "<ipython"))
    is_installed = bool({"site-packages", "dist-packages"} & set(Path(name).parts))
    return not (is_made or is_installed or module_of(frame).partition(".")[0] in LIBRARIES)


def caller() -> str:
    """The line of the user's that is being run, as `train.py:12 in step`."""
    frame: Any = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        frame = frame.f_back
    return line_of(frame)


def line_of(frame: FrameType) -> str:
    """Describe a frame as `train.py:12 in step`."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


# ---------------------------------------------------------------- threads


class OneThread:
    """The thread that exchanges now."""

    def __init__(self) -> None:
        """Nobody does."""
        self.lock, self.holder = threading.RLock(), ""


_door = OneThread()


@contextmanager
def one_thread(comm: Comm) -> Iterator[None]:
    """Refuse a second thread while one exchanges with other ranks.

    To let it wait would not do: which of two threads comes first is another matter on every rank, so one thread's
    numbers would meet another's. Who is refused sends nothing; the other goes on.

    Raises:
        UsageError: both threads' names.
    """
    if not isinstance(comm, MpiComm) or comm.size == 1:
        yield
        return
    mine = threading.current_thread().name
    if not _door.lock.acquire(blocking=False):
        raise UsageError(
            f"exchange: thread {mine!r} calls it while thread {_door.holder!r} is in it; expected one at a time, in "
            "the same order on all ranks: call it from one thread, or have threads take turns in a fixed order"
        )
    try:
        _door.holder = mine
        yield
    finally:
        _door.lock.release()
