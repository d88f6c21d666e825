"""MPI's functions in programs: mpi4jax's or, where it cannot be imported, those of this module, of the same names.

These call mpi4py through Python, on a GPU with copies on the host.
"""

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmpi.runtime import host_callbacks, process

CALL = "jaxmpi: a function of mpi4py"
_objects: dict[int, Any] = {}  # communicators, operations and statuses by number, which programs hold
_numbers = itertools.count()  # a number is not used again: a program of a communicator that was freed finds nothing


@functools.cache
def mpi_calls() -> Any:
    """The module mpi4jax, or this one."""
    try:
        import mpi4jax

        return mpi4jax
    except ImportError as error:
        if process.my_rank() == 0:
            slow = "outside programs, on GPUs and without a C compiler they call MPI through Python, which takes longer"
            print(f"jaxmpi: mpi4jax cannot be imported ({error}): {slow}", file=sys.stderr, flush=True)
    host_callbacks.register(CALL, _run_by_number, ends_job=True)
    return sys.modules[__name__]


def run_mpi(
    mpi: Any,
    operands: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    kind: str,
    op: Any = None,
    root: int | None = None,
    source: int | None = None,
    dest: int | None = None,
    sendtag: int = 0,
    recvtag: int = 0,
    status: Any = None,
) -> None:
    """Call a function of mpi4py's communicator that sends an array, fills one, or both.

    Without an operation arrays move as integers of equal size, for which MPI has types. A sendrecv without a source
    gives zeros.
    """
    from mpi4py import MPI

    arrays = [array.reshape(-1) for array in (*operands, *results)]
    if op is None or arrays[0].dtype == bool:
        arrays = [array.view(f"u{min(array.itemsize, 8)}") for array in arrays]
    x, y = arrays[0] if operands else None, arrays[-1] if results else None
    if kind == "sendrecv":
        if y is not None:
            y[...] = 0
        to, origin = (MPI.PROC_NULL if rank is None else rank for rank in (dest, source))
        mpi.Sendrecv(x, to, sendtag, y, origin, recvtag, status)
    elif kind == "bcast":
        assert y is not None
        np.copyto(y, arrays[0])
        mpi.Bcast(y, root)
    elif kind == "barrier":
        mpi.Barrier()
    else:
        getattr(mpi, kind.capitalize())(x, y, *(value for value in (op, root) if value is not None))


def _run_by_number(operands: Sequence, results: Sequence, comm: int, op: int, status: int, **options: Any) -> None:
    run_mpi(_objects[comm], operands, results, op=_objects[op], status=_objects[status], **options)


def _call(
    kind: str, comm: Any, x: Any, like: Any, op: Any = None, status: Any = None, **options: Any
) -> list[jax.Array]:
    """Call it in a program: send x, unless it is None, and fill an array like this, unless that is None."""
    options |= {"comm": _number(comm), "op": _number(op), "status": _number(status)}
    operands, results = ([] if array is None else [array] for array in (x, like))
    return host_callbacks.call(CALL, operands, results, kind=kind, **options)


def _number(thing: Any) -> int:
    number = next((number for number, known in _objects.items() if known is thing), -1)
    if number < 0:
        _objects[number := next(_numbers)] = thing
    return number


def forget(comm: Any) -> None:
    """Let go of a communicator; a program that still calls it ends the job."""
    _objects.pop(_number(comm))


# ---------------------------------------------------------------- as mpi4jax has them


def _collective(kind: str, x: Any, op: Any = None, root: int | None = None, *, comm: Any) -> jax.Array:
    is_root = root in (None, comm.rank)
    shape = (comm.size, *x.shape) if "gather" in kind else x.shape[1:] if kind == "scatter" and is_root else x.shape
    like = jax.ShapeDtypeStruct(shape, x.dtype) if is_root or kind in ("bcast", "scatter") else None
    options = {} if root is None else {"root": root}
    return [*_call(kind, comm, x if is_root or kind != "scatter" else None, like, op, **options), x][0]


allreduce, reduce, scan, bcast, allgather, gather, scatter, alltoall = (
    functools.partial(_collective, kind)
    for kind in ("allreduce", "reduce", "scan", "bcast", "allgather", "gather", "scatter", "alltoall")
)


def sendrecv(x: Any, place: Any, *ranks: int, comm: Any, status: Any = None, **options: int) -> jax.Array:
    """Send x, and receive an array like `place`; ranks are (source, dest)."""
    options |= dict(zip(("source", "dest"), ranks, strict=False))
    return _call("sendrecv", comm, x, jax.ShapeDtypeStruct(place.shape, place.dtype), status=status, **options)[0]


def send(x: Any, dest: int, tag: int = 0, *, comm: Any) -> None:
    """Send x."""
    _call("sendrecv", comm, x, None, dest=dest, sendtag=tag)


def recv(x: Any, source: int, tag: int = 0, *, comm: Any, status: Any = None) -> jax.Array:
    """Receive an array like x."""
    return sendrecv(None, x, source, recvtag=tag, comm=comm, status=status)


def barrier(*, comm: Any) -> None:
    """Wait for all."""
    _call("barrier", comm, None, None)


def has_cuda_support() -> bool:
    """Return False: mpi4py gets arrays on the host."""
    return False


has_sycl_support = has_cuda_support
