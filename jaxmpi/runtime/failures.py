"""Hooks that end the job when a rank fails, with one message; signals that ask to leave.

If one rank raises an error, the others block in their next collective for ever: MPI does not pass exceptions on. So an
uncaught error in any thread prints rank, host and phase, and aborts the job (`fail`, `end_job`). At exit a rank waits
for the others, and aborts the job if it leaves while they work (`leave`). If all ranks raise the same error, rank 0
prints it; the others wait for some seconds and print it only if the job has not ended by then. A `UsageError` ends with
code 2, for a restart would not help. Open MPI 5 may lose the last lines of a rank that aborts, or return 0 for its job;
hence `drain_stdio`, and the exit code in a file (docs/decisions.md, 11).
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, NoReturn, TextIO

from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import AgreedError, TrainingError, UsageError
from jaxmpi.runtime.job_folder import ENDED_WITH, ENDING, is_marked, mark
from jaxmpi.runtime.process import _prepared, has_backend, launched, my_rank

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
INTERRUPTED = 128 + signal.SIGINT  # the exit code of a shell
INTERRUPT_NOTE = "interrupted: the run saves itself and leaves; Ctrl-C again ends it at once, unsaved"
# Within this time a second signal is part of the first: GNU `timeout` sends two, to its command and to the group.
ONE_REQUEST_S = 0.5
ONE_CTRL_C_S = 0.05  # a key may be typed twice in less


@dataclass
class JobControl:
    """This process's part in a job, as hooks need it."""

    rank: int
    size: int
    abort: Callable[[int], NoReturn] = os._exit  # ends all ranks
    wait_for_all: Callable[[float], bool] = lambda timeout_s: True  # False if time ran out
    echoes: Callable[[BaseException | None], str | None] = lambda error: None  # see `fail`
    working: bool = False  # True while a rank that leaves must take the others with it
    is_asked_to_leave: Callable[[], bool] = lambda: False  # by a signal; for waits in which nobody looks otherwise
    has_spawned: bool = False  # processes by MPI spawn, with which Open MPI 5's launcher takes an abort for 0 at times
    kill: Callable[[Sequence[int]], bool] | None = None  # ends ranks, if the others go on without them


job = JobControl(0, 1)  # until MPI starts
_ending = threading.RLock()  # by the thread that ends the job, until this process is gone


def install_hooks(control: JobControl) -> None:
    """Install hooks that end the job after an error or early exit."""
    global job
    job = control
    install_excepthooks()
    call_before_finalize(leave)


def install_excepthooks() -> None:
    """Pass uncaught errors of all threads to `fail`, also before MPI starts."""
    sys.excepthook = lambda kind, error, trace: fail(error, trace)
    threading.excepthook = fail_in_thread


def kill_ranks(ranks: Sequence[int]) -> bool:
    """End these ranks, if the others go on; False if they cannot, or one has ended already unnoticed."""
    return job.kill is not None and job.kill(ranks)


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


LONG_FACTOR = 6.0  # patience with what compiles or writes
_at = PhaseStatus("start", time.monotonic(), 0, LONG_FACTOR)


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
    of = launched() or job if job.size == 1 else job
    return f"rank {of.rank}/{of.size} on {socket.gethostname()}"


# ---------------------------------------------------------------- a failure


def fail(error: BaseException | None, trace: TracebackType | None) -> None:
    """Print rank, host, phase and traceback, then end the job.

    A `UsageError` or `TrainingError` is printed without a traceback. An error may be caused by the end of another rank,
    as `JobControl.echoes` finds. Such an error is one line, or none if that rank has said why.
    """
    echo = job.echoes(error)
    if echo is not None:
        sys.stderr.write(f"jaxmpi: {describe_rank()} ({_at.phase}) {echo}\n" if echo else "")
        end_job(1 if echo else 0)  # so that the other rank's code is the job's
    if isinstance(error, (UsageError, AgreedError)) and my_rank() != 0:
        age_s = time.monotonic() - LOADED_S if job.size == 1 else 0.0
        time.sleep(max(RANK_0_FIRST_S, min(age_s, RANK_0_FIRST_MOST_S)))  # rank 0 most likely says it, and ends the job
        if is_marked(ENDING):  # it has said so, and the launcher is slow to end this rank
            end_job(exit_code(error))
    error = no_device(error) or error
    if isinstance(error, (UsageError, TrainingError)):
        text = f"error: {error}\n"
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted\n"
    else:
        text = "".join(traceback.format_exception(None if error is None else type(error), error, trace))
    phase = f" ({_at.phase})" if _at.count else ""
    sys.stderr.write(f"jaxmpi: {describe_rank()}{phase}:\n{text}")  # at once: other ranks write too
    if not isinstance(error, (UsageError, AgreedError, KeyboardInterrupt)):
        _die_alone_if_others_go_on()
    end_job(exit_code(error))


def fail_in_thread(args: threading.ExceptHookArgs) -> None:
    """Call `fail`, or what the thread's starter wants called instead; `SystemExit` ends the thread alone."""
    report = getattr(args.thread, "jaxmpi_report", None)
    if args.exc_type is SystemExit:
        return
    if report and args.exc_value is not None:
        report(args.exc_value)
    else:
        fail(args.exc_value, args.exc_traceback)


def exit_code(error: BaseException | None) -> int:
    """The job's exit code; a restart helps only if it is 1."""
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else MISUSED if isinstance(error, UsageError) else 1


def no_device(error: BaseException | None) -> UsageError | None:
    """JAX's error that it cannot start a backend, with a way out; None for any other error."""
    if isinstance(error, AssertionError) and not error.args and os.environ.get("JAX_PLATFORMS") and error.__traceback__:
        # JAX passes over `cuda` if the host has no GPU, and then a bare assertion of its own fails.
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if has_backend() or not str(frame.f_globals.get("__name__")).startswith("jax."):
            return None
    elif not (isinstance(error, RuntimeError) and str(error).startswith("Unable to initialize backend")):
        return None
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


# ---------------------------------------------------------------- the end of the job


def end_job(code: int) -> NoReturn:
    """End all ranks with `code`, from any thread, if necessary by SIGKILL."""
    sys.stdout.flush()
    sys.stderr.flush()
    if job.size > 1:
        _ending.acquire(timeout=ENDING_S)
        if not job.kill or code == MISUSED:
            mark(ENDING)
        if job.has_spawned and not job.kill:
            mark(f"{ENDED_WITH}{code}")
            drain_stdio()
            os.kill(os.getpid(), signal.SIGKILL)
        job.abort(code)
    os._exit(code)


def _die_alone_if_others_go_on() -> None:
    """End this rank by SIGKILL if the others are to go on: after a bad exit code Open MPI would end them."""
    if job.kill:
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ending_thread() -> None:
    """Wait while another thread ends the job, rather than exit with 0."""
    if _ending.acquire(timeout=ENDING_S):
        _ending.release()


def leave() -> None:
    """Wait for the other ranks at exit, or end the whole job."""
    if job.size == 1:
        return
    wait_for_ending_thread()
    if job.working:
        end = "the others go on" if job.kill else "ending the job"
        print(f"jaxmpi: {describe_rank()} left early ({_at.phase}); {end}", file=sys.stderr)
        _die_alone_if_others_go_on()
        end_job(1)
    if not job.wait_for_all(EXIT_TIMEOUT_S):
        print(
            f"jaxmpi: {describe_rank()} has ended, but others had not {EXIT_TIMEOUT_S:.0f} s later; ending the job "
            "(JAXMPI_EXIT_TIMEOUT_S sets the time)",
            file=sys.stderr,
        )
        end_job(1)
    for check in _checks:
        check()


@contextmanager
def at_work() -> Iterator[None]:
    """End the job at once if a rank leaves within this block."""
    job.working = True
    try:
        yield
    except SystemExit as error:
        if error.code not in (0, None):
            fail(error, error.__traceback__)
        raise
    job.working = False


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
        if getattr(sys, name) is None:  # else the next file opened, as MPI's socket, would get the number
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, open(number, "w", closefd=False))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


# ---------------------------------------------------------------- signals that ask to leave


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

    def end(number: int, frame: object) -> None:
        write_error("jaxmpi: interrupted\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)


# ---------------------------------------------------------------- children of os.fork


def forget_in_child() -> None:
    """Detach a child of `os.fork` from its parent's job.

    The child inherits exit hooks and objects of JAX and MPI, but not the threads and connections behind them. Hooks
    that wait for these block for ever, and so do JAX's objects when they are destroyed, unless they crash. So the child
    drops the hooks, handles its own errors, and keeps for ever what its parent has made.
    """
    global job
    if _prepared.is_set():
        job = JobControl(0, 1)
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        atexit._clear()
        gc.freeze()
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in ("jax", "jaxlib"):
                for value in list(vars(module).values()):
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


os.register_at_fork(after_in_child=forget_in_child)
