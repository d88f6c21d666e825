"""Launchers: which one started this process, its rank and the job's size."""

import os
from typing import NamedTuple


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


# ---------------------------------------------------------------- hooks


def my_rank() -> int:
    """This process's rank by the launcher's word, 0 where there is no launcher; needs no MPI."""
    here = launched()
    return here.rank if here else 0


def launched_workers() -> int:
    """Ranks of this job by the launcher's word, 1 where there is none; needs no MPI. For recipes that depend on it."""
    here = launched()
    return here.size if here else 1
