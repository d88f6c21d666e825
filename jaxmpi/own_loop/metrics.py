"""Metrics over all ranks: sums and means of numbers and arrays of any dtype, exact for uneven counts.

Numbers travel as 64-bit floats whatever JAX's settings are, integers in two halves. Their sums are rounded once, so
that neither the number of ranks nor their order matters.
"""

import builtins
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmpi.comm.control import processes
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.runtime.in_flight import check_may_send

HALF = 2**32  # integers travel as high * HALF + low
COUNTS = 2**26  # half a float's 53 bits times less is exact; integers are multiplied as Python's


def sum(metrics: PyTree) -> PyTree:
    """The sum over ranks of every leaf, on every rank; outside jit.

    Args:
        metrics: a tree of Python numbers, NumPy or JAX arrays of any real dtype; the same structure and shapes on all
            ranks. A leaf is of integers (or bools) on all ranks, or of floats on all.

    Returns:
        The tree with Python's int or float for each number, i64[...] or f64[...] for each array: the exact sum, of
        floats rounded once.

    Communicates: a comparison of structure and shapes, then 16 bytes a number to each rank.

    Raises:
        UsageError: a leaf that is no real number or array of such, or is traced (path); a sum in an array that int64
            does not hold (path); ranks whose trees differ (rank, path, got, expected).
    """
    return _over_ranks("jaxmpi.metrics.sum", metrics, 1, is_mean=False)


def mean(metrics: PyTree, count: int = 1) -> PyTree:
    """The mean over examples of every rank's means, on every rank; outside jit.

    sum_r count_r metrics_r / sum_r count_r; the numerator is the exact sum, rounded once. Ranks of count 0 do not
    matter, whatever their metrics are.

    Args:
        metrics: as of `sum`.
        count: examples that this rank's metrics are the means of, below 2^26.

    Returns:
        The tree with a float for each number, f64[...] for each array.

    Communicates, raises: as `sum`; `UsageError` if all counts are 0.
    """
    check(0 <= count < COUNTS, f"jaxmpi.metrics.mean: count: got {count}; expected 0 to {COUNTS - 1}")
    return _over_ranks("jaxmpi.metrics.mean", metrics, count, is_mean=True)


def _over_ranks(what: str, metrics: PyTree, count: int, is_mean: bool) -> PyTree:
    check_may_send(what)
    arrays = [_array(what, path, leaf) for path, leaf in named_leaves(metrics)]
    kinds = [f"{'floats' if x.dtype.kind == 'f' else 'integers'}{list(x.shape)}" for x in arrays]
    control = processes()
    control.assert_same(what, dict(zip((path for path, _ in named_leaves(metrics)), kinds, strict=True)))
    columns = [np.stack(_halves(x.reshape(-1)), axis=-1).reshape(-1) for x in arrays]
    rows = control.allgather_array(np.concatenate([[float(count)], *columns]))
    counts = rows[:, 0]
    check(bool(counts.any()), f"{what}: got a count of 0 on every rank; expected examples on one of them")
    present, counts = rows[counts > 0, 1:], counts[counts > 0]
    out, begin = [], 0
    for (path, _), x, column in zip(named_leaves(metrics), arrays, columns, strict=True):
        parts = present[:, begin : begin + column.size].reshape(len(counts), x.size, 2)
        begin += column.size
        totals = _totals(np.moveaxis(parts, 1, 0), counts, x.dtype.kind != "f")
        total: Any = [t / int(counts.sum()) for t in totals] if is_mean else totals
        is_float = is_mean or x.dtype.kind == "f"
        is_long = not is_float and x.ndim > 0 and any(not -(2**63) <= t < 2**63 for t in total)
        check(
            not is_long,
            f"{what}: leaf {path or '(the number itself)'!r}: got a sum beyond 64 bits; expected one of int64: give "
            "floats, or numbers one by one, whose sums are Python's",
        )
        out.append(total[0] if x.ndim == 0 else np.array(total, np.float64 if is_float else np.int64).reshape(x.shape))
    return jax.tree.unflatten(jax.tree.structure(metrics), out)


def _array(what: str, path: str, leaf: Any) -> np.ndarray:
    """A leaf as bools, integers or 64-bit floats of NumPy."""
    where = f"{what}: leaf {path or '(the number itself)'!r}"
    check(not isinstance(leaf, Tracer), f"{where} is traced; inside jit take jaxmpi.collectives.allreduce")
    array = np.asarray(leaf)
    if array.dtype.kind in "biu":
        return array
    is_float = array.dtype != object and jnp.issubdtype(array.dtype, jnp.floating)
    check(is_float, f"{where}: got {array.dtype}; expected real numbers (of complex ones, give both parts)")
    return array.astype(np.float64)


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two f64[n] for f64[n] or integers [n]: each number is their sum, and of floats so are products with a count."""
    if x.dtype.kind != "f":
        whole = x.astype(object)
        return (whole // HALF).astype(np.float64), (whole % HALF).astype(np.float64)
    is_finite = np.isfinite(x)
    high = (x.view(np.int64) & -(1 << 27)).view(np.float64)
    return np.where(is_finite, high, x), np.where(is_finite, x - np.where(is_finite, high, 0), 0.0)


def _totals(halves: np.ndarray, counts: np.ndarray, is_integer: bool) -> list[Any]:
    """The sum over ranks of each number times its rank's count, from halves f64[n, ranks, 2]: integers, or floats."""
    if is_integer:
        weights = [int(count) for count in counts]
        return [
            builtins.sum(
                weight * (HALF * int(high) + int(low)) for weight, (high, low) in zip(weights, rows, strict=True)
            )
            for rows in halves.tolist()
        ]
    with np.errstate(invalid="ignore"):  # infinities of both signs
        parts = halves * counts[:, None]
        return [math.fsum(each.flat) if np.isfinite(each).all() else float(each.sum()) for each in parts]
