"""ASA: an all-to-all, additions in rank order, an all-gather. Ma et al. 2016, section 3.2.

Sends 2 (w - 1) / w of the vector; rounds twice, the summands and the sum.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import jax

from jaxmpi.allreduce.algorithms.spec import Halves, Net, add, code, in_halves, turn
from jaxmpi.allreduce.building_blocks import allgather, alltoall
from jaxmpi.allreduce.schedules import Group, Schedule, Span, gather_round_ring
from jaxmpi.allreduce.wires import Wire
from jaxmpi.comm.base import Comm, add_rows


def reduce_scatter(x: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """f32[n] -> f32[n / w]: this worker's chunk of the sum, by an all-to-all and additions in rank order."""
    # A worker encodes its own row too: else the bits of the sum would depend on which worker adds it up.
    return add_rows(wire.decode(alltoall(wire.encode(x.reshape(comm.size, -1)), comm)))


def all_gather(chunk: jax.Array, comm: Comm, wire: Wire) -> jax.Array:
    """f32[n / w] -> f32[n]: all workers' chunks."""
    return wire.decode(allgather(wire.encode(chunk), comm)).reshape(-1)


def schedule_scatter(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
    """ASA's first half: inside a host with all ranks at once, else as rotations, with one partner at a time."""
    size, place, order, numbers = group.size, group.place, group.order, group.numbers
    row = rows[numbers[place]]
    with schedule.scratch():
        parts = {numbers[place]: schedule.encode(row)}
        for step in range(1, size):
            to, source = (place + step) % size, (place - step) % size
            parts[numbers[source]] = received = schedule.message(row.floats)
            with nullcontext() if group.is_one_host else schedule.scratch():
                schedule.receive(received, order[source])
                schedule.send(schedule.encode(rows[numbers[to]]), order[to])
                if not group.is_one_host:
                    schedule.wait()
        schedule.wait()
        schedule.add(row, [parts[number] for number in range(size)])


def schedule_gather(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
    """ASA's second half: inside a host from each to all at once, else round a ring, which loads each link once."""
    ring_rows = [rows[group.numbers[(group.place - distance) % group.size]] for distance in range(group.size)]
    if not group.is_one_host:
        return gather_round_ring(ring_rows, group, schedule)
    with schedule.scratch():
        message = schedule.encode(ring_rows[0])
        schedule.decode(message, ring_rows[0])
        landings = [schedule.landing(row) for row in ring_rows[1:]]
        for distance, landing in enumerate(landings, 1):
            schedule.receive(landing, group.order[(group.place - distance) % group.size])
            schedule.send(message, group.order[(group.place + distance) % group.size])
        schedule.wait()
        for landing, row in zip(landings, ring_rows[1:], strict=True):
            schedule.decode(landing, row)


def asa_seconds(net: Net, n: float, wire: str) -> float:
    """Seconds of 2 (w - 1) rounds of n / w.

    First come rotations, in which up to s ranks of a host send to other hosts. Then comes a ring, in which one rank
    does. Thakur et al. 2005, section 4.4 (pairwise exchange) and 4.1 (ring allgather).
    """
    w, part = net.workers, n / net.workers
    rounds = [min(i, w - i, net.slots) if net.hosts > 1 else 0 for i in range(1, w)]
    scatter = sum(rounds.count(c) * turn(net, part, wire, c) for c in set(rounds))
    return scatter + (w - 1) * turn(net, part, wire, int(net.hosts > 1)) + add(net, n) + code(net, 2 * n, wire)


ASA = in_halves(
    Halves(reduce_scatter, all_gather, scatter_part=schedule_scatter, gather_part=schedule_gather),
    crosses=True,
    seconds=asa_seconds,
)
