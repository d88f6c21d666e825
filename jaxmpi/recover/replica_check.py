"""Check that replicated state is bit-identical; name workers that differ."""

import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.comm.job import Processes
from jaxmpi.comm.topology import Workers, local_rows
from jaxmpi.core.pytrees import PyTree, named_leaves


def fingerprints_by(jit: Callable, workers: Workers) -> Callable[[PyTree], np.ndarray]:
    """Build the function that fingerprints a tree: u32[workers of this process, leaves].

    The device hashes, so that only numbers leave it. On CPUs the host does, whose memory it is. So there is no program
    for it that all ranks of a host would have to compile during a run.
    """
    if jax.default_backend() == "cpu":
        return partial(checksums, workers=workers)
    compiled = jit(fingerprints)
    return lambda tree: local_rows(compiled(tree), workers).reshape(len(workers.mine), -1)


def checksums(tree: PyTree, workers: Workers) -> np.ndarray:
    """u32[workers of this process, leaves]: CRC-32, which any flipped bit changes."""
    columns = [[checksum(row) for row in local_rows(leaf, workers)] for leaf in jax.tree.leaves(tree)]
    return np.array(columns, np.uint32).reshape(-1, len(workers.mine)).T


def checksum(row: np.ndarray) -> int:
    """CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(row).reshape(-1).view(np.uint8).data)


def fingerprints(tree: PyTree) -> jax.Array:
    """u32[leaves]: each leaf's words, times distinct odd numbers, summed.

    h = sum_i (2 i + 1) word_i  mod 2^32 ; a flipped bit of one word changes it by +-2^b (2 i + 1), which is not 0.
    """
    return jnp.stack([fingerprint(leaf) for leaf in jax.tree.leaves(tree)] or [jnp.zeros((), jnp.uint32)])


def fingerprint(leaf: jax.Array) -> jax.Array:
    """u32[] of one leaf."""
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, words).reshape(-1).astype(jnp.uint32)
    odd = 2 * jax.lax.iota(jnp.uint32, bits.size) + 1
    return (bits * odd).sum(dtype=jnp.uint32)


def compare_replicas(tree: PyTree, hashes: np.ndarray, mine: tuple[int, ...], processes: Processes, step: int) -> str:
    """Message on the workers and leaves that differ from most, on all ranks alike; empty if none do.

    Args:
        tree: of which `hashes`, u32[workers of this process, leaves], are the fingerprints.

    Communicates: a gather of the fingerprints as text.
    """
    texts = processes.allgather_object(hashes.astype("<u4").tobytes().hex())
    every = np.frombuffer(bytes.fromhex("".join(texts)), "<u4").reshape(len(texts) * len(mine), -1)
    rows = [row.tobytes() for row in every]
    (majority, count), *others = Counter(rows).most_common()
    if not others:
        return ""
    text = f"params of workers differ after step {step}: "
    if count == others[0][1]:
        groups = [[worker for worker, row in enumerate(rows) if row == key] for key in dict.fromkeys(rows)]
        return text + f"workers {' and '.join(map(str, groups))} apart; which of them are right cannot be told"
    odd = [worker for worker, row in enumerate(rows) if row != majority]
    wrong = np.flatnonzero(every[odd[0]] != every[rows.index(majority)])
    leaves = [name for name, _ in named_leaves(tree)]
    paths = ", ".join(leaves[i] for i in wrong[:4])
    return text + f"worker {odd if len(odd) > 1 else odd[0]} differs from the other {count} in {paths}"
