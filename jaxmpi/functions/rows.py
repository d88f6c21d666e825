"""Which rows of an array each worker takes, and taking them."""

import functools
import itertools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.comm.shared_sum import aligned
from jaxmpi.core.errors import UsageError
from jaxmpi.functions.shared_array import SharedArray


def shard_bounds(n: int, parts: int) -> list[int]:
    """Edges floor(i n / parts) of n rows in nearly equal parts."""
    return [i * n // parts for i in range(parts + 1)]


def worker_pieces(n: int, workers: int, worker: int, slices: int) -> list[tuple[int, int]]:
    """A worker's rows [begin, end) in up to `slices` pieces, none empty.

    All pieces of all workers have one of two lengths: floor and ceiling of n / (workers * slices).
    """
    slices = max(1, min(slices, n))  # from there on every row is a piece
    edges = [i * n // (workers * slices) for i in range(worker * slices, (worker + 1) * slices + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


class RowSelection(NamedTuple):
    """Chosen rows of an array: `count` of them, from `start` with a step, or by indices."""

    count: int
    start: int = 0
    step: int = 1
    indices: np.ndarray | None = None  # i64[count]

    def index(self, begin: int, end: int) -> slice | np.ndarray:
        """The chosen rows [begin, end), as an index of the array."""
        if self.indices is not None:
            return self.indices[begin:end]
        stop = self.start + end * self.step
        return slice(self.start + begin * self.step, stop if stop >= 0 else None, self.step)

    def shard(self, begin: int, end: int) -> "RowSelection":
        """The chosen rows [begin, end), as a selection."""
        if self.indices is not None:
            return RowSelection(end - begin, indices=self.indices[begin:end])
        return RowSelection(end - begin, self.start + begin * self.step, self.step)


def select_rows(batch: Any, length: int, what: str = "batch") -> RowSelection:
    """The rows that `batch` names, out of `length`: None all, an int n the first n; a slice, indices or a mask."""
    if batch is None:
        return RowSelection(length)
    if isinstance(batch, slice):
        picked = range(length)[batch]
        return RowSelection(len(picked), picked.start, picked.step)
    there = f"there are {length} examples"
    if isinstance(batch, (int, np.integer)) and not isinstance(batch, bool):
        if not 0 <= batch <= length:
            raise UsageError(f"{what}: got {batch}; {there}")
        return RowSelection(int(batch))
    indices = np.asarray(batch)
    if indices.dtype == bool and indices.ndim:
        if indices.shape != (length,):
            raise UsageError(f"{what}: got a mask of shape {list(indices.shape)}; {there}")
        indices = np.flatnonzero(indices)
    if indices.ndim != 1 or (indices.dtype.kind not in "iu" and indices.size):
        got = f"{indices.dtype}{list(indices.shape)}"
        raise UsageError(f"{what}: got {got}; expected a whole number, a slice, a mask, or indices in one axis")
    low, high = (int(indices.min()), int(indices.max())) if indices.size else (0, -1)
    if low < -length or high >= length:
        raise UsageError(f"{what}: got index {high if high >= length else low}; {there}")
    indices = indices.astype(np.int64, copy=False)  # now that none is beyond it
    return RowSelection(indices.size, indices=np.where(indices < 0, indices + length, indices) if low < 0 else indices)


def choices_by_worker(batch: Any, workers: int) -> list[Any]:
    """One choice of rows for each worker, from a list with one for each, or from one choice for all.

    A list that holds slices, lists or arrays has one for each worker; all else is for all.
    """
    if not isinstance(batch, (list, tuple)) or not any(hasattr(b, "__len__") or isinstance(b, slice) for b in batch):
        batch = [batch] * workers
    if len(batch) != workers:
        raise UsageError(f"batch_local: got {len(batch)} choices of rows; expected {workers}, one a worker")
    return [np.asarray(b) if hasattr(b, "__len__") else b for b in batch]


def check_choices(batch: Any, batch_local: Any, slices: Any, is_scattered: bool, is_resident: bool) -> None:
    """Refuse choices of rows that no input has."""
    if not isinstance(slices, (int, np.integer)) or slices < 1:
        raise UsageError(f"slices: got {slices!r}; expected a whole number > 0")
    if batch_local is not None and not is_resident:
        raise UsageError("batch_local: got a choice of rows, but no input is scatter(variable); leave it out")
    if (batch is not None and not is_scattered) or (slices > 1 and not (is_scattered or is_resident)):
        raise UsageError("batch, slices: got a choice of examples, but no input is scattered; leave it out")


def digest_rows(rows: RowSelection | None, choices: list[Any]) -> dict[str, Any]:
    """Rows that ranks compare, if each of them chooses."""
    crc = 0
    for indices in (rows and rows.indices, *choices):
        if hasattr(indices, "__len__"):
            crc = zlib.crc32(np.asarray(indices, np.int64).tobytes(), crc)
    return {
        "rows": str(rows and rows[:3]),
        "local": [str(choice) for choice in choices if not hasattr(choice, "__len__")],
        "indices": crc,
    }


def check_lengths(lengths: dict[str, int], workers: int, batch: Any) -> RowSelection:
    """The rows that a batch names of scattered arrays, given by name with their lengths, which must be the same."""
    (first, length), *others = lengths.items()
    for name, other in others:
        if other != length:
            raise UsageError(f"scattered inputs have different lengths: {name} {other}, {first} {length}")
    rows = select_rows(batch, length)
    if rows.count < workers:
        raise UsageError(f"got {rows.count} examples for {workers} workers; every worker needs one")
    return rows


def take_rows(array: Any, index: slice | np.ndarray) -> Any:
    """Rows of an array: a view if possible, else one copy; of an array on a GPU without leaving it."""
    if isinstance(array, jax.Array):
        if next(iter(array.devices())).platform != "cpu":
            if isinstance(index, slice) and index.step == 1:
                return _rows_from(array, np.int32(index.start), index.stop - index.start)
            return _rows_at(array, np.asarray(np.arange(len(array))[index], np.int32))
        array = np.asarray(array)  # a view
    array = array.array if isinstance(array, SharedArray) else array
    if isinstance(index, slice) or not array.flags.c_contiguous:  # np.take would copy all of it first
        return array[index]
    out = aligned((len(index), *array.shape[1:]), array.dtype)
    return np.take(array, index, axis=0, out=out, mode="clip")  # checked before; "raise" would copy once more


_rows_from = jax.jit(jax.lax.dynamic_slice_in_dim, static_argnums=2)
_rows_at = jax.jit(functools.partial(jnp.take, axis=0, mode="clip"))
