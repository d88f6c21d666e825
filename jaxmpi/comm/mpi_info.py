"""Facts about the MPI library at hand: version, threads, CUDA."""

import ctypes
from pathlib import Path
from typing import Any

from jaxmpi.core.env import building_for_mpicc
from jaxmpi.core.errors import check
from jaxmpi.runtime import process


def mpi_facts() -> dict[str, str]:
    """Vendor, version, thread level and CUDA support of mpi4py's MPI.

    A single process does not start MPI for it. Unknown facts are left out; without an MPI there are none.
    """
    alone = process.launched_workers() == 1
    try:
        import mpi4py

        if alone:
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return {}
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    levels = {getattr(MPI, f"THREAD_{name}"): f"MPI_THREAD_{name}" for name in names}
    facts = {
        "library": library_of(MPI.Get_library_version()),
        "vendor": f"{MPI.get_vendor()[0]} {'.'.join(map(str, MPI.get_vendor()[1]))}",
        "standard": ".".join(map(str, MPI.Get_version())),
    }
    return facts if alone else {**facts, "threads": levels[MPI.Query_thread()], "cuda": cuda_support()}


def cuda_support() -> str:
    """CUDA support of Open MPI, in words; "unknown" for other MPIs."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libmpi.so" in line}
    for path in paths:
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None:
            return "built with CUDA" if query() else "built without CUDA"
    return "unknown"


def thread_level(mpi: Any) -> int:
    """Thread level of MPI.

    Raises:
        UsageError: less than THREAD_SERIALIZED.
    """
    level = mpi.Query_thread()
    check(
        level >= mpi.THREAD_SERIALIZED,
        "MPI lets the main thread alone call it (MPI_THREAD_FUNNELED or less), but XLA exchanges from threads of its "
        "own; use an MPI built with thread support, and leave mpi4py.rc.thread_level as it is",
    )
    return level


def library_of(version: str) -> str:
    """Name and release out of the text of MPI_Get_library_version.

    Open MPI separates facts by commas, MPICH by lines and tabs.
    """
    return " ".join(version.splitlines()[0].split(",")[0].split())


def check_launcher(launch: process.Launch | None, mpi_size: int, library: str) -> None:
    """Refuse an MPI whose size is not the launcher's.

    This is the commonest failure on clusters.
    """
    check(
        launch is None or launch.size == mpi_size,
        f"the launcher ({launch.launcher if launch else ''}) started {launch.size if launch else 1} ranks, but MPI "
        f"({library_of(library)}) sees {mpi_size}: they are of different families. Use this library's own "
        f"mpirun, or build for the launcher's MPI, with its mpicc on PATH: {building_for_mpicc()}",
    )
