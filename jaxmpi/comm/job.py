"""This job's control plane, made at first use; MPI starts then.

The calls for users that need no more than it are here too: `same_on_all_ranks` and `broadcast`. Importing mpi4py starts
MPI, so it happens inside functions.
"""

import atexit
import functools
import os
import re
import sys
import warnings
from typing import Any

from jaxmpi.comm.agreement import check_may_send, refuse_together
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.mpi_calls import mpi_calls
from jaxmpi.comm.mpi_info import library_of
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.core.env import building_for_mpicc, getting_mpi
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, as_given, has_ranks_own
from jaxmpi.core.random_keys import packed, unpacked
from jaxmpi.runtime import failures, job_folder, process

Processes = SoloProcesses | MpiProcesses


@functools.cache
def processes() -> Processes:
    """The control plane of this job; starts MPI for several ranks.

    Raises:
        UsageError: mpi4py is missing; it, mpi4jax and the launcher are not of one MPI; or MPI has several ranks of
            a launcher that is not known.
    """
    launch = process.launched()
    if launch is None:
        _check_alone()
    if launch is None or launch.size == 1:
        return SoloProcesses()
    if process.has_backend() and not process._prepared.is_set():
        warnings.warn(
            "JAX's device started before jaxmpi.world(), so this rank keeps all cores of its host and its first GPU, "
            "as all others do; call it before the first JAX array",
            stacklevel=3,  # `world`'s caller
        )
    process.prepare()
    try:
        start_mpi()
    except UsageError as error:
        raise UsageError(f"{launch.launcher} started {launch.size} ranks, but {error}") from error
    job_folder.mark(job_folder.MPI_RUNS)
    return MpiProcesses()


def start_mpi() -> None:
    """Import mpi4py and mpi4jax, which starts MPI; an exit hook ends it, unless the script has done so.

    Raises:
        UsageError: mpi4py is missing, or they were built for two MPIs.
    """
    process.set_home()
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:  # else it ends MPI in C code, in a child of `os.fork` too, which then hangs
            mpi4py.rc.finalize = False
            with failures.start_limit():
                import mpi4py.MPI
            # Registered before mpi4jax's hook, so that it runs after that, which waits for programs that communicate.
            atexit.register(lambda: mpi4py.MPI.Is_finalized() or mpi4py.MPI.Finalize())
    except (ImportError, RuntimeError) as error:  # the second from a wheel that finds no library
        raise UsageError(f"mpi4py cannot be imported ({str(error).splitlines()[0]}); {getting_mpi()}") from error
    try:
        mpi_calls()
    except RuntimeError as error:
        if not (built := re.search(r"Build-time MPI: *(.*)", str(error))):
            raise
        raise UsageError(
            f"mpi4jax was built for {library_of(built[1])}, and mpi4py runs with "
            f"{library_of(mpi4py.MPI.Get_library_version())}; build both for the MPI whose mpicc is on PATH: "
            f"{building_for_mpicc()}"
        ) from error


def _check_alone() -> None:
    """Refuse MPI ranks of an unknown launcher, which would each work alone."""
    mpi = sys.modules.get("mpi4py.MPI")
    ranks = mpi.COMM_WORLD.size if mpi and mpi.Is_initialized() and not mpi.Is_finalized() else 1
    launchers = ", or ".join(f"{rank} and {size}" for rank, size, *_ in process.LAUNCHERS.values())
    way_out = f"expected {launchers}: set a pair of them for each rank, as in a script that the launcher starts"
    if ranks > 1:
        raise UsageError(
            f"MPI has {ranks} ranks, but their launcher sets no variable by which they are known; {way_out}"
        )
    if marks := [name for name in process.MARKS if name in os.environ]:
        line = f"got {marks[0]}, as of a rank, but not the size of its job, so this process works alone; {way_out}"
        warnings.warn(line, stacklevel=4)  # the caller of `world`


def same_on_all_ranks(what: str, value: Any) -> None:
    """Check that all ranks give the same JSON value, outside jit.

    Communicates: 40 bytes a rank; the values if they differ.

    Raises:
        UsageError: on all ranks alike: rank, path, got, expected.
        TrainingError: who did not answer within the time limit.
    """
    check_may_send("jaxmpi.same_on_all_ranks")
    processes().assert_same(what, value)


def broadcast(tree: PyTree, root: int = 0) -> PyTree:
    """Return rank `root`'s tree on every rank; dtypes and shapes as given.

    Arrays of JAX, random keys too, come as such, as in the state of an NNX module; other leaves as NumPy arrays.

    Communicates: one broadcast a leaf over all ranks, after a comparison of structure, shapes and dtypes.

    Raises:
        UsageError: ranks gave trees of different structure; rank, path, got, expected. A state of `jaxmpi.sharded`.
    """
    check_may_send("jaxmpi.broadcast")
    with refuse_together(processes()):
        if has_ranks_own(tree):
            raise UsageError(
                "broadcast: got a state of jaxmpi.sharded, which is each rank's own; leave it out; its init makes it "
                "alike from equal params, and jaxmpi.Checkpoints restores it"
            )
        buffers = packed(tree)
        return unpacked(as_given(processes().bcast(buffers, root), buffers))
