"""Bounds to compare with: the library's own allreduce, and no exchange."""

import math

import jax

from jaxmpi.allreduce.algorithms.spec import Halves, StrategySpec, own_chunks
from jaxmpi.allreduce.algorithms.tree import pairwise_seconds
from jaxmpi.allreduce.prices import Net, add, crossings, turn
from jaxmpi.allreduce.wires import WIRES, Wire
from jaxmpi.comm.base import Comm


def allreduce(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Whatever the MPI library's (or XLA's) own allreduce does; 32 bits only."""
    del wire
    return comm.allreduce(x)


def summed_slice(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """The library's own reduce-scatter: f32[n] -> f32[n / w].

    It may add in another order than the library's allreduce.
    """
    del wire
    return comm.reduce_scatter(x)


def allgathered(mine: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """The library's own allgather: f32[n / w] -> f32[n], in any wire."""
    return wire.decode(comm.allgather(wire.encode(mine))).reshape(-1)


def allreduce_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of recursive doubling or of `pairwise_seconds`, whichever is less.

    Recursive doubling takes log2 w rounds of all n. Good libraries use it for short vectors, and halving with doubling
    for long ones. Thakur et al. 2005, section 4.5.
    """
    levels = range(max(1, math.ceil(math.log2(net.workers))))
    doubling = sum(turn(net, n, wire, crossings(net, 1 << level)) + add(net, n) for level in levels)
    return min(doubling, pairwise_seconds(net, n, wire))


def none(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """No exchange: the bound of compute alone. Workers drift apart."""
    del wire
    return x * comm.size


def own_means(leaves: list[jax.Array], comm: Comm, divisor: float) -> list[jax.Array]:
    """The leaves, untouched, as their mean, at a single worker's cost."""
    return leaves if divisor == comm.size else [none(x, comm, WIRES["32"]) / divisor for x in leaves]


def none_seconds(net: Net, n: float, wire: str) -> float:
    """Nothing travels."""
    del net, n, wire
    return 0.0


# Libraries need not repeat it bit for bit, and a resumed run must.
ALLREDUCE = StrategySpec(
    allreduce,
    ("32",),
    seconds=allreduce_seconds,
    is_candidate=lambda net: False,
    halves=Halves(summed_slice, allgathered, own_chunks),
)
# It would always win.
NONE = StrategySpec(
    none,
    ("32",),
    means=own_means,
    seconds=none_seconds,
    is_candidate=lambda net: False,
    exchanges=False,
    arrays_at_work=1,
)
