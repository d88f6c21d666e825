"""This process: its rank by the launcher's variables, its memory, cores and devices, and the set-up before JAX starts.

XLA sizes its thread pool, and takes a GPU, when its device starts; MPI reads its settings when it starts. So `prepare`
comes before both, and everything here goes by the environment, without MPI.
"""

import ctypes
import itertools
import os
import pwd
import resource
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jaxmpi.core.errors import UsageError
from jaxmpi.runtime.compile_cache import use_compilation_cache
from jaxmpi.runtime.job_folder import BEGAN, OWN, SEGMENTS, lock_folder, mark, remove_stale_folders

# Launcher: its variables for rank, size, local rank, local size.
LAUNCHERS = {
    "Open MPI's mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MVAPICH's mpirun": tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "jsrun": tuple(f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "flux run": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    "Hydra's mpiexec (MPICH, Intel MPI)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "HPE's PALS": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
MARKS = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE")  # other launchers' ranks, without a size
VARIABLES = {name for names in LAUNCHERS.values() for name in names if name} | {*MARKS}


class Launch(NamedTuple):
    """This process's place in the job, from the launcher's environment."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def launched() -> Launch | None:
    """This process's launcher, rank and size; None without a launcher."""
    environ = {name: os.environ[name] for names in LAUNCHERS.values() for name in names if name in os.environ}
    known = {launcher: names for launcher, names in LAUNCHERS.items() if {*names[:2]} <= environ.keys()}
    # Several launchers speak PMI; one that also says which rank of its host this is comes first.
    for launcher, (rank, size, local_rank, local_size) in sorted(
        known.items(), key=lambda row: row[1][2] not in environ
    ):
        ranks = int(environ[size])
        on_host = environ.get(local_size, "").split("(")[0].split(",")[0] or ranks  # srun writes "4(x2)" or "4,3"
        if launcher == "flux run":  # which tells the hosts in place of a host's ranks
            on_host = -(-ranks // int(os.environ.get("FLUX_JOB_NNODES", "1")))
        return Launch(launcher, int(environ[rank]), ranks, int(environ.get(local_rank, environ[rank])), int(on_host))
    return None


def my_rank() -> int:
    """This process's rank by the launcher's variables, without MPI; else 0."""
    launch = launched()
    return launch.rank if launch else 0


def launched_workers() -> int:
    """The job's size by the launcher's variables, before MPI starts; else 1."""
    launch = launched()
    return launch.size if launch else 1


# ---------------------------------------------------------------- set-up

_prepared = threading.Event()


def prepare() -> None:
    """Set allocator, cores and device once, before JAX's first device call."""
    if _prepared.is_set():
        return
    _prepared.set()
    keep_freed_memory()
    launch = launched()
    lines = []
    if launch is not None and launch.size > 1:
        lines.append(use_main_arena())
        # Ranks compile at the same time: what one finds half written by another it compiles for itself.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry", UserWarning)
        _tune_mpi(launch)
        if len(core_mask()) == 1 and (os.cpu_count() or 1) > launch.local_size:  # as Open MPI binds one rank or two
            lines.append(
                f"each rank may use 1 of the {os.cpu_count()} cores of its host, which has {launch.local_size} of the "
                "ranks; if the launcher has bound them: mpirun --bind-to none, or srun --cpus-per-task"
            )
        pin_cores(launch.local_rank, launch.local_size)
        pin_gpu(launch.local_rank, launch.local_size)
    lines.append(use_compilation_cache())
    os.environ.setdefault("MPI4JAX_USE_CUDA_MPI", "0")  # else each process with a GPU warns that it is not set
    for line in filter(None, lines if my_rank() == 0 else []):
        print(f"jaxmpi: {line}", file=sys.stderr, flush=True)


def _tune_mpi(launch: Launch) -> None:
    """Set Open MPI's defaults before it starts; the user's settings stay."""
    if launch.local_size < launch.size:  # else ranks of other hosts abort, and are blamed, before a death is reported
        os.environ.setdefault("OMPI_MCA_opal_abort_delay", "1")  # seconds
    if launch.local_size > cores():  # a rank that spins while it waits takes the core that another needs
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    folder = Path(os.environ.get(SEGMENTS, ""))
    if folder.name.startswith(OWN):
        with suppress(OSError):  # without such memory Open MPI takes other
            remove_stale_folders(folder.parent)
            lock_folder(folder)
        mark(BEGAN)
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # prints an error a process if there is no such network


def set_home() -> None:
    """Set HOME if the environment lacks it, as in a container or a service: Open MPI does not start without it."""
    if not os.environ.get("HOME"):
        try:
            os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a user without an entry
            os.environ["HOME"] = "/nonexistent"


# ---------------------------------------------------------------- memory that a program has freed
#
# Kept memory is used again without page faults, but it has holes where buffers of other sizes were: 0.3 to 0.9 of what
# is in use was seen with language models, whose leaves are few and big. JAXMPI_ALLOCATOR=system leaves glibc as it
# comes, JAXMPI_ALLOCATOR=keep has it keep freed memory in any case.

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8  # malloc.h
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _HUGE_BYTES = 14, 15, 2 << 20  # sys/mman.h
_MADVISE = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_TOP_PAD = 2**17  # bytes by which the heap grows beyond what is asked for, by default
_MOST_BYTES = 2**31 - 2**27  # below the threshold from which glibc gives the heap's top back
_huge: list[tuple[int, int]] = []  # begin and bytes of reserved addresses


def keep_freed_memory() -> None:
    """Have glibc keep freed buffers, since fresh ones cost page faults, more than half of a big exchange's time.

    There is one arena, because those of other threads hold 64 MiB at most, and map larger buffers afresh each time.
    Arenas that exist already, as after the start of MPI, stay and are given to new threads, too: `use_main_arena`.
    """
    if os.environ.get("JAXMPI_ALLOCATOR") == "system":
        return
    _set({_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1})
    _grow_by_huge_pages()


def _grow_by_huge_pages() -> None:
    """Reserve up to 2 GiB of addresses, in which the heap grows by pages of 2 MiB in place of 4 KiB.

    Without it a program's first ten exchanges fault a tree or more each, until the heap has room for all sizes in
    every order. Addresses take no memory until they are written. glibc 2.35 has a setting for this, but only in the
    environment that a process starts with. Nothing is reserved where addresses are limited or count as memory, or
    where another allocator is loaded, whose blocks do not lie in the heap.
    """
    libc, limits = ctypes.CDLL(None), (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    is_limited = any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)
    with suppress(OSError):
        is_limited |= Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    if _huge or is_limited or not hasattr(libc, "mallopt"):
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], _MADVISE
    size = min(_MOST_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8)
    _set({_M_TOP_PAD: _TOP_PAD})
    # Until `free` nothing may call malloc: a block above this one would pin the heap's top.
    begin = libc.malloc(size)
    aligned = -(-(begin or 0) // _HUGE_BYTES) * _HUGE_BYTES
    is_top = bool(begin) and begin + size <= libc.sbrk(0) < begin + size + _HUGE_BYTES
    if is_top:
        libc.madvise(aligned, begin + size - aligned, _MADV_HUGEPAGE)
    libc.free(begin)
    if is_top:
        _huge.append((aligned, begin + size - aligned))
        _set({_M_TOP_PAD: size})  # what glibc leaves when it gives the top of the heap back


def use_main_arena() -> str:
    """Have XLA take buffers from the main arena, if threads that started before have made others; else say why not.

    XLA's threads would be given those arenas in turn, from which a buffer above 64 MiB costs page faults at each use.
    The main thread always has the main arena, so programs run in the thread that calls them.
    """
    libc = ctypes.CDLL(None)
    if os.environ.get("JAXMPI_ALLOCATOR") == "system" or not hasattr(libc, "malloc_info"):
        return ""
    libc.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile() as report:
        stream = ctypes.c_void_p(libc.fdopen(os.dup(report.fileno()), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        report.seek(0)
        if report.read().count(b"<heap nr=") == 1:
            return ""
    import jax

    if not has_backend() and "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        return ""
    return (
        "threads that started before jaxmpi.world() have arenas in which a buffer above 64 MiB costs page faults "
        "at each use; set MALLOC_ARENA_MAX=1 for all ranks, or call jaxmpi.world() before the first JAX array"
    )


def give_back_at_once() -> None:
    """Have glibc unmap each buffer of 1 MiB or more when freed."""
    for begin, size in _huge:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = _MADVISE
        madvise(begin, size, _MADV_NOHUGEPAGE)  # else the kernel may fill holes of given back pages again
    _huge.clear()
    _set({_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 2**20, _M_TRIM_THRESHOLD: 2**21, _M_TOP_PAD: _TOP_PAD})
    give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Return freed memory to the kernel now, as after a run's start."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    if _huge:  # these addresses are given back as well
        _huge.clear()
        _grow_by_huge_pages()


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        for name, value in options.items():
            mallopt(name, value)


# ---------------------------------------------------------------- cores

QUOTA = Path("/sys/fs/cgroup/cpu.max")
_before_sharing: set[int] = set()  # cores that this process had before it took its share


def core_mask() -> list[int]:
    """The cores that this process may use; none if they are unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def cores() -> int:
    """Number of cores that affinity and a container's quota allow this process."""
    return min(len(core_mask()) or os.cpu_count() or 1, quota_cores())


def rank_cores() -> int:
    """Number of cores of this rank, at least 1: its own, or its part of those that it shares with ranks of its host."""
    launch = launched()
    return min(cores(), max(1, min(os.cpu_count() or 1, quota_cores()) // (launch.local_size if launch else 1)))


def quota_cores() -> int:
    """Whole cores, at least 1, of a control group's quota; without one the host's."""
    with suppress(OSError, ValueError):  # there is no control group, or its quota is "max"
        quota, period = map(int, QUOTA.read_text().split())
        return max(1, quota // period)
    return os.cpu_count() or 1


def pin_cores(local_rank: int, local_size: int) -> None:
    """Bind this rank to its share of the host's cores; one that was given a part of the cores keeps that part."""
    mask = core_mask()
    if len(mask) == (os.cpu_count() or 1) and local_rank < local_size:
        _bind_to_share(mask, local_rank, local_size)


def divide_mask(masks: Sequence[Sequence[int]], local_rank: int) -> None:
    """Take a share of cores that several ranks have, as in containers."""
    mask = masks[local_rank]
    sharing = [rank for rank, other in enumerate(masks) if other == mask]
    if mask and len(sharing) > 1:
        _bind_to_share(mask, sharing.index(local_rank), len(sharing))


def _bind_to_share(mask: Sequence[int], rank: int, size: int) -> None:
    """Bind to one of `size` shares of these cores; to all of them if neither number divides the other."""
    _before_sharing.update(mask)
    if len(mask) % size == 0:
        share = len(mask) // size
        os.sched_setaffinity(0, mask[rank * share : (rank + 1) * share])
    elif size % len(mask) == 0:
        os.sched_setaffinity(0, {mask[rank % len(mask)]})


def unbind() -> None:
    """Let threads use all cores again if this rank's share is one core.

    This is for ranks that do not keep step: bound ones that share a core with others, or with a server, would have less
    of the machine than those on a core of their own.
    """
    if not _before_sharing or len(os.sched_getaffinity(0)) > 1:
        return
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), _before_sharing)


# ---------------------------------------------------------------- devices

MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # share of a GPU's memory that JAX takes when its device starts
_share = ""  # value that `share_gpu` has set, to distinguish it from the user's


def has_backend() -> bool:
    """Return True if a device of JAX has started."""
    from jax._src import xla_bridge  # nothing public shows it without starting one

    return xla_bridge.backends_are_initialized()


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by CUDA's numbers or names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    names = (name.strip() for name in visible.split(","))
    return list(itertools.takewhile(lambda name: name and name != "-1", names))  # CUDA reads no further


def pin_gpu(local_rank: int, local_size: int, devices: int = 1) -> None:
    """Take this rank's GPUs, and its part of their memory.

    This assumes that all ranks of the host see the same GPUs. A launcher may give each rank its own; `share_gpu`
    corrects that once ranks can communicate.

    Raises:
        UsageError: a GPU has started already, and there are several.
    """
    gpus = visible_gpus()
    if len(gpus) > 1:
        import jax

        if has_backend() and jax.default_backend() == "gpu":
            raise UsageError(
                "JAX's device has started before jaxmpi could give this rank a GPU of its own: all ranks of the host "
                "would be on the first; call jaxmpi.world() before the first JAX array"
            )
        chosen = {(local_rank * devices + i) % len(gpus) for i in range(devices)}
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, sorted(chosen))))
    if gpus:
        share_gpu(-(-local_size * devices // len(gpus)))


def my_gpu() -> str:
    """Name of this rank's GPU within its host; empty if none."""
    launch, gpus = launched(), visible_gpus()
    if launch is None or not gpus:
        return ""
    gpu = gpus[launch.local_rank % len(gpus)]
    in_step = int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) if launch.launcher == "srun" else 0
    is_by_task = in_step >= launch.local_size * len(gpus)  # then every rank may call its own "0"
    return f"{gpu} of local rank {launch.local_rank}" if is_by_task else gpu


def share_gpu(ranks: int) -> None:
    """Give each of `ranks` processes on a GPU an equal memory share; a share that the user has set stays.

    It counts only before the device starts.
    """
    global _share
    if os.environ.get(MEMORY_SHARE, _share) != _share:
        return
    _share = f"{0.9 / ranks:.3f}" if ranks > 1 else ""
    os.environ.pop(MEMORY_SHARE, None)
    if _share:
        os.environ[MEMORY_SHARE] = _share


def take_devices(devices: int) -> None:
    """Before MPI starts, take `devices` GPUs or CPU devices for this rank."""
    launch = launched()
    if devices > 1 and launch is not None and launch.size > 1:
        pin_gpu(launch.local_rank, launch.local_size, devices)
    make_cpu_devices(devices)


def make_cpu_devices(devices: int) -> None:
    """Let the CPU backend offer `devices` devices; GPUs stay as they are."""
    if devices == 1:
        return
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # the backend has started: what it has must do
        if (have := jax.local_device_count()) < devices:
            raise UsageError(
                f"asked for {devices} devices after the device started with {have}; set it first: before the first "
                "JAX array, in a notebook after a restart; or train in processes, jaxmpi.Trainer(experiment, workers=N)"
            ) from None


# ---------------------------------------------------------------- other processes (Linux)


def stat_of(process: int) -> list[str]:
    """Fields of a process behind its name: state, who started it, ...

    Raises:
        OSError: it is gone, or not shown.
    """
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()  # a name may hold blanks and brackets of its own


def end_with_parent(parent: int) -> None:
    """Have Linux send this process SIGTERM when its parent ends."""
    pr_set_pdeathsig = 1
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before
        os._exit(128 + signal.SIGTERM)
