"""Oracles: what exchange must compute, slowly and readably, in NumPy.

`sum_over_workers` is the float64 sum that every strategy must come close to. `asa` and `ring` follow the roundings and
the order of additions of the strategies in float32, which they must equal bit for bit.
"""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

Rows = np.ndarray  # f32[workers, n]


def sum_over_workers(rows: Rows) -> np.ndarray:
    """f64[n]: the sum over workers."""
    result = np.zeros(rows.shape[1])
    for row in rows:
        result += row.astype(np.float64)
    return result


def round_to_wire(x: np.ndarray, wire: str) -> np.ndarray:
    """What arrives of f32[n] that one worker sends."""
    if wire == "32":
        return x
    if wire == "bf16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert wire == "16"
    largest = np.max(np.abs(x), initial=0)
    if largest == 0 or not np.isfinite(largest):
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    _, exponent = np.frexp(largest)  # largest is in [2^(exponent - 1), 2^exponent)
    power = np.clip(15 - exponent, -126, 126)
    return np.ldexp(np.ldexp(x, power).astype(np.float16).astype(np.float32), -power)


def asa(rows: Rows, wire: str) -> np.ndarray:
    """Every worker sums its slice in rank order, then sends it to all."""
    size = len(rows)
    slices = rows.reshape(size, size, -1)  # [sender, receiver, n / size]
    parts = []
    for receiver in range(size):
        mine = round_to_wire(slices[0, receiver], wire)
        for sender in range(1, size):
            mine = mine + round_to_wire(slices[sender, receiver], wire)
        parts.append(round_to_wire(mine, wire))
    return np.concatenate(parts)


def ring(rows: Rows, wire: str, order: Sequence[int]) -> np.ndarray:
    """Chunk c starts at place c of the ring, and each place it comes to adds its own."""
    size = len(rows)
    chunks = rows.reshape(size, size, -1)  # [rank, chunk, n / size]
    parts = []
    for chunk in range(size):
        partial = chunks[order[chunk], chunk]
        for hop in range(1, size):
            rank = order[(chunk + hop) % size]
            partial = round_to_wire(partial, wire) + chunks[rank, chunk]
        parts.append(round_to_wire(partial, wire))
    return np.concatenate(parts)


def mean_in_leaf_dtype(rows: np.ndarray) -> np.ndarray:
    """f64: the mean over workers of leaves in any float dtype, not rounded to it."""
    return rows.astype(np.float64).mean(0)
