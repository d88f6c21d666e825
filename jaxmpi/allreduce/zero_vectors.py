"""Sharded trees as the vectors f32[w m] that are sent: w chunks f32[m], one for each worker.

Tried and dropped: chunks of vectors as arguments of the optimizer's program, in place of shards. XLA rounds moments
otherwise if it reads them out of a longer vector. So workers' bits were no more those of an unsharded update. Exchange
and optimizer in one program, which every rank compiles: as fast, and 75 s for the first update of GoogLeNet.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxmpi.allreduce.buckets import INSIDE, Programs, in_buckets
from jaxmpi.core.sharding import TensorShard, TensorSharding, cut, join, shard_rows, shard_shape, unshard

Vectors = list[jax.Array]
Send = Callable[[Vectors], Vectors]  # f32[w m] -> f32[m] each, or the other way as f32[w, m]
Receive = Callable[[jax.Array], jax.Array]  # on what has come, in the program that unpacks


def as_is(x: jax.Array) -> jax.Array:
    """The vector itself."""
    return x


class ElementVectors(NamedTuple):
    """A vector for each bucket: row c of [w, m] has shard c of each tensor."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    workers: int
    buckets: list[list[int]]  # empty tensors are in none
    block: int = 1  # floats that share a scale on the wire

    def scatter(self, send: Send, programs: Programs = INSIDE, receive: Receive = as_is) -> Callable[[Vectors], Any]:
        """Leaves -> this worker's shards."""

        def pack(group: Vectors) -> jax.Array:
            return join([shard_rows(x, self.workers) for x in group], self.block).reshape(-1)

        def unpack(chunk: jax.Array, bucket: Sequence[int]) -> Vectors:
            shapes = [shard_shape(self.leaves[i].shape, self.workers) for i in bucket]
            return [x.reshape(shape) for x, shape in zip(self._split(receive(chunk), bucket), shapes, strict=True)]

        return in_buckets(self.buckets, pack, send, unpack, programs)

    def gather(self, send: Send, programs: Programs = INSIDE, receive: Receive = as_is) -> Callable[[Any], Vectors]:
        """This worker's shards -> leaves."""

        def pack(group: Vectors) -> jax.Array:
            return join([x.reshape(-1) for x in group], self.block)

        def unpack(rows: jax.Array, bucket: Sequence[int]) -> Vectors:
            return [unshard(x, self.leaves[i]) for x, i in zip(self._split(receive(rows), bucket), bucket, strict=True)]

        return in_buckets(self.buckets, pack, send, unpack, programs)

    def _split(self, vector: jax.Array, bucket: Sequence[int]) -> Vectors:
        sizes = [math.prod(shard_shape(self.leaves[i].shape, self.workers)) for i in bucket]
        return cut(vector, sizes, self.block)


class TensorVectors(NamedTuple):
    """One vector of whole tensors, in whose rows are the workers' shards: so only the ends of shards are padded."""

    sharding: TensorSharding

    def scatter(self, send: Send, programs: Programs = INSIDE, receive: Receive = as_is) -> Callable[[Vectors], Any]:
        """Leaves -> this worker's shard."""
        pack = lambda leaves: [self.sharding.shard_rows(leaves).reshape(-1)]  # noqa: E731
        return programs.compose(pack, send, lambda chunks: TensorShard({"float32": receive(chunks[0])}))

    def gather(self, send: Send, programs: Programs = INSIDE, receive: Receive = as_is) -> Callable[[Any], Vectors]:
        """This worker's shard -> leaves."""
        unpack = lambda rows: self.sharding.unshard(receive(rows[0]))  # noqa: E731
        return programs.compose(lambda shard: [shard.flat], send, unpack)
