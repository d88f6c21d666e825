"""mpi4jax 0.9's API on jaxmpi: same names, order of arguments and results.

    import jaxmpi.compat.mpi4jax as mpi4jax

Its calls are compared between ranks, messages say what they are, and more is differentiable: docs/collectives.md. Ranks
may make the same call at different lines, as in branches on the rank: all but lines is compared. A communicator other
than `MPI.COMM_WORLD` is known to jaxmpi from its first call on. At that call all its ranks come together. `MPI.LAND`
and the like give 0 and 1, as MPI does.
"""

from typing import Any

import jax

from jaxmpi import collectives
from jaxmpi.collectives import NOBODY
from jaxmpi.collectives.call import lines_may_differ
from jaxmpi.comm.mpi import communicator
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.to_jax import to_jax
from jaxmpi.runtime import failures, prepare

if not failures.has_backend():  # before the program's first array: such a program never calls `jaxmpi.world()`
    prepare.prepare()

__version__ = "0.9.1"
_NOT_SET: Any = object()
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


@lines_may_differ()
def allgather(x: Any, *, comm: Any = None, token: Any = _NOT_SET) -> jax.Array:
    """`collectives.allgather`."""
    _check_token(token)
    return collectives.allgather(x, comm=comm)


@lines_may_differ()
def allreduce(x: Any, op: Any, *, comm: Any = None, token: Any = _NOT_SET) -> jax.Array:
    """`collectives.allreduce`, by an `mpi4py.MPI.Op`."""
    _check_token(token)
    return _reduced(collectives.allreduce, x, op, comm)


@lines_may_differ()
def alltoall(x: Any, *, comm: Any = None, token: Any = _NOT_SET) -> jax.Array:
    """`collectives.alltoall`."""
    _check_token(token)
    return collectives.alltoall(x, comm=comm)


@lines_may_differ()
def barrier(*, comm: Any = None, token: Any = _NOT_SET) -> None:
    """`collectives.barrier`."""
    _check_token(token)
    collectives.barrier(comm=comm)


@lines_may_differ()
def bcast(x: Any, root: int, *, comm: Any = None, token: Any = _NOT_SET) -> jax.Array:
    """`collectives.bcast`."""
    _check_token(token)
    return collectives.bcast(x, root, comm=comm)


@lines_may_differ()
def gather(x: Any, root: int, *, comm: Any = None, token: Any = _NOT_SET) -> jax.Array:
    """`collectives.gather`."""
    _check_token(token)
    return collectives.gather(x, root, comm=comm)


@lines_may_differ()
def recv(
    x: Any, source: Any = None, *, tag: Any = None, comm: Any = None, status: Any = None, token: Any = _NOT_SET
) -> jax.Array:
    """`collectives.recv`; `MPI.ANY_SOURCE`, `MPI.ANY_TAG`, `MPI.PROC_NULL` as in MPI."""
    _check_token(token)
    return collectives.recv(x, _rank(source), tag=_tag(tag), comm=comm, status=status)


@lines_may_differ()
def reduce(x: Any, op: Any, root: int, *, comm: Any = None, token: Any = _NOT_SET) -> jax.Array:
    """`collectives.reduce`, by an `mpi4py.MPI.Op`."""
    _check_token(token)
    return _reduced(collectives.reduce, x, op, comm, root)


@lines_may_differ()
def scan(x: Any, op: Any, *, comm: Any = None, token: Any = _NOT_SET) -> jax.Array:
    """`collectives.scan`, by an `mpi4py.MPI.Op`."""
    _check_token(token)
    return _reduced(collectives.scan, x, op, comm)


@lines_may_differ()
def scatter(x: Any, root: int, *, comm: Any = None, token: Any = _NOT_SET) -> jax.Array:
    """`collectives.scatter`."""
    _check_token(token)
    return collectives.scatter(x, root, comm=comm)


@lines_may_differ()
def send(x: Any, dest: int, *, tag: int = 0, comm: Any = None, token: Any = _NOT_SET) -> None:
    """`collectives.send`; `MPI.PROC_NULL` as in MPI."""
    _check_token(token)
    collectives.send(x, _destination("send", dest), tag=tag, comm=comm)


@lines_may_differ()
def sendrecv(
    sendbuf: Any,
    recvbuf: Any,
    source: Any,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: Any = None,
    comm: Any = None,
    status: Any = None,
    token: Any = _NOT_SET,
) -> jax.Array:
    """`collectives.sendrecv`; `MPI.ANY_SOURCE`, `MPI.ANY_TAG`, `MPI.PROC_NULL` as in MPI."""
    _check_token(token)
    return collectives.sendrecv(
        sendbuf,
        recvbuf,
        _rank(source),
        _destination("sendrecv", dest),
        sendtag=sendtag,
        recvtag=_tag(recvtag),
        comm=comm,
        status=status,
    )


def has_cuda_support() -> bool:
    """Return True if mpi4jax, which moves GPUs' arrays, was built with CUDA."""
    import mpi4jax

    return mpi4jax.has_cuda_support()


def has_sycl_support() -> bool:
    """Return True if mpi4jax, which moves GPUs' arrays, was built with SYCL."""
    import mpi4jax

    return mpi4jax.has_sycl_support()


def _check_token(token: Any) -> None:
    if token is not _NOT_SET:
        raise RuntimeError("got a token; mpi4jax takes none since 0.8.0, and returns none: leave it out")


def _reduced(function: Any, x: Any, op: Any, comm: Any, *root: int) -> jax.Array:
    """A reduction by an operation of mpi4py."""
    from mpi4py import MPI

    words = [(MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MAX, "max"), (MPI.MIN, "min")]
    words += [(MPI.BAND, "and"), (MPI.BOR, "or"), (MPI.BXOR, "xor")]
    logical = [(MPI.LAND, "and"), (MPI.LOR, "or"), (MPI.LXOR, "xor")]
    for known, word in words:
        if op == known:
            return function(x, word, *root, comm=comm)
    for known, word in logical:
        if op == known:
            array = to_jax(function.__name__, x)
            result = function(array != 0, word, *root, comm=comm).astype(array.dtype)
            return array if root and communicator(comm).rank != root[0] else result
    raise UsageError(f"{function.__name__}: got op {op!r}; expected one of mpi4py's, without MINLOC and MAXLOC")


def _destination(operation: str, dest: Any) -> Any:
    """A rank that a message goes to, as `collectives` has it."""
    rank = _rank(dest)
    check(
        rank is not None,
        f"{operation}: dest: got {dest}; expected a rank, or MPI.PROC_NULL to send nothing: MPI.ANY_SOURCE is a source",
    )
    return rank


def _rank(rank: Any) -> Any:
    """A rank as `collectives` has it: None is any."""
    from mpi4py import MPI

    if rank is None or rank == MPI.ANY_SOURCE:
        return None
    return NOBODY if rank == MPI.PROC_NULL else rank


def _tag(tag: Any) -> Any:
    from mpi4py import MPI

    return None if tag is None or tag == MPI.ANY_TAG else tag
