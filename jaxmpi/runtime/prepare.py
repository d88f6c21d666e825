"""Process setup before JAX starts its backend and MPI its threads."""

import os
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path

from jaxmpi.runtime.affinity import core_mask, cores, idle_cores, pin_cores
from jaxmpi.runtime.allocator import keep_freed_memory, use_main_arena
from jaxmpi.runtime.caches import use_compilation_cache
from jaxmpi.runtime.device_setup import pin_gpu
from jaxmpi.runtime.job_folder import BEGAN, OWN, SEGMENTS, lock_folder, mark, remove_stale_folders
from jaxmpi.runtime.launchers import Launch, launched


def prepare() -> None:
    """Set allocator, cores and device once, before JAX's first device call."""
    if _prepared.is_set():
        return
    _prepared.set()
    keep_freed_memory()
    here = launched()
    if here is not None and here.size > 1:
        if (trouble := use_main_arena()) and here.rank == 0:
            print(f"jaxmpi: {trouble}", file=sys.stderr, flush=True)
        # Ranks compile at the same time: what one finds half written by another it compiles for itself.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry", UserWarning)
        tune_mpi(here)
        if here.rank == 0 and (idle := idle_cores(len(core_mask()), os.cpu_count() or 1, here.local_size)):
            print(f"jaxmpi: {idle}", file=sys.stderr, flush=True)
        pin_cores(here.local_rank, here.local_size)
        pin_gpu(here.local_rank, here.local_size)
    use_compilation_cache()
    os.environ.setdefault("MPI4JAX_USE_CUDA_MPI", "0")  # else each process with a GPU warns that it is not set


_prepared = threading.Event()


def tune_mpi(here: Launch) -> None:
    """Set Open MPI's defaults before it starts; the user's settings stay."""
    if here.local_size < here.size:  # else ranks of other hosts abort, and are blamed, before a death is reported
        os.environ.setdefault("OMPI_MCA_opal_abort_delay", "1")  # seconds
    if here.local_size > cores():  # a rank that spins while it waits takes the core that another needs
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    folder = Path(os.environ.get(SEGMENTS, ""))
    if folder.name.startswith(OWN):
        with suppress(OSError):  # without such memory Open MPI takes other
            remove_stale_folders(folder.parent)
            lock_folder(folder)
        mark(BEGAN)
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # prints an error a process if there is no such network
