"""A worker's part of a call: fetch rows, run programs, combine pieces.

A worker receives its rows from rank 0, or cuts them out of an array. That array is in its process or in shared memory.
The worker may also hold them in a variable; each way is a `RowSource`. With `slices=n` the program runs on n pieces of
the share, one after another, for a share that does not fit at once. Pieces are combined on the device: a mean is
weighted by examples, gathered outputs are concatenated. All programs are looked up before the first one runs, so a
worker that lacks one has computed nothing yet. Rows are views if possible, else one copy of these rows alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.comm.shared_sum import aligned
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.to_jax import in_jax_dtype
from jaxmpi.functions import profiling
from jaxmpi.functions.partitioning import Picked, RowSelection, select_rows, worker_pieces
from jaxmpi.functions.reductions import OPS, accumulation_dtype, check_reducible
from jaxmpi.functions.shared_array import SharedArray, from_ticket
from jaxmpi.functions.transport import CallReport
from jaxmpi.functions.worker import Command, Leaf, Leaves, WorkerProgram, WorkerSlot
from jaxmpi.functions.worker_group import WorkerGroup


class RowSource(NamedTuple):
    """Rows that this worker can fetch: `fetch(a, b)` gives examples [a, b)."""

    shape: tuple[int, ...]  # shape of one row
    dtype: Any
    fetch: Callable[[int, int], Any]


def compute(slot: WorkerSlot, command: Command, group: WorkerGroup) -> CallReport:
    """Fill the worker's slot with results, unless a repeated command finds them.

    The report says what must be the same on all workers.
    """
    if slot.done is None or "again" not in command.header:
        slot.release()
        slot.done = compute_now(slot, command, group)
    return slot.done


def compute_now(slot: WorkerSlot, command: Command, group: WorkerGroup) -> CallReport:
    """The same, now. No program runs before all are there."""
    header = command.header
    with profiling.part("shuffle"):
        spans, sources = plan_rows(slot, command, group)
        keep_broadcasts(slot, command)
        wholes = {i: whole_input(slot, command, i) for i, entry in enumerate(header["inputs"]) if entry[0] in WHOLE}
    programs = {}
    for length in sorted({b - a for a, b in spans}):
        shapes = tuple(
            ((length, *sources[i].shape), sources[i].dtype) if i in sources else (wholes[i].shape, wholes[i].dtype)
            for i in range(len(header["inputs"]))
        )
        programs[length] = group.program(slot, header["f"], header["form"], shapes)
    slot.count = sum(b - a for a, b in spans)
    slot.program = programs[spans[0][1] - spans[0][0]]
    slot.out = run_pieces(slot, spans, programs, sources, wholes)
    add_to_held_values(slot)
    says = '{"call": %s, "outputs": %s}' % (command.header["says"], next(iter(programs.values())).says)  # noqa: UP031
    return CallReport("ok", says, slot.count)


# ---------------------------------------------------------------- inputs


WHOLE = ("kept", "whole", "read")


def plan_rows(
    slot: WorkerSlot, command: Command, group: WorkerGroup
) -> tuple[list[tuple[int, int]], dict[int, RowSource]]:
    """The pieces [a, b) of this worker, and row sources by input."""
    header, sources = command.header, {}
    spans, slices = [(0, 1)], header["slices"]
    if header["n"] is not None:
        spans = worker_pieces(header["n"], group.size, slot.rank, slices)
        first = spans[0][0]
        pick = row_picker(command, first)
        for i, entry in enumerate(header["inputs"]):
            if entry[0] == "sent" and command.given is None:
                sources[i] = source_from_message(slot, next(command.received), first)
            elif entry[0] in ("sent", "shared"):
                array = command.given.leaves[i] if command.given is not None else from_ticket(entry[2], slot.arrays)
                sources[i] = source_from_array(slot, entry[1], array, pick)
    resident = [i for i, entry in enumerate(header["inputs"]) if entry[0] == "rows"]
    if resident:
        spans = add_resident_rows(slot, command, sources, resident, spans if header["n"] is not None else None)
    return spans, sources


def row_picker(command: Command, first: int) -> Callable[[int, int], Picked]:
    """From numbers of chosen rows to an index of the whole array."""
    if command.given is not None:
        return command.given.rows.of
    if command.header["rows"] == "indices":
        indices = next(command.received)
        return lambda a, b: indices[a - first : b - first]
    return RowSelection(command.header["n"], *command.header["rows"]).of


def source_from_message(slot: WorkerSlot, share: np.ndarray, first: int) -> RowSource:
    """This worker's rows, which have come from the master."""
    return RowSource(share.shape[1:], share.dtype, lambda a, b: slot.given(share[a - first : b - first]))


def source_from_array(slot: WorkerSlot, name: str, array: Any, pick: Callable[[int, int], Picked]) -> RowSource:
    """Rows of an array that this process sees whole."""
    fetch = lambda a, b: slot.given(in_jax_dtype(name, take_rows(array, pick(a, b))))  # noqa: E731
    return RowSource(array.shape[1:], canonical_dtype(array.dtype), fetch)


def add_resident_rows(
    slot: WorkerSlot, command: Command, sources: dict[int, RowSource], inputs: list[int], spans: Any
) -> list[tuple[int, int]]:
    """The rows of variables that are scattered already."""
    arrays = {i: slot.held(command.header["inputs"][i][1])[command.header["inputs"][i][2]] for i in inputs}
    check(all(x.ndim for x in arrays.values()), "scatter(variable): got a variable without axes; expected rows")
    lengths = {i: len(x) for i, x in arrays.items()}
    check(len(set(lengths.values())) == 1, f"worker {slot.rank}: variables hold {lengths} rows; expected the same")
    rows = select_rows(resident_choice(command, slot.rank), next(iter(lengths.values())), "batch_local")
    first, count = (spans[0][0], spans[-1][1] - spans[0][0]) if spans else (0, rows.count)
    check(rows.count > 0, f"worker {slot.rank} has no example; every worker needs one")
    check(
        rows.count == count,
        f"worker {slot.rank} has {rows.count} rows in its variable and {count} examples in the call's arguments; "
        "expected the same",
    )
    for i, array in arrays.items():
        sources[i] = source_from_array(slot, f"input {i}", array, lambda a, b: rows.of(a - first, b - first))
    return spans or worker_pieces(count, 1, 0, command.header["slices"])


def resident_choice(command: Command, rank: int) -> Any:
    """Which rows of its variables a worker takes."""
    if command.given is not None:
        return command.given.local[rank]
    kind, value = command.header["local"][rank]
    return slice(*value) if kind == "slice" else next(command.received) if kind == "indices" else value


def take_rows(array: Any, picked: Picked) -> Any:
    """Rows of an array: a view if possible, else one copy."""
    if isinstance(array, jax.Array):
        if next(iter(array.devices())).platform != "cpu":
            return take_rows_on_device(array, picked)
        array = np.asarray(array)  # a view
    array = array.array if isinstance(array, SharedArray) else array
    if isinstance(picked, slice) or not array.flags.c_contiguous:  # np.take would copy all of it first
        return array[picked]
    out = aligned((len(picked), *array.shape[1:]), array.dtype)
    return np.take(array, picked, axis=0, out=out, mode="clip")  # checked before; "raise" would copy once more


def take_rows_on_device(array: jax.Array, picked: Picked) -> jax.Array:
    """Rows of an array on a GPU, without leaving it."""
    if isinstance(picked, slice):
        if picked.step == 1:
            return rows_from(array, np.int32(picked.start), picked.stop - picked.start)
        picked = np.arange(len(array))[picked]
    return rows_at(array, np.asarray(picked, np.int32))


rows_from = jax.jit(jax.lax.dynamic_slice_in_dim, static_argnums=2)
rows_at = jax.jit(functools.partial(jnp.take, axis=0, mode="clip"))


def canonical_dtype(dtype: Any) -> Any:
    """The dtype that JAX gives such an array."""
    return jax.dtypes.canonicalize_dtype(dtype)


def keep_broadcasts(slot: WorkerSlot, command: Command) -> None:
    """Put broadcast inputs that are new where later calls find them."""
    for i in command.header["fresh"]:
        value = command.given.fresh[i] if command.given is not None else next(command.received)
        slot.kept[command.header["f"], i] = slot.put(value)


def whole_input(slot: WorkerSlot, command: Command, i: int) -> Any:
    """Input number i, that a worker sees whole."""
    entry = command.header["inputs"][i]
    if entry[0] == "kept":
        return slot.kept[command.header["f"], entry[1]]
    if entry[0] == "read":
        array = command.given.leaves[i] if command.given is not None else from_ticket(entry[2], slot.arrays)
        return slot.given(in_jax_dtype(entry[1], array.array))
    return slot.held(entry[1])[entry[2]]


# ---------------------------------------------------------------- pieces


def run_pieces(
    slot: WorkerSlot,
    spans: list[tuple[int, int]],
    programs: dict[int, WorkerProgram],
    sources: dict[int, RowSource],
    wholes: dict[int, jax.Array],
) -> Leaves:
    """The worker's results: op over its pieces, mean weighted by examples."""
    count, inputs = len(sources) + len(wholes), []
    total: Leaves = []
    first: list[jax.ShapeDtypeStruct] = []
    gathered: list[Leaves] = []
    for a, b in spans:
        with profiling.part("shuffle"):
            inputs = [sources[i].fetch(a, b) if i in sources else wholes[i] for i in range(count)]
        with jax.disable_jit(False):  # results must be JAX's arrays
            out = programs[b - a].run(*inputs)
        if len(spans) == 1:
            return [slot.own(x) if x in InputBuffers(inputs) else x for x in out]
        ops = tuple(leaf.op for leaf in slot.program.leaves)
        check_sliceable(slot.program.leaves, out)
        first = first or [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out]
        check_alike(slot.program.leaves, first, out)
        gathered.append([x for op, x in zip(ops, out, strict=True) if op == "gather"])
        weight = np.float64((b - a) / slot.count)
        total = fold(ops, total, out, weight)
    parts = [jnp.concatenate(rows) for rows in zip(*gathered, strict=True)]
    return finish_pieces(slot.program.leaves, total, parts, [x.dtype for x in out])


def add_to_held_values(slot: WorkerSlot) -> None:
    """Add the held values to the results of `add` updates."""
    for i, leaf in enumerate(slot.program.leaves):
        if leaf.op == "add":
            old, new = slot.held(leaf.target)[leaf.index], slot.out[i]
            got, expected = (f"{x.dtype}{list(x.shape)}" for x in (new, old))
            check(got == expected, f"updates: add: got {got} for a variable that holds {expected}; expected the same")
            slot.out[i] = added(old, new)


added = jax.jit(jnp.add)


class InputBuffers:
    """Memory of a call's arguments, to find results that lie in it.

    The caller may overwrite that memory, so such results are copied.
    """

    def __init__(self, arrays: list[Any]) -> None:
        self.pointers = {x.ctypes.data if isinstance(x, np.ndarray) else x.unsafe_buffer_pointer() for x in arrays}

    def __contains__(self, array: jax.Array) -> bool:
        return array.unsafe_buffer_pointer() in self.pointers


def check_sliceable(leaves: Sequence[Leaf], out: Leaves) -> None:
    """Refuse slices if pieces cannot combine, or no op says how."""
    for leaf, x in zip(leaves, out, strict=True):
        check(
            bool(leaf.op),
            f"slices: {leaf.name}: nothing says how pieces combine: local(mean), local(sum)",
        )
        check_reducible(leaf.op, x.dtype, x.shape, f"slices: {leaf.name}")


def check_alike(leaves: Sequence[Leaf], first: Sequence[jax.ShapeDtypeStruct], out: Leaves) -> None:
    """Refuse pieces of other dtypes, or of other shapes, which would broadcast.

    Gathered leaves may differ in the length of their first axis.
    """
    for leaf, x, y in zip(leaves, first, out, strict=True):
        start = leaf.op == "gather"
        if (x.dtype, x.shape[start:]) != (y.dtype, y.shape[start:]):
            raise UsageError(
                f"slices: {leaf.name}: got {x.dtype}{list(x.shape)} of one piece and "
                f"{y.dtype}{list(y.shape)} of another; {leaf.op} expects the same of all: reduce over the examples of "
                "a piece in the function, use gather, or slices=1"
            )


@functools.partial(jax.jit, static_argnums=0)
def _fold(ops: tuple[str, ...], total: Leaves, out: Leaves, weights: Leaves) -> Leaves:
    def one(op: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        x = x.astype(accumulation_dtype(x.dtype))
        return x * weight if op == "mean" else x

    new = [one(op, x, w) for op, x, w in zip(ops, out, weights, strict=True)]
    if not total:
        return new
    return [OPS[op].jnp(t, x) for op, t, x in zip(ops, total, new, strict=True)]  # pyright: ignore[reportOptionalCall]


def fold(ops: tuple[str, ...], total: Leaves, out: Leaves, weight: float) -> Leaves:
    """Combine the total with one more piece; gathered leaves stay apart.

    total <- op(total, out); for a mean, total + weight * out.
    """
    kept = [(op, x) for op, x in zip(ops, out, strict=True) if op != "gather"]
    weights = [np.asarray(weight if op == "mean" else 0, accumulation_dtype(x.dtype)) for op, x in kept]
    return _fold(tuple(op for op, _ in kept), total, [x for _, x in kept], weights)


def finish_pieces(leaves: Sequence[Leaf], total: Leaves, gathered: Leaves, dtypes: list) -> Leaves:
    """Totals in their own dtype, and gathered leaves, in the program's order."""
    totals, parts = iter(total), iter(gathered)
    return [
        next(parts) if leaf.op == "gather" else next(totals).astype(d) for leaf, d in zip(leaves, dtypes, strict=True)
    ]
