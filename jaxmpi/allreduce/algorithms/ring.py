"""The ring: scatter-reduce, then allgather. Gibiansky 2017."""

import functools
from collections.abc import Iterator

import jax

from jaxmpi.allreduce.algorithms.spec import ALL, Halves, HalvesOnHost, StrategySpec, in_columns, one_after_another
from jaxmpi.allreduce.building_blocks import gather_round, place_of, shift
from jaxmpi.allreduce.host_comm import HostComm, Requests, Rows, pass_on
from jaxmpi.allreduce.prices import Net, add, code, ring_crossing, turn
from jaxmpi.allreduce.wires import HostWire, Wire
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

    def reduce_step(i: jax.Array, partial: jax.Array) -> jax.Array:
        received = wire.decode(comm.permute(wire.encode(partial), shift(comm, 1)))
        return received + chunks[(place - i - 1) % size]

    return comm.loop(size - 1, reduce_step, chunks[place])


def passed_round(mine: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """The allgather from chunk place + 1: f32[n / w] -> f32[n]."""
    place = place_of(comm)
    return wire.decode(gather_round(wire.encode(mine), comm, lambda back: (place + 1 - back) % comm.size)).reshape(-1)


def next_chunks(comm: Comm) -> tuple[int, ...]:
    """By rank, its chunk: i + 1 at place i."""
    return tuple((comm.order.index(rank) + 1) % comm.size for rank in range(comm.size))


def reduced_round_on_host(rows: Rows, comm: HostComm, wire: HostWire, tag: int) -> Iterator[Requests]:
    """The ring's first half, as `reduced_round`."""
    size, place = comm.size, comm.place
    for hop in range(1, size):
        sent, mine = wire.encode(rows[(place - hop + 1) % size]), rows[(place - hop) % size]
        received = comm.empty(wire.size_bytes(mine.size))
        yield comm.shift(sent, received, tag)
        comm.add(mine, [wire.decode(received), mine])


def passed_round_on_host(rows: Rows, comm: HostComm, wire: HostWire, tag: int) -> Iterator[Requests]:
    """The ring's second half, as `passed_round`."""
    around = [rows[(comm.place + 1 - back) % comm.size] for back in range(comm.size)]
    yield from pass_on(wire.encode(around[0]), around, comm, wire, tag)


ON_HOST = HalvesOnHost(reduced_round_on_host, passed_round_on_host)


def ring_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of 2 (w - 1) rounds of n / w.

    2 (w - 1) alpha + 2 (w - 1) / w n b beta, for the messages. Gibiansky 2017.
    """
    w = net.workers
    rounds = 2 * (w - 1) * turn(net, n / w, wire, ring_crossing(net))
    return rounds + add(net, (w - 1) / w * n) + code(net, 2 * n, wire)


RING = StrategySpec(
    ring,
    ALL,
    crosses=True,
    on_host=functools.partial(in_columns, sum=one_after_another(ON_HOST)),
    seconds=ring_seconds,
    halves=Halves(reduced_round, passed_round, next_chunks, on_host=ON_HOST),
)
