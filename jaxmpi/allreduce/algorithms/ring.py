"""The ring: a reduce-scatter, then an all-gather, around the ring of ranks ordered by host. Gibiansky 2017.

Sends 2 (w - 1) / w of the vector in 2 (w - 1) messages; rounds once per hop while it adds, and the sum once.
"""

from collections.abc import Sequence

import jax

from jaxmpi.allreduce.algorithms.spec import Halves, Net, add, code, in_halves, turn
from jaxmpi.allreduce.building_blocks import ring_all_gather, ring_index, ring_permutation
from jaxmpi.allreduce.schedules import Group, Schedule, Span, gather_round_ring
from jaxmpi.allreduce.wires import Wire
from jaxmpi.comm.base import Comm


def reduce_scatter(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """f32[n] -> f32[n / w], the sum of chunk place + 1."""
    size, chunks, place = comm.size, x.reshape(comm.size, -1), ring_index(comm)

    # Chunk c sets out from place c and comes to rest at place c - 1, with a summand from each place on the way. So
    # chunks are added in different orders, but each entry once and in one order: all that get it have the same bits.
    def reduce_step(i: jax.Array, partial: jax.Array) -> jax.Array:
        received = wire.decode(comm.permute(wire.encode(partial), ring_permutation(comm, 1)))
        return received + chunks[(place - i - 1) % size]

    return comm.loop(size - 1, reduce_step, chunks[place])


def all_gather(chunk: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """f32[n / w] -> f32[n], from chunk place + 1."""
    place = ring_index(comm)
    # Encoded once, forwarded as it is, and decoded by all, its maker too: encoding anew at every hop would round w - 1
    # times, and leave each worker with other bits.
    rows = ring_all_gather(wire.encode(chunk), comm, lambda distance: (place + 1 - distance) % comm.size)
    return wire.decode(rows).reshape(-1)


def chunk_of_rank(comm: Comm) -> tuple[int, ...]:
    """By rank, its chunk: i + 1 at place i."""
    return tuple((comm.order.index(rank) + 1) % comm.size for rank in range(comm.size))


def schedule_scatter(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
    """The steps of `reduce_scatter`."""
    size, place = group.size, group.place
    for hop in range(1, size):
        row = rows[(place - hop) % size]
        with schedule.scratch():
            received = schedule.message(row.floats)
            schedule.pass_on(schedule.encode(rows[(place - hop + 1) % size]), received, group)
            schedule.add(row, [received, row])


def schedule_gather(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
    """The steps of `all_gather`."""
    gather_round_ring(
        [rows[(group.place + 1 - distance) % group.size] for distance in range(group.size)], group, schedule
    )


def ring_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of 2 (w - 1) rounds of n / w.

    2 (w - 1) alpha + 2 (w - 1) / w n b beta, for the messages. Gibiansky 2017.
    """
    w = net.workers
    rounds = 2 * (w - 1) * turn(net, n / w, wire, int(net.hosts > 1))
    return rounds + add(net, (w - 1) / w * n) + code(net, 2 * n, wire)


RING = in_halves(
    Halves(reduce_scatter, all_gather, chunk_of_rank, scatter_part=schedule_scatter, gather_part=schedule_gather),
    crosses=True,
    seconds=ring_seconds,
)
