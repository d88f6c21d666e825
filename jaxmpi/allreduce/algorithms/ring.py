"""The ring: scatter-reduce, then allgather. Gibiansky 2017."""

import functools
from collections.abc import Sequence

import jax

from jaxmpi.allreduce.algorithms.spec import ALL, Halves, Net, StrategySpec, add, both_halves, code, turn
from jaxmpi.allreduce.building_blocks import gather_round, place_of, shift
from jaxmpi.allreduce.schedules import Group, Schedule, Span, gather_round_ring, in_columns
from jaxmpi.allreduce.wires import Wire
from jaxmpi.comm.base import Comm


def ring(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Scatter-reduce, then allgather, around the ring of ranks ordered by host.

    Sends 2 (w - 1) / w of the vector in 2 (w - 1) messages; rounds once per hop while summing and once after.
    The second half forwards the encoded chunk. Gibiansky 2017.
    """
    return passed_round(reduced_round(x, comm, wire), comm, wire)


def reduced_round(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """The scatter-reduce, f32[n] -> f32[n / w], of chunk place + 1."""
    size, chunks, place = comm.size, x.reshape(comm.size, -1), place_of(comm)

    # Chunk c sets out from place c and comes to rest at place c - 1, with a summand from each place on the way. So
    # chunks are added in different orders, but each entry once and in one order: all that get it have the same bits.
    def reduce_step(i: jax.Array, partial: jax.Array) -> jax.Array:
        received = wire.decode(comm.permute(wire.encode(partial), shift(comm, 1)))
        return received + chunks[(place - i - 1) % size]

    return comm.loop(size - 1, reduce_step, chunks[place])


def passed_round(mine: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """The allgather from chunk place + 1: f32[n / w] -> f32[n]."""
    place = place_of(comm)
    # Encoded once, forwarded as it is, and decoded by all, its maker too: encoding anew at every hop would round w - 1
    # times, and leave each worker with other bits.
    return wire.decode(gather_round(wire.encode(mine), comm, lambda back: (place + 1 - back) % comm.size)).reshape(-1)


def next_chunks(comm: Comm) -> tuple[int, ...]:
    """By rank, its chunk: i + 1 at place i."""
    return tuple((comm.order.index(rank) + 1) % comm.size for rank in range(comm.size))


def scatter_round_ring(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
    """The ring's first half, as `reduced_round`."""
    size, place = group.size, group.place
    for hop in range(1, size):
        mine = rows[(place - hop) % size]
        with schedule.scratch():
            received = schedule.message(mine.floats)
            schedule.pass_on(schedule.encode(rows[(place - hop + 1) % size]), received, group)
            schedule.add(mine, [received, mine])


def gather_next_chunks(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
    """The ring's second half, as `passed_round`."""
    gather_round_ring([rows[(group.place + 1 - back) % group.size] for back in range(group.size)], group, schedule)


def ring_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of 2 (w - 1) rounds of n / w.

    2 (w - 1) alpha + 2 (w - 1) / w n b beta, for the messages. Gibiansky 2017.
    """
    w = net.workers
    rounds = 2 * (w - 1) * turn(net, n / w, wire, int(net.hosts > 1))
    return rounds + add(net, (w - 1) / w * n) + code(net, 2 * n, wire)


RING = StrategySpec(
    ring,
    ALL,
    crosses=True,
    parts=functools.partial(in_columns, sum=both_halves(scatter_round_ring, gather_next_chunks)),
    seconds=ring_seconds,
    halves=Halves(
        reduced_round, passed_round, next_chunks, scatter_part=scatter_round_ring, gather_part=gather_next_chunks
    ),
)
