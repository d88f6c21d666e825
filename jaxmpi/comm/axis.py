"""Communicators over a mapped axis of `vmap` or `shard_map`, through the collectives of `jax.lax`.

Along an axis of `vmap` eight workers run in one process in milliseconds, which is how strategies are tested. Along an
axis of `shard_map` they are devices of one process or, with `--comm xla`, of all.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import get_opaque_trace_state

from jaxmpi.comm.agreement import Fingerprint
from jaxmpi.comm.base import Comm, Pairs, Turn, ring_order
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree


class AxisComm(Comm):
    """Workers along a named axis of `vmap` or `shard_map`.

    Args:
        hosts: of every worker; default: one host.
        one_at_a_time: each collective's input depends on the result of the one before it in the same trace. gloo,
            between the CPUs of several processes, needs this: its messages have no names, and XLA lets programs
            overlap if their results do not need each other and one of them holds a loop.
    """

    _last: ClassVar[tuple[Any, PyTree]] = (None, None)  # a trace, and the newest result in it, of all Comms

    def __init__(self, axis: str, size: int, hosts: tuple[int, ...] | None = None, one_at_a_time: bool = False) -> None:
        self.axis, self.size, self.one_at_a_time = axis, size, one_at_a_time
        self.hosts = hosts or (0,) * size
        self.order = ring_order(self.hosts)

    @property
    def rank(self) -> jax.Array:
        return lax.axis_index(self.axis)

    def allreduce(self, x: jax.Array) -> jax.Array:
        return self._map(lambda leaf: lax.psum(leaf, self.axis), x)

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        return self._map(lambda leaf: lax.psum_scatter(leaf, self.axis, tiled=True), x)

    def alltoall(self, x: PyTree) -> PyTree:
        return self._map(lambda leaf: lax.all_to_all(leaf, self.axis, 0, 0), x)

    def allgather(self, x: PyTree) -> PyTree:
        return self._map(lambda leaf: lax.all_gather(leaf, self.axis), x)

    def permute(self, x: PyTree, pairs: Pairs) -> PyTree:
        """`lax.ppermute`, completed to a permutation (`vmap` refuses a partial one) and masked."""
        sources = sorted(set(range(self.size)) - {source for source, _ in pairs})
        destinations = sorted(set(range(self.size)) - {destination for _, destination in pairs})
        full = [*pairs, *zip(sources, destinations, strict=True)]
        receives = np.ones(self.size, bool)
        receives[destinations] = False
        is_receiver = jnp.asarray(receives)[self.rank]

        def move(leaf: jax.Array) -> jax.Array:
            moved = lax.ppermute(leaf, self.axis, full)
            return moved if receives.all() else jnp.where(is_receiver, moved, jnp.zeros_like(moved))

        return self._map(move, x)

    def loop(self, turns: int, turn: Turn, carry: PyTree) -> PyTree:
        """`lax.fori_loop`; with `one_at_a_time` it counts as one collective among the others."""
        return self._ordered(lambda carry: lax.fori_loop(0, turns, turn, carry), carry)

    def assert_same(self, mine: Fingerprint) -> None:
        """Check the axis's size: in one program nothing else can differ.

        Raises:
            UsageError: the axis has another size.
        """
        if (size := lax.axis_size(self.axis)) != self.size:
            raise UsageError(f"got {self.size} workers along axis {self.axis!r}, which has {size}; give that size")

    def _map(self, move: Callable[[jax.Array], jax.Array], x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: self._ordered(move, leaf), x)

    def _ordered(self, move: Callable[[PyTree], PyTree], x: PyTree) -> PyTree:
        if not self.one_at_a_time:
            return move(x)
        trace, result = AxisComm._last
        result = move(depend_on(x, result) if trace == get_opaque_trace_state() else x)
        AxisComm._last = get_opaque_trace_state(), result
        return result


def depend_on(x: PyTree, result: PyTree) -> PyTree:
    """Return `x` unchanged, with a dependence on `result` that XLA cannot remove."""
    first = [as_integers(leaf.reshape(-1)[0]).astype(jnp.uint32) for leaf in jax.tree.leaves(result) if leaf.size]
    zeros = [lax.population_count(bits) >> 6 for bits in first]  # a word of 32 bits never has 64 ones

    def waiting(leaf: jax.Array) -> jax.Array:
        bits = as_integers(leaf)
        for zero in zeros:
            bits = bits | zero.astype(bits.dtype)
        return lax.bitcast_convert_type(bits, leaf.dtype)

    return jax.tree.map(waiting, x)


def as_integers(x: jax.Array) -> jax.Array:
    """The bits of numbers of 8, 16 or 32 bits."""
    return lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
