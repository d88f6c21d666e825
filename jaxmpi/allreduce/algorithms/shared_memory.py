"""One host: ranks add in shared memory."""

import jax

from jaxmpi.allreduce.algorithms.spec import Halves, StrategySpec, is_one, own_chunks
from jaxmpi.allreduce.prices import Net, add, wire_format
from jaxmpi.allreduce.wires import Wire
from jaxmpi.comm.base import Comm
from jaxmpi.comm.shared_sum import CHUNK


def shared_memory(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Sum on one host through shared memory, in 32 bits only."""
    del wire
    return comm.sum_on_host([x])[0]


def summed_slice(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """The first half: f32[n] -> f32[n / w], this rank's summed slice."""
    del wire
    return comm.scatter_on_host([x])[0]


def gathered(mine: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """The second half: f32[n / w] -> f32[n], through the same memory."""
    del wire
    return comm.gather_on_host([mine])[0]


def shared_memory_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of a chain of ranks over chunks in shared memory.

    `shared_sum.SharedSum` of long vectors, by rank: the rank reads its n floats and the slot, and writes the slot,
    which is an addition. Then it reads the slot and writes its result, which is a message's way. Waits are as many as
    ranks and chunks together. Only on one host.
    """
    wait = (net.workers + n / CHUNK) * net.inside.alpha_s
    return (wait + n * wire_format(wire)[1] * net.inside.beta_s_per_byte) * net.crowd + add(net, n)


SHARED_MEMORY = StrategySpec(
    shared_memory,
    ("32",),
    means=lambda leaves, comm, divisor: comm.sum_on_host(leaves, divisor),  # nothing is fused, padded or split
    halves=Halves(
        summed_slice,
        gathered,
        own_chunks,
        means=lambda vectors, comm, divisor: comm.scatter_on_host(vectors, divisor),
        wholes=lambda chunks, comm: comm.gather_on_host(chunks),
        gathers=("32",),
    ),
    fits=is_one,
    seconds=shared_memory_seconds,
    is_candidate=lambda net: net.hosts == 1,
    in_shared_memory=True,
    arrays_at_work=1,
)
