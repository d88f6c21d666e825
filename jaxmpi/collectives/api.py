"""The operations as functions of arrays and trees, inside and outside jit.

A function checks what this rank can see by itself: op, root, counts, dtype, rows. Then it makes one call for each leaf,
or one for many small leaves of a dtype. Each call is bound as a primitive of JAX (`primitive`). Ranks compare it when
it is traced and when it runs. The leaves as the user gave them, before casts and packing, go along with the first call
of a tree, so that an error names them. With one worker nothing is bound: a row of the table says what it gets.
"""

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.api import BUCKET_BYTES, is_traced
from jaxmpi.allreduce.call_order import caller, callers, columns, one_thread
from jaxmpi.allreduce.integer_mean import halves, mean_of_halves
from jaxmpi.collectives import messages
from jaxmpi.collectives.call import MAY_DIFFER, NOBODY, MpiCall, like
from jaxmpi.collectives.primitive import bind, said_once
from jaxmpi.collectives.table import OPERATIONS, neutral
from jaxmpi.comm.agreement import refuse_together
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm, communicator
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.to_jax import check_on_one_device, to_jax
from jaxmpi.runtime.in_flight import check_may_send

LEAST_TAGS = 1 << 15  # that every MPI has

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
    shared memory, and numbers are combined in rank order. Small leaves of one dtype travel together.
    Transpose: the identity, as in mpi4jax.

    Raises:
        UsageError: an unknown op; a dtype for which it is not defined (by path); ranks whose calls differ (rank, got,
            expected); a derivative of what is not linear.
    """
    return _reduced("allreduce", x, op, comm, dtype)


def reduce(x: PyTree, op: str = "sum", root: int = 0, *, comm: Any = None, dtype: Any = None) -> PyTree:
    """The reduction over ranks on rank `root`; elsewhere x as it is.

    Arguments, communication, errors: as `allreduce`, `MPI_Reduce`. Transpose: `bcast`.
    """
    return _reduced("reduce", x, op, comm, dtype, root)


def reduce_scatter(x: PyTree, op: str = "sum", *, comm: Any = None, dtype: Any = None) -> PyTree:
    """Row r of the reduction, on rank r: [w, ...] to [...].

    Arguments, errors: as `allreduce`. Communicates: an all-to-all; rows are combined in rank order. Started, it is
    `MPI_Ireduce_scatter_block`, which adds in the MPI library's order. Transpose: `allgather`.
    """
    return _reduced("reduce_scatter", x, op, comm, dtype)


def scan(x: PyTree, op: str = "sum", *, comm: Any = None, dtype: Any = None) -> PyTree:
    """The reduction over ranks 0 to this one, `MPI_Scan`.

    Arguments, errors: as `allreduce`; no mean. Transpose: from the last rank to this one.
    """
    return _reduced("scan", x, op, comm, dtype)


def exscan(x: PyTree, op: str = "sum", *, comm: Any = None, dtype: Any = None) -> PyTree:
    """The reduction over the ranks before this one.

    Rank 0 gets the number that changes nothing. It is 0 for sum, or and xor, 1 for prod, all bits for and. For max it
    is the least number, for min the largest.
    Arguments, errors: as `allreduce`; no mean. Communicates: `MPI_Scan`, passed on by one rank.
    """
    return _reduced("exscan", x, op, comm, dtype)


def _reduced(operation: str, x: PyTree, op: str, comm: Any, dtype: Any, root: int | None = None) -> PyTree:
    row, chosen = OPERATIONS[operation], _comm_of(operation, comm)
    check(op in row.ops, f"{operation}: op: got {op!r}; expected one of {', '.join(row.ops)}")
    root, dtype = _root(operation, root, chosen), _dtype(operation, dtype)
    if operation == "reduce_scatter":
        _check_rows(operation, x, chosen)
    arrays = _arrays(operation, x, chosen, op)
    given = given_by(operation, x, chosen, root)
    plans = [_plan(operation, path, leaf, op, dtype) for path, leaf in named_leaves(x)]
    leaves = [leaf.astype(wide) for leaf, (wide, _) in zip(arrays, plans, strict=True)]
    if op == "mean":
        dtypes = [leaf.dtype.name for leaf in leaves]
        summands = [_summand(leaf) for leaf in leaves]
        sums = _each(operation, summands, chosen, given, means_of=dtypes, op="sum", root=root)
        added = chosen.size if root is None or chosen.rank == root else 1
        results = [_divided(y, added, leaf.dtype, of) for y, leaf, (_, of) in zip(sums, leaves, plans, strict=True)]
    else:
        results = _each(operation, leaves, chosen, given, op=op, root=root)
    finished = [y.astype(narrow) for y, (_, narrow) in zip(results, plans, strict=True)]
    if operation == "exscan" and op in ("max", "min") and chosen.rank == 0:  # a wider type's would be cut off
        finished = [jnp.full_like(y, neutral(op, y.dtype)) for y in finished]
    return jax.tree.unflatten(jax.tree.structure(x), finished)


def _summand(x: jax.Array) -> jax.Array:
    """A leaf as it is summed for a mean."""
    return halves(x) if jnp.issubdtype(x.dtype, jnp.integer) else x


def _divided(total: jax.Array, workers: int, dtype: Any, result: Any) -> jax.Array:
    """The mean of leaves of a dtype from the sum of `_summand`s."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return total / workers
    return mean_of_halves(total, workers, dtype, is_whole=bool(jnp.issubdtype(result, jnp.integer)))


def _dtype(operation: str, dtype: Any) -> Any:
    """The canonical JAX dtype, of numbers or bools; None for None."""
    with suppress(TypeError):
        known = None if dtype is None else jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))
        if known is None or known == jnp.bool_ or jnp.issubdtype(known, jnp.number):
            return known
    raise UsageError(f"{operation}: dtype: got {dtype!r}; expected one of numbers, as jnp.float32")


def _plan(operation: str, path: str, leaf: Any, op: str, dtype: Any) -> tuple[Any, Any]:
    """Dtype in which a leaf is reduced, and that of the result.

    Raises:
        UsageError: the operation is not defined for it.
    """
    mine = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    is_bool, is_integer = mine == jnp.bool_, jnp.issubdtype(mine, jnp.integer)
    where = f"{operation}: leaf {path or '(the array itself)'!r}"
    if op in ("and", "or", "xor"):
        check(is_bool or is_integer, f"{where} is {mine}; {op} expects bools or integers")
        return (jnp.uint8 if is_bool else mine), dtype or mine
    is_complex = jnp.issubdtype(mine, jnp.complexfloating)
    has_order = not jnp.issubdtype(dtype or mine, jnp.complexfloating)
    check(has_order or op not in ("max", "min"), f"{where} is {dtype or mine}, which has no order; {op} its parts")
    is_real = dtype is not None and not jnp.issubdtype(dtype, jnp.complexfloating)
    check(
        not (is_complex and is_real),
        f"{where} is {mine}; dtype: got {dtype}, which would drop its imaginary part; {operation} x.real",
    )
    is_cut = dtype is not None and jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(mine, jnp.inexact)
    check(
        not (is_cut and op == "mean"),
        f"{where} is {mine}; dtype: got {dtype} for a mean; expected one of floats, as jnp.float32",
    )
    result = dtype or mine
    if dtype is None and (is_bool or is_integer) and op == "mean":
        result = jnp.result_type(float)
    elif dtype is None and is_bool and op == "sum":
        result = jnp.int32
    if is_bool and (op in ("max", "min", "prod") or (op == "mean" and dtype is None)):
        return jnp.uint8, result
    wide = dtype or (jnp.int32 if is_bool else mine)
    check(wide != jnp.bool_, f"{where} is {mine}; dtype: got bool for a {op}; expected a type of numbers, as jnp.int32")
    bits = jnp.iinfo(wide).bits if jnp.issubdtype(wide, jnp.integer) else jnp.finfo(wide).bits
    is_short = bits < (8 if jnp.issubdtype(wide, jnp.integer) else 16)
    check(
        not is_short or op in ("max", "min"),
        f"{where} is {mine}, too short for a {op}; expected a wider type for it, as dtype=jnp.float32",
    )
    return (jnp.float32 if jnp.issubdtype(wide, jnp.floating) and bits < 32 else jnp.int8 if is_short else wide), result


# ---------------------------------------------------------------- the same numbers elsewhere


def bcast(x: PyTree, root: int = 0, *, comm: Any = None) -> PyTree:
    """The leaves of rank `root`, on every rank.

    The other ranks give arrays of the same shapes and dtypes. For derivatives these depend on the differentiated input,
    as 0 * x: the transposed call takes all ranks.

    Communicates: a comparison of calls between ranks, then `MPI_Bcast`. Transpose: `reduce` of a sum, to root.
    """
    return _moved("bcast", x, comm, root=root)


def allgather(x: PyTree, *, comm: Any = None) -> PyTree:
    """The leaves of all ranks, on every rank: [...] to [w, ...].

    Communicates: a comparison of calls between ranks, then `MPI_Allgather`. Transpose: `reduce_scatter` of a sum.
    """
    return _moved("allgather", x, comm)


def gather(x: PyTree, root: int = 0, *, comm: Any = None) -> PyTree:
    """The leaves of all ranks on rank `root`: [...] to [w, ...].

    The other ranks return x as it is.
    Communicates: a comparison of calls between ranks, then `MPI_Gather`. Transpose: `scatter`.
    """
    return _moved("gather", x, comm, root=root)


def scatter(x: PyTree, root: int = 0, *, comm: Any = None) -> PyTree:
    """Row r of the leaves of rank `root`, on rank r.

    Root gives leaves [w, ...]; others give arrays [...] that say shape and dtype of a row only. For derivatives these
    depend on the differentiated input, as 0 * x[0]: the transposed call takes all ranks.
    Communicates: a comparison of calls between ranks, then `MPI_Scatter`. Transpose: `gather`.

    Raises:
        UsageError: root's leaves do not have w rows (by path); ranks whose calls differ.
    """
    chosen = _comm_of("scatter", comm)
    if chosen.rank == root:
        _check_rows("scatter", x, chosen)
    return _moved("scatter", x, chosen, root=root)


def alltoall(x: PyTree, *, comm: Any = None) -> PyTree:
    """Exchange rows of leaves [w, ...], row i with rank i.

    Communicates: a comparison of calls between ranks, then `MPI_Alltoall`. Transpose: itself.

    Raises:
        UsageError: leaves that do not have w rows (by path); ranks whose calls differ.
    """
    _check_rows("alltoall", x, _comm_of("alltoall", comm))
    return _moved("alltoall", x, comm)


def allgatherv(x: PyTree, *, counts: Sequence[int] | None = None, comm: Any = None) -> PyTree:
    """The rows of all ranks, one after another, on every rank.

    Leaves [n_r, ...] become [n_0 + … + n_(w-1), ...].

    Args:
        x: leaves have as many rows as each other; each rank may have another number.
        counts: n_0 to n_(w-1), the same on all ranks. Default: ranks say them now, in a message, also under jit.
        comm: as in `allreduce`.

    Communicates: counts, a comparison of calls between ranks, then a message to each rank. Transpose: its parts, added.

    Raises:
        UsageError: counts that are not those of the rows; ranks whose calls differ.
    """
    chosen = _comm_of("allgatherv", comm)
    rows = _rows("allgatherv", x)
    given = [int(n) for n in counts] if counts is not None else _known_to_all("allgatherv", chosen, rows)
    check(
        len(given) == chosen.size and given[int(chosen.rank)] == rows,
        f"allgatherv: rank {_number(chosen)}: counts: got {given} with {rows} rows here; expected {chosen.size} "
        "numbers, of which this rank's is the number of its rows",
    )
    return _moved("allgatherv", x, chosen, counts=tuple((n,) * chosen.size for n in given))


def alltoallv(x: PyTree, send_counts: Sequence[int], *, comm: Any = None) -> PyTree:
    """Send each rank its rows; return those that came, by rank.

    Args:
        x: leaves [n, ...]: first the rows for rank 0, then those for rank 1, …
        send_counts: how many rows each rank gets, w numbers, in all n. Each rank gives its own; ranks say them to each
            other now, in a message, also under jit.
        comm: as in `allreduce`.

    Communicates: counts, a comparison of calls between ranks, then a message to each rank. Transpose: the way back.

    Raises:
        UsageError: counts that are not w or do not add up to n; ranks whose calls differ.
    """
    chosen, rows, given = _comm_of("alltoallv", comm), _rows("alltoallv", x), [int(n) for n in send_counts]
    check(
        len(given) == chosen.size and sum(given) == rows and min(given) >= 0,
        f"alltoallv: rank {_number(chosen)}: send_counts: got {given} for {rows} rows; expected {chosen.size} numbers "
        "that add up to the rows",
    )
    return _moved("alltoallv", x, chosen, counts=tuple(map(tuple, _known_to_all("alltoallv", chosen, given))))


def _number(comm: Comm) -> int | jax.Array:
    """This rank's number in the job, for errors."""
    return comm.processes.numbers[comm.rank] if isinstance(comm, MpiComm) else comm.rank


def _known_to_all(operation: str, comm: Comm, counts: Any) -> list[Any]:
    """The counts of all ranks, by rank.

    Calls are compared first, as a rank at another call would take the counts for its own message.
    """
    if not isinstance(comm, MpiComm):
        return [counts]

    def say() -> list[Any]:
        comm.processes.assert_same(f"the counts of {operation}", None)
        return comm.processes.allgather_object(counts)

    return said_once(say)


def _rows(operation: str, x: PyTree) -> int:
    """Rows that all leaves have."""
    found = {path: np.shape(leaf)[:1] for path, leaf in named_leaves(x)}
    check(len(set(found.values())) == 1 and () not in found.values(), f"{operation}: got leaves of {found} rows")
    return next(iter(found.values()))[0]


def _check_rows(operation: str, x: PyTree, comm: Comm) -> None:
    for path, leaf in named_leaves(x):
        check(
            np.shape(leaf)[:1] == (comm.size,),
            f"{operation}: rank {_number(comm)}: leaf {path or '(the array itself)'!r} has shape "
            f"{list(np.shape(leaf))}; expected {comm.size} rows, one for each rank",
        )


def _index(operation: str, name: str, value: Any) -> int:
    """An integer of Python, NumPy or JAX as int, which ranks compare."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise UsageError(f"{operation}: {name}: got {value!r}; expected a whole number known to Python") from error


def _root(operation: str, root: Any, comm: Comm) -> int | None:
    number = None if root is None else _index(operation, "root", root)
    is_rank = number is None or 0 <= number < comm.size
    check(is_rank, f"{operation}: root: got {number}; expected a rank below {comm.size}")
    return number


def _moved(operation: str, x: PyTree, comm: Any, root: Any = None, **options: Any) -> PyTree:
    chosen = _comm_of(operation, comm)
    root = _root(operation, root, chosen)
    is_value = operation not in ("bcast", "scatter") or chosen.rank == root
    leaves = _arrays(operation, x, chosen) if is_value else _templates(operation, x)
    given = given_by(operation, x, chosen, root)
    results = _each(operation, leaves, chosen, given, root=root, **options)
    return jax.tree.unflatten(jax.tree.structure(x), results)


# ---------------------------------------------------------------- from one rank to another


def send(x: PyTree, dest: int, *, tag: int = 0, comm: Any = None) -> None:
    """Send each leaf in a message, which rank `dest` must `recv`.

    Communicates: a header of 64 bytes and n; returns as soon as x may change. `NOBODY` as dest sends nothing.

    Raises:
        TrainingError: nobody has received it within `JAXMPI_EXCHANGE_TIMEOUT_S`.
    """
    chosen = _comm_of("send", comm)
    options: dict[str, Any] = {
        "dest": _partner("send", "dest", dest, chosen),
        "sendtag": _tag("send", "tag", tag, chosen),
    }
    leaves = _arrays("send", x, chosen)
    if dest != NOBODY:
        _each("send", leaves, chosen, {}, **options)


def recv(
    x: PyTree, source: int | None = None, *, tag: int | None = None, comm: Any = None, status: Any = None
) -> PyTree:
    """The leaves that rank `source` sends; x gives only shapes and dtypes.

    Args:
        x: a tree of arrays or of `jax.ShapeDtypeStruct`.
        source: a rank, `NOBODY`, which gives x, zeros for shapes, or None: any.
        tag: of the message, or None: any.
        comm: as in `allreduce`.
        status: an `mpi4py.MPI.Status`, filled whenever the program runs.

    Raises:
        UsageError: the message has another shape or dtype: this call, and the other's line.
        TrainingError: none has come within `JAXMPI_EXCHANGE_TIMEOUT_S`.
    """
    chosen = _comm_of("recv", comm)
    source = _partner("recv", "source", source, chosen)
    leaves = _templates("recv", x, is_kept=source == NOBODY)
    if source == NOBODY:
        messages.fill_in_program(messages.status_number(status), NOBODY, None, 0)
        return jax.tree.unflatten(jax.tree.structure(x), leaves)
    recvtag, number = _tag("recv", "tag", tag, chosen), messages.status_number(status)
    options = {"source": source, "recvtag": recvtag, "status": number}
    return jax.tree.unflatten(jax.tree.structure(x), _each("recv", leaves, chosen, {}, **options))


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
    chosen = _comm_of("sendrecv", comm)
    sent, places = _arrays("sendrecv", sendbuf, chosen), _templates("sendrecv", recvbuf, is_kept=source == NOBODY)
    check(
        len(sent) == len(places),
        f"sendrecv: rank {_number(chosen)}: got {len(sent)} leaves in sendbuf and {len(places)} in recvbuf; "
        "expected as many, or a send and a recv",
    )
    options = {
        "source": _partner("sendrecv", "source", source, chosen),
        "dest": _partner("sendrecv", "dest", dest, chosen),
        "sendtag": _tag("sendrecv", "sendtag", sendtag, chosen),
        "recvtag": _tag("sendrecv", "recvtag", recvtag, chosen),
        "status": messages.status_number(status),
    }
    pairs = zip(sent, places, strict=True)
    received = [_one("sendrecv", chosen, x, place, **options)[0] for x, place in pairs]
    return jax.tree.unflatten(jax.tree.structure(recvbuf), received)


def _templates(operation: str, x: PyTree, *, is_kept: bool = False) -> list[jax.Array]:
    """Leaves for the shapes and dtypes of what comes; if nothing comes, x itself is kept."""
    arrays = []
    for path, leaf in named_leaves(x):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            arrays.append(jnp.zeros(leaf.shape, leaf.dtype))
        elif isinstance(leaf, np.ndarray) and not is_kept:  # NumPy's empty arrays may hold numbers that do not fit
            arrays.append(jnp.zeros(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)))
        else:
            arrays.append(to_jax(f"{operation}: leaf {path or '(the array itself)'!r}", leaf))
    return arrays


def barrier(*, comm: Any = None) -> None:
    """Block until all ranks have called it; under jit in program order."""
    _one("barrier", _comm_of("barrier", comm))


def _partner(operation: str, name: str, rank: Any, comm: Comm) -> int | None:
    """A rank that may be `NOBODY`, or None for any source."""
    number = None if rank is None and name == "source" else _index(operation, name, rank)
    check(
        number is None or number == NOBODY or 0 <= number < comm.size,
        f"{operation}: {name}: got {number}; expected a rank below {comm.size}"
        + (", NOBODY, or None for any; MPI.ANY_SOURCE is None here, " if name == "source" else " or NOBODY; ")
        + "MPI.PROC_NULL is jaxmpi.collectives.NOBODY",
    )
    return number


def _tag(operation: str, name: str, tag: Any, comm: Comm) -> int | None:
    """A tag of a message, or None for any that comes."""
    is_sent = name == "sendtag" or operation == "send"
    if tag is None and not is_sent:
        return None
    number, most = _index(operation, name, tag), comm.processes.tags if isinstance(comm, MpiComm) else LEAST_TAGS
    is_any = "" if is_sent else ", or None for any"
    check(0 <= number < most, f"{operation}: {name}: got {number}; expected a number from 0 to {most - 1}{is_any}")
    return number


# ---------------------------------------------------------------- calls


def _comm_of(operation: str, comm: Any) -> Comm:
    check_may_send(f"jaxmpi.collectives.{operation}")
    return communicator(comm)


def given_by(operation: str, x: PyTree, comm: Comm, root: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    """The user's leaves by path, before casts, in shapes that ranks share."""
    if not isinstance(comm, MpiComm):
        return {}
    call, shared = MpiCall(operation=operation, comm=comm, root=root), OPERATIONS[operation].shared
    given = {path: jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for path, leaf in named_leaves(x)}
    return {path: like(leaf, shared(call, leaf)) for path, leaf in given.items()}


def _each(
    operation: str,
    leaves: list[jax.Array],
    comm: Comm,
    given: Mapping[str, Any],
    means_of: Sequence[str] = (),
    **options: Any,
) -> list[jax.Array]:
    """Call once per leaf; for elementwise operations once per group of `_groups`.

    Args:
        given: `given_by`, which ranks compare at the first call.
        means_of: dtypes of leaves that are summed for means, of which these may be parts.
    """
    row, means_of = OPERATIONS[operation], means_of or [""] * len(leaves)
    if not row.is_elementwise or row.is_message or comm.size == 1 or len(leaves) < 2:
        firsts = [given, *({} for _ in leaves[1:])]
        rows = zip(leaves, means_of, firsts, strict=False)
        return [y for leaf, of, first in rows for y in _one(operation, comm, leaf, mean_of=of, given=first, **options)]
    results = list(leaves)
    for group in _groups(leaves, means_of):
        flat = leaves[group[0]] if len(group) == 1 else jnp.concatenate([leaves[i].reshape(-1) for i in group])
        first = given if group[0] == 0 else {}
        [total] = _one(operation, comm, flat, mean_of=means_of[group[0]], given=first, **options)
        ends = np.cumsum([leaves[i].size for i in group]).tolist()
        parts = [total] if len(group) == 1 else jnp.split(total, ends[:-1])
        for i, part in zip(group, parts, strict=True):
            results[i] = part.reshape(leaves[i].shape)
    return results


def _groups(leaves: Sequence[jax.Array], means_of: Sequence[str]) -> list[list[int]]:
    """Group leaves by dtype and `means_of` within BUCKET_BYTES; larger ones stay alone."""
    groups: list[list[int]] = []
    open_groups: dict[Any, tuple[list[int], int]] = {}
    for i, (leaf, mean_of) in enumerate(zip(leaves, means_of, strict=True)):
        group, held_bytes = open_groups.get((leaf.dtype, mean_of), ([], 0))
        if not group or held_bytes + leaf.nbytes > BUCKET_BYTES:
            group, held_bytes = [], 0
            groups.append(group)
        group.append(i)
        open_groups[leaf.dtype, mean_of] = group, held_bytes + leaf.nbytes
    return groups


def _arrays(operation: str, x: PyTree, comm: Comm, op: str = "") -> list[jax.Array]:
    """The leaves as JAX arrays; ranks refuse them together, except in messages, which two ranks alone exchange."""
    together = nullcontext() if OPERATIONS[operation].is_message else refuse_together(comm.assert_same)
    arrays = []
    with one_thread(comm, operation), together:
        for path, leaf in named_leaves(x):
            where = f"{operation}: leaf {path or '(the array itself)'!r}"
            _check_no_keys(operation, leaf)
            array = to_jax(where, leaf, op, comm.size)
            check_on_one_device(where, array)
            arrays.append(array)
    return arrays


def _check_no_keys(operation: str, tree: PyTree) -> None:
    is_key = any(hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in jax.tree.leaves(tree))
    check(not is_key, f"{operation}: got a random key; expected numbers: jax.random.key_data of it")


def _one(operation: str, comm: Comm, *operands: jax.Array, **options: Any) -> list[jax.Array]:
    _check_no_keys(operation, operands)
    if comm.size == 1:
        result = OPERATIONS[operation].alone(MpiCall(operation=operation, comm=comm, **options), *operands)  # pyright: ignore[reportArgumentType]
        return [] if result is None else [result]
    assert isinstance(comm, MpiComm)
    lines: dict[str, Any] = {"may_differ": MAY_DIFFER.get()}
    if OPERATIONS[operation].is_message or is_traced(operands):
        lines["line"] = caller()
    if is_traced(operands) and not lines["may_differ"]:
        lines["lines"] = (callers(), *columns())
    return bind(MpiCall(operation=operation, comm=comm, **options, **lines), *operands)
