"""The table of operations: equation, bytes sent, transpose, and MPI calls.

A row works on one array and on MPI ranks. Trees, dtypes and a single worker are `api`'s; derivatives and mapping are
`primitive`'s. In a row w is the number of ranks, r this one, n the bytes of x.

mpi4jax lacks some operations and dtypes. These are composed of those that it has: 16-bit floats are sent as integers. A
`reduce_scatter` is an all-to-all and a sum. Operations with counts are a message to each rank. An `exscan` is a scan
passed on by one rank.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi.collectives import compiled_messages, messages
from jaxmpi.collectives.call import MpiCall, from_mpi_dtype, shape_of, to_mpi_dtype
from jaxmpi.core.errors import check

# ---------------------------------------------------------------- reductions


def mpi_op(op: str) -> Any:
    """MPI's operation: bitwise, which on bools as 0 and 1 is logical."""
    from mpi4py import MPI

    ops = {"sum": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN}
    return (ops | {"and": MPI.BAND, "or": MPI.BOR, "xor": MPI.BXOR})[op]


COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": lax.add,
    "prod": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}


def neutral(op: str, dtype: Any) -> Any:
    """The number that changes no result of an operation."""
    if op in ("max", "min"):
        if dtype == jnp.bool_:
            return np.array(op == "min")
        if not jnp.issubdtype(dtype, jnp.floating):
            return np.array(jnp.iinfo(dtype).min if op == "max" else jnp.iinfo(dtype).max, dtype)
        infinity = np.array(-np.inf if op == "max" else np.inf, dtype)
        if np.isinf(infinity.astype(np.float32)):
            return infinity
        return np.array(jnp.finfo(dtype).min if op == "max" else jnp.finfo(dtype).max, dtype)  # it has no infinity
    if op == "and":
        ones = (
            True if dtype == jnp.bool_ else jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.unsignedinteger) else -1
        )
        return np.array(ones, dtype)  # numpy.invert has no integers of 4 bits
    return np.array(op == "prod", dtype)


# ---------------------------------------------------------------- how a program calls MPI


def in_mpi_dtype(move: Callable[[MpiCall, Any, jax.Array], jax.Array]) -> Callable[..., list[jax.Array]]:
    """Make a row's `run` from a `move` of dtypes that MPI has.

    A `move` of one call takes mpi4jax, or `compiled_calls.NumberedCalls`, which compares in the same call.
    """

    @functools.wraps(move)
    def run(call: MpiCall, x: jax.Array, mpi: Any = None) -> list[jax.Array]:
        import mpi4jax

        return [from_mpi_dtype(move(call, mpi or mpi4jax, to_mpi_dtype(x)), x.dtype)]

    return run


def mpi_function(name: str, *fields: str) -> Callable[..., list[jax.Array]]:
    """Make the `run` of an MPI function of `op`, `root`, or neither."""

    @in_mpi_dtype
    def move(call: MpiCall, mpi: Any, x: jax.Array) -> jax.Array:
        given = [mpi_op(call.op) if field == "op" else call.root for field in fields]
        return getattr(mpi, name)(x, *given, comm=mpi_comm(call))

    return move


def mpi_comm(call: MpiCall) -> Any:
    """The communicator of a call; a scan may be reversed."""
    return call.comm.reversed_mpi if call.is_reversed else call.comm.mpi


@in_mpi_dtype
def _reduce_scatter(call: MpiCall, mpi4jax: Any, x: jax.Array) -> jax.Array:
    rows = mpi4jax.alltoall(x, comm=call.comm.mpi)
    combine = COMBINE[call.op]
    return lax.scan(lambda total, row: (combine(total, row), None), rows[0], rows[1:])[0]


@in_mpi_dtype
def _exscan(call: MpiCall, mpi4jax: Any, x: jax.Array) -> jax.Array:
    comm = mpi_comm(call)
    through = mpi4jax.scan(x, mpi_op(call.op), comm=comm)
    if comm.rank == 0:
        mpi4jax.send(through, 1, comm=comm)
        return jnp.full_like(x, neutral(call.op, x.dtype))
    if comm.rank == comm.size - 1:
        return mpi4jax.recv(through, comm.rank - 1, comm=comm)
    return mpi4jax.sendrecv(through, through, comm.rank - 1, comm.rank + 1, comm=comm)


@in_mpi_dtype
def _alltoallv(call: MpiCall, mpi4jax: Any, x: jax.Array) -> jax.Array:
    comm, size, rank = call.comm.mpi, call.comm.size, call.comm.rank
    sent = jnp.split(x, np.cumsum(call.counts[rank])[:-1].tolist())
    return jnp.concatenate(_each(mpi4jax, comm, sent, [sent_rows[rank] for sent_rows in call.counts], size, rank))


@in_mpi_dtype
def _allgatherv(call: MpiCall, mpi4jax: Any, x: jax.Array) -> jax.Array:
    comm, size, rank = call.comm.mpi, call.comm.size, call.comm.rank
    return jnp.concatenate(_each(mpi4jax, comm, [x] * size, [sent_rows[0] for sent_rows in call.counts], size, rank))


def _each(mpi4jax: Any, comm: Any, sent: list, counts: list[int], size: int, rank: int) -> list[jax.Array]:
    """Exchange messages with all ranks; in each turn a rank receives one."""
    received: dict[int, jax.Array] = {rank: sent[rank]}
    for turn in range(1, size):
        to, source = (rank + turn) % size, (rank - turn) % size
        place = jnp.zeros((counts[source], *sent[rank].shape[1:]), sent[rank].dtype)
        received[source] = mpi4jax.sendrecv(sent[to], place, source, to, comm=comm)
    return [received[source] for source in range(size)]


def _barrier(call: MpiCall, mpi: Any = None) -> list[jax.Array]:
    import mpi4jax

    (mpi or mpi4jax).barrier(comm=call.comm.mpi)
    return []


# ---------------------------------------------------------------- the table

Bind = Callable[..., list[jax.Array]]  # (call, *arrays) -> results


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation on one array over ranks."""

    equation: str
    sends: str  # by each rank
    transpose: str  # in words; empty if there is none
    results: Callable[..., list[jax.ShapeDtypeStruct]] = lambda call, x: [
        shape_of(x)
    ]  # (call, *operands) -> on this rank
    run: Callable[..., list[jax.Array]]  # (call, *operands) -> in a program, over MPI
    on_one_rank: Callable[..., Any] = lambda call, x: x  # (call, *operands) -> with one worker
    adjoint: Callable[[Bind, MpiCall, jax.Array, Any], jax.Array] | None = None  # cotangent of y, like x -> that of x
    shared: Callable[[MpiCall, Any], Any] = lambda call, x: x.shape  # part of x's shape that ranks must share
    ops: tuple[str, ...] = ()  # that it may reduce by
    is_elementwise: bool = True  # small leaves of a tree are packed together, and a mapped axis stays first
    is_message: bool = False  # from one rank to another: others take no part
    is_one_call: bool = False  # True if it is one call of MPI, which `run` makes by its argument `mpi`


def zero_unless(root: bool, x: jax.Array) -> jax.Array:
    """X on one rank, zeros on the others."""
    return x if root else jnp.zeros_like(x)


def is_root(call: MpiCall) -> bool:
    """Return True on the rank that an operation begins or ends at."""
    return call.comm.rank == call.root


def _reduce_adjoint(bind: Bind, call: MpiCall, ct: jax.Array, x: Any) -> jax.Array:
    [from_root] = bind(call.derive("bcast", op=""), ct)
    return from_root if is_root(call) else from_root + ct


def sum_dtype(dtype: Any) -> Any:
    """The dtype to sum cotangents in: MPI has no floats below float32."""
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if is_short else dtype


def sum_cotangents(bind: Bind, call: MpiCall, ct: jax.Array) -> jax.Array:
    """The result of a call that sums cotangents, rounded once."""
    return bind(call, ct.astype(sum_dtype(ct.dtype)))[0].astype(ct.dtype)


def _bcast_adjoint(bind: Bind, call: MpiCall, ct: jax.Array, x: Any) -> jax.Array:
    return zero_unless(is_root(call), sum_cotangents(bind, call.derive("reduce", op="sum"), ct))


def _gather_adjoint(bind: Bind, call: MpiCall, ct: jax.Array, x: Any) -> jax.Array:
    [mine] = bind(call.derive("scatter"), ct)
    return mine if is_root(call) else mine + ct


def _scatter_adjoint(bind: Bind, call: MpiCall, ct: jax.Array, x: Any) -> jax.Array:
    return zero_unless(is_root(call), bind(call.derive("gather"), ct)[0])


def _alltoallv_adjoint(bind: Bind, call: MpiCall, ct: jax.Array, x: Any) -> jax.Array:
    turned = tuple(zip(*call.counts, strict=True))
    return bind(call.derive("alltoallv", counts=turned), ct)[0]


def _sendrecv_adjoint(bind: Bind, call: MpiCall, ct: jax.Array, x: Any) -> jax.Array:
    check(
        call.source is not None, f"{call.describe(ct)} has no transpose: a message may come from any rank; give source"
    )
    tags = {} if call.recvtag is None else {"sendtag": call.recvtag, "recvtag": call.sendtag}
    back = call.derive("sendrecv", source=call.dest, dest=call.source, status=0, **tags)
    return bind(back, ct, jnp.zeros(x.shape, x.dtype))[0]


def _allgatherv_adjoint(bind: Bind, call: MpiCall, ct: jax.Array, x: Any) -> jax.Array:
    """Every rank's part of the cotangent to that rank, which adds them."""
    sizes = tuple(rows[0] for rows in call.counts)
    [parts] = bind(call.derive("alltoallv", counts=(sizes,) * call.comm.size), ct)
    rows = parts.reshape(call.comm.size, sizes[call.comm.rank], *ct.shape[1:])
    return rows.sum(0, dtype=sum_dtype(ct.dtype)).astype(ct.dtype)


ARITHMETIC = ("sum", "prod", "max", "min", "and", "or", "xor")
REDUCTIONS = ("sum", "mean", *ARITHMETIC[1:])

OPERATIONS: dict[str, Operation] = {
    "allreduce": Operation(
        equation="y_r = x_0 ⊕ … ⊕ x_(w-1)",
        sends="about 2 n (w-1)/w, as MPI's algorithm does",
        transpose="the identity, as in mpi4jax: the loss is the same on all ranks; transposed again, allreduce",
        run=mpi_function("allreduce", "op"),
        is_one_call=True,
        adjoint=lambda bind, call, ct, x: bind(call.derive("allreduce", is_identity=not call.is_identity), ct)[0],
        ops=REDUCTIONS,
    ),
    "reduce": Operation(
        equation="y_root = x_0 ⊕ … ⊕ x_(w-1); elsewhere y_r = x_r",
        sends="about n; root receives n log w, or in all n (w-1)",
        transpose="bcast of root's cotangent, and elsewhere the rank's own added",
        run=mpi_function("reduce", "op", "root"),
        is_one_call=True,
        adjoint=_reduce_adjoint,
        ops=REDUCTIONS,
    ),
    "bcast": Operation(
        equation="y_r = x_root",
        sends="about n, from root on",
        transpose="reduce(sum) to root; zeros elsewhere",
        run=mpi_function("bcast", "root"),
        is_one_call=True,
        adjoint=_bcast_adjoint,
    ),
    "allgather": Operation(
        equation="y_r = [x_0, …, x_(w-1)]",
        sends="n (w-1)",
        transpose="reduce_scatter(sum)",
        results=lambda call, x: [shape_of(x, (call.comm.size, *x.shape))],
        run=mpi_function("allgather"),
        is_one_call=True,
        on_one_rank=lambda call, x: x[None],
        adjoint=lambda bind, call, ct, x: sum_cotangents(bind, call.derive("reduce_scatter", op="sum"), ct),
        is_elementwise=False,
    ),
    "gather": Operation(
        equation="y_root = [x_0, …, x_(w-1)]; elsewhere y_r = x_r",
        sends="n, to root",
        transpose="scatter of root's cotangent, and elsewhere the rank's own added",
        results=lambda call, x: [shape_of(x, (call.comm.size, *x.shape) if is_root(call) else x.shape)],
        run=mpi_function("gather", "root"),
        is_one_call=True,
        on_one_rank=lambda call, x: x[None],
        adjoint=_gather_adjoint,
        is_elementwise=False,
    ),
    "scatter": Operation(
        equation="y_r = x_root[r]; elsewhere x says only shape and dtype of a row",
        sends="root sends n (w-1)/w",
        transpose="gather to root; zeros elsewhere",
        results=lambda call, x: [shape_of(x, x.shape[1:] if is_root(call) else x.shape)],
        run=mpi_function("scatter", "root"),
        is_one_call=True,
        on_one_rank=lambda call, x: x[0],
        adjoint=_scatter_adjoint,
        shared=lambda call, x: x.shape[1:] if is_root(call) else x.shape,
        is_elementwise=False,
    ),
    "alltoall": Operation(
        equation="y_r[i] = x_i[r]",
        sends="n (w-1)/w",
        transpose="alltoall",
        run=mpi_function("alltoall"),
        is_one_call=True,
        adjoint=lambda bind, call, ct, x: bind(call.derive("alltoall"), ct)[0],
        is_elementwise=False,
    ),
    "allgatherv": Operation(
        equation="y_r = the rows of x_0, then those of x_1, …; as many as each rank has",
        sends="n (w-1)",
        transpose="alltoallv of the parts of the cotangent, added",
        results=lambda call, x: [shape_of(x, (sum(rows[0] for rows in call.counts), *x.shape[1:]))],
        run=_allgatherv,
        adjoint=_allgatherv_adjoint,
        shared=lambda call, x: x.shape[1:],
        is_elementwise=False,
    ),
    "alltoallv": Operation(
        equation="y_r = from each rank i in turn the counts_i[r] rows of x_i that are for r",
        sends="n, less the rows that stay",
        transpose="alltoallv with the counts turned round",
        results=lambda call, x: [shape_of(x, (sum(rows[call.comm.rank] for rows in call.counts), *x.shape[1:]))],
        run=_alltoallv,
        adjoint=_alltoallv_adjoint,
        shared=lambda call, x: x.shape[1:],
        is_elementwise=False,
    ),
    "reduce_scatter": Operation(
        equation="y_r = x_0[r] ⊕ … ⊕ x_(w-1)[r]",
        sends="n (w-1)/w",
        transpose="allgather, of a sum",
        results=lambda call, x: [shape_of(x, x.shape[1:])],
        run=_reduce_scatter,
        on_one_rank=lambda call, x: x[0],
        adjoint=lambda bind, call, ct, x: bind(call.derive("allgather", op=""), ct)[0],
        ops=REDUCTIONS,
        is_elementwise=False,
    ),
    "scan": Operation(
        equation="y_r = x_0 ⊕ … ⊕ x_r",
        sends="about n log w",
        transpose="scan from the last rank to the first, of a sum",
        run=mpi_function("scan", "op"),
        is_one_call=True,
        adjoint=lambda bind, call, ct, x: bind(call.derive("scan", is_reversed=not call.is_reversed), ct)[0],
        ops=ARITHMETIC,
    ),
    "exscan": Operation(
        equation="y_r = x_0 ⊕ … ⊕ x_(r-1); y_0 is what changes nothing: 0, 1, or the least or largest number",
        sends="about n log w + n",
        transpose="exscan from the last rank to the first, of a sum",
        run=_exscan,
        on_one_rank=lambda call, x: jnp.full_like(x, neutral(call.op, x.dtype)),
        adjoint=lambda bind, call, ct, x: bind(call.derive("exscan", is_reversed=not call.is_reversed), ct)[0],
        ops=ARITHMETIC,
    ),
    "send": Operation(
        equation="x goes to rank dest",
        sends="n, and a header of 64 bytes",
        transpose="",
        results=lambda call, x: [],
        run=compiled_messages.run,
        on_one_rank=messages.refuse_one_rank,
        is_message=True,
    ),
    "recv": Operation(
        equation="y = what rank source sends; x says only shape and dtype",
        sends="nothing",
        transpose="",
        run=compiled_messages.run,
        on_one_rank=messages.refuse_one_rank,
        is_message=True,
    ),
    "sendrecv": Operation(
        equation="x goes to rank dest, y = what rank source sends; recvbuf says its shape and dtype",
        sends="n, and a header of 64 bytes",
        transpose="sendrecv the other way",
        results=lambda call, x, place: [shape_of(place)],
        run=compiled_messages.run,
        on_one_rank=messages.sendrecv_to_self,
        adjoint=_sendrecv_adjoint,
        is_message=True,
    ),
    "barrier": Operation(
        equation="no rank goes on before all have come",
        sends="a few bytes",
        transpose="",
        results=lambda call: [],
        run=_barrier,
        is_one_call=True,
        on_one_rank=lambda call: None,
        shared=lambda call, x: (),
    ),
}


def list_operations() -> list[tuple[str, str, str, str]]:
    """Rows of the docs' table: operation, equation, what a rank sends, transpose."""
    return [(name, row.equation, row.sends, row.transpose or "none") for name, row in OPERATIONS.items()]
