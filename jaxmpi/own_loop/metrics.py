"""Sums and means of metrics over all ranks, exact for uneven counts.

A mean of the ranks' means is wrong if ranks have unequal numbers of examples. Sums of floats also depend on the order
of additions. Numbers are therefore gathered as 64-bit floats, whatever JAX's settings are, an integer as a high and a
low half. A float is a whole number over a power of 2, so Python's integers add all of them without rounding, and the
quotient of two integers is rounded once.
"""

import builtins
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmpi.allreduce.call_order import joint_call
from jaxmpi.comm.agreement import check_may_send, fingerprint
from jaxmpi.comm.job import processes
from jaxmpi.core.errors import UsageError
from jaxmpi.core.host_arrays import check_holds, check_unmasked
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.to_jax import check_not_float0

HALF = 2**32  # integers travel as high * HALF + low
KINDS = {"f": "floats", "c": "complex numbers"}


def sum(metrics: PyTree) -> PyTree:
    """The sum over ranks of every leaf, on every rank; outside jit.

    Args:
        metrics: a tree of Python numbers, of integers up to 85 bits, NumPy or JAX arrays of any dtype; the same
            structure and shapes on all ranks. A leaf is of one kind on all ranks: of integers (or bools), of floats, or
            of complex numbers, whose parts are summed.

    Returns:
        The tree with Python's int, float or complex for each number, i64[...], f64[...] or c128[...] for each array:
        the exact sum, of floats rounded once.

    Communicates: a comparison of structure and shapes, then 8 bytes a float and 16 bytes an integer to each rank.

    Raises:
        UsageError: a leaf that is no number or array of such, or is traced (path); a sum in an array that int64
            does not hold (path); ranks whose trees differ (rank, path, got, expected).
    """
    return _over_ranks("jaxmpi.metrics.sum", metrics, 1, is_mean=False)


def mean(metrics: PyTree, count: Any = 1) -> PyTree:
    """The example-weighted mean of all ranks' means, on every rank; outside jit.

    sum_r count_r metrics_r / sum_r count_r, rounded once. Ranks of count 0 do not matter, whatever their metrics are.

    Args:
        metrics: as of `sum`.
        count: examples that this rank's metrics are the means of, or their weight: a finite number from 0 on, if whole
            up to 2^53.

    Returns:
        The tree with a float for each number, f64[...] for each array; complex ones for complex ones.

    Communicates, raises: as `sum`; `UsageError` if all counts are 0, or one is negative or not finite.
    """
    return _over_ranks("jaxmpi.metrics.mean", metrics, count, is_mean=True)


def _over_ranks(what: str, metrics: PyTree, count: Any, is_mean: bool) -> PyTree:
    check_may_send(what)
    control = processes()
    with joint_call(control, what):
        weight = _weight(count) if is_mean else 1.0
        named = [(path or "(the number itself)", leaf) for path, leaf in named_leaves(metrics)]
        given = [_array(f"{what}: leaf {path!r}", leaf) for path, leaf in named]
        kinds = {
            path: f"{KINDS.get(x.dtype.kind, 'integers')}{list(x.shape)}"
            for (path, _), x in zip(named, given, strict=True)
        }
        arrays = [_real(x) for x in given]
        columns = [_as_floats(x.reshape(-1)) for x in arrays]
        control.compare(fingerprint(what, kinds))
        rows = control.allgather_array(np.concatenate([[weight], *columns]))
    if not rows[:, 0].any():
        raise UsageError(f"{what}: got a count of 0 on every rank; expected examples on one of them")
    rows = rows[rows[:, 0] > 0]
    # All weights over one power of 2, which cancels in a mean; of a sum they are 1.
    ratios = [count.as_integer_ratio() for count in rows[:, 0].tolist()]
    weights = [number * max(scale for _, scale in ratios) // scale for number, scale in ratios]
    divisor = builtins.sum(weights) if is_mean else 1
    parts = np.split(rows[:, 1:], np.cumsum([column.size for column in columns], dtype=int), axis=1)[:-1]
    out = []
    for (path, _), x, original, part in zip(named, arrays, given, parts, strict=True):
        is_float = x.dtype.kind == "f"
        if is_float:
            totals: list[Any] = [_quotient(*_weighted_sum(each, weights), divisor) for each in part.T.tolist()]
        else:
            numbers = [
                [HALF * int(high) + int(low) for high, low in zip(*np.split(row, 2), strict=True)] for row in part
            ]
            totals = [_weighted_sum(each, weights)[0] for each in zip(*numbers, strict=True)]
            totals = [_quotient(total, 1, divisor) for total in totals] if is_mean else totals
        if not (is_mean or is_float) and x.ndim and any(not -(2**63) <= t < 2**63 for t in totals):
            raise UsageError(
                f"{what}: leaf {path!r}: got a sum beyond 64 bits; expected one of int64: give floats, or numbers one "
                "by one, whose sums are Python's"
            )
        dtype = np.float64 if is_mean or is_float else np.int64
        total = totals[0] if x.ndim == 0 else np.array(totals, dtype).reshape(x.shape)
        if original.dtype.kind == "c":
            total = np.asarray(total).view(np.complex128)[..., 0]
            total = total.item() if original.ndim == 0 else total
        out.append(total)
    return jax.tree.unflatten(jax.tree.structure(metrics), out)


def _weight(count: Any) -> float:
    """A count as a float equal to it."""
    what = "jaxmpi.metrics.mean: count"
    x = _array(what, count)
    is_one = x.shape == () and x.dtype.kind != "c" and bool(np.isfinite(x.astype(np.float64)))
    if not (is_one and 0 <= x.item() and (x.dtype.kind == "f" or x.item() <= 2**53)):
        raise UsageError(f"{what}: got {count}; expected one finite number from 0 on, if whole up to 2^53")
    return float(x.item())


def _real(x: np.ndarray) -> np.ndarray:
    """Complex c128[...] as its parts, f64[..., 2]; others as they are."""
    return np.ascontiguousarray(x).reshape(*x.shape, 1).view(np.float64) if x.dtype.kind == "c" else x


def _array(where: str, leaf: Any) -> np.ndarray:
    """A leaf in NumPy: bools, integers (Python's as objects), f64, c128."""
    if isinstance(leaf, Tracer):
        raise UsageError(f"{where} is traced; inside jit take jaxmpi.collectives.allreduce")
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise UsageError(f"{where}: got a random key; expected numbers: jax.random.key_data of it")
    check_not_float0(where, leaf)
    check_unmasked(where, leaf)
    array = np.asarray(leaf)
    if array.dtype.kind in "biu":
        return array
    if isinstance(leaf, int):
        if not -(2**84) <= leaf < 2**84:  # what two floats hold
            raise UsageError(f"{where}: got a whole number beyond 85 bits; expected a smaller one, or a float")
        return array
    is_plain = array.dtype != object
    if is_plain and jnp.issubdtype(array.dtype, jnp.integer):  # integers of fewer than 8 bits
        return array.astype(np.int64)
    if not (is_plain and jnp.issubdtype(array.dtype, jnp.inexact)):
        raise UsageError(f"{where}: got {array.dtype if is_plain else type(leaf).__name__}; expected numbers")
    if array.dtype.itemsize > 8 and array.dtype != np.complex128:
        check_holds(where, array, np.float64)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _as_floats(x: np.ndarray) -> np.ndarray:
    """f64[n] as it is; integers [n] as f64[2 n], their high parts and then their low ones."""
    if x.dtype.kind == "f":
        return x
    whole = x.astype(object)
    return np.concatenate([whole // HALF, whole % HALF]).astype(np.float64)


def _weighted_sum(values: Sequence[Any], weights: Sequence[int]) -> tuple[Any, int]:
    """The sum of weighted numbers as a whole number and the power of 2 that divides it; inf or nan if one is."""
    if endless := [value for value in values if not math.isfinite(value)]:
        return builtins.sum(endless), 1  # infinities of both signs give nan
    ratios = [value.as_integer_ratio() for value in values]
    scale = max(divisor for _, divisor in ratios)
    return builtins.sum(
        weight * number * (scale // divisor) for weight, (number, divisor) in zip(weights, ratios, strict=True)
    ), scale


def _quotient(total: Any, scale: int, divisor: int) -> float:
    """A sum or mean, rounded once; infinite beyond the range of floats."""
    if isinstance(total, float):  # inf or nan
        return total
    try:
        return total / (scale * divisor)
    except OverflowError:
        return math.inf if total > 0 else -math.inf
