"""The table of operations: shapes, MPI calls and transposes.

A row works on one array and on MPI ranks; trees, dtypes and a single worker are `api`'s, derivatives and mapping are
`primitive`'s. In a row w is the number of ranks, r this one, n the bytes of x.

mpi4jax lacks some operations, which are composed of those that it has: a `reduce_scatter` is an all-to-all and a sum,
operations with counts are a message to each rank, and an `exscan` is a scan that each rank sends to the next one.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi.collectives import messages
from jaxmpi.collectives.call import MpiCall, from_mpi_dtype, shape_of, to_mpi_dtype
from jaxmpi.comm.call_comparison import OPS, comparison_of
from jaxmpi.comm.mpi_calls import mpi_calls
from jaxmpi.core.errors import UsageError

COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {  # in the order of `OPS`, MPI's names
    **{"sum": lax.add, "prod": lax.mul, "max": lax.max, "min": lax.min},
    **{"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor},
}
ARITHMETIC = tuple(COMBINE)
REDUCTIONS = ("sum", "mean", *ARITHMETIC[1:])
Bind = Callable[..., list[jax.Array]]  # (call, *arrays) -> results


def mpi_op(op: str) -> Any:
    """MPI's operation: bitwise, which on bools as 0 and 1 is logical."""
    from mpi4py import MPI

    return getattr(MPI, OPS[ARITHMETIC.index(op)])


def neutral(op: str, dtype: Any) -> Any:
    """The number that changes no result of an operation."""
    if dtype == jnp.bool_:
        return np.array(op in ("min", "and", "prod"))
    if op == "and":
        return np.invert(np.zeros((), dtype))
    if op not in ("max", "min"):
        return np.array(op == "prod", dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.array(jnp.iinfo(dtype).min if op == "max" else jnp.iinfo(dtype).max, dtype)
    infinity = np.array(-np.inf if op == "max" else np.inf, dtype)
    has_infinity = np.isinf(infinity.astype(np.float32))
    return infinity if has_infinity else np.array(getattr(jnp.finfo(dtype), "min" if op == "max" else "max"), dtype)


# ---------------------------------------------------------------- how a program calls MPI


def in_mpi_dtype(move: Callable[[MpiCall, Any, jax.Array], jax.Array]) -> Callable[..., list[jax.Array]]:
    """Make a row's `run` from a `move` by mpi4jax of dtypes that MPI has."""

    @functools.wraps(move)
    def run(call: MpiCall, x: jax.Array) -> list[jax.Array]:
        return [from_mpi_dtype(move(call, mpi_calls(), to_mpi_dtype(x)), x.dtype)]

    return run


@in_mpi_dtype
def run_by_mpi(call: MpiCall, calls: Any, x: jax.Array) -> jax.Array:
    """The MPI function of the operation's name."""
    arguments = ({"op": mpi_op(call.op)} if call.op else {}) | ({} if call.root is None else {"root": call.root})
    return getattr(calls, call.operation)(x, **arguments, comm=call.comm.mpi)


def has_slots_for(call: MpiCall, x: Any) -> bool:
    """Return True if `run_in_c` can take the place of `run_by_mpi`."""
    rows = call.comm.size if call.operation == "alltoall" or (call.operation == "scatter" and call.is_root) else 1
    row_bytes = x.size * max(x.dtype.itemsize, 1) // rows
    return comparison_of(call.comm).has_slots_for(call.operation, row_bytes)


def run_in_c(call: MpiCall, number: int, x: jax.Array) -> list[jax.Array]:
    """The same through shared memory, with this call's comparison over ranks, of that number."""
    operand, [result] = to_mpi_dtype(x), OPERATIONS[call.operation].results(call, x)
    # Here the result is x itself.
    keeps_x = call.is_root if call.operation == "bcast" else call.operation in ("reduce", "gather") and not call.is_root
    op, root = ARITHMETIC.index(call.op) if call.op else 0, call.root or 0
    shape = (0,) if keeps_x else result.shape
    y = comparison_of(call.comm).call(call.operation, number, operand, shape, op, root)
    return [x if keeps_x else from_mpi_dtype(y, result.dtype)]


@in_mpi_dtype
def _reduce_scatter(call: MpiCall, calls: Any, x: jax.Array) -> jax.Array:
    rows = calls.alltoall(x, comm=call.comm.mpi)
    return lax.scan(lambda total, row: (COMBINE[call.op](total, row), None), rows[0], rows[1:])[0]


@in_mpi_dtype
def _exscan(call: MpiCall, calls: Any, x: jax.Array) -> jax.Array:
    comm = call.comm.mpi
    through = calls.scan(x, mpi_op(call.op), comm=comm)
    if comm.rank == 0:
        calls.send(through, 1, comm=comm)
        return jnp.full_like(x, neutral(call.op, x.dtype))
    if comm.rank == comm.size - 1:
        return calls.recv(through, comm.rank - 1, comm=comm)
    return calls.sendrecv(through, through, comm.rank - 1, comm.rank + 1, comm=comm)


@in_mpi_dtype
def _with_counts(call: MpiCall, calls: Any, x: jax.Array) -> jax.Array:
    """Exchange messages with all ranks; in each turn a rank receives one."""
    size, rank, mpi = call.comm.size, call.comm.rank, call.comm.mpi
    is_gather = call.operation == "allgatherv"
    outgoing = [x] * size if is_gather else jnp.split(x, np.cumsum(call.counts[rank])[:-1].tolist())
    received: dict[int, jax.Array] = {rank: outgoing[rank]}
    for turn in range(1, size):
        to, source = (rank + turn) % size, (rank - turn) % size
        place = jnp.zeros((call.counts[source][rank], *x.shape[1:]), x.dtype)
        received[source] = calls.sendrecv(outgoing[to], place, source, to, comm=mpi)
    return jnp.concatenate([received[source] for source in range(size)])


def _barrier(call: MpiCall) -> list[jax.Array]:
    mpi_calls().barrier(comm=call.comm.mpi)
    return []


# ---------------------------------------------------------------- transposes: (bind, call, cotangent of y, like x)


def _sum_dtype(dtype: Any) -> Any:
    """The dtype to sum cotangents in: MPI has no floats below float32."""
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if is_short else dtype


def _sum_cotangents(bind: Bind, call: MpiCall, ct: jax.Array) -> jax.Array:
    """The result of a call that sums cotangents, rounded once."""
    return bind(call, ct.astype(_sum_dtype(ct.dtype)))[0].astype(ct.dtype)


def _at_root(call: MpiCall, ct: jax.Array) -> jax.Array:
    return ct if call.is_root else jnp.zeros_like(ct)


def _and_this_ranks(call: MpiCall, cotangent: jax.Array, ct: jax.Array) -> jax.Array:
    """Elsewhere than at root the result was x itself, so its cotangent counts as well."""
    return cotangent if call.is_root else cotangent + ct


def _sendrecv_adjoint(bind: Bind, call: MpiCall, ct: jax.Array, x: Any) -> jax.Array:
    if call.source is None:
        raise UsageError(
            f"{call.describe(ct)} has no transpose: a message may come from any rank; expected a source: give it"
        )
    tags = {} if call.recvtag is None else {"sendtag": call.recvtag, "recvtag": call.sendtag}
    adjoint = call.derive("sendrecv", source=call.dest, dest=call.source, status=0, **tags)
    return bind(adjoint, ct, jnp.zeros(x.shape, x.dtype))[0]


def _allgatherv_adjoint(bind: Bind, call: MpiCall, ct: jax.Array, x: Any) -> jax.Array:
    """Every rank's part of the cotangent to that rank, which adds them."""
    sizes = tuple(rows[0] for rows in call.counts)
    [parts] = bind(call.derive("alltoallv", counts=(sizes,) * call.comm.size), ct)
    rows = parts.reshape(call.comm.size, sizes[call.comm.rank], *ct.shape[1:])
    return rows.sum(0, dtype=_sum_dtype(ct.dtype)).astype(ct.dtype)


def _sum_rows_from(bind: Bind, call: MpiCall, ct: jax.Array, first: int) -> jax.Array:
    [rows] = bind(call.derive("allgather", op=""), ct)
    return rows[first:].sum(0, dtype=_sum_dtype(ct.dtype)).astype(ct.dtype)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation on one array over ranks."""

    shape: Callable[[MpiCall, tuple[int, ...]], tuple[int, ...]] | None = lambda call, shape: shape  # None: no result
    run: Callable[..., list[jax.Array]] = run_by_mpi  # (call, *operands) -> in a program, over MPI
    on_one_rank: Callable[..., Any] = lambda call, x: x  # (call, *operands) -> with one worker
    adjoint: Callable[[Bind, MpiCall, jax.Array, Any], jax.Array] | None = None  # cotangent of y, like x -> that of x
    shared: Callable[[MpiCall, Any], Any] = lambda call, x: x.shape  # part of x's shape that ranks must share
    ops: tuple[str, ...] = ()  # that it may reduce by
    is_elementwise: bool = True  # small leaves of a tree are packed together, and a mapped axis stays first
    is_message: bool = False  # from one rank to another: others take no part

    def results(self, call: MpiCall, *operands: Any) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes on this rank; those of a message are like its last operand."""
        if self.shape is None:
            return []
        return [shape_of(operands[-1], self.shape(call, operands[-1].shape))]


def _all_rows(call: MpiCall, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (call.comm.size, *shape)


def _rows_by_counts(call: MpiCall, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (sum(rows[call.comm.rank] for rows in call.counts), *shape[1:])


_with_rows = {"is_elementwise": False, "shared": lambda call, x: x.shape[1:]}
OPERATIONS: dict[str, Operation] = {
    "allreduce": Operation(
        adjoint=lambda bind, call, ct, x: bind(call.derive("allreduce", is_identity=not call.is_identity), ct)[0],
        ops=REDUCTIONS,
    ),
    "reduce": Operation(
        adjoint=lambda bind, call, ct, x: _and_this_ranks(call, bind(call.derive("bcast", op=""), ct)[0], ct),
        ops=REDUCTIONS,
    ),
    "bcast": Operation(
        adjoint=lambda bind, call, ct, x: _at_root(call, _sum_cotangents(bind, call.derive("reduce", op="sum"), ct)),
    ),
    "allgather": Operation(
        shape=_all_rows,
        on_one_rank=lambda call, x: x[None],
        adjoint=lambda bind, call, ct, x: _sum_cotangents(bind, call.derive("reduce_scatter", op="sum"), ct),
        is_elementwise=False,
    ),
    "gather": Operation(
        shape=lambda call, shape: _all_rows(call, shape) if call.is_root else shape,
        on_one_rank=lambda call, x: x[None],
        adjoint=lambda bind, call, ct, x: _and_this_ranks(call, bind(call.derive("scatter"), ct)[0], ct),
        is_elementwise=False,
    ),
    "scatter": Operation(
        shape=lambda call, shape: shape[1:] if call.is_root else shape,
        on_one_rank=lambda call, x: x[0],
        adjoint=lambda bind, call, ct, x: _at_root(call, bind(call.derive("gather"), ct)[0]),
        shared=lambda call, x: x.shape[1:] if call.is_root else x.shape,
        is_elementwise=False,
    ),
    "alltoall": Operation(
        adjoint=lambda bind, call, ct, x: bind(call.derive("alltoall"), ct)[0],
        is_elementwise=False,
    ),
    "allgatherv": Operation(
        shape=_rows_by_counts,
        run=_with_counts,
        adjoint=_allgatherv_adjoint,
        **_with_rows,
    ),
    "alltoallv": Operation(
        shape=_rows_by_counts,
        run=_with_counts,
        adjoint=lambda bind, call, ct, x: bind(
            call.derive("alltoallv", counts=tuple(zip(*call.counts, strict=True))), ct
        )[0],
        **_with_rows,
    ),
    "reduce_scatter": Operation(
        shape=lambda call, shape: shape[1:],
        run=_reduce_scatter,
        on_one_rank=lambda call, x: x[0],
        adjoint=lambda bind, call, ct, x: bind(call.derive("allgather", op=""), ct)[0],
        ops=REDUCTIONS,
        is_elementwise=False,
    ),
    "scan": Operation(
        adjoint=lambda bind, call, ct, x: _sum_rows_from(bind, call, ct, call.comm.rank),
        ops=ARITHMETIC,
    ),
    "exscan": Operation(
        run=_exscan,
        on_one_rank=lambda call, x: jnp.full_like(x, neutral(call.op, x.dtype)),
        adjoint=lambda bind, call, ct, x: _sum_rows_from(bind, call, ct, call.comm.rank + 1),
        ops=ARITHMETIC,
    ),
    "send": Operation(
        shape=None,
        run=messages.run,
        on_one_rank=messages.on_one_rank,
        is_message=True,
    ),
    "recv": Operation(
        run=messages.run,
        on_one_rank=messages.on_one_rank,
        is_message=True,
    ),
    "sendrecv": Operation(
        run=messages.run,
        on_one_rank=messages.on_one_rank,
        adjoint=_sendrecv_adjoint,
        is_message=True,
    ),
    "barrier": Operation(
        shape=None,
        run=_barrier,
        on_one_rank=lambda call: None,
        shared=lambda call, x: (),
    ),
}
