"""ASA: all-to-all, sum, allgather. Ma et al. 2016, section 3.2."""

import functools
from collections.abc import Iterator

import jax
import numpy as np

from jaxmpi.allreduce.algorithms.spec import (
    ALL,
    Halves,
    HalvesOnHost,
    StrategySpec,
    in_columns,
    one_after_another,
    own_chunks,
)
from jaxmpi.allreduce.building_blocks import allgather, alltoall
from jaxmpi.allreduce.host_comm import HostComm, Requests, Rows, pass_on
from jaxmpi.allreduce.prices import Net, add, code, ring_crossing, turn
from jaxmpi.allreduce.wires import HostWire, Wire
from jaxmpi.comm.axis import add_rows
from jaxmpi.comm.base import Comm


def alltoall_sum_allgather(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """Sum by an all-to-all, additions in rank order and an allgather.

    Sends 2 (w - 1) / w of the vector; rounds twice (slices sent, sum sent). Ma et al. 2016, section 3.2.
    """
    return allgathered(summed_slice(x, comm, wire), comm, wire)


def summed_slice(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """ASA's first half, f32[n] -> f32[n / w]: this worker's summed slice."""
    parts = wire.decode(alltoall(wire.encode(x.reshape(comm.size, -1)), comm))  # f32[w, n/w]: my slice of each worker
    return add_rows(parts)


def allgathered(mine: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """ASA's second half: f32[n / w] -> f32[n]."""
    return wire.decode(allgather(wire.encode(mine), comm)).reshape(-1)


def summed_slice_on_host(rows: Rows, comm: HostComm, wire: HostWire, tag: int) -> Iterator[Requests]:
    """ASA's first half, its all-to-all as rotations: one partner at a time."""
    size, place, order, numbers = comm.size, comm.place, comm.order, comm.numbers
    mine = rows[numbers[place]]
    parts = {numbers[place]: wire.encode(mine)}
    for step in range(1, size):
        to, source = (place + step) % size, (place - step) % size
        parts[numbers[source]] = received = comm.empty(wire.size_bytes(mine.size))
        yield comm.swap(wire.encode(rows[numbers[to]]), order[to], received, order[source], tag)
    total = comm.empty(mine.nbytes).view(np.float32)
    comm.add(total, [wire.decode(parts[0])])
    for number in range(1, size):
        comm.add(total, [total, wire.decode(parts[number])])
    comm.add(mine, [total])


def allgathered_on_host(rows: Rows, comm: HostComm, wire: HostWire, tag: int) -> Iterator[Requests]:
    """ASA's second half, round a ring."""
    around = [rows[comm.numbers[(comm.place - back) % comm.size]] for back in range(comm.size)]
    yield from pass_on(wire.encode(around[0]), around, comm, wire, tag)


ON_HOST = HalvesOnHost(summed_slice_on_host, allgathered_on_host)


def asa_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of 2 (w - 1) rounds of n / w.

    First come rotations, in which up to s ranks of a host send to other hosts. Then comes a ring, in which one rank
    does. Thakur et al. 2005, section 4.4 (pairwise exchange) and 4.1 (ring allgather).
    """
    w, part = net.workers, n / net.workers
    rounds = [min(i, w - i, net.slots) if net.hosts > 1 else 0 for i in range(1, w)]
    scatter = sum(rounds.count(c) * turn(net, part, wire, c) for c in set(rounds))
    return scatter + (w - 1) * turn(net, part, wire, ring_crossing(net)) + add(net, n) + code(net, 2 * n, wire)


ASA = StrategySpec(
    alltoall_sum_allgather,
    ALL,
    crosses=True,
    on_host=functools.partial(in_columns, sum=one_after_another(ON_HOST)),
    seconds=asa_seconds,
    halves=Halves(summed_slice, allgathered, own_chunks, on_host=ON_HOST),
    arrays_at_work=3,
)
