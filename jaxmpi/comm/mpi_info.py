"""Facts about the MPI library at hand: version, threads, CUDA; and whether it fits the launcher."""

from typing import Any

from jaxmpi.comm.c_handlers import find_function
from jaxmpi.core.env import building_for_mpicc
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime.process import Launch, launched_workers


def mpi_facts() -> dict[str, str]:
    """Vendor, version, thread level and CUDA support of mpi4py's MPI.

    A single process does not start MPI for it. Unknown facts are left out; without an MPI there are none.
    """
    is_alone = launched_workers() == 1
    try:
        import mpi4py

        if is_alone:
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return {}
    facts = {
        "library": library_of(MPI.Get_library_version()),
        "vendor": f"{MPI.get_vendor()[0]} {'.'.join(map(str, MPI.get_vendor()[1]))}",
        "standard": ".".join(map(str, MPI.Get_version())),
    }
    if is_alone:
        return facts
    levels = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    return {**facts, "threads": f"MPI_THREAD_{levels[MPI.Query_thread()]}", "cuda": _cuda_support()}


def _cuda_support() -> str:
    """CUDA support of Open MPI, in words; "unknown" for other MPIs."""
    query = find_function("MPIX_Query_cuda_support")
    return "unknown" if query is None else "built with CUDA" if query() else "built without CUDA"


def thread_level(mpi: Any) -> int:
    """Thread level of MPI, at least THREAD_SERIALIZED."""
    if (level := mpi.Query_thread()) < mpi.THREAD_SERIALIZED:
        raise UsageError(
            "MPI lets the main thread alone call it (MPI_THREAD_FUNNELED or less), but XLA exchanges from threads of "
            "its own; use an MPI built with thread support, and leave mpi4py.rc.thread_level as it is"
        )
    return level


def library_of(version: str) -> str:
    """Name and release out of MPI_Get_library_version, whose facts commas separate, or in MPICH lines and tabs."""
    return " ".join(version.splitlines()[0].split(",")[0].split())


def check_launcher(launch: Launch | None, mpi_size: int, library: str) -> None:
    """Refuse an MPI whose size is not the launcher's, the commonest failure on clusters."""
    if launch is not None and launch.size != mpi_size:
        raise UsageError(
            f"the launcher ({launch.launcher}) started {launch.size} ranks, but MPI ({library_of(library)}) sees "
            f"{mpi_size}: they are of different families. Use this library's own mpirun, or build for the launcher's "
            f"MPI, with its mpicc on PATH: {building_for_mpicc()}"
        )
