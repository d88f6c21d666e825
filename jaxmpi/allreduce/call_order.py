"""Comparison of the exchange that each rank has come to, and one exchange at a time in each process.

Messages between ranks have no names: of two programs with equal shapes, run in another order on another rank, each
would take the other's numbers for its own. So an exchange gets a number when ranks trace it, which they do together,
and this number travels beside the data, from each rank to the next one: sent before the exchange's first message,
received behind its last. All are equal if each equals its neighbour's. What is unequal shows in one of three ways:

- Both exchanges have messages of equal lengths: they end, and then the numbers differ, before a program has a result.
- A message is longer than what is expected: MPI reports it to a handler, which reads the neighbour's number.
- A rank waits for messages that never come: a thread of each rank looks now and then, and tells the others.

All of it is messages of mpi4jax in the program, with no Python, and nobody waits for a number. Both matter for a step
of few milliseconds. A call into Python waits for the interpreter, which dispatches the next step (1.10 of a step of
4 ms); a wait before the first message is one more point at which ranks must meet (1.07 to 1.15); this is 1.00.

From its first to its last message an exchange has the process's turn, which is a message to itself: who receives it has
the turn, and sends it again at the end. Else two programs that two threads have dispatched could exchange at once, and
one's messages meet the other's: JAX orders the programs of one thread only.
"""

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi.allreduce.comm_thread_calls import mpi_effect
from jaxmpi.allreduce.exchange_watch import FREE, HELD, WAITS, ExchangeWatch
from jaxmpi.comm.agreement import different_calls
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime import failures, host_callbacks

DIFFERS = "jaxmpi: a rank has come to another exchange"
LIBRARIES = ("jax", "jaxlib", "jaxmpi", "optax", "flax", "equinox", "functools", "contextlib", "threading")


# ---------------------------------------------------------------- in a program


def number_of(comm: Comm, what: str) -> int | None:
    """Number of an exchange by which programs compare it; None if there is nothing to compare.

    There is nothing to compare if there is one worker, one program for all of them, or no CPU: a GPU's program would
    wait for all its work at each message. All ranks come here together, after they have agreed on what is exchanged.

    Args:
        comm: who exchanges.
        what: is exchanged, for messages.
    """
    if not isinstance(comm, MpiComm) or comm.size == 1 or host_callbacks.why_not():
        return None
    return comparison_of(comm).number(what)


@contextmanager
def compared(comm: Comm, number: int | None) -> Iterator[None]:
    """Put the comparison around the exchange that is traced inside; nothing if there is no number.

    Ranks that differ end the job, with the exchange that each of them has come to.
    """
    if number is None or not isinstance(comm, MpiComm):
        yield
        return
    comparison = comparison_of(comm)
    held = comparison.begin(number)
    yield
    comparison.end(number, held)


_numbers = itertools.count()  # of comparisons, the same on all ranks


class CallComparison:
    """How the ranks of a job compare which exchange they have come to.

    A message is i32[2]: the number of an exchange, and how many this process has begun.
    """

    def __init__(self, comm: MpiComm) -> None:
        """All ranks come here together."""
        from mpi4py import MPI

        self._comm = comm
        self._texts: dict[int, str] = {}  # by number, for messages; the same on all ranks
        self._turn = MPI.COMM_SELF.Dup()
        self._turn.Send(np.zeros(2, np.int32), 0, FREE)
        self._ring = comm.processes.clone()
        self._before, self._next = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        self._name = f"{DIFFERS} {next(_numbers)}"
        host_callbacks.register(self._name, self._differs, ends_job=True)
        self._on_mpi_error = MPI.Comm.Create_errhandler(self._mpi_failed)
        comm.mpi.Set_errhandler(self._on_mpi_error)
        self._watch = ExchangeWatch(comm.processes, self._turn, self.text)

    def number(self, what: str) -> int:
        """Return the number of the next exchange that is traced."""
        number = len(self._texts) + 1
        self._texts[number] = f"exchange {number} of the job ({what})"
        return number

    def text(self, number: int) -> str:
        """Describe an exchange; this rank may still be tracing what another runs already."""
        return self._texts.get(number, f"exchange {number} of the job")

    def begin(self, number: int) -> jax.Array:
        """Wait for this process's turn and send the number on; what `end` needs.

        These messages need nothing of the data, so they are the first that a program does: of two programs the one that
        was dispatched first has its turn first.
        """
        import mpi4jax

        waits = jnp.array([number, 0], jnp.int32)  # how many exchanges there were before comes with the turn
        free = self._to_self(waits, sendtag=WAITS, recvtag=FREE)
        held = jnp.stack([jnp.int32(number), free[1] + 1])
        self._to_self(held, sendtag=HELD, recvtag=WAITS)
        mpi4jax.send(held, self._next, comm=self._ring)
        return held

    def end(self, number: int, held: jax.Array) -> None:
        """Compare with the number of the rank before, and give the turn away."""
        import mpi4jax

        theirs = mpi4jax.recv(held, self._before, comm=self._ring)

        def differs() -> None:
            host_callbacks.call(self._name, [theirs], [], effect=mpi_effect(self._comm), number=number)

        lax.cond(theirs[0] == number, lambda: None, differs)
        self._to_self(held, sendtag=FREE, recvtag=HELD)

    def _to_self(self, message: jax.Array, sendtag: int, recvtag: int) -> jax.Array:
        import mpi4jax

        tags = {"sendtag": sendtag, "recvtag": recvtag}
        return mpi4jax.sendrecv(message, message, source=0, dest=0, comm=self._turn, **tags)

    def _differs(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int) -> None:
        """Handler that programs call behind an exchange if the rank before has come to another one."""
        self._refuse(number, int(operands[0][0]))

    def _refuse(self, mine: int, theirs: int) -> None:
        raise UsageError(different_calls({self._comm.rank: self.text(mine), self._before: self.text(theirs)}))

    def _mpi_failed(self, comm: Any, code: int) -> None:
        """Handler that MPI calls in an exchange; after it mpi4jax ends the job, with a message of its own."""
        from mpi4py import MPI

        if MPI.Get_error_class(code) != MPI.ERR_TRUNCATE or not (held := self._watch.held()):
            return
        theirs = np.zeros(2, np.int32)
        is_sent = self._ring.Iprobe(self._before)  # a message longer than expected may be another rank's
        if is_sent:
            self._ring.Recv(theirs, self._before)
        try:
            if is_sent and theirs[0] != held[0]:
                self._refuse(held[0], int(theirs[0]))
            raise UsageError(
                f"{self.text(held[0])} got a longer message than it expects, so another rank has come to another "
                "exchange; all must make the same calls in the same order"
            )
        except UsageError as error:
            failures.fail(error, None)


@functools.cache
def comparison_of(comm: MpiComm) -> CallComparison:
    """This Comm's; all ranks come here together for the first time, as they trace."""
    return CallComparison(comm)


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
        self.lock, self.holder, self.depth = threading.RLock(), "", 0
        self.last: tuple[int, jax.Array] | None = None  # who ran the last program outside jit, and its end


_door = OneThread()


def in_turn(program: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
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
def one_thread(comm: Comm) -> Iterator[bool]:
    """Refuse a second thread while one exchanges with other ranks; True inside another exchange of this thread.

    To let it wait would not do: which of two threads comes first is another matter on every rank, so one thread's
    numbers would meet another's. Who is refused sends nothing; the other goes on.

    Raises:
        UsageError: both threads' names.
    """
    if not isinstance(comm, MpiComm) or comm.size == 1:
        yield False
        return
    mine = threading.current_thread().name
    if not _door.lock.acquire(blocking=False):
        raise UsageError(
            f"exchange: thread {mine!r} calls it while thread {_door.holder!r} is in it; expected one at a time, in "
            "the same order on all ranks: call it from one thread, or have threads take turns in a fixed order"
        )
    _door.depth += 1
    try:
        _door.holder = mine
        if _door.last and _door.last[0] != threading.get_ident():
            with contextlib.suppress(Exception):  # the other thread's own to hear of
                _door.last[1].block_until_ready()
        yield _door.depth > 1
    finally:
        _door.depth -= 1
        _door.lock.release()
