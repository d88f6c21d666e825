"""Sharded trees as the vectors f32[w m] that travel.

A vector has w chunks f32[m], one for each worker. A program that communicates cannot be read from the cache of compiled
programs, so every rank compiles it. With the 128 leaves of GoogLeNet in it 8 ranks on 2 cores took 35 s for their first
update. So outside jit a half of the exchange is pieces: one program joins leaves, one moves vectors, one splits what
has come. Only the one in the middle communicates, and it sees some dozens of arrays. Ranks of a host compile the others
once, and the cache keeps them: 17 s for the first update, 6 s if they are in the cache. A half with whole tensors stays
one program: it holds less at once.

Tried and dropped: chunks of vectors as arguments of the optimizer's program, in place of slices. XLA rounds moments
otherwise if it reads them out of a longer vector. So workers' bits were no more those of an unsharded update. Exchange
and optimizer in one program, which every rank compiles: as fast, and 75 s for the first update.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.deals import Deal, DealtLeaves
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.slices import rows_of, shape_of_slice, whole_of

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]
MOST_VECTORS = 1024  # vectors of a row of whole tensors at most: each is a collective of the program


def as_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, in place of a jit, inside a program."""
    return function


class SlicesInBuckets(NamedTuple):
    """Vectors [w, m] of slices: row c has slice c of leaves.

    No function here communicates. A leaf that is alone in its bucket is in no piece but the one that communicates. That
    piece fills it up if need be.
    """

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    workers: int
    buckets: list[list[int]]  # leaves of each vector; empty ones are in none
    block: int = 1  # in a row of several, slices begin at multiples of it: the floats that share a scale on the wire

    def joining(self, jit: Jit) -> Callable[[PyTree], list[jax.Array]]:
        """A function that joins a whole tree's leaves, bucket by bucket."""
        return self._joining(jit, lambda leaf: rows_of(leaf, self.workers))

    def flat(self, vector: jax.Array) -> jax.Array:
        """f32[w m], of what `joining` gives."""
        return rows_of(vector, self.workers).reshape(-1)

    def scattered(self, chunks: Sequence[jax.Array]) -> list[jax.Array]:
        """Arguments of `unpacking`, of f32[m] each."""
        each = zip(self.buckets, chunks, strict=True)
        return [x.reshape(self._slice(bucket[0])) if len(bucket) == 1 else x for bucket, x in each]

    def unpacking(self, jit: Jit) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """A function that takes a worker's slices out of its chunks."""
        return self._splitting(jit, lambda part, i: part.reshape(self._slice(i)), self._slice)

    def packing(self, jit: Jit) -> Callable[[PyTree], list[jax.Array]]:
        """A function that joins a worker's slices: f32[m] each, once flat."""
        return self._joining(jit, lambda part: part.reshape(-1))

    def gathered(self, rows: Sequence[jax.Array]) -> list[jax.Array]:
        """Arguments of `splitting`, of f32[w, m] each."""
        each = zip(self.buckets, rows, strict=True)
        return [whole_of(x, self.leaves[bucket[0]]) if len(bucket) == 1 else x for bucket, x in each]

    def splitting(self, jit: Jit) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """A function that takes the tree's leaves out of all workers' rows."""
        return self._splitting(jit, lambda part, i: whole_of(part, self.leaves[i]), lambda i: self.leaves[i].shape)

    def _slice(self, i: int) -> tuple[int, ...]:
        return shape_of_slice(self.leaves[i].shape, self.workers)

    def _filled_up(self, part: jax.Array) -> jax.Array:
        missing = -part.shape[-1] % self.block
        return jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, missing)]) if missing else part

    def _joining(self, jit: Jit, part: Callable[[jax.Array], jax.Array]) -> Callable[[PyTree], list[jax.Array]]:
        def join(groups: list[list[jax.Array]]) -> list[jax.Array]:
            return [joined([self._filled_up(part(x)) for x in group]).reshape(-1) for group in groups]

        join_groups = jit(join)

        def vectors(tree: PyTree) -> list[jax.Array]:
            leaves = jax.tree.leaves(tree)
            groups = [[leaves[i] for i in bucket] for bucket in self.buckets if len(bucket) > 1]
            flats = iter(join_groups(groups) if groups else [])
            return [leaves[bucket[0]] if len(bucket) == 1 else next(flats) for bucket in self.buckets]

        return vectors

    def _splitting(
        self,
        jit: Jit,
        leaf: Callable[[jax.Array, int], jax.Array],
        shape: Callable[[int], Sequence[int]],
    ) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        several = [bucket for bucket in self.buckets if len(bucket) > 1]

        def split(vectors: Sequence[jax.Array]) -> list[jax.Array]:
            out = []
            for bucket, vector in zip(several, vectors, strict=True):
                sizes = [math.prod(self._slice(i)) for i in bucket]
                parts = cut(vector, [-(-size // self.block) * self.block for size in sizes])
                out += [leaf(part[..., :size], i) for i, size, part in zip(bucket, sizes, parts, strict=True)]
            return out

        split_vectors = jit(split)

        def listed(vectors: Sequence[jax.Array]) -> list[jax.Array]:
            each = [*zip(self.buckets, vectors, strict=True)]
            out = {bucket[0]: x for bucket, x in each if len(bucket) == 1}
            if several:
                parts = split_vectors([x for bucket, x in each if len(bucket) > 1])
                out |= zip([i for bucket in several for i in bucket], parts, strict=True)
            return [out[i] if i in out else jnp.zeros(shape(i), x.dtype) for i, x in enumerate(self.leaves)]

        return listed


class RowsInColumns(NamedTuple):
    """Vectors of whole tensors: each is some columns of all workers' rows."""

    deal: Deal
    spans: list[tuple[int, int]]

    def joining(self, jit: Jit) -> Callable[[PyTree], list[jax.Array]]:
        """A function of a whole tree that gives its vectors."""

        def join(leaves: list[jax.Array]) -> list[jax.Array]:
            return [self.deal.columns(leaves, start, stop).reshape(-1) for start, stop in self.spans]

        join_leaves = jit(join)
        return lambda tree: join_leaves(jax.tree.leaves(tree))

    def flat(self, vector: jax.Array) -> jax.Array:
        """f32[w m], of what `joining` gives."""
        return vector

    def scattered(self, chunks: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Arguments of `unpacking`, of f32[m] each."""
        return chunks

    def unpacking(self, jit: Jit) -> Callable[[Sequence[jax.Array]], DealtLeaves]:
        """A function that makes a worker's row of its chunks."""

        def unpack(chunks: Sequence[jax.Array]) -> DealtLeaves:
            return DealtLeaves(jnp.concatenate(chunks))

        return jit(unpack)

    def packing(self, jit: Jit) -> Callable[[Any], list[jax.Array]]:
        """A function that cuts a worker's row up: f32[m] each."""

        def pack(slices: DealtLeaves) -> list[jax.Array]:
            return [slices.entries[start:stop] for start, stop in self.spans]

        return jit(pack)

    def gathered(self, rows: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Arguments of `splitting`, of f32[w, m] each."""
        return rows

    def splitting(self, jit: Jit) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """A function that takes the tree's leaves out of all workers' rows."""

        def split(rows: Sequence[jax.Array]) -> list[jax.Array]:
            return jax.tree.leaves(self.deal.whole_of(jnp.concatenate(rows, 1)))

        return jit(split)


def joined(parts: Sequence[jax.Array]) -> jax.Array:
    """Concatenate arrays along their last axis; one alone is not copied."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)


def cut(x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    """Cut an array along its last axis; one piece is not copied."""
    ends = np.cumsum(widths)
    return [x] if len(widths) == 1 else [x[..., end - width : end] for end, width in zip(ends, widths, strict=True)]
