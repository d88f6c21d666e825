"""Strategies to compare with, and the sum in the memory of one host.

`ar` is the library's own allreduce, `root` sends all to one rank, `none` exchanges nothing, and `shm` adds in memory
that ranks share.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxmpi.allreduce.algorithms.spec import (
    ALL,
    Halves,
    Net,
    StrategySpec,
    add,
    code,
    crossings,
    is_one,
    turn,
    wire_format,
)
from jaxmpi.allreduce.algorithms.tree import pairwise_seconds
from jaxmpi.allreduce.wires import Wire
from jaxmpi.comm.base import Comm
from jaxmpi.comm.shared_sum import CHUNK

# ---------------------------------------------------------------- the library's own, and nothing at all


def allreduce_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of recursive doubling or of `pairwise_seconds`, whichever is less.

    Recursive doubling takes log2 w rounds of all n. Good libraries use it for short vectors, and halving with doubling
    for long ones. Thakur et al. 2005, section 4.5.
    """
    levels = range(max(1, math.ceil(math.log2(net.workers))))
    doubling = sum(turn(net, n, wire, crossings(net.hosts, net.slots, 1 << level)) + add(net, n) for level in levels)
    return min(doubling, pairwise_seconds(net, n, wire))


def own_means(leaves: list[jax.Array], comm: Comm, divisor: float) -> list[jax.Array]:
    """The leaves, untouched, as their mean, at a single worker's cost."""
    return leaves if divisor == comm.size else [x * comm.size / divisor for x in leaves]


# Its reduce-scatter may add in another order than its allreduce.
ALLREDUCE = StrategySpec(
    lambda x, comm, wire: comm.allreduce(x),
    ("32",),
    seconds=allreduce_seconds,
    halves=Halves(
        lambda x, comm, wire: comm.reduce_scatter(x),
        lambda mine, comm, wire: wire.decode(comm.allgather(wire.encode(mine))).reshape(-1),
    ),
)
# The bound of compute alone: workers drift apart.
NONE = StrategySpec(
    lambda x, comm, wire: x * comm.size,
    ("32",),
    means=own_means,
    seconds=lambda net, n, wire: 0.0,
    exchanges=False,
)

# ---------------------------------------------------------------- all to one


def all_to_root(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Send all vectors to rank 0, which sends back their sum.

    Vectors come one after another and are added in rank order. Rank 0 receives and sends w - 1 vectors, the others one
    each: the naive way, to compare with. Rounds twice.
    """
    message, total = wire.encode(x), x
    for rank in range(1, comm.size):
        total = total + wire.decode(comm.permute(message, [(rank, 0)]))
    result = wire.encode(total)
    for rank in range(1, comm.size):
        received = comm.permute(result, [(0, rank)])
        result = jax.tree.map(functools.partial(jnp.where, comm.rank == rank), received, result)
    return wire.decode(result)


def all_to_root_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of 2 (w - 1) messages of n, and their additions.

    Messages go one after another, and one rank adds: the growth with w that Gibiansky 2017 begins with.
    """
    single_slot = net._replace(slots=1)  # a rank that does not send or receive waits, and leaves its core to the others
    inside = (net.slots - 1) * turn(single_slot._replace(slots=2), n, wire, 0)
    between = (net.workers - net.slots) * turn(single_slot, n, wire, 1)
    return 2 * (inside + between) + (net.workers - 1) * (add(single_slot, n) + code(single_slot, n, wire) / 2)


ROOT = StrategySpec(all_to_root, ALL, crosses=True, seconds=all_to_root_seconds)


# ---------------------------------------------------------------- in the memory of a host


def shared_memory_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of a chain of ranks over chunks in shared memory.

    `shared_sum.SharedSum` of long vectors, by rank: the rank reads its n floats and the slot, and writes the slot,
    which is an addition. Then it reads the slot and writes its result, which is a message's way. Waits are as many as
    ranks and chunks together. Only on one host.
    """
    wait = (net.workers + n / CHUNK) * net.inside.alpha_s
    return (wait + n * wire_format(wire)[1] * net.inside.beta_s_per_byte) * net.crowd + add(net, n)


SHARED_MEMORY = StrategySpec(
    lambda x, comm, wire: comm.sum_on_host([x])[0],
    ("32",),
    means=lambda leaves, comm, divisor: comm.sum_on_host(leaves, divisor),  # nothing is fused, padded or split
    halves=Halves(
        lambda x, comm, wire: comm.sum_on_host([x], half="scatter")[0],
        lambda chunk, comm, wire: comm.sum_on_host([chunk], half="gather")[0],
        means=lambda vectors, comm, divisor: comm.sum_on_host(vectors, divisor, "scatter"),
        wholes=lambda chunks, comm: comm.sum_on_host(chunks, half="gather"),
        gathers=("32",),
    ),
    fits=is_one,
    seconds=shared_memory_seconds,
    in_shared_memory=True,
)
