"""mpi4jax 0.9's API: the same names, order of arguments and results. Programs change only their import line.

    import jaxmpi.compat.mpi4jax as mpi4jax

Unlike mpi4jax, ranks compare their calls, messages have headers, and more is differentiable: docs/collectives.md. Ranks
may make the same call at different lines, as in branches on the rank, so lines are not compared. A communicator other
than `MPI.COMM_WORLD` becomes known to jaxmpi at its first call, which all its ranks make together. `MPI.LAND` and the
like give 0 and 1, as in MPI.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxmpi.collectives import api
from jaxmpi.collectives.arguments import arrays_of, joint_operation
from jaxmpi.collectives.call import MAY_DIFFER, NOBODY
from jaxmpi.collectives.table import ARITHMETIC
from jaxmpi.comm.call_comparison import OPS
from jaxmpi.comm.mpi_calls import mpi_calls
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import process

if not process.has_backend():  # before the program's first array: such a program never calls `jaxmpi.world()`
    process.prepare()

__version__ = "0.9.1"
__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bcast",
    "gather",
    "has_cuda_support",
    "has_sycl_support",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]
WORDS = dict(zip(OPS, ARITHMETIC, strict=True))
LOGICAL = {"LAND": "and", "LOR": "or", "LXOR": "xor"}


def _as_mpi4jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse tokens as mpi4jax does, and leave source lines out of the comparison between ranks."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "token" in kwargs:
            raise RuntimeError("got a token; mpi4jax takes none since 0.8.0, and returns none: leave it out")
        token = MAY_DIFFER.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            MAY_DIFFER.reset(token)

    return call


allgather = _as_mpi4jax(api.allgather)
alltoall = _as_mpi4jax(api.alltoall)
barrier = _as_mpi4jax(api.barrier)
bcast = _as_mpi4jax(api.bcast)
gather = _as_mpi4jax(api.gather)
scatter = _as_mpi4jax(api.scatter)


@_as_mpi4jax
def allreduce(x: Any, op: Any, *, comm: Any = None) -> jax.Array:
    """`collectives.allreduce`, by an `mpi4py.MPI.Op`."""
    return _reduce_by(op, api.allreduce, x, comm)


@_as_mpi4jax
def reduce(x: Any, op: Any, root: int, *, comm: Any = None) -> jax.Array:
    """`collectives.reduce`, by an `mpi4py.MPI.Op`."""
    return _reduce_by(op, api.reduce, x, comm, root=root)


@_as_mpi4jax
def scan(x: Any, op: Any, *, comm: Any = None) -> jax.Array:
    """`collectives.scan`, by an `mpi4py.MPI.Op`."""
    return _reduce_by(op, api.scan, x, comm)


@_as_mpi4jax
def recv(x: Any, source: Any = None, *, tag: Any = None, comm: Any = None, status: Any = None) -> jax.Array:
    """`collectives.recv`; `MPI.ANY_SOURCE`, `MPI.ANY_TAG`, `MPI.PROC_NULL` as in MPI."""
    return api.recv(x, _rank(source, may_be_any=True), tag=_tag(tag), comm=comm, status=status)


@_as_mpi4jax
def send(x: Any, dest: int, *, tag: int = 0, comm: Any = None) -> None:
    """`collectives.send`; `MPI.PROC_NULL` as in MPI."""
    api.send(x, _rank(dest), tag=tag, comm=comm)


@_as_mpi4jax
def sendrecv(
    sendbuf: Any, recvbuf: Any, source: Any, dest: int, *, sendtag: int = 0, recvtag: Any = None, **options: Any
) -> jax.Array:
    """`collectives.sendrecv`; `MPI.ANY_SOURCE`, `MPI.ANY_TAG`, `MPI.PROC_NULL` as in MPI."""
    ranks = _rank(source, may_be_any=True), _rank(dest)
    return api.sendrecv(sendbuf, recvbuf, *ranks, sendtag=sendtag, recvtag=_tag(recvtag), **options)


def has_cuda_support() -> bool:
    """Return True if mpi4jax, which moves GPUs' arrays, was built with CUDA."""
    return mpi_calls().has_cuda_support()


def has_sycl_support() -> bool:
    """Return True if mpi4jax, which moves GPUs' arrays, was built with SYCL."""
    return mpi_calls().has_sycl_support()


def _reduce_by(op: Any, function: Callable[..., Any], x: Any, comm: Any, **options: Any) -> jax.Array:
    """Reduce by an operation of mpi4py."""
    from mpi4py import MPI

    operation = function.__name__
    with joint_operation(operation, comm) as comm:
        name = next((name for name in (*WORDS, *LOGICAL) if op == getattr(MPI, name)), None)
        if name in WORDS:
            return function(x, WORDS[name], comm=comm, **options)
        if name not in LOGICAL:
            raise UsageError(f"{operation}: got op {op!r}; expected one of mpi4py's, without MINLOC and MAXLOC")
        arrays = jax.tree.unflatten(jax.tree.structure(x), arrays_of(operation, x, comm))
        are_true = jax.tree.map(lambda array: array != 0, arrays)
        results = function(are_true, LOGICAL[name], comm=comm, **options)
        is_elsewhere = comm.rank != options.get("root", comm.rank)
        return arrays if is_elsewhere else jax.tree.map(lambda y, array: y.astype(array.dtype), results, arrays)


def _rank(rank: Any, may_be_any: bool = False) -> Any:
    """A rank as `collectives` has it, where None is any."""
    from mpi4py import MPI

    if may_be_any and rank == MPI.ANY_SOURCE:
        return None
    return NOBODY if rank == MPI.PROC_NULL else rank


def _tag(tag: Any) -> Any:
    from mpi4py import MPI

    return None if tag == MPI.ANY_TAG else tag
