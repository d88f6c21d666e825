"""Leaves as flat buckets and back, with their grouping and order.

A message has a price of its own, so small leaves are fused; fusing copies, so a big leaf travels as it is. An exchange
beside the backward pass also wants buckets that are full early. `Order` finds in the traced program in which order the
gradients are computed, and buckets are filled in that order. The first one is small, since nothing travels before it
has left; so are the last two, since little is computed while they travel. Buckets are the same with overlap and
without, and so are the bits of the sums (docs/decisions.md, 8).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from jaxmpi.comm.agreement import HostProcesses
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.sharding import cut, join, round_up

# ---------------------------------------------------------------- in which order gradients come to exist


class Order:
    """In which order a program computes gradients, found while it is traced."""

    def __init__(self) -> None:
        """Nothing has been traced."""
        self._places: tuple[int, ...] = ()  # number of the program's equation that gives each leaf
        self._is_shared = False

    def record(
        self, function: Callable[..., tuple], traced_as: Callable[[jax.extend.core.Jaxpr], None] = lambda jaxpr: None
    ) -> Callable[..., tuple]:
        """The same function; tracing notes the order of its first result's leaves.

        Args:
            traced_as: gets its program, too.
        """

        @functools.wraps(function)
        def noted(*args: PyTree) -> tuple:
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            traced_as(traced.jaxpr)
            self._places = places(traced.jaxpr)[: len(jax.tree.leaves(shapes[0]))]
            results = jax.extend.core.jaxpr_as_fun(traced)(*jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        return noted

    def share(self, function: Callable, host: HostProcesses) -> Callable:
        """The same function; its first call shares the order inside the host.

        Communicates: the order that the host's first rank found, once; all ranks of the host make that call together.
        """

        def call(*args: PyTree) -> PyTree:
            results = function(*args)
            if not self._is_shared:
                self._places, self._is_shared = host.bcast_from_host_leader(lambda: self._places), True
            return results

        return call

    def leaves(self, count: int) -> list[int]:
        """Leaves from the first computed to the last; others from the end."""
        places = self._places if len(self._places) == count else (0,) * count
        return sorted(range(count), key=lambda i: (places[i], -i))


def places(jaxpr: jax.extend.core.Jaxpr) -> tuple[int, ...]:
    """Number of the equation that computes each result; -1 if given."""
    equation_of = {var: i for i, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
    return tuple(-1 if isinstance(var, jax.extend.core.Literal) else equation_of.get(var, -1) for var in jaxpr.outvars)


# ---------------------------------------------------------------- which travel together


def assign_buckets(
    sizes: Sequence[int], bucket_bytes: int | None, ready: Sequence[int] | None = None
) -> list[list[int]]:
    """Which leaves travel together, as indices; empty leaves do not travel.

    A leaf of `bucket_bytes` or more is alone, so that it need not be copied; smaller neighbours are fused up to that.

    Args:
        sizes: of all leaves, in floats.
        bucket_bytes: None is one bucket for all.
        ready: the leaves as they come to exist. The first bucket is then closed once it holds a quarter of
            `bucket_bytes`, for nothing travels until it has left; the last holds a quarter at most and the one before
            it half, for little or nothing is left to compute behind which they could travel. Default: in order, all
            buckets alike.
    """
    leaves = [i for i in (range(len(sizes)) if ready is None else ready) if sizes[i]]
    if ready is None or bucket_bytes is None:
        return fill(leaves, sizes, bucket_bytes)
    first = filled = 0
    while first < len(leaves) and 4 * filled < bucket_bytes and 4 * sizes[leaves[first]] < bucket_bytes:
        filled += 4 * sizes[leaves[first]]
        first += 1
    rest, late = leaves[first:], []
    for part in (4, 2):
        sums = np.cumsum([4 * part * sizes[i] for i in reversed(rest)])
        end = len(rest) - int(np.searchsorted(sums, bucket_bytes, "right"))
        rest, late = rest[:end], [rest[end:], *late]
    return [bucket for bucket in (leaves[:first], *fill(rest, sizes, bucket_bytes), *late) if bucket]


def fill(leaves: Sequence[int], sizes: Sequence[int], bucket_bytes: int | None) -> list[list[int]]:
    """Buckets of leaves that hold something, one after another."""
    if bucket_bytes is None:
        return [list(leaves)] if leaves else []
    buckets: list[list[int]] = []
    bucket: list[int] = []  # the bucket that small leaves still go into
    room = 0
    for i in leaves:
        size_bytes = 4 * sizes[i]  # all leaves travel from f32
        if size_bytes >= bucket_bytes:
            buckets.append([i])
        elif size_bytes <= room:
            bucket.append(i)
            room -= size_bytes
        else:
            bucket = [i]
            buckets.append(bucket)
            room = bucket_bytes - size_bytes
    return buckets


# ---------------------------------------------------------------- in one program or in three

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]


def no_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, for use inside a program."""
    return function


class Programs(NamedTuple):
    """How an exchange is compiled: as part of the caller's program, or as three programs of its own.

    Of the three only the middle one communicates. Every rank must compile such a program for itself, since it cannot be
    read from the cache of compiled programs; the other two are compiled once a host. With the 128 tensors of GoogLeNet
    in one program 8 ranks on 2 cores took 35 s for their first update, and now 17 s, or 6 s from the cache
    (docs/decisions.md, 7).
    """

    before: Jit = no_jit
    exchange: Jit = no_jit
    after: Jit = no_jit
    lone_pass: bool = True  # a leaf that is alone in its bucket goes to the middle one as it is, without a copy

    def compose(self, pack: Callable, send: Callable, unpack: Callable) -> Callable[[Any], Any]:
        """`unpack(send(pack(x)))`; one program if nothing but `exchange` compiles."""
        pack, unpack = self.before(pack), self.after(unpack)
        return self.exchange(lambda x: unpack(send(pack(x))))


INSIDE = Programs()  # part of the caller's program


def in_buckets(
    buckets: Sequence[Sequence[int]],
    fuse: Callable[[list[jax.Array]], jax.Array],
    exchange: Callable[[list[jax.Array]], list[jax.Array]],
    split: Callable[[jax.Array, Sequence[int]], list[jax.Array]],
    programs: Programs = INSIDE,
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """A function that exchanges leaves in buckets.

    Args:
        buckets: indices of leaves; a leaf that is in none stays as it is.
        fuse: leaves of a bucket -> vector.
        exchange: all vectors -> as many.
        split: vector, bucket -> results for its leaves.
    """
    is_lone = [programs.lone_pass and len(bucket) == 1 for bucket in buckets]
    fused_buckets = [bucket for bucket, lone in zip(buckets, is_lone, strict=True) if not lone]
    fuse_each = programs.before(lambda groups: [fuse(group) for group in groups])
    split_each = programs.after(lambda vectors: list(map(split, vectors, fused_buckets)))

    @programs.exchange
    def exchange_each(vectors: list[jax.Array]) -> list[jax.Array]:
        results = exchange([fuse([x]) if lone else x for x, lone in zip(vectors, is_lone, strict=True)])
        results_of_buckets = zip(results, buckets, is_lone, strict=True)
        return [split(x, bucket)[0] if lone else x for x, bucket, lone in results_of_buckets]

    def run(leaves: list[jax.Array]) -> list[jax.Array]:
        results_by_leaf = list(leaves)
        vectors = iter(fuse_each([[leaves[i] for i in bucket] for bucket in fused_buckets]) if fused_buckets else [])
        sent = [leaves[bucket[0]] if lone else next(vectors) for bucket, lone in zip(buckets, is_lone, strict=True)]
        results = [*zip(exchange_each(sent), buckets, is_lone, strict=True)]
        parts = iter(split_each([x for x, _, lone in results if not lone]) if fused_buckets else [])
        for x, bucket, lone in results:
            for i, leaf in zip(bucket, [x] if lone else next(parts), strict=True):
                results_by_leaf[i] = leaf
        return results_by_leaf

    return run


# ---------------------------------------------------------------- as flat vectors


class Alignment(NamedTuple):
    """Where leaves begin in a bucket.

    Wires 16 and 8 give each block of floats one scale. In a block with two leaves the smaller would be rounded away by
    the scale of the larger, and a NaN would spread to a leaf that has none. Zeros therefore fill up each leaf to whole
    blocks, and the bucket to whole blocks in each piece into which a strategy cuts it. So every block lies in one leaf,
    and its error is that of the leaf alone. A leaf that is alone in its bucket needs none of this.
    """

    block: int = 1  # floats that share a scale on the wire
    pieces: int = 1  # equal pieces into which the strategy cuts a bucket

    def size(self, sizes: Sequence[int]) -> int:
        """Floats of a bucket with leaves of these sizes."""
        if len(sizes) == 1 or self.block == 1:
            return sum(sizes)
        return round_up(sum(round_up(size, self.block) for size in sizes), self.block * self.pieces)


PACKED = Alignment()  # leaves one right after another


def fuse(leaves: Sequence[jax.Array], alignment: Alignment = PACKED) -> jax.Array:
    """Leaves as one f32[n]; a single f32 leaf is only reshaped."""
    flat = [leaf.astype(jnp.float32).reshape(-1) for leaf in leaves]
    return join(flat, alignment.block, alignment.size([leaf.size for leaf in leaves]))


def split(
    flat: jax.Array, leaves: Sequence[jax.Array | jax.ShapeDtypeStruct], alignment: Alignment = PACKED
) -> list[jax.Array]:
    """The inverse of `fuse`, in the shapes and dtypes of `leaves`."""
    parts = cut(flat, [leaf.size for leaf in leaves], alignment.block)
    return [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
