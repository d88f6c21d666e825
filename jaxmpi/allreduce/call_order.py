"""Comparison of the exchange that each rank has come to, and one exchange at a time in each process.

Messages between ranks have no names: of two programs with equal shapes, run in another order on another rank, each
would take the other's numbers for its own. So an exchange gets a number when ranks trace it, which they do together.
A program publishes that number before its first message and looks at the other ranks' numbers; it looks once more
behind its last message. Both calls of a program are ordered among its messages.

- On one host ranks publish in shared memory, and nobody waits: of two ranks at different exchanges the one that comes
  second sees the first one's number before it sends anything, and ends the job. Up to version 0.2 all ranks waited for
  each other here, which cost eight ranks on two cores 0.4 ms at every exchange.
- Between hosts 32 bytes a rank travel, and a rank waits for all.

From the first call to the second a process holds a lock. Else two programs that two threads have dispatched could
exchange at once, and one's messages meet the other's: JAX orders the programs of one thread only.
"""

import contextlib
import functools
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.comm_thread_calls import mpi_effect
from jaxmpi.comm.agreement import Fingerprint, different_calls
from jaxmpi.comm.base import Comm
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.comm.polling import WaitClock
from jaxmpi.comm.shared_sync import TIMEOUT_S, SharedCompare
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime import failures, host_callbacks

BEGIN = "jaxmpi: an exchange begins, the same on all ranks"
END = "jaxmpi: an exchange has ended"
LOOK_S = 0.5  # between looks for ranks that do not come
SAID_AFTER_S = 30.0  # that an exchange waits for another one of its process
LIBRARIES = ("jax", "jaxlib", "jaxmpi", "optax", "flax", "equinox", "functools", "contextlib", "threading")


# ---------------------------------------------------------------- in a program


def number_of(comm: Comm, what: str) -> int | None:
    """Number of an exchange by which programs compare it; None if there is nothing to compare.

    There is nothing to compare if there is one worker, one program for all of them, or no CPU: a call from a GPU's
    program would wait for all its work. All ranks come here together, after they have agreed on what is exchanged.

    Args:
        comm: who exchanges.
        what: is exchanged, for messages.
    """
    if not isinstance(comm, MpiComm) or comm.size == 1 or host_callbacks.why_not() or _door.is_one_program:
        return None
    return comparison_of(comm.processes).number(what)


@contextmanager
def compared(comm: Comm, number: int | None) -> Iterator[None]:
    """Put the comparison before and behind the exchange that is traced inside; nothing if there is no number.

    Ranks that differ end the job, with the exchange that each of them has come to.
    """
    if number is None:
        yield
        return
    host_callbacks.call(BEGIN, [], [], effect=mpi_effect(comm), number=number)
    yield
    host_callbacks.call(END, [], [], effect=mpi_effect(comm), number=number)


class CallComparison:
    """How the ranks of a job compare which exchange they have come to."""

    def __init__(self, processes: MpiProcesses) -> None:
        """All ranks come here together."""
        self._texts: dict[int, str] = {}  # by number, for messages; the same on all ranks
        self._control = processes.apart()
        self._control.may_overlap = True  # it speaks from programs, and so must not wait for their end
        self._held = 0  # the number of the exchange for which the lock is held
        self._lock = threading.Lock()  # held from the begin of an exchange to its end, by whichever thread of XLA's
        self._shared = self._map(processes)
        host_callbacks.register(BEGIN, self._begin, ends_job=True)
        host_callbacks.register(END, self._end, ends_job=True)
        if self._shared:
            threading.Thread(target=self._watch, args=(self._shared,), name="jaxmpi absent ranks", daemon=True).start()

    def _map(self, processes: MpiProcesses) -> SharedCompare | None:
        if len(set(processes.hosts)) > 1:
            return None
        try:
            return SharedCompare(processes)
        except UsageError:  # on all ranks alike: no room, or containers that share no memory
            return None

    def number(self, what: str) -> int:
        """Return the number of the next exchange that is traced."""
        number = len(self._texts) + 1
        self._texts[number] = f"exchange {number} of the job ({what})"
        return number

    def _begin(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int) -> None:
        """Handler that programs call before an exchange."""
        self._wait_for_turn(number)
        if self._shared:
            self._shared.what = self._texts[number]
            self._check(self._shared.come(number))
        else:
            what = self._texts[number]
            self._control.compare(Fingerprint(what, number, hashlib.sha256(str(number).encode()).digest()), TIMEOUT_S)

    def _wait_for_turn(self, number: int) -> None:
        """Take the lock, and say whom it waits for if that takes long.

        Raises:
            TrainingError: the other exchange has not ended within the time limit.
        """
        if not self._lock.acquire(timeout=SAID_AFTER_S):
            why = (
                f"{self._texts[number]} waits for {self._texts[self._held]}, which has begun in this process and not "
                "ended; if its program has failed, or a callback in it exchanges, it never will"
            )
            print(f"jaxmpi: {failures.who()}: {why}", file=sys.stderr, flush=True)
            if not self._lock.acquire(timeout=TIMEOUT_S):
                raise TrainingError(f"{why} (JAXMPI_EXCHANGE_TIMEOUT_S sets the time)")
        self._held = number

    def _end(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], number: int) -> None:
        """Handler that programs call behind an exchange: every rank has come to one by now."""
        if self._shared:
            self._check(self._shared.numbers())
        self._lock.release()

    def _check(self, numbers: dict[int, int]) -> None:
        """Refuse ranks that have come to another exchange than this one."""
        if len(set(numbers.values())) > 1:
            # This rank may still be tracing what another runs already.
            texts = {rank: self._texts.get(n, f"exchange {n} of the job") for rank, n in numbers.items()}
            raise UsageError(different_calls(texts))

    def _watch(self, shared: SharedCompare) -> None:
        """End the job if this rank is in an exchange to which another will not come: that rank is named."""
        waited, call = WaitClock(), 0
        while True:
            time.sleep(LOOK_S)
            if not self._lock.locked() or call != shared.call:
                call = shared.call
                waited.restart()
                continue
            try:
                shared.check_who_is_absent(call, waited.look())
            except TrainingError as error:
                failures.fail(error, None)


@functools.cache
def comparison_of(processes: MpiProcesses) -> CallComparison:
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
        self.lock, self.holder, self.depth = threading.RLock(), "", 0
        self.last: tuple[int, jax.Array] | None = None  # who ran the last program outside jit, and its end
        self.is_one_program = False  # what is traced now


_door = OneThread()
Function = TypeVar("Function", bound=Callable[..., Any])


def one_program(function: Function) -> Function:
    """The function, traced without comparisons: all ranks run this program, and no other one at its side.

    A comparison is two calls into Python, which wait for the interpreter while it dispatches the next step: a step of
    5 ms took a tenth longer.
    """

    @functools.wraps(function)
    def traced(*args: Any) -> Any:
        before, _door.is_one_program = _door.is_one_program, True
        try:
            return function(*args)
        finally:
            _door.is_one_program = before

    return traced  # pyright: ignore[reportReturnType]


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
