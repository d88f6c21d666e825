"""Sharded trees as the vectors f32[w m] that are sent.

A vector has w chunks f32[m], one for each worker. A program that communicates cannot be read from the cache of compiled
programs, so every rank compiles it. With the 128 tensors of GoogLeNet in it 8 ranks on 2 cores took 35 s for their
first update. So outside jit a half of the exchange is three programs: one packs tensors, one sends vectors, one unpacks
what has come. Only the one in the middle communicates, and it sees some dozens of arrays. Ranks of a host compile the
others once, and the cache keeps them: 17 s for the first update, 6 s if they are in the cache. A half with whole
tensors stays one program: it holds less at once.

Tried and dropped: chunks of vectors as arguments of the optimizer's program, in place of shards. XLA rounds moments
otherwise if it reads them out of a longer vector. So workers' bits were no more those of an unsharded update. Exchange
and optimizer in one program, which every rank compiles: as fast, and 75 s for the first update.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.buckets import assign_buckets, round_up
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.sharding import ElementSharding, TensorShard, TensorSharding, shard_rows, shard_shape, unshard

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]
MAX_VECTORS = 1024  # of whole tensors: each is a collective of the program


def no_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, for use inside a program."""
    return function


def vectors_for(
    leaves: Sequence[jax.ShapeDtypeStruct],
    sharding: ElementSharding | TensorSharding,
    bucket_bytes: int | None,
    block: int = 1,
    buckets: list[list[int]] | None = None,
) -> "ElementVectors | TensorVectors":
    """The vectors of a tree.

    Args:
        leaves: of the whole tree.
        block: floats that share a scale on the wire; none of them lies in two tensors.
        buckets: tensors of each vector, if not by `bucket_bytes`.
    """
    if isinstance(sharding, TensorSharding):
        width = sharding.width if bucket_bytes is None else bucket_bytes // (4 * sharding.workers)
        width = round_up(max(1, width, -(-sharding.width // MAX_VECTORS)), sharding.block)
        starts = range(0, sharding.width, width)
        return TensorVectors(sharding, [(start, min(start + width, sharding.width)) for start in starts])
    if buckets is None:
        buckets = assign_buckets([leaf.size for leaf in leaves], bucket_bytes)
    return ElementVectors(tuple(leaves), sharding.workers, buckets, block)


class ElementVectors(NamedTuple):
    """Vectors [w, m] of buckets: row c has shard c of each tensor.

    A tensor that is alone in its bucket is copied by no program but the one that communicates, which pads it if need
    be: `flat`, `lone_shards` and `lone_leaves` belong into that one.
    """

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    workers: int
    buckets: list[list[int]]  # empty tensors are in none
    block: int = 1

    def pack(self, jit: Jit) -> Callable[[PyTree], list[jax.Array]]:
        """Tree -> what `flat` takes."""
        return self._packing(jit, lambda leaf: shard_rows(leaf, self.workers))

    def flat(self, packed: jax.Array) -> jax.Array:
        """-> f32[w m]."""
        return shard_rows(packed, self.workers).reshape(-1)

    def lone_shards(self, chunks: Sequence[jax.Array]) -> list[jax.Array]:
        """Each f32[m] -> what `unpack_shards` takes."""
        each = zip(self.buckets, chunks, strict=True)
        return [x.reshape(self._shard(bucket[0])) if len(bucket) == 1 else x for bucket, x in each]

    def unpack_shards(self, jit: Jit) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """-> this worker's shards."""
        return self._unpacking(jit, lambda part, i: part.reshape(self._shard(i)), self._shard)

    def pack_shards(self, jit: Jit) -> Callable[[PyTree], list[jax.Array]]:
        """This worker's shards -> f32[m] each, once flat."""
        return self._packing(jit, lambda shard: shard.reshape(-1))

    def lone_leaves(self, rows: Sequence[jax.Array]) -> list[jax.Array]:
        """Each f32[w, m] -> what `unpack` takes."""
        each = zip(self.buckets, rows, strict=True)
        return [unshard(x, self.leaves[bucket[0]]) if len(bucket) == 1 else x for bucket, x in each]

    def unpack(self, jit: Jit) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """-> the tree's leaves."""
        return self._unpacking(jit, lambda part, i: unshard(part, self.leaves[i]), lambda i: self.leaves[i].shape)

    def _shard(self, i: int) -> tuple[int, ...]:
        return shard_shape(self.leaves[i].shape, self.workers)

    def _packing(self, jit: Jit, rows: Callable[[jax.Array], jax.Array]) -> Callable[[PyTree], list[jax.Array]]:
        def padded(part: jax.Array) -> jax.Array:
            missing = -part.shape[-1] % self.block
            return jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, missing)]) if missing else part

        @jit
        def join(groups: list[list[jax.Array]]) -> list[jax.Array]:
            return [jnp.concatenate([padded(rows(x)) for x in group], -1).reshape(-1) for group in groups]

        def pack(tree: PyTree) -> list[jax.Array]:
            leaves = jax.tree.leaves(tree)
            groups = [[leaves[i] for i in bucket] for bucket in self.buckets if len(bucket) > 1]
            joined = iter(join(groups) if groups else [])
            return [leaves[bucket[0]] if len(bucket) == 1 else next(joined) for bucket in self.buckets]

        return pack

    def _unpacking(
        self,
        jit: Jit,
        leaf: Callable[[jax.Array, int], jax.Array],
        shape: Callable[[int], Sequence[int]],
    ) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        several = [bucket for bucket in self.buckets if len(bucket) > 1]

        @jit
        def split(vectors: Sequence[jax.Array]) -> list[jax.Array]:
            out = []
            for bucket, vector in zip(several, vectors, strict=True):
                sizes = [math.prod(self._shard(i)) for i in bucket]
                ends = np.cumsum([round_up(size, self.block) for size in sizes])
                parts = [
                    vector[..., end - round_up(n, self.block) : end][..., :n]
                    for n, end in zip(sizes, ends, strict=True)
                ]
                out += [leaf(part, i) for part, i in zip(parts, bucket, strict=True)]
            return out

        def unpack(vectors: Sequence[jax.Array]) -> list[jax.Array]:
            each = [*zip(self.buckets, vectors, strict=True)]
            found = {bucket[0]: x for bucket, x in each if len(bucket) == 1}
            if several:
                parts = split([x for bucket, x in each if len(bucket) > 1])
                found |= zip([i for bucket in several for i in bucket], parts, strict=True)
            return [found[i] if i in found else jnp.zeros(shape(i), x.dtype) for i, x in enumerate(self.leaves)]

        return unpack


class TensorVectors(NamedTuple):
    """Vectors of whole tensors: each is some entries of all workers' shards."""

    sharding: TensorSharding
    spans: list[tuple[int, int]]

    def pack(self, jit: Jit) -> Callable[[PyTree], list[jax.Array]]:
        """Tree -> f32[w m] each."""

        def pack(leaves: list[jax.Array]) -> list[jax.Array]:
            return [self.sharding.columns(leaves, start, stop).reshape(-1) for start, stop in self.spans]

        joined = jit(pack)
        return lambda tree: joined(jax.tree.leaves(tree))

    def flat(self, packed: jax.Array) -> jax.Array:
        """The vector itself."""
        return packed

    def lone_shards(self, chunks: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The chunks themselves."""
        return chunks

    def unpack_shards(self, jit: Jit) -> Callable[[Sequence[jax.Array]], TensorShard]:
        """f32[m] each -> this worker's shard."""
        return jit(lambda chunks: TensorShard(jnp.concatenate(chunks)))

    def pack_shards(self, jit: Jit) -> Callable[[Any], list[jax.Array]]:
        """The inverse."""
        return jit(lambda shard: [shard.flat[start:stop] for start, stop in self.spans])

    def lone_leaves(self, rows: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The rows themselves."""
        return rows

    def unpack(self, jit: Jit) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """f32[w, m] each -> the tree's leaves."""
        return jit(lambda rows: self.sharding.unshard(jnp.concatenate(rows, 1)))
