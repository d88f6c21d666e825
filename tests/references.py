"""Oracles: what exchange must compute, slowly and readably, in NumPy.

`sum_over_workers` is the float64 sum that every strategy must come close to. `asa`, `ring` and the others named like
strategies follow the strategies' roundings and order of additions in float32. The strategies must equal these oracles
bit for bit.
"""

import functools
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.algorithms.color_trees import TreeSchedule, build_trees

Rows = np.ndarray  # f32[workers, n]


def sum_over_workers(rows: Rows) -> np.ndarray:
    """f64[n]: the sum over workers."""
    result = np.zeros(rows.shape[1])
    for row in rows:
        result += row.astype(np.float64)
    return result


def round_to_wire(x: np.ndarray, wire: str) -> np.ndarray:
    """Return what arrives of f32[n] that one worker sends."""
    if wire == "32":
        return x
    if wire == "bf16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert wire in ROUND_BLOCK
    return np.concatenate([ROUND_BLOCK[wire](x[i : i + 256]) for i in range(0, len(x), 256)] or [x])


def round_block_to_halves(x: np.ndarray) -> np.ndarray:
    """f32[n <= 256] to halves, after scaling by a power of two."""
    largest = np.max(np.abs(x))
    if largest == 0 or not np.isfinite(largest):
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    _, exponent = np.frexp(largest)  # largest is in [2^(exponent - 1), 2^exponent)
    power = np.clip(15 - exponent, -126, 126)
    return np.ldexp(np.ldexp(x, power).astype(np.float16).astype(np.float32), -power)


def round_block_to_multiples(x: np.ndarray) -> np.ndarray:
    """f32[n <= 256] to multiples of one scale, a number of 16 significant bits."""
    largest = np.max(np.abs(x))
    if not np.isfinite(largest):
        return np.full_like(x, np.nan)
    mantissa, exponent = np.frexp(largest / np.float32(127))
    scale = np.maximum(np.ldexp(np.ceil(mantissa * 2**16) / np.float32(2**16), exponent), np.float32(2.0**-126))
    return (np.rint(x * (1 / scale)) + np.float32(0)) * scale  # an integer has no -0


ROUND_BLOCK = {"16": round_block_to_halves, "8": round_block_to_multiples}


def asa(rows: Rows, wire: str) -> np.ndarray:
    """Every worker sums its chunk in rank order, then sends it to all."""
    size = len(rows)
    chunks = rows.reshape(size, size, -1)  # [sender, receiver, n / size]
    parts = []
    for receiver in range(size):
        mine = round_to_wire(chunks[0, receiver], wire)
        for sender in range(1, size):
            mine = mine + round_to_wire(chunks[sender, receiver], wire)
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


def root(rows: Rows, wire: str) -> np.ndarray:
    """Rank 0 adds what it receives to its own, in rank order, and sends the sum."""
    total = rows[0]
    for row in rows[1:]:
        total = total + round_to_wire(row, wire)
    return round_to_wire(total, wire)


def tree(rows: Rows, wire: str, order: Sequence[int]) -> np.ndarray:
    """Partners swap halves and add, with partners 1, 2, 4, ... places away; then all blocks are sent."""
    levels = len(rows).bit_length() - 1
    p = 1 << levels
    rows = padded(rows[list(order)], p)
    rows = rows.reshape(len(rows), p, rows.shape[1] // p)  # [place, block, n / p]
    parts = [rows[i] + arrived(rows[p + i], wire) if p + i < len(rows) else rows[i] for i in range(p)]
    blocks = [0] * p  # which block each place ends up with
    for level in range(levels):
        halves = [np.split(part, 2) for part in parts]
        sides = [(i >> level) & 1 for i in range(p)]
        parts = [halves[i][side] + arrived(halves[i ^ (1 << level)][side], wire) for i, side in enumerate(sides)]
        blocks = [2 * block + side for block, side in zip(blocks, sides, strict=True)]
    return np.concatenate([round_to_wire(parts[blocks.index(block)][0], wire) for block in range(p)])


def arrived(blocks: np.ndarray, wire: str) -> np.ndarray:
    """Return what arrives of f32[blocks, n], each encoded by itself."""
    return np.stack([round_to_wire(block, wire) for block in blocks])


def color(rows: Rows, wire: str, order: Sequence[int], colours: int, packets: int = 1) -> np.ndarray:
    """Each packet is summed up its tree, children in the order of the rounds they send in."""
    forest, workers, n = build_trees(len(rows), colours), len(rows), rows.shape[1]
    k = len(forest.parent)
    parts = padded(rows[list(order)], k * workers).reshape(workers, k, -1)  # each a multiple of the workers

    def summed(c: int) -> np.ndarray:
        length = -(-parts.shape[2] // packets)
        length = length if length < 256 else min(parts.shape[2], -(-length // 256) * 256)
        each = np.pad(parts[:, c], ((0, 0), (0, packets * length - parts.shape[2]))).reshape(workers, packets, length)
        sums = [climb(forest, each[:, i], wire, c, forest.parent[c].index(-1)) for i in range(packets)]
        return np.concatenate(sums)[: parts.shape[2]]

    return np.concatenate([summed(c) for c in range(k)])[:n]


def climb(forest: TreeSchedule, rows: Rows, wire: str, tree: int, place: int) -> np.ndarray:
    """Return what one place of a tree sends upwards, and the root to all."""
    received = np.zeros_like(rows[place])
    for child in (child for edges in forest.rounds for c, child, above in edges if (c, above) == (tree, place)):
        received = received + climb(forest, rows, wire, tree, child)
    return round_to_wire(rows[place] + received, wire)


def hier(rows: Rows, wire: str, hosts: Sequence[int], cross: Callable[[Rows, str], np.ndarray]) -> np.ndarray:
    """Hosts add in rank order, then `cross` sums each part over hosts."""
    slots = len(hosts) // len(set(hosts))
    groups = [[row for row, at in zip(rows, hosts, strict=True) if at == host] for host in sorted(set(hosts))]
    sums = np.stack([functools.reduce(np.add, group) for group in groups]).reshape(len(groups), slots, -1)
    parts = [cross(sums[:, part], wire) if len(groups) > 1 else sums[0, part] for part in range(slots)]
    return np.concatenate([part[: sums.shape[-1]] for part in parts])  # without what `cross` filled up


def by_name(strategy: str, rows: Rows, order: Sequence[int], hosts: Sequence[int], packets: int = 1) -> np.ndarray:
    """The bits of a strategy's sum of rows that are a multiple of the workers; it may be filled up with zeros."""
    algorithm, _, wire = parse(strategy).name.partition(":")
    if algorithm.startswith("hier-"):
        cross = lambda parts, wire: by_name(f"{algorithm[5:]}:{wire}", parts, range(len(parts)), ())  # noqa: E731
        return hier(rows, wire, hosts, cross)
    if algorithm in ("asa", "shm"):
        return asa(rows, wire)
    if algorithm == "root":
        return root(rows, wire)
    if algorithm in ("ring", "tree"):
        return {"ring": ring, "tree": tree}[algorithm](rows, wire, order)
    return color(rows, wire, order, 1 if algorithm == "pipering" else int(algorithm[5:]), packets)


def padded(rows: Rows, multiple: int) -> Rows:
    """f32[workers, n] with zeros up to a multiple."""
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple)))


def mean_in_leaf_dtype(rows: np.ndarray) -> np.ndarray:
    """f64: the mean over workers of leaves in any float dtype, not rounded to it."""
    return rows.astype(np.float64).mean(0)
