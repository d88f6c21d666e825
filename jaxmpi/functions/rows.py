"""Which rows of an array each worker takes, and taking them.

Chosen rows are a `range` or an array of indices: both can be sliced, so a worker's shard of them, and a piece of that,
is `rows[begin:end]`.
"""

import functools
import itertools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.functions.shared_array import SharedArray

Rows = range | np.ndarray  # indices: i64[n]


def shard_bounds(n: int, parts: int) -> list[int]:
    """Edges floor(i n / parts) of n rows in nearly equal parts."""
    return [i * n // parts for i in range(parts + 1)]


def worker_pieces(n: int, workers: int, worker: int, slices: int) -> list[tuple[int, int]]:
    """A worker's rows [begin, end) in up to `slices` pieces, none empty.

    All pieces of all workers have one of two lengths: floor and ceiling of n / (workers * slices). So the function is
    compiled for two shapes at most, however many pieces there are.
    """
    slices = max(1, min(slices, n))  # from there on every row is a piece
    edges = [i * n // (workers * slices) for i in range(worker * slices, (worker + 1) * slices + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


def select_rows(batch: Any, length: int, label: str = "batch") -> Rows:
    """The rows that `batch` names, out of `length`: None all, an int n the first n; a slice, indices or a mask."""
    if batch is None or isinstance(batch, slice):
        return range(length)[batch or slice(None)]
    expectation = f"there are {length} examples"
    if isinstance(batch, (int, np.integer)) and not isinstance(batch, bool):
        if not 0 <= batch <= length:
            raise UsageError(f"{label}: got {batch}; {expectation}")
        return range(int(batch))
    indices = np.asarray(batch)
    if indices.dtype == bool and indices.ndim:
        if indices.shape != (length,):
            raise UsageError(f"{label}: got a mask of shape {list(indices.shape)}; {expectation}")
        indices = np.flatnonzero(indices)
    if indices.ndim != 1 or (indices.dtype.kind not in "iu" and indices.size):
        got = f"{indices.dtype}{list(indices.shape)}"
        raise UsageError(f"{label}: got {got}; expected a whole number, a slice, a mask, or indices in one axis")
    low, high = (int(indices.min()), int(indices.max())) if indices.size else (0, -1)
    if low < -length or high >= length:
        raise UsageError(f"{label}: got index {high if high >= length else low}; {expectation}")
    indices = indices.astype(np.int64, copy=False)  # after the check: a cast of uint64 could wrap into range
    return np.where(indices < 0, indices + length, indices) if low < 0 else indices


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


def digest_rows(rows: Rows | None, choices: list[Any]) -> dict[str, Any]:
    """Rows that ranks compare, if each of them chooses; of indices a checksum."""
    crc, described = 0, []
    for choice in (rows, *choices):
        if isinstance(choice, np.ndarray):
            crc = zlib.crc32(np.asarray(choice, np.int64).tobytes(), crc)
        else:
            described.append(str(choice))
    return {"rows": described, "indices": crc}


def check_lengths(lengths: dict[str, int], workers: int, batch: Any) -> Rows:
    """The rows that a batch names of scattered arrays, given by name with their lengths, which must be the same."""
    (first, length), *others = lengths.items()
    for name, other in others:
        if other != length:
            raise UsageError(f"scattered inputs have different lengths: {name} {other}, {first} {length}")
    rows = select_rows(batch, length)
    if len(rows) < workers:
        raise UsageError(f"got {len(rows)} examples for {workers} workers; every worker needs one")
    return rows


def take_rows(array: Any, rows: Rows) -> Any:
    """Rows of an array: a view if possible, else one copy; of an array on a GPU without leaving it."""
    index = rows
    if isinstance(rows, range):
        # A range that counts down to row 0 stops at -1, which in a slice would be the last row.
        index = slice(rows.start, rows.stop if rows.stop >= 0 else None, rows.step) if rows else slice(0)
    if isinstance(array, jax.Array):
        if next(iter(array.devices())).platform != "cpu":
            if isinstance(index, slice) and index.step == 1:
                return _rows_from(array, np.int32(index.start), len(rows))
            return _rows_at(array, np.asarray(np.arange(len(array))[index], np.int32))
        array = np.asarray(array)  # a view
    array = array.array if isinstance(array, SharedArray) else array
    if isinstance(index, slice) or not array.flags.c_contiguous:  # np.take would copy all of it first
        return array[index]
    out = aligned((len(rows), *array.shape[1:]), array.dtype)
    return np.take(array, index, axis=0, out=out, mode="clip")  # checked before; "raise" would copy once more


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A new array at a multiple of 64 bytes; JAX copies others."""
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size_bytes].view(dtype).reshape(shape)


_rows_from = jax.jit(jax.lax.dynamic_slice_in_dim, static_argnums=2)
_rows_at = jax.jit(functools.partial(jnp.take, axis=0, mode="clip"))
