"""Launchers: which one started this process, its rank and the job's size."""

import contextlib
import ctypes
import os
import pwd
import signal
from pathlib import Path
from typing import NamedTuple


class Launch(NamedTuple):
    """This process's place in the job, from the launcher's environment."""

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
# Variables of other launchers: a rank, without the size of the job.
MARKS = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "FLUX_TASK_RANK")
VARIABLES = {name for names in LAUNCHERS.values() for name in names} | {*MARKS}


def launched() -> Launch | None:
    """This process's launcher, rank and size; None without a launcher."""
    for launcher, names in LAUNCHERS.items():
        rank, size, local_rank, local_size = (os.environ.get(name) for name in names)
        if rank is None or size is None:
            continue
        if local_rank is None and os.environ.get("SLURM_STEP_NUM_TASKS") == size:  # srun --mpi=pmi2 speaks PMI, too
            local_rank, local_size = (os.environ.get(name) for name in LAUNCHERS["srun"][2:])
        # srun writes "4(x2)" or "4,3": the tasks of the first host stand for all.
        local = (local_size or size).split("(")[0].split(",")[0]
        return Launch(
            launcher=launcher, rank=int(rank), size=int(size), local_rank=int(local_rank or rank), local_size=int(local)
        )
    return None


# ---------------------------------------------------------------- ranks


def my_rank() -> int:
    """This process's rank by the launcher's variables, without MPI; else 0."""
    here = launched()
    return here.rank if here else 0


def launched_workers() -> int:
    """The job's size by the launcher's variables, before MPI starts; else 1."""
    here = launched()
    return here.size if here else 1


def ranks_under(pid: int) -> dict[int, int]:
    """A launcher's processes on this host by rank, except spawned ones (Linux)."""
    variables = tuple(f"{names[0]}=".encode() for names in LAUNCHERS.values())
    jobs = b"PMIX_NAMESPACE="  # Open MPI's job: the launcher's own ends with @1, of spawned processes with @2, ...
    found: dict[int, int] = {}
    waiting = [pid]
    while waiting:
        for child in children_of(waiting.pop()):
            with contextlib.suppress(OSError):  # it has ended
                environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                ranks = [int(line.partition(b"=")[2]) for line in environ if line.startswith(variables)]
                is_spawned = any(line.startswith(jobs) and not line.endswith(b"@1") for line in environ)
                if not ranks:
                    waiting.append(child)
                elif not is_spawned:
                    found[ranks[0]] = child
    return found


def children_of(pid: int) -> list[int]:
    """Processes that any thread of a process has started (Linux)."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def set_home() -> None:
    """Set HOME if the environment lacks it, as in a container or a service: Open MPI does not start without it."""
    if not os.environ.get("HOME"):
        try:
            os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a user without an entry
            os.environ["HOME"] = "/nonexistent"


def end_with_parent(parent: int) -> None:
    """Have Linux send this process SIGTERM when its parent ends."""
    pr_set_pdeathsig = 1
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before
        os._exit(128 + signal.SIGTERM)
