"""Tree -> buckets -> strategy(wire) -> tree: the one place that divides by the world size."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxmpi.comm import Comm, signature, world
from jaxmpi.config import UsageError, lookup
from jaxmpi.strategies import Strategy, parse

PyTree = Any
Op = Literal["mean", "sum"]
BUCKET_BYTES = 4 << 20  # small leaves are fused up to this; a leaf at least as big travels as it is
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def exchange(
    tree: PyTree,
    strategy: str = "asa32",
    op: Op = "mean",
    comm: Comm | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
) -> PyTree:
    """The mean or sum of a tree over all workers, bitwise equal on all of them.

    mean: (1/w) sum_i tree_i ;  sum: sum_i tree_i ;  both added in f32.

    Works inside and outside jit, on any pytree of float32, bfloat16 and float16 leaves of any size, and keeps their
    dtypes and shapes.

    Args:
        tree: this worker's leaves; the same structure, shapes and dtypes on every worker.
        strategy: `algorithm[:wire]` or an alias: ar, asa32 (default), asa16, asabf16, ring32, ring16, ring:bf16, none.
        op: mean or sum.
        comm: who takes part; default: all ranks of the MPI job, or one worker where there is no launcher.
        bucket_bytes: small leaves are fused up to this many bytes; None is one flat buffer for all leaves.

    Communicates: a comparison of structure and options between ranks the first time, then the strategy once a bucket.

    Raises:
        UsageError: an unknown strategy, wire or op; a leaf that is no 16- or 32-bit float (by path); ranks whose trees
            or options differ (rank, path, got, expected); a call under `jax.grad`.
    """
    workers: Comm = comm or world()
    parse(strategy)
    lookup({"mean": 0, "sum": 0}, op, "op")
    check_leaves(tree)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        return _exchange(tree, strategy, op, workers, bucket_bytes)
    return _jitted(strategy, op, workers, bucket_bytes)(tree)


@functools.cache
def _jitted(strategy: str, op: Op, comm: Comm, bucket_bytes: int | None) -> Callable[[PyTree], PyTree]:
    def exchange_in_jit(tree: PyTree) -> PyTree:
        return _exchange(tree, strategy, op, comm, bucket_bytes)

    return jax.jit(exchange_in_jit)


def _exchange(tree: PyTree, strategy: str, op: Op, comm: Comm, bucket_bytes: int | None) -> PyTree:
    comm.sign(
        "exchange",
        {"strategy": strategy, "op": op, "bucket_bytes": bucket_bytes, "leaf": signature(tree)},
    )
    leaves, structure = jax.tree.flatten(jax.tree.map(not_differentiable, tree))
    chosen = parse(strategy)
    for bucket in plan([leaf.size for leaf in leaves], bucket_bytes):
        total = sum_bucket(fuse([leaves[i] for i in bucket]), chosen, comm)
        mean = total / comm.size if op == "mean" else total
        for i, part in zip(bucket, split(mean, [leaves[i] for i in bucket]), strict=True):
            leaves[i] = part
    return jax.tree.unflatten(structure, leaves)


def plan(sizes: Sequence[int], bucket_bytes: int | None) -> list[list[int]]:
    """Which leaves travel together, as indices in order; empty leaves do not travel.

    A leaf of `bucket_bytes` or more is alone, so that it need not be copied; smaller neighbours are fused up to that.
    """
    if bucket_bytes is None:
        return [bucket] if (bucket := [i for i, n in enumerate(sizes) if n]) else []
    buckets: list[list[int]] = []
    fused: list[int] = []  # the bucket that small leaves still go into
    room = 0
    for i, n in enumerate(sizes):
        size_bytes = 4 * n  # all leaves travel from f32
        if n == 0:
            continue
        if size_bytes >= bucket_bytes:
            buckets.append([i])
        elif size_bytes <= room:
            fused.append(i)
            room -= size_bytes
        else:
            fused = [i]
            buckets.append(fused)
            room = bucket_bytes - size_bytes
    return buckets


def fuse(leaves: Sequence[jax.Array]) -> jax.Array:
    """Leaves as one f32[n]; a single f32 leaf is only reshaped."""
    flat = [leaf.astype(jnp.float32).reshape(-1) for leaf in leaves]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def split(flat: jax.Array, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The inverse of `fuse`, in the shapes and dtypes of `leaves`."""
    ends = np.cumsum([leaf.size for leaf in leaves])
    return [
        flat[end - leaf.size : end].reshape(leaf.shape).astype(leaf.dtype)
        for end, leaf in zip(ends, leaves, strict=True)
    ]


def sum_bucket(flat: jax.Array, strategy: Strategy, comm: Comm) -> jax.Array:
    """The strategy over f32[n], padded to a multiple of the number of workers."""
    missing = -flat.size % comm.size
    padded = jnp.pad(flat, (0, missing)) if missing else flat
    return strategy.sum(padded, comm, strategy.wire)[: flat.size]


def check_leaves(tree: PyTree) -> None:
    """Refuse leaves that a 32-bit sum would falsify."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", None)
        if dtype not in FLOATS:
            raise UsageError(
                f"exchange: leaf {jax.tree_util.keystr(path, simple=True, separator='/') or '(the tree itself)'!r} is "
                f"{dtype or type(leaf).__name__}; expected float32, bfloat16 or float16: cast it, or leave it out"
            )


@jax.custom_jvp
def not_differentiable(x: jax.Array) -> jax.Array:
    """The identity, for which no derivative is offered."""
    return x


@not_differentiable.defjvp
def _refuse(primals: tuple, tangents: tuple) -> NamedTuple:
    raise UsageError("exchange cannot be differentiated; take jax.grad first, then exchange the gradients")


def exchange_gradients(
    strategy: str = "asa32",
    op: Op = "mean",
    comm: Comm | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
) -> optax.GradientTransformation:
    """`exchange` as an Optax transformation: updates <- mean or sum of updates over all workers.

    First in a chain it makes any optimizer data-parallel:
    `optax.chain(exchange_gradients("ring16"), optax.adamw(1e-3))`.

    Args: as of `exchange`. State: empty. Communicates and raises: as `exchange`.
    """
    parse(strategy)

    return optax.stateless(lambda updates, params: exchange(updates, strategy, op, comm, bucket_bytes))
