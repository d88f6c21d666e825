"""Sharded trees as the vectors f32[w m] that are sent: w chunks f32[m], one for each worker.

Tried and dropped: chunks of vectors as arguments of the optimizer's program, in place of shards. XLA rounds moments
otherwise if it reads them out of a longer vector. So workers' bits were no more those of an unsharded update. Exchange
and optimizer in one program, which every rank compiles: as fast, and 75 s for the first update of GoogLeNet.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.buckets import Programs, in_buckets, round_up
from jaxmpi.core.sharding import TensorShard, TensorSharding, shard_rows, shard_shape, unshard

Vectors = list[jax.Array]


class Exchange(NamedTuple):
    """How vectors are exchanged."""

    send: Callable[[Vectors], Vectors]  # f32[w m] -> f32[m] each, or the other way as f32[w, m]
    programs: Programs
    arrived: Callable[[jax.Array], jax.Array] = lambda x: x  # on what has come, in the program that unpacks


class ElementVectors(NamedTuple):
    """A vector for each bucket: row c of [w, m] has shard c of each tensor."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    workers: int
    buckets: list[list[int]]  # empty tensors are in none
    block: int = 1  # floats that share a scale on the wire; none of them lies in two tensors

    def scatter(self, exchange: Exchange) -> Callable[[Vectors], Any]:
        """Leaves -> this worker's shards."""
        shapes = [shard_shape(leaf.shape, self.workers) for leaf in self.leaves]

        def pack(group: Vectors) -> jax.Array:
            return self._joined([shard_rows(x, self.workers) for x in group]).reshape(-1)

        def unpack(chunk: jax.Array, bucket: Sequence[int]) -> Vectors:
            return [part.reshape(shapes[i]) for i, part in self._parts(exchange.arrived(chunk), bucket)]

        return self._exchanging(pack, exchange, unpack, shapes)

    def gather(self, exchange: Exchange) -> Callable[[Any], Vectors]:
        """This worker's shards -> leaves."""

        def pack(group: Vectors) -> jax.Array:
            return self._joined([x.reshape(-1) for x in group])

        def unpack(rows: jax.Array, bucket: Sequence[int]) -> Vectors:
            return [unshard(part, self.leaves[i]) for i, part in self._parts(exchange.arrived(rows), bucket)]

        return self._exchanging(pack, exchange, unpack, [leaf.shape for leaf in self.leaves])

    def _exchanging(self, pack: Callable, exchange: Exchange, unpack: Callable, shapes: Sequence) -> Callable:
        run = in_buckets(self.buckets, pack, exchange.send, unpack, exchange.programs)

        def reshaped(x: jax.Array, shape: Sequence[int]) -> jax.Array:  # an empty one, which has not been sent
            return x if x.size else x.reshape(*x.shape[: x.ndim - len(shape)], *shape)

        return lambda leaves: [reshaped(*each) for each in zip(run(leaves), shapes, strict=True)]

    def _joined(self, parts: Vectors) -> jax.Array:
        """[..., n] each -> [..., m]: one after another, at whole blocks if there are several."""
        if len(parts) == 1:
            return parts[0]
        missing = [[(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % self.block)] for x in parts]
        return jnp.concatenate([jnp.pad(x, by) if by[-1][1] else x for x, by in zip(parts, missing, strict=True)], -1)

    def _parts(self, vector: jax.Array, bucket: Sequence[int]) -> list[tuple[int, jax.Array]]:
        """The inverse, with the tensors' indices."""
        sizes = [math.prod(shard_shape(self.leaves[i].shape, self.workers)) for i in bucket]
        begins = np.cumsum([0, *(round_up(n, self.block) for n in sizes)])
        return [(i, vector[..., begin : begin + n]) for i, begin, n in zip(bucket, begins, sizes, strict=False)]


class TensorVectors(NamedTuple):
    """One vector of whole tensors, in whose rows are the workers' shards: so only the ends of shards are padded."""

    sharding: TensorSharding

    def scatter(self, exchange: Exchange) -> Callable[[Vectors], Any]:
        """Leaves -> this worker's shard."""
        return exchange.programs.compose(
            lambda leaves: [self.sharding.shard_rows(leaves).reshape(-1)],
            exchange.send,
            lambda chunks: TensorShard((), {"float32": exchange.arrived(chunks[0])}),
        )

    def gather(self, exchange: Exchange) -> Callable[[Any], Vectors]:
        """This worker's shard -> leaves."""
        return exchange.programs.compose(
            lambda shard: [shard.flat],
            exchange.send,
            lambda rows: self.sharding.unshard(exchange.arrived(rows[0])),
        )
