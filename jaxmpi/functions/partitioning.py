"""Which rows are whose: pure arithmetic of bounds and indices."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.errors import UsageError, check

Picked = slice | np.ndarray  # rows of an array


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
    """Chosen rows of an array: `count` of them."""

    count: int
    start: int = 0
    step: int = 1
    indices: np.ndarray | None = None  # i64[count]

    def of(self, begin: int, end: int) -> Picked:
        """The chosen rows [begin, end), as an index of the array."""
        if self.indices is not None:
            return self.indices[begin:end]
        stop = self.start + end * self.step
        return slice(self.start + begin * self.step, stop if stop >= 0 else None, self.step)


def select_rows(batch: Any, length: int, what: str = "batch") -> RowSelection:
    """The rows that `batch` names, out of `length`.

    None names all, an int n the first n; a slice, indices or a mask name their own.

    Raises:
        UsageError: rows that are not there, or no such thing.
    """
    if batch is None:
        return RowSelection(length)
    if isinstance(batch, slice):
        picked = range(length)[batch]
        return RowSelection(len(picked), picked.start, picked.step)
    if isinstance(batch, (int, np.integer)) and not isinstance(batch, bool):
        first = int(batch)
        check(0 <= first <= length, f"{what}: got {first}; there are {length} examples")
        return RowSelection(first)
    mask = np.asarray(batch)
    if mask.dtype == bool and mask.ndim:
        got = f"{what}: got a mask of shape {list(mask.shape)}"
        check(mask.shape == (length,), f"{got}; there are {length} examples, and it needs an entry for each")
        return RowSelection(*check_indices(np.flatnonzero(mask), length, what))
    return RowSelection(*check_indices(batch, length, what))


def check_indices(batch: Any, length: int, what: str) -> tuple[int, int, int, np.ndarray]:
    """Fields of a `RowSelection` by indices; negative ones count from the end."""
    indices = np.asarray(batch)
    check(
        bool(indices.ndim == 1 and (indices.dtype.kind in "iu" or indices.size == 0)),
        f"{what}: got {indices.dtype}{list(indices.shape)}; expected a whole number, a slice, a mask, or indices "
        "in one axis",
    )
    low, high = (int(indices.min()), int(indices.max())) if indices.size else (0, -1)
    odd = high if high >= length else low
    check(-length <= low and high < length, f"{what}: got index {odd}; there are {length} examples")
    indices = indices.astype(np.int64, copy=False)  # now that none is beyond it
    indices = np.where(indices < 0, indices + length, indices) if low < 0 else indices
    return indices.size, 0, 1, indices


def choices_by_worker(batch: Any, workers: int) -> list[Any]:
    """Return one choice a worker, from a list or one for all.

    A list that holds slices, lists or arrays has one for each worker; all else is for all.

    Raises:
        UsageError: another number of choices than workers.
    """
    if not isinstance(batch, (list, tuple)) or not any(hasattr(b, "__len__") or isinstance(b, slice) for b in batch):
        return [batch] * workers
    check(len(batch) == workers, f"batch_local: got {len(batch)} choices of rows; expected {workers}, one a worker")
    return list(batch)


def check_enough(n: int, workers: int) -> None:
    """Refuse a call that leaves a worker without an example."""
    if n < workers:
        raise UsageError(f"got {n} examples for {workers} workers; every worker needs one: fork fewer, or give more")


def common_length(lengths: Sequence[int], names: Sequence[str]) -> int:
    """The one length of all scattered inputs."""
    odd = [i for i, length in enumerate(lengths) if length != lengths[0]]
    if odd:
        raise UsageError(
            f"scattered inputs have different lengths: {names[odd[0]]} {lengths[odd[0]]}, {names[0]} {lengths[0]}; "
            "their first axes must be the same examples"
        )
    return lengths[0]
