"""Communicators over a mapped axis of `vmap` or `shard_map`.

Along an axis of `vmap` eight workers run in one process in milliseconds, which is how strategies are tested. Along an
axis of `shard_map` they are devices, of one process or, with `--comm xla`, of all. `lax` names the collectives that MPI
has, with two differences that are made up for here. A permutation must be complete under `vmap`. The part that each
worker takes from a sum must be cut out by its traced index.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import get_opaque_trace_state

from jaxmpi.comm.agreement import Fingerprint
from jaxmpi.comm.base import Pairs, Turn, check_one_host, ring_order
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree


class CommDefaults:
    """Base of Comms: what follows from `allgather` and `alltoall`, or sends nothing."""

    size: int
    hosts: tuple[int, ...]

    def alltoall(self, x: PyTree) -> PyTree:
        """Exchange rows of leaves [size, ...], row i with worker i."""
        raise NotImplementedError

    def allgather(self, x: PyTree) -> PyTree:
        """Leaves [...] to [size, ...], row j from worker j."""
        raise NotImplementedError

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        """Columns of an all-to-all, added in rank order."""
        return add_rows(self.alltoall(x.reshape(self.size, -1)))

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        """`lax.fori_loop`."""
        return lax.fori_loop(0, turns, turn, carry)

    def sum_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """Rows of an all-gather, added in rank order."""
        check_one_host(self.hosts)
        return [add_rows(rows) / divisor for rows in self.allgather(list(vectors))]

    def scatter_on_host(self, vectors: Sequence[jax.Array], divisor: float = 1) -> list[jax.Array]:
        """Columns of an all-to-all, added in rank order."""
        check_one_host(self.hosts)
        return [add_rows(self.alltoall(x.reshape(self.size, -1))) / divisor for x in vectors]

    def gather_on_host(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """Rows of an all-gather."""
        check_one_host(self.hosts)
        return [self.allgather(x).reshape(-1) for x in vectors]

    def jit(self, function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """`jax.jit`."""
        return jax.jit(function, donate_argnums=donate_argnums)


def add_rows(rows: jax.Array) -> jax.Array:
    """Sum f32[w, n] over its first axis, row after row.

    XLA:CPU walks `rows.sum(0)` column by column, a hundred times slower.
    """
    return lax.scan(lambda total, row: (total + row, None), rows[0], rows[1:], unroll=8)[0]


class AxisComm(CommDefaults):
    """Workers along a named axis of `vmap` or `shard_map`, through `lax` collectives."""

    def __init__(self, axis: str, size: int, hosts: tuple[int, ...] | None = None) -> None:
        """Take the axis's name, its size, and workers' hosts (default: one host)."""
        self.axis, self.size = axis, size
        self.hosts = hosts or (0,) * size
        self.order = ring_order(self.hosts)

    @property
    def rank(self) -> jax.Array:
        return lax.axis_index(self.axis)

    def _each(self, move: Callable[[jax.Array], jax.Array], x: PyTree) -> PyTree:
        return jax.tree.map(move, x)

    def allreduce(self, x: jax.Array) -> jax.Array:
        return self._each(lambda leaf: lax.psum(leaf, self.axis), x)

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        return self._each(lambda leaf: lax.psum_scatter(leaf, self.axis, tiled=True), x)

    def alltoall(self, x: PyTree) -> PyTree:
        return self._each(lambda leaf: lax.all_to_all(leaf, self.axis, 0, 0), x)

    def allgather(self, x: PyTree) -> PyTree:
        return self._each(lambda leaf: lax.all_gather(leaf, self.axis), x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`lax.ppermute`, completed to a permutation (`vmap` refuses a partial one) and masked."""
        full = complete_permutation(pairs, self.size)
        receives = np.zeros(self.size, bool)
        receives[[destination for _, destination in pairs]] = True
        mine = jnp.asarray(receives)[self.rank]

        def one(leaf: jax.Array) -> jax.Array:
            moved = lax.ppermute(leaf, self.axis, full)
            return moved if receives.all() else jnp.where(mine, moved, jnp.zeros_like(moved))

        return self._each(one, x)

    def bcast(self, x: PyTree, root: int = 0) -> PyTree:
        return self._each(lambda leaf: lax.all_gather(leaf, self.axis)[root], x)

    def assert_same(self, mine: Fingerprint) -> None:
        """Check the axis's size: in one program nothing else can differ.

        Raises:
            UsageError: the axis has another size.
        """
        have = lax.axis_size(self.axis)
        check(have == self.size, f"got {self.size} workers along axis {self.axis!r}, which has {have}; give that size")


class GlooComm(AxisComm):
    """Collectives over several processes' CPUs, one at a time in one order.

    gloo's messages have no names. XLA lets programs overlap if their results do not need each other and one of them
    holds a loop. Then ranks would take one's message for another's. So each collective's input here is made to need the
    result of the one before it in the same trace.
    """

    _last: ClassVar[tuple[Any, PyTree]] = (None, None)  # a trace, and the newest result in it, of all Comms

    def _done(self, result: PyTree) -> PyTree:
        GlooComm._last = (get_opaque_trace_state(), result)
        return result

    def _each(self, move: Callable[[jax.Array], jax.Array], x: PyTree) -> PyTree:
        return super()._each(lambda leaf: self._done(move(self._after_last(leaf))), x)

    def _after_last(self, x: PyTree) -> PyTree:
        trace, result = self._last
        return depend_on(x, result) if trace == get_opaque_trace_state() else x

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        """`lax.fori_loop`, as a whole one collective among the others."""
        return self._done(super().loop(turns, turn, self._after_last(carry)))


def depend_on(x: PyTree, result: PyTree) -> PyTree:
    """Return `x` unchanged, with a dependence on `result` that XLA cannot remove."""
    first = [as_integers(leaf.reshape(-1)[0]).astype(jnp.uint32) for leaf in jax.tree.leaves(result) if leaf.size]
    never = [lax.population_count(bits) >> 6 for bits in first]  # zero: 32 bits are no 64

    def waiting(leaf: jax.Array) -> jax.Array:
        bits = as_integers(leaf)
        for zero in never:
            bits = bits | zero.astype(bits.dtype)
        return lax.bitcast_convert_type(bits, leaf.dtype)

    return jax.tree.map(waiting, x)


def as_integers(x: jax.Array) -> jax.Array:
    """The bits of numbers of 8, 16 or 32 bits."""
    return lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def complete_permutation(pairs: Pairs, size: int) -> list[tuple[int, int]]:
    """Complete `pairs` so that each worker sends and receives once."""
    sources = sorted(set(range(size)) - {source for source, _ in pairs})
    destinations = sorted(set(range(size)) - {destination for _, destination in pairs})
    return [*pairs, *zip(sources, destinations, strict=True)]
