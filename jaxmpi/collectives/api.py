"""MPI's operations as functions of arrays and trees, inside and outside jit.

A function checks what this rank can see by itself: op, root, counts, dtypes, rows. Then it makes one call for each
leaf, or one for many small leaves of a dtype, by a JAX primitive (`primitive.py`) that ranks compare when it is traced
and when it runs. The leaves as the user gave them, before casts and packing, accompany a tree's first call, so that
errors name them. With one worker nothing is bound: the operation's row of the table says what it returns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.api import BUCKET_BYTES, is_traced
from jaxmpi.allreduce.buckets import fill
from jaxmpi.allreduce.building_blocks import halves, mean_of_halves
from jaxmpi.allreduce.call_order import call_places, caller
from jaxmpi.collectives import messages
from jaxmpi.collectives.arguments import (
    NO_NUMBERS,
    arrays_of,
    canonical_dtype,
    check_partner,
    check_root,
    check_rows,
    check_tag,
    count_rows,
    dtypes_of_reduction,
    exchange_counts,
    given_leaves,
    joint_operation,
)
from jaxmpi.collectives.call import MAY_DIFFER, NOBODY, MpiCall
from jaxmpi.collectives.primitive import bind
from jaxmpi.collectives.table import OPERATIONS, neutral
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves

# ---------------------------------------------------------------- reductions


def allreduce(x: PyTree, op: str = "sum", *, comm: Any = None, dtype: Any = None) -> PyTree:
    """The sum, or another reduction, over ranks, on every rank.

    y_r = x_0 ⊕ … ⊕ x_(w-1) of every leaf, in its shape.

    Args:
        x: an array, a number or a tree; the same structure, shapes and dtypes on all ranks.
        op: sum, mean, prod, max, min; and, or, xor, which are logical for bools and bitwise for integers. 16-bit floats
            are reduced in float32. Sums of bools are int32. Means of bools and integers are float32, within 2 ulp: no
            sum wraps, or is rounded before it is divided.
        comm: `jaxmpi.world()` (default), a part of it by `split`, or a communicator of mpi4py.
        dtype: of the sum and of the result; 8-bit floats need one.

    Communicates: a comparison of calls between ranks, then `MPI_Allreduce`. In a program on one host both go through
    shared memory, and numbers are combined in rank order. Small leaves of one dtype are packed into one call.
    Transpose: the identity, as in mpi4jax.

    Raises:
        UsageError: an unknown op; a dtype for which it is not defined, or numbers that JAX's dtype does not hold (by
            path); ranks whose calls differ (rank, got, expected); a derivative of what is not linear.
    """
    return _apply("allreduce", x, comm, op=op, dtype=dtype)


def reduce(x: PyTree, op: str = "sum", root: int = 0, *, comm: Any = None, dtype: Any = None) -> PyTree:
    """The reduction over ranks on rank `root`; elsewhere x itself.

    Arguments, communication, errors: as `allreduce`, `MPI_Reduce`. Transpose: `bcast`.
    """
    return _apply("reduce", x, comm, op=op, dtype=dtype, root=root)


def reduce_scatter(x: PyTree, op: str = "sum", *, comm: Any = None, dtype: Any = None) -> PyTree:
    """Row r of the reduction, on rank r: [w, ...] to [...].

    Arguments, errors: as `allreduce`. Communicates: an all-to-all; rows are combined in rank order. Started, it is
    `MPI_Ireduce_scatter_block`, which adds in the MPI library's order. Transpose: `allgather`.
    """
    return _apply("reduce_scatter", x, comm, op=op, dtype=dtype)


def scan(x: PyTree, op: str = "sum", *, comm: Any = None, dtype: Any = None) -> PyTree:
    """The reduction over ranks 0 to this one, `MPI_Scan`.

    Arguments, errors: as `allreduce`; no mean. Transpose: an allgather, and the sum of the rows from this rank's on.
    """
    return _apply("scan", x, comm, op=op, dtype=dtype)


def exscan(x: PyTree, op: str = "sum", *, comm: Any = None, dtype: Any = None) -> PyTree:
    """The reduction over the ranks before this one.

    Rank 0 gets the operation's neutral number: 0 for sum, or and xor, 1 for prod, all bits for and, the least number
    for max, the largest for min.
    Arguments, errors: as `allreduce`; no mean. Communicates: `MPI_Scan`, passed on by one rank.
    """
    return _apply("exscan", x, comm, op=op, dtype=dtype)


def _apply(operation: str, x: PyTree, comm: Any, *, op: str = "", dtype: Any = None, **options: Any) -> PyTree:
    """An operation on a tree, after all that this rank can check by itself."""
    row = OPERATIONS[operation]
    with joint_operation(operation, comm) as comm:
        if op not in (row.ops or ("",)):
            raise UsageError(f"{operation}: op: got {op!r}; expected one of {', '.join(row.ops)}")
        dtype, root = canonical_dtype(operation, dtype), None
        if "root" in options:
            options["root"] = root = check_root(operation, options["root"], comm)
        is_elsewhere = root is not None and comm.rank != root
        if operation in ("alltoall", "reduce_scatter") or (operation == "scatter" and not is_elsewhere):
            check_rows(operation, x, comm)
        is_template = operation in ("bcast", "scatter") and is_elsewhere
        leaves = arrays_of(operation, x, comm, op, NO_NUMBERS if is_template else (), dtype)
        dtypes = [dtypes_of_reduction(operation, path, leaf, op, dtype) for path, leaf in named_leaves(x) if op]
        leaf_shapes = given_leaves(operation, x, comm, root)
        if op:
            leaves = [leaf.astype(wide) for leaf, (wide, _) in zip(leaves, dtypes, strict=True)]
        if op == "mean":
            results = _means(operation, leaves, [narrow for _, narrow in dtypes], comm, leaf_shapes, root)
        else:
            results = _call_each_leaf(operation, leaves, comm, leaf_shapes, op=op, **options)
        if op:
            results = [y.astype(narrow) for y, (_, narrow) in zip(results, dtypes, strict=True)]
        if operation == "exscan" and op in ("max", "min") and comm.rank == 0:  # a wider type's would be cut off
            results = [jnp.full_like(y, neutral(op, y.dtype)) for y in results]
        return jax.tree.unflatten(jax.tree.structure(x), results)


def _means(
    operation: str,
    leaves: list[jax.Array],
    dtypes: list[Any],
    comm: Comm,
    leaf_shapes: Mapping[str, Any],
    root: int | None,
) -> list[jax.Array]:
    """Sums divided by the number of workers; integers are sent as halves of their bits, whose sums do not wrap."""
    is_integer = [bool(jnp.issubdtype(leaf.dtype, jnp.integer)) for leaf in leaves]
    summands = [halves(leaf) if whole else leaf for leaf, whole in zip(leaves, is_integer, strict=True)]
    totals = _call_each_leaf(operation, summands, comm, leaf_shapes, op="sum", root=root)
    workers = comm.size if root is None or comm.rank == root else 1
    return [
        mean_of_halves(total, workers, leaf.dtype, bool(jnp.issubdtype(dtype, jnp.integer)))
        if whole
        else total / workers
        for total, leaf, dtype, whole in zip(totals, leaves, dtypes, is_integer, strict=True)
    ]


# ---------------------------------------------------------------- the same numbers on other ranks


def bcast(x: PyTree, root: int = 0, *, comm: Any = None) -> PyTree:
    """The leaves of rank `root`, on every rank.

    The other ranks give arrays of the same shapes and dtypes. For derivatives these depend on the differentiated input,
    as 0 * x: the transposed call takes all ranks.

    Communicates: a comparison of calls between ranks, then `MPI_Bcast`. Transpose: `reduce` of a sum, to root.
    """
    return _apply("bcast", x, comm, root=root)


def allgather(x: PyTree, *, comm: Any = None) -> PyTree:
    """The leaves of all ranks, on every rank: [...] to [w, ...].

    Communicates: a comparison of calls between ranks, then `MPI_Allgather`. Transpose: `reduce_scatter` of a sum.
    """
    return _apply("allgather", x, comm)


def gather(x: PyTree, root: int = 0, *, comm: Any = None) -> PyTree:
    """The leaves of all ranks on rank `root`, [...] to [w, ...]; elsewhere x itself.

    Communicates: a comparison of calls between ranks, then `MPI_Gather`. Transpose: `scatter`.
    """
    return _apply("gather", x, comm, root=root)


def scatter(x: PyTree, root: int = 0, *, comm: Any = None) -> PyTree:
    """Row r of the leaves of rank `root`, on rank r.

    Root gives leaves [w, ...]; others give arrays [...] that say shape and dtype of a row only. For derivatives these
    depend on the differentiated input, as 0 * x[0]: the transposed call takes all ranks.
    Communicates: a comparison of calls between ranks, then `MPI_Scatter`. Transpose: `gather`.

    Raises:
        UsageError: root's leaves do not have w rows (by path); ranks whose calls differ.
    """
    return _apply("scatter", x, comm, root=root)


def alltoall(x: PyTree, *, comm: Any = None) -> PyTree:
    """Exchange rows of leaves [w, ...], row i with rank i.

    Communicates: a comparison of calls between ranks, then `MPI_Alltoall`. Transpose: itself.

    Raises:
        UsageError: leaves that do not have w rows (by path); ranks whose calls differ.
    """
    return _apply("alltoall", x, comm)


def allgatherv(x: PyTree, *, counts: Sequence[int] | None = None, comm: Any = None) -> PyTree:
    """The rows of all ranks, one after another, on every rank: [n_r, ...] to [n_0 + … + n_(w-1), ...].

    Args:
        x: leaves of one number of rows, which may differ from rank to rank.
        counts: n_0 to n_(w-1), the same on all ranks. Default: ranks exchange them now, in a message, also under jit.
        comm: as in `allreduce`.

    Communicates: counts, a comparison of calls between ranks, then a message to each rank. Transpose: its parts, added.

    Raises:
        UsageError: counts that are not those of the rows; ranks whose calls differ.
    """
    with joint_operation("allgatherv", comm) as comm:
        rows, sizes = count_rows("allgatherv", x), None if counts is None else [int(n) for n in counts]
        if sizes is not None and (len(sizes) != comm.size or sizes[int(comm.rank)] != rows):
            raise UsageError(
                f"allgatherv: counts: got {sizes} with {rows} rows here; expected {comm.size} numbers, of which this "
                "rank's is the number of its rows"
            )
        every = sizes or exchange_counts("allgatherv", comm, rows)
        return _apply("allgatherv", x, comm, counts=tuple((n,) * comm.size for n in every))


def alltoallv(x: PyTree, send_counts: Sequence[int], *, comm: Any = None) -> PyTree:
    """Send each rank its rows; return those that came, by rank.

    Args:
        x: leaves [n, ...]: first the rows for rank 0, then those for rank 1, …
        send_counts: how many rows each rank gets, w numbers, n in all. Each rank gives its own; ranks exchange them
            now, in a message, also under jit.
        comm: as in `allreduce`.

    Communicates: counts, a comparison of calls between ranks, then a message to each rank. Transpose: the way back.

    Raises:
        UsageError: counts that are not w or do not add up to n; ranks whose calls differ.
    """
    with joint_operation("alltoallv", comm) as comm:
        rows, counts = count_rows("alltoallv", x), [int(n) for n in send_counts]
        if len(counts) != comm.size or sum(counts) != rows or min(counts) < 0:
            raise UsageError(
                f"alltoallv: send_counts: got {counts} for {rows} rows; expected {comm.size} numbers that add up to "
                "the rows"
            )
        return _apply("alltoallv", x, comm, counts=tuple(map(tuple, exchange_counts("alltoallv", comm, counts))))


def barrier(*, comm: Any = None) -> None:
    """Block until all ranks have called it; under jit in program order."""
    with joint_operation("barrier", comm) as comm:
        _call("barrier", comm)


# ---------------------------------------------------------------- messages from one rank to another


def send(x: PyTree, dest: int, *, tag: int = 0, comm: Any = None) -> None:
    """Send each leaf in a message, which rank `dest` must `recv`.

    Communicates: a header of 64 bytes and n; returns as soon as x may change. `NOBODY` as dest sends nothing.

    Raises:
        TrainingError: nobody has received it within `JAXMPI_EXCHANGE_TIMEOUT_S`.
    """
    with joint_operation("send", comm) as comm:
        dest, tag = check_partner("send", "dest", dest, comm), check_tag("send", "tag", tag, comm)
        leaves = arrays_of("send", x, comm)
    if dest != NOBODY:
        _call_each_leaf("send", leaves, comm, {}, dest=dest, sendtag=tag)


def recv(
    x: PyTree, source: int | None = None, *, tag: int | None = None, comm: Any = None, status: Any = None
) -> PyTree:
    """The leaves that rank `source` sends; x gives only shapes and dtypes.

    Args:
        x: a tree of arrays or of `jax.ShapeDtypeStruct`.
        source: a rank, `NOBODY`, which gives x, zeros for shapes, or None: any.
        tag: of the message, or None: any.
        comm: as in `allreduce`.
        status: an `mpi4py.MPI.Status`, filled whenever the program runs; of `NOBODY` when it is traced.

    Raises:
        UsageError: the message has another shape or dtype: this call, and the other's line.
        TrainingError: none has come within `JAXMPI_EXCHANGE_TIMEOUT_S`.
    """
    with joint_operation("recv", comm) as comm:
        source, recvtag = check_partner("recv", "source", source, comm), check_tag("recv", "tag", tag, comm)
        leaves = arrays_of("recv", x, comm, templates=_templates(source))
    number = messages.status_number(status)
    if source == NOBODY:
        messages.fill_status(number, NOBODY, -1, 0)
    else:
        leaves = _call_each_leaf("recv", leaves, comm, {}, source=source, recvtag=recvtag, status=number)
    return jax.tree.unflatten(jax.tree.structure(x), leaves)


def sendrecv(
    sendbuf: PyTree,
    recvbuf: PyTree,
    source: int | None,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: int | None = None,
    comm: Any = None,
    status: Any = None,
) -> PyTree:
    """Send `sendbuf`'s leaves to rank `dest`; return those that `source` sends.

    Arguments, errors: as `send` and `recv`; both trees have as many leaves. `NOBODY` may stand for either rank.
    As with MPI, more than a few kB may wait until rank `dest` receives them.
    Transpose: the other way round; for it both ranks give `recvtag`, or neither does.
    """
    with joint_operation("sendrecv", comm) as comm:
        leaves = arrays_of("sendrecv", sendbuf, comm)
        places = arrays_of("sendrecv", recvbuf, comm, templates=_templates(source))
        if len(leaves) != len(places):
            raise UsageError(
                f"sendrecv: got {len(leaves)} leaves in sendbuf and {len(places)} in recvbuf; expected as many, or a "
                "send and a recv"
            )
        options = {
            "source": check_partner("sendrecv", "source", source, comm),
            "dest": check_partner("sendrecv", "dest", dest, comm),
            "sendtag": check_tag("sendrecv", "sendtag", sendtag, comm),
            "recvtag": check_tag("sendrecv", "recvtag", recvtag, comm),
            "status": messages.status_number(status),
        }
    received = [_call("sendrecv", comm, x, place, **options)[0] for x, place in zip(leaves, places, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(recvbuf), received)


def _templates(source: int | None) -> tuple[type, ...]:
    """Types of leaves that give shape and dtype alone; what comes from nobody is the leaf itself."""
    return (jax.ShapeDtypeStruct,) if source == NOBODY else NO_NUMBERS


# ---------------------------------------------------------------- calls


def _call_each_leaf(
    operation: str, leaves: list[jax.Array], comm: Comm, leaf_shapes: Mapping[str, Any], **options: Any
) -> list[jax.Array]:
    """Call once per leaf; for elementwise operations once per group of small leaves.

    Args:
        leaf_shapes: `given_leaves`, which ranks compare at the first call.
    """
    row = OPERATIONS[operation]
    is_packed = row.is_elementwise and not row.is_message and comm.size > 1
    results: list[Any] = [None] * len(leaves)
    groups = [[i] for i in range(len(leaves))]
    if is_packed:
        by_dtype: dict[Any, list[int]] = {}
        for i, x in enumerate(leaves):
            by_dtype.setdefault(x.dtype, []).append(i)
        sizes = [-(-max(1, x.nbytes) // 4) for x in leaves]  # as many 32-bit numbers
        groups = [group for alike in by_dtype.values() for group in fill(alike, sizes, BUCKET_BYTES)]
    for group in groups:
        packed = leaves[group[0]] if len(group) == 1 else jnp.concatenate([leaves[i].reshape(-1) for i in group])
        outputs = _call(operation, comm, packed, given=leaf_shapes if group[0] == 0 else {}, **options)
        if len(group) == 1:
            results[group[0]] = outputs[0] if outputs else None  # a send returns nothing
            continue
        ends = np.cumsum([leaves[i].size for i in group]).tolist()
        for i, part in zip(group, jnp.split(outputs[0], ends[:-1]), strict=True):
            results[i] = part.reshape(leaves[i].shape)
    return results


def _call(operation: str, comm: Comm, *operands: jax.Array, **options: Any) -> list[jax.Array]:
    """One call on arrays; with one worker its result without a message."""
    row = OPERATIONS[operation]
    if comm.size == 1:
        result = row.on_one_rank(MpiCall(operation=operation, comm=comm, **options), *operands)  # pyright: ignore[reportArgumentType]
        return [] if result is None else [result]
    assert isinstance(comm, MpiComm)
    lines: dict[str, Any] = {"may_differ": MAY_DIFFER.get()}
    if row.is_message or is_traced(operands):
        lines["line"] = caller()
    if is_traced(operands) and not lines["may_differ"]:
        places = call_places()
        lines["lines"] = (places["at"], *places["columns"])
    return bind(MpiCall(operation=operation, comm=comm, **options, **lines), *operands)
