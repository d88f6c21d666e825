"""Hooks that end the job when a rank fails, with one message.

If one rank raises an error, the others block in their next collective for ever: MPI does not pass exceptions on. So an
uncaught error in any thread prints rank, host and phase, and aborts the job (`fail`, `end_job`). At exit a rank waits
for the others, and aborts the job if it leaves while they work (`leave`). If all ranks raise the same error, rank 0
prints it; the others wait for some seconds and print it only if the job has not ended by then. A `UsageError` ends with
code 2, for a restart would not help. Open MPI 5 may lose the last lines of a rank that aborts, or return 0 for its job;
hence `drain_stdio`, and the exit code in a file (docs/decisions/0011).
"""

import atexit
import ctypes
import faulthandler
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
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, NoReturn, TextIO

from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import AgreedError, TrainingError, UsageError
from jaxmpi.runtime.interrupts import INTERRUPTED as INTERRUPTED
from jaxmpi.runtime.job_folder import ENDED_WITH, ENDING, is_marked, mark
from jaxmpi.runtime.process import _prepared, launched, my_rank

# How long a rank at its end waits for the others before it takes them for stuck.
EXIT_TIMEOUT_S = seconds_from("JAXMPI_EXIT_TIMEOUT_S", 300)
# How long MPI may take to start, which waits until all ranks have come, or to start other processes.
START_TIMEOUT_S = seconds_from("JAXMPI_START_TIMEOUT_S", 600)
# How long a rank that ends the job lets the launcher read its output, and then pass it on.
READ_S, PASSED_ON_S = 1.0, 0.1
ENDING_S = READ_S + PASSED_ON_S + 1  # after which another thread takes the one that ends the job for stuck
# How long another rank waits for rank 0 to print an error that both may hold; longer if ranks came up slowly.
RANK_0_FIRST_S, RANK_0_FIRST_MOST_S = 4.0, 30.0
LOADED_S = time.monotonic()  # nearly when this process began
MISUSED = 2  # exit code if what was asked for cannot be
PREEMPTED = 75  # exit code after a checkpoint on request: to be resumed
INTERRUPT_NOTE = "interrupted: the run saves itself and leaves; Ctrl-C again ends it at once, unsaved"


@dataclass
class JobControl:
    """This process's part in a job of several, as hooks need it."""

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


def install_hooks(job: JobControl) -> None:
    """Install hooks that end the job after an error or early exit."""
    global _job
    _job = job
    install_excepthooks()
    call_before_finalize(leave)


def install_excepthooks() -> None:
    """Pass uncaught errors of all threads to `fail`, also before MPI starts."""
    sys.excepthook = lambda kind, error, trace: fail(error, trace)
    threading.excepthook = fail_in_thread


def survive_losses(kill: Callable[[Sequence[int]], bool]) -> None:
    """From now on let a rank that fails by itself end alone.

    Args:
        kill: ends other ranks; False if one has ended already, though nobody has noticed.
    """
    if _job is not None:
        _job.kill = kill


def kill_ranks(ranks: Sequence[int]) -> bool:
    """End these ranks, if the others go on; False if they cannot."""
    return _job is not None and _job.kill is not None and _job.kill(ranks)


def note_spawned() -> None:
    """From now on this job has processes that MPI has spawned."""
    if _job is not None:
        _job.has_spawned = True


@contextmanager
def start_limit() -> Iterator[None]:
    """Print the stack and end this process if the block, which starts MPI, takes longer than START_TIMEOUT_S.

    MPI starts with Python's lock held, so only a thread in C can keep the limit.
    """
    faulthandler.dump_traceback_later(START_TIMEOUT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---------------------------------------------------------------- what this process does, for messages


class PhaseStatus(NamedTuple):
    """The phase of this process, and since when."""

    phase: str
    since_s: float  # seconds of time.monotonic
    count: int  # phases so far; the process is stuck if this stays the same
    patience: float = 1.0  # how many times longer than others the phase may last


LONG = 6.0  # patience with what compiles or writes
_at = PhaseStatus("start", time.monotonic(), 0, LONG)


def set_phase(phase: str, patience: float = 1.0) -> None:
    """Note this process's phase, for error messages, and that it makes progress.

    Args:
        patience: how many times longer than a step it may last before it counts as stuck.
    """
    global _at
    _at = PhaseStatus(phase, time.monotonic(), _at.count + 1, patience)


def current_phase() -> PhaseStatus:
    """The phase of this process."""
    return _at


def describe_rank() -> str:
    """This rank in messages, also before MPI starts: `rank 2/4 on node07`."""
    launch = launched()
    rank, size = (_job.rank, _job.size) if _job else (launch.rank, launch.size) if launch else (0, 1)
    return f"rank {rank}/{size} on {socket.gethostname()}"


# ---------------------------------------------------------------- a failure


def fail(error: BaseException | None, trace: TracebackType | None) -> None:
    """Print rank, host, phase and traceback, then end the job.

    A `UsageError` or `TrainingError` is printed without a traceback. An error may be caused by the end of another rank,
    as `JobControl.echoes` finds. Such an error is one line, or none if that rank has said why.
    """
    echo = _job.echoes(error) if _job else None
    if echo is not None:
        sys.stderr.write(f"jaxmpi: {describe_rank()} ({_at.phase}) {echo}\n" if echo else "")
        end_job(1 if echo else 0)  # so that the other rank's code is the job's
    if isinstance(error, (UsageError, AgreedError)) and my_rank() != 0:
        age_s = time.monotonic() - LOADED_S if _job is None else 0.0
        time.sleep(max(RANK_0_FIRST_S, min(age_s, RANK_0_FIRST_MOST_S)))  # rank 0 most likely says it, and ends the job
        if is_marked(ENDING):  # it has said so, and the launcher is slow to end this rank
            end_job(exit_code(error))
    phase = f" ({_at.phase})" if _job else ""
    if _is_no_backend(error):
        error = no_device(error)
    if isinstance(error, (UsageError, TrainingError)):
        text = f"error: {error}\n"
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted\n"
    else:
        text = "".join(traceback.format_exception(None if error is None else type(error), error, trace))
    sys.stderr.write(f"jaxmpi: {describe_rank()}{phase}:\n{text}")  # at once: other ranks write too
    if not isinstance(error, (UsageError, AgreedError, KeyboardInterrupt)):
        _die_alone_if_others_go_on()
    end_job(exit_code(error))


def fail_in_thread(args: threading.ExceptHookArgs) -> None:
    """Call `fail`, unless the thread is spared or raised `SystemExit`."""
    report = _spared.get(args.thread) if args.thread else None
    if args.exc_type is SystemExit:
        return
    if report and args.exc_value is not None:
        report(args.exc_value)
    else:
        fail(args.exc_value, args.exc_traceback)


def exit_code(error: BaseException | None) -> int:
    """The job's exit code; a restart helps only if it is 1."""
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else MISUSED if isinstance(error, UsageError) else 1


def as_sentence(error: Exception) -> Exception:
    """The error in the user's words, which Python prints without a traceback."""
    shown = no_device(error) if _is_no_backend(error) else error
    before = sys.excepthook

    def show(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is shown:
            sys.stderr.write(f"jaxmpi: error: {raised}\n")
        else:
            before(kind, raised, trace)

    if isinstance(shown, (UsageError, TrainingError)) and before is sys.__excepthook__:  # else hooks show sentences
        sys.excepthook = show
    return shown


def no_device(error: BaseException | None) -> UsageError:
    """JAX's error that it cannot start a backend, with a way out."""
    said = (str(error) or "none of that platform").splitlines()[0]
    if "FFI handler registration for mpi_" in said:
        return UsageError(
            "JAX refuses mpi4jax, which was built with another jaxlib, as an isolated build takes the newest; build it "
            f"with the one that is installed: docs/launching.md#troubleshooting. JAX: {said}"
        )
    return UsageError(
        f"JAX finds no device: {said}; JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', '')!r}: unset it, or name one "
        "that is installed, such as cpu"
    )


def _is_no_backend(error: BaseException | None) -> bool:
    """Return True if JAX could not start the backend that JAX_PLATFORMS names.

    JAX passes over `cuda` if the host has no GPU, and then a bare assertion of its own fails.
    """
    if isinstance(error, RuntimeError):
        return str(error).startswith("Unable to initialize backend")
    if not isinstance(error, AssertionError) or error.args or not os.environ.get("JAX_PLATFORMS"):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_jax = bool(frames) and str(frames[-1].f_globals.get("__name__", "")).split(".")[0] == "jax"
    return is_of_jax and not has_backend()


def has_backend() -> bool:
    """Return True if a device of JAX has started."""
    from jax._src import xla_bridge  # nothing public shows it without starting one

    return xla_bridge.backends_are_initialized()


# ---------------------------------------------------------------- the end of the job


def end_job(code: int) -> NoReturn:
    """End all ranks with `code`, from any thread, if necessary by SIGKILL."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _job is not None and _job.size > 1:
        _ending.acquire(timeout=ENDING_S)
        if not _job.kill or code == MISUSED:
            mark(ENDING)
        if _job.has_spawned and not _job.kill:
            mark(f"{ENDED_WITH}{code}")
            drain_stdio()
            os.kill(os.getpid(), signal.SIGKILL)
        _job.abort(code)
    os._exit(code)


def _die_alone_if_others_go_on() -> None:
    """End this rank by SIGKILL if the others are to go on: after a bad exit code Open MPI would end them."""
    if _job is not None and _job.kill:
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ending_thread() -> None:
    """Wait while another thread ends the job, rather than exit with 0."""
    if _ending.acquire(timeout=ENDING_S):
        _ending.release()


def leave_with(code: object) -> None:
    """End the job unless this rank's `sys.exit` was given 0 or None."""
    if code in (0, None):
        return
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
    number = code if isinstance(code, int) else 1
    sys.stderr.write(f"jaxmpi: {describe_rank()} has left with exit code {number}; ending the job\n")
    end_job(number)


def leave() -> None:
    """Wait for the other ranks at exit, or end the whole job."""
    if _job is None or _job.size == 1:
        return
    wait_for_ending_thread()
    if _job.working:
        end = "the others go on" if _job.kill else "ending the job"
        print(f"jaxmpi: {describe_rank()} left early ({_at.phase}); {end}", file=sys.stderr)
        _die_alone_if_others_go_on()
        end_job(1)
    if not _job.wait_for_all(EXIT_TIMEOUT_S):
        print(
            f"jaxmpi: {describe_rank()} has ended, but others had not {EXIT_TIMEOUT_S:.0f} s later; ending the job "
            "(JAXMPI_EXIT_TIMEOUT_S sets the time)",
            file=sys.stderr,
        )
        end_job(1)
    for check in _checks:
        check()


def is_at_work() -> bool:
    """Return True within `at_work`."""
    return _job is not None and _job.working


@contextmanager
def at_work() -> Iterator[None]:
    """End the job at once if a rank leaves within this block."""
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


# ---------------------------------------------------------------- hooks before MPI ends, at exit or in MPI.Finalize()

_hooks: list[Callable[[], None]] = []
_checks: list[Callable[[], object]] = []


def call_before_finalize(hook: Callable[[], object]) -> None:
    """Call a hook once when MPI or the process ends, newest first."""

    def once() -> None:
        if once in _hooks:
            _hooks.remove(once)
            hook()

    _hooks.append(once)
    atexit.register(once)


def run_hooks() -> None:
    """Call the remaining hooks, in which MPI can still be used."""
    while _hooks:
        with suppress(Exception):  # errors of a program that failed; mpi4jax's hook raises them again at exit
            _hooks[-1]()


def call_after_all_scripts(check: Callable[[], object]) -> None:
    """Call the check when all ranks' scripts have ended, before MPI ends."""
    _checks.append(check)


# ---------------------------------------------------------------- threads of other libraries, such as trackers

Report = Callable[[BaseException], None]
_spared: weakref.WeakKeyDictionary[threading.Thread, Report] = weakref.WeakKeyDictionary()
_scope = threading.local()
_start = threading.Thread.start


@contextmanager
def spare_threads(report: Report) -> Iterator[None]:
    """Have errors of threads that this thread starts in the block, and of their children, end no run.

    Args:
        report: is called by a spared thread with its uncaught error.
    """

    def start(self: threading.Thread) -> None:  # Python does not keep who has started a thread
        if found := getattr(_scope, "report", None) or _spared.get(threading.current_thread()):
            _spared[self] = found
        _start(self)

    threading.Thread.start = start
    before, _scope.report = getattr(_scope, "report", None), report
    try:
        yield
    finally:
        _scope.report = before


# ---------------------------------------------------------------- output


def drain_stdio() -> None:
    """Wait until the launcher has read and passed on this process's output.

    Open MPI 5 at times loses output that its launcher has not passed on when the job ends. A pipe shows how much of it
    is unread. The terminal that this launcher makes of stdout does not, so there a fixed time must do. Ctrl-C ends the
    wait.
    """
    deadline = time.monotonic() + READ_S
    with suppress(KeyboardInterrupt):
        while any(map(_unread, (1, 2))) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(PASSED_ON_S)


def _unread(fd: int) -> int:
    """Number of unread bytes in a pipe; 0 for any other file."""
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:  # closed
        return 0


def write_error(text: str) -> None:
    """Write to standard error without Python's buffers, as signal handlers must."""
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def drop_unread_stream(stream: TextIO) -> None:
    """Redirect a stream without a reader to nowhere; the run goes on."""
    if stream is not sys.stderr:
        write_error(
            "jaxmpi: standard output cannot be written, as after `| head`: the run goes on without it; its "
            "record.jsonl has every line\n"
        )
    redirect_to_devnull(stream)


def redirect_to_devnull(stream: TextIO) -> None:
    """Redirect a stream to nowhere, with the text still in its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def open_streams() -> None:
    """Open stdout and stderr if closed, and let both print undecodable names."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            setattr(sys, name, open(number, "w", closefd=False))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


# ---------------------------------------------------------------- children of os.fork


def forget_in_child() -> None:
    """Detach a child of `os.fork` from its parent's job.

    The child inherits exit hooks and objects of JAX and MPI, but not the threads and connections behind them. Hooks
    that wait for these block for ever, and so do JAX's objects when they are destroyed, unless they crash. So the child
    drops the hooks, handles its own errors, and keeps for ever what its parent has made.
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
