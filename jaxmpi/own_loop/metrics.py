"""Sums and means of metrics over all ranks, exact for uneven counts.

A mean of the ranks' means is wrong if ranks have unequal numbers of examples. Sums of floats also depend on the order
of additions. Numbers are therefore gathered as pairs of 64-bit floats, whatever JAX's settings are. An integer has a
high and a low half; a float is split so that products with counts are exact. For floats `math.fsum` adds these products
without intermediate rounding. `Fraction` replaces it for large or fractional counts, and after an overflow.
"""

import builtins
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmpi.allreduce.call_order import one_thread
from jaxmpi.comm.agreement import check_may_send, fingerprint, refuse_together
from jaxmpi.comm.job import processes
from jaxmpi.core.errors import UsageError
from jaxmpi.core.host_arrays import check_holds, check_unmasked
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.to_jax import check_not_float0

HALF = 2**32  # integers travel as high * HALF + low
KINDS = {"f": "floats", "c": "complex numbers"}
COUNTS = 2**26  # half a float's 53 bits times a whole count below is exact; all else is multiplied as fractions


def sum(metrics: PyTree) -> PyTree:
    """The sum over ranks of every leaf, on every rank; outside jit.

    Args:
        metrics: a tree of Python numbers, of integers up to 85 bits, NumPy or JAX arrays of any dtype; the same
            structure and shapes on all ranks. A leaf is of one kind on all ranks: of integers (or bools), of floats, or
            of complex numbers, whose parts are summed.

    Returns:
        The tree with Python's int, float or complex for each number, i64[...], f64[...] or c128[...] for each array:
        the exact sum, of floats rounded once.

    Communicates: a comparison of structure and shapes, then 16 bytes a number to each rank.

    Raises:
        UsageError: a leaf that is no number or array of such, or is traced (path); a sum in an array that int64
            does not hold (path); ranks whose trees differ (rank, path, got, expected).
    """
    return _over_ranks("jaxmpi.metrics.sum", metrics, 1, is_mean=False)


def mean(metrics: PyTree, count: Any = 1) -> PyTree:
    """The example-weighted mean of all ranks' means, on every rank; outside jit.

    sum_r count_r metrics_r / sum_r count_r; the numerator is the exact sum, rounded once. Ranks of count 0 do not
    matter, whatever their metrics are.

    Args:
        metrics: as of `sum`.
        count: examples that this rank's metrics are the means of, or their weight: a finite number from 0 on, if whole
            up to 2^53. Arrays take longer by fractions, and by numbers from 2^26 on.

    Returns:
        The tree with a float for each number, f64[...] for each array; complex ones for complex ones.

    Communicates, raises: as `sum`; `UsageError` if all counts are 0, or one is negative or not finite.
    """
    return _over_ranks("jaxmpi.metrics.mean", metrics, count, is_mean=True)


def _over_ranks(what: str, metrics: PyTree, count: Any, is_mean: bool) -> PyTree:
    check_may_send(what)
    control = processes()
    with one_thread(control, what), refuse_together(control.compare):
        weight = _weight(count) if is_mean else 1.0
        named = [(path or "(the number itself)", leaf) for path, leaf in named_leaves(metrics)]
        given = [_array(f"{what}: leaf {path!r}", leaf) for path, leaf in named]
    kinds = {
        path: f"{KINDS.get(x.dtype.kind, 'integers')}{list(x.shape)}" for (path, _), x in zip(named, given, strict=True)
    }
    arrays = [_real(x) for x in given]
    columns = [np.stack(_halves(x.reshape(-1)), axis=-1).reshape(-1) for x in arrays]
    with one_thread(control, what):
        control.compare(fingerprint(what, kinds))
        rows = control.allgather_array(np.concatenate([[weight], *columns]))
    counts = rows[:, 0]
    if not counts.any():
        raise UsageError(f"{what}: got a count of 0 on every rank; expected examples on one of them")
    present, counts = rows[counts > 0, 1:], counts[counts > 0]
    out, begin = [], 0
    for (path, _), x, original, column in zip(named, arrays, given, columns, strict=True):
        parts = np.moveaxis(present[:, begin : begin + column.size].reshape(len(counts), x.size, 2), 1, 0)
        begin += column.size
        is_float = x.dtype.kind == "f"
        totals = (_sum_floats if is_float else _sum_integers)(parts, counts, is_mean)
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


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split f64[n] or integers [n] into high and low parts, f64[n] each.

    An integer is high * HALF + low. A float is high + low, whose products with a whole count below COUNTS are exact.
    """
    if x.dtype.kind != "f":
        whole = x.astype(object)
        return (whole // HALF).astype(np.float64), (whole % HALF).astype(np.float64)
    is_finite = np.isfinite(x)
    high = (x.view(np.int64) & -(1 << 27)).view(np.float64)
    return np.where(is_finite, high, x), np.where(is_finite, x - np.where(is_finite, high, 0), 0.0)


def _exact_weights(counts: np.ndarray) -> list[Any]:
    """Counts as Python integers, or as fractions if one is not whole."""
    return [int(count) for count in counts] if (counts % 1 == 0).all() else [Fraction(count) for count in counts]


def _sum_integers(halves: np.ndarray, counts: np.ndarray, is_mean: bool) -> list[Any]:
    """Count-weighted sums over ranks, or means, from halves f64[n, ranks, 2]."""
    weights = _exact_weights(counts)
    totals = [
        builtins.sum(weight * (HALF * int(high) + int(low)) for weight, (high, low) in zip(weights, rows, strict=True))
        for rows in halves.tolist()
    ]
    divisor = builtins.sum(weights)
    return [float(total / divisor) for total in totals] if is_mean else totals


def _sum_floats(halves: np.ndarray, counts: np.ndarray, is_mean: bool) -> list[float]:
    """As `_sum_integers`: by `math.fsum` of exact products, else by fractions."""
    weights = _exact_weights(counts)
    divisor = builtins.sum(weights) if is_mean else 1
    with np.errstate(over="ignore", invalid="ignore"):  # such are summed as fractions
        products = halves * counts[:, None]
    is_short = bool((counts % 1 == 0).all() and (counts < COUNTS).all())
    is_exact = np.asarray(np.isfinite(products).all(axis=(1, 2)) & is_short)
    out = []
    for row, each, exact in zip(halves, products, is_exact, strict=True):
        try:
            total = math.fsum(each.ravel().tolist()) / divisor if exact else _sum_fractions(row, weights, divisor)
        except OverflowError:
            total = _sum_fractions(row, weights, divisor)
        out.append(total)
    return out


def _sum_fractions(row: np.ndarray, weights: list[Any], divisor: Any) -> float:
    """The sum or mean from halves f64[ranks, 2], rounded once."""
    endless = row[~np.isfinite(row)]
    if endless.size:
        with np.errstate(invalid="ignore"):  # infinities of both signs
            return float(endless.sum())
    pairs = zip(weights, row.tolist(), strict=True)
    total = builtins.sum(weight * (Fraction(high) + Fraction(low)) for weight, (high, low) in pairs) / divisor
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf
