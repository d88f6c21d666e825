"""Numbers and names of exchanges, for comparison; one thread at a time.

MPI's messages do not name the exchange that they belong to. So each exchange gets a number when all ranks trace it
together, and programs compare numbers when they run; `jaxmpi.comm.call_comparison` compares them. The user's lines tell
exchanges of equal shapes apart. Two threads could exchange in another order on each rank, so a second thread is
refused. Letting it wait was dropped: another rank's other thread may come first.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi.comm.agreement import refuse_together
from jaxmpi.comm.base import Comm
from jaxmpi.comm.call_comparison import comparison_of
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import UsageError
from jaxmpi.core.frames import LIBRARIES, is_users, line_of, module_of
from jaxmpi.core.pytrees import PyTree

# ---------------------------------------------------------------- in a program


def number_of(comm: Comm, what: str) -> int | None:
    """Number by which programs compare an exchange, `what` in messages; None without a comparison.

    There is nothing to compare if there is one worker, or one program for all of them. All ranks call it together,
    after they have agreed on what is exchanged.
    """
    if not isinstance(comm, MpiComm) or comm.size == 1:
        return None
    return comparison_of(comm).number(what)


@contextmanager
def compare_when_run(comm: Comm, number: int | None) -> Iterator[None]:
    """Put the comparison around the exchange that is traced inside, if numbered; ranks that differ end the job."""
    if number is None or not isinstance(comm, MpiComm):
        yield
        return
    comparison_of(comm).begin(number)
    yield
    comparison_of(comm).end(number)


def call_places() -> dict[str, Any]:
    """The user's lines from the traced function to this exchange, and the module and column of each.

    Lines are for messages, as `train.py:12 in step, loss.py:3 in mean`; columns tell exchanges on one line apart.
    """
    columns = []
    for frame in (frames := users_frames()):
        places = list(frame.f_code.co_positions())
        column = places[frame.f_lasti // 2][2] if frame.f_lasti // 2 < len(places) else None
        columns.append(f"{module_of(frame)}:{column}")
    return {"at": ", ".join(map(line_of, frames)), "columns": columns}


def users_frames() -> list[FrameType]:
    """The user's frames, from JAX's outermost traced function to this exchange.

    Frames outside it are left out, since ranks may call it from different lines; so are libraries and code that has no
    file, as decorators make it, whose names differ from process to process. A jit made anew at each call hides nothing
    so, and a `lax.scan` outside jit ends the walk, too.
    """
    stack: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame:
        stack.insert(0, frame)
        frame = frame.f_back
    traced = [i for i, frame in enumerate(stack) if module_of(frame).startswith("jax._src.")]
    return [frame for frame in stack[traced[0] if traced else 0 :] if is_users(frame)]


def caller() -> str:
    """The user's line that is being run, as `train.py:12 in step`."""
    frame: Any = sys._getframe(1)
    while frame.f_back and module_of(frame).partition(".")[0] in LIBRARIES:
        frame = frame.f_back
    return line_of(frame)


# ---------------------------------------------------------------- threads

# The thread that exchanges now, and the one that ran the last program outside jit, with the program's end.
_door = SimpleNamespace(lock=threading.RLock(), holder="", depth=0, last=None)


def jit_in_turn(program: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
    """Compile a program that exchanges, for calls outside jit.

    JAX orders the programs of one thread only, and one whose inputs are late begins late: another thread's next
    exchange waits for its end.
    """
    run = jax.jit(lambda tree: (program(tree), jnp.zeros(())))

    def call(tree: PyTree) -> PyTree:
        result, end = run(tree)
        _door.last = threading.get_ident(), end
        return result

    return call


@contextmanager
def joint_call(comm: Comm | Processes, call: str = "exchange", *, is_compared: bool = True) -> Iterator[bool]:
    """Make a call that all ranks make together; inside another one of this thread True.

    What this rank raises before ranks have compared the call, the others raise as well. While another thread exchanges
    with other ranks it is refused: it sends nothing, and the other goes on.

    Args:
        is_compared: ranks compare the call in the block, as they do all but messages.

    Raises:
        UsageError: both threads' names.
    """
    if not isinstance(comm, (MpiComm, MpiProcesses)) or comm.size == 1:
        yield False
        return
    name = threading.current_thread().name
    if not _door.lock.acquire(blocking=False):
        raise UsageError(
            f"{call}: thread {name!r} calls it while thread {_door.holder!r} is in an exchange or a collective; "
            "expected one at a time, in the same order on all ranks: from one thread, or threads that take turns in a "
            "fixed order"
        )
    _door.depth += 1
    try:
        _door.holder = name
        if _door.last and _door.last[0] != threading.get_ident():
            with contextlib.suppress(Exception):  # the other thread raises that itself
                _door.last[1].block_until_ready()
        control = comm.processes if isinstance(comm, MpiComm) else comm
        with refuse_together(control) if is_compared else contextlib.nullcontext():
            yield _door.depth > 1
    finally:
        _door.depth -= 1
        _door.lock.release()
