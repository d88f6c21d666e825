"""Hooks that end the whole job when a rank fails, and say why once.

If one rank raises an error, the others block in their next collective for ever: MPI does not pass exceptions on. So an
uncaught error in any thread prints rank, host and phase, and aborts the job (`fail`, `end_job`). At exit a rank waits
for the others, and aborts the job if it leaves while they work (`leave`). If all ranks raise the same error, rank 0
prints it; the others wait for some seconds and print it only if the job has not ended by then. A `UsageError` ends with
code 2, for a restart would not help. Open MPI 5 may lose the last lines of a rank that aborts, or return 0 for its job;
hence `let_be_heard`, and the exit code in a file (docs/decisions/0011).
"""

import atexit
import ctypes
import fcntl
import gc
import io
import os
import signal
import socket
import stat
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, NoReturn, TextIO

from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import AgreedError, TrainingError, UsageError
from jaxmpi.runtime.interrupts import INTERRUPTED as INTERRUPTED
from jaxmpi.runtime.job_folder import ENDED_WITH, ENDING, is_marked, mark
from jaxmpi.runtime.launchers import launched, my_rank
from jaxmpi.runtime.mpi_end import before_mpi_ends
from jaxmpi.runtime.prepare import _prepared
from jaxmpi.runtime.spared_threads import report_of

# How long a rank at its end waits for the others before it takes them for stuck.
EXIT_TIMEOUT_S = seconds_from("JAXMPI_EXIT_TIMEOUT_S", 300)
# How long a rank that ends the job lets the launcher read what it has said, and then pass it on.
READ_S, PASSED_ON_S = 1.0, 0.1
# How long another rank waits for rank 0 to print an error that both may hold; longer if ranks came up slowly.
RANK_0_FIRST_S, RANK_0_FIRST_MOST_S = 4.0, 30.0
LOADED_S = time.monotonic()  # nearly when this process began
MISUSED = 2  # exit code if what was asked for cannot be
PREEMPTED = 75  # exit code after a checkpoint on request: to be resumed


def forget_in_child() -> None:
    """Make a child of `os.fork` a process of its own: no rank of the job, with errors and an exit of its own.

    The child inherits exit hooks and objects of JAX and MPI, but not the threads and connections behind them. At its
    exit, hooks that wait for these block for ever, and so do JAX's objects when they are destroyed, unless they crash.
    So the child drops the hooks, and keeps for ever what its parent has made.
    """
    global _job
    if _prepared.is_set():
        _job = None
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        atexit._clear()
        gc.freeze()
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in ("jax", "jaxlib"):
                for value in list(vars(module).values()):
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


os.register_at_fork(after_in_child=forget_in_child)


# ---------------------------------------------------------------- hooks


INTERRUPT_NOTE = "interrupted: the run saves itself and leaves; Ctrl-C again ends it at once, unsaved"


def write_error(text: str) -> None:
    """Write to standard error from a signal handler: Python's buffered streams may be in use when it interrupts."""
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def unheard(stream: TextIO) -> None:
    """Redirect a stream that nobody reads any more to nowhere: the run goes on, and its exit code stays."""
    if stream is not sys.stderr:
        write_error(
            "jaxmpi: standard output cannot be written, as after `| head`: the run goes on without it; its "
            "record.jsonl has every line\n"
        )
    to_nowhere(stream)


def to_nowhere(stream: TextIO) -> None:
    """Redirect a stream to nowhere, also what Python still has of it and writes when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def open_streams() -> None:
    """Give stdout and stderr a place if they were closed before the start, and let them show names that are no text."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            setattr(sys, name, open(number, "w", closefd=False))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@dataclass
class JobControl:
    """This process's part in a job of several, as the hooks need it."""

    rank: int
    size: int
    abort: Callable[[int], NoReturn]  # ends all ranks
    wait_for_all: Callable[[float], bool]  # False if time ran out
    echoes: Callable[[BaseException | None], str | None] = lambda error: None  # see `fail`
    working: bool = False  # True while a rank that leaves must take the others with it
    has_spawned: bool = False  # processes by MPI spawn, with which Open MPI 5's launcher takes an abort for 0 at times
    kill: Callable[[Sequence[int]], bool] | None = None  # ends ranks, if the others go on without them


_job: JobControl | None = None
_ending = threading.RLock()  # by the thread that ends the job, until this process is gone
ENDING_S = READ_S + PASSED_ON_S + 1  # after which another thread takes that one for stuck


def install_hooks(job: JobControl) -> None:
    """From now on an error in any thread, or a rank that leaves early, ends the whole job with a message."""
    global _job
    _job = job
    install_excepthooks()
    before_mpi_ends(leave)


def note_spawned() -> None:
    """From now on this job has processes that MPI has spawned."""
    if _job is not None:
        _job.has_spawned = True


def outlive(kill: Callable[[Sequence[int]], bool]) -> None:
    """From now on a rank of this job that fails by itself, not together with the others, goes alone.

    Args:
        kill: ends other ranks; False if one has ended already, though nobody has noticed.
    """
    if _job is not None:
        _job.kill = kill


def go_on_without(ranks: Sequence[int]) -> bool:
    """End these ranks, if the others go on; False if they cannot."""
    return _job is not None and _job.kill is not None and _job.kill(ranks)


def install_excepthooks() -> None:
    """Show an uncaught error of any thread with this rank's name, and end; needed before MPI starts, too."""
    sys.excepthook = lambda kind, error, trace: fail(error, trace)
    threading.excepthook = fail_in_thread


def fail_in_thread(args: threading.ExceptHookArgs) -> None:
    """`fail`, but for a thread that only ends itself, as Python has it, or that is spared."""
    if args.exc_type is SystemExit:
        return
    report = report_of(args.thread)
    if report and args.exc_value is not None:
        report(args.exc_value)
    else:
        fail(args.exc_value, args.exc_traceback)


def who() -> str:
    """`rank 2/4 on node07`, for messages; from the launcher's variables before MPI has started."""
    here = launched()
    rank, size = (_job.rank, _job.size) if _job else (here.rank, here.size) if here else (0, 1)
    return f"rank {rank}/{size} on {socket.gethostname()}"


class At(NamedTuple):
    """The phase of this process, and since when."""

    phase: str
    since_s: float  # of time.monotonic
    count: int  # of phases so far: it is stuck if this stays
    patience: float = 1.0  # how many times longer than others the phase may last


LONG = 6.0  # patience with what compiles or writes
_at = At("start", time.monotonic(), 0, LONG)


def doing(phase: str, patience: float = 1.0) -> None:
    """Note what this process is at, for the message if it fails, and that it gets on.

    Args:
        patience: how many times longer than a step it may last before it counts as stuck.
    """
    global _at
    _at = At(phase, time.monotonic(), _at.count + 1, patience)


def at() -> At:
    """The phase of this process."""
    return _at


def fail(error: BaseException | None, trace: TracebackType | None) -> None:
    """Print rank, host, phase and traceback, then end the job. What the user did wrong needs no traceback.

    An error that is there because another rank has ended, by `JobControl.echoes`, is a line, or none if that rank has
    said why.
    """
    echo = _job.echoes(error) if _job else None
    if echo is not None:
        sys.stderr.write(f"jaxmpi: {who()} ({_at.phase}) {echo}\n" if echo else "")
        end_job(1 if echo else 0)  # so that the other rank's code is the job's
    if isinstance(error, (UsageError, AgreedError)) and my_rank() != 0:
        time.sleep(rank_0_first_s())  # rank 0 most likely says the same, and ends the job
        if is_marked(ENDING):  # it has said so, and the launcher is slow to end this rank
            end_job(exit_code(error))
    phase = f" ({_at.phase})" if _job else ""
    if is_no_backend(error):
        error = no_device(error)
    if isinstance(error, (UsageError, TrainingError)):
        text = f"error: {error}\n"
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted\n"
    else:
        text = "".join(traceback.format_exception(None if error is None else type(error), error, trace))
    sys.stderr.write(f"jaxmpi: {who()}{phase}:\n{text}")  # at once: other ranks write too
    if not isinstance(error, (UsageError, AgreedError, KeyboardInterrupt)):
        go_alone()
    end_job(exit_code(error))


def as_sentence(error: Exception) -> Exception:
    """The error in the user's words; if nobody catches it, Python prints it without a traceback."""
    told = no_device(error) if is_no_backend(error) else error
    before = sys.excepthook

    def show(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is told:
            sys.stderr.write(f"jaxmpi: error: {raised}\n")
        else:
            before(kind, raised, trace)

    if isinstance(told, (UsageError, TrainingError)) and before is sys.__excepthook__:  # else hooks show sentences
        sys.excepthook = show
    return told


def no_device(error: BaseException | None) -> UsageError:
    """The error of JAX that it could not start a backend, with a way out."""
    said = (str(error) or "none of that platform").splitlines()[0]
    if "FFI handler registration for mpi_" in said:
        return UsageError(
            "JAX refuses mpi4jax, which was built with another jaxlib, as an isolated build takes the newest; build it "
            f"with the one that is installed: docs/launching.md#troubleshooting. JAX: {said}"
        )
    return UsageError(
        f"JAX finds no device: {said}; JAX_PLATFORMS is "
        f"{os.environ.get('JAX_PLATFORMS', '')!r}: unset it, or name one that is installed, such as cpu"
    )


def is_no_backend(error: BaseException | None) -> bool:
    """Return True if JAX could not start the backend that JAX_PLATFORMS names.

    JAX passes over `cuda` if the host has no GPU, and then a bare assertion of its own fails.
    """
    if isinstance(error, RuntimeError):
        return str(error).startswith("Unable to initialize backend")
    if not isinstance(error, AssertionError) or error.args or not os.environ.get("JAX_PLATFORMS"):
        return False
    return "jax" in sys.modules and is_raised_by("jax", error) and not has_backend()


def is_raised_by(package: str, error: BaseException) -> bool:
    """Return True if the code of a package raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).split(".")[0] == package


def has_backend() -> bool:
    """Return True if a device of JAX has started."""
    from jax._src import xla_bridge  # nothing public shows it without starting one

    return xla_bridge.backends_are_initialized()


def rank_0_first_s() -> float:
    """Seconds to wait for rank 0's message: before MPI starts it may be as late as this rank has taken to get here."""
    age_s = time.monotonic() - LOADED_S if _job is None else 0.0
    return max(RANK_0_FIRST_S, min(age_s, RANK_0_FIRST_MOST_S))


def go_alone() -> None:
    """End this rank if the others go on without it: by a signal, since Open MPI would end them after a bad exit."""
    if _job is not None and _job.kill:
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def exit_code(error: BaseException | None) -> int:
    """The job's exit code for launchers: starting again helps only if it is 1 or a signal's."""
    codes = ((KeyboardInterrupt, INTERRUPTED), (UsageError, MISUSED))
    return next((code for kind, code in codes if isinstance(error, kind)), 1)


def leave_with(code: object) -> None:
    """End the job if a rank leaves by `sys.exit` with what is no success; nothing otherwise."""
    if code in (0, None):
        return
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
    number = code if isinstance(code, int) else 1
    sys.stderr.write(f"jaxmpi: {who()} has left with exit code {number}; ending the job\n")
    end_job(number)


def end_job(code: int) -> NoReturn:
    """End all ranks with `code`, from any thread; by SIGKILL if a launcher might take that for 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _job is not None and _job.size > 1:
        _ending.acquire(timeout=ENDING_S)
        if not _job.kill or code == MISUSED:
            mark(ENDING)
        if _job.has_spawned and not _job.kill:
            mark(f"{ENDED_WITH}{code}")
            let_be_heard()
            os.kill(os.getpid(), signal.SIGKILL)
        _job.abort(code)
    os._exit(code)


def let_be_heard() -> None:
    """Wait until the launcher has read what this process has said to a pipe, and could pass it on: Open MPI 5's forgets
    at times what it has not by the time the job is ended. Of a terminal, as that launcher makes stdout, nobody can see
    what has been read: there the time to pass it on must do. Ctrl-C ends the wait.
    """
    deadline = time.monotonic() + READ_S
    with suppress(KeyboardInterrupt):
        while any(map(unread, (1, 2))) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(PASSED_ON_S)


def let_end() -> None:
    """Let another thread end the job, if one does: this process must not exit with 0 meanwhile."""
    if _ending.acquire(timeout=ENDING_S):
        _ending.release()


def unread(fd: int) -> int:
    """Bytes in a pipe that nobody has read yet; 0 for what is no pipe."""
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:  # closed
        return 0


def is_at_work() -> bool:
    """Return True within `at_work`."""
    return _job is not None and _job.working


def leave() -> None:
    """At exit: wait for the other ranks, or end them if they would wait for this one for ever."""
    if _job is None or _job.size == 1:
        return
    let_end()
    if _job.working:
        end = "the others go on" if _job.kill else "ending the job"
        print(f"jaxmpi: {who()} left early ({_at.phase}); {end}", file=sys.stderr)
        go_alone()
        end_job(1)
    if not _job.wait_for_all(EXIT_TIMEOUT_S):
        print(
            f"jaxmpi: {who()} has ended, but others had not {EXIT_TIMEOUT_S:.0f} s later; ending the job "
            "(JAXMPI_EXIT_TIMEOUT_S sets the time)",
            file=sys.stderr,
        )
        end_job(1)


@contextmanager
def at_work() -> Iterator[None]:
    """While this lasts, a rank that leaves takes the job with it at once; errors go through `fail`."""
    if _job is not None:
        _job.working = True
    try:
        yield
    except SystemExit as error:
        if error.code not in (0, None):
            fail(error, error.__traceback__)
        raise
    if _job is not None:
        _job.working = False
