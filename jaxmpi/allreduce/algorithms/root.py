"""All to one rank, and back: the naive way, to compare with."""

import functools

import jax
import jax.numpy as jnp

from jaxmpi.allreduce.algorithms.spec import ALL, StrategySpec
from jaxmpi.allreduce.prices import Net, add, code, turn
from jaxmpi.allreduce.wires import Wire
from jaxmpi.comm.base import Comm


def all_to_root(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Send all vectors to rank 0, which sends back their sum.

    Vectors come one after another and are added in rank order. Rank 0 receives and sends w - 1 vectors, the others one
    each: the naive way, to compare with. Rounds twice.
    """
    sent, total = wire.encode(x), x
    for rank in range(1, comm.size):
        total = total + wire.decode(comm.permute(sent, [(rank, 0)]))
    result = wire.encode(total)
    for rank in range(1, comm.size):
        received = comm.permute(result, [(0, rank)])
        result = jax.tree.map(functools.partial(jnp.where, comm.rank == rank), received, result)
    return wire.decode(result)


def all_to_root_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of 2 (w - 1) messages of n, and their additions.

    Messages go one after another, and one rank adds: the growth with w that Gibiansky 2017 begins with.
    """
    alone = net._replace(slots=1)  # a rank that does not send or receive waits, and leaves its core to the others
    inside = (net.slots - 1) * turn(alone._replace(slots=2), n, wire, 0)
    between = (net.workers - net.slots) * turn(alone, n, wire, 1)
    return 2 * (inside + between) + (net.workers - 1) * (add(alone, n) + code(alone, n, wire) / 2)


ROOT = StrategySpec(all_to_root, ALL, crosses=True, seconds=all_to_root_seconds)
