"""A sum inside each host, another algorithm between hosts."""

import functools
from collections.abc import Iterator, Sequence

import jax

from jaxmpi.allreduce.algorithms.spec import ALL, Halves, Link, Net, StrategySpec, add, both_halves, is_even, turn
from jaxmpi.allreduce.building_blocks import split_by_host
from jaxmpi.allreduce.schedules import Group, Part, Schedule, Span, SumSchedule
from jaxmpi.allreduce.wires import Wire
from jaxmpi.comm.base import Comm, add_rows


def hierarchical(x: jax.Array, comm: Comm, wire: Wire, cross: StrategySpec) -> jax.Array:
    """Sum inside hosts, then `cross` between hosts, then share inside hosts.

    Between hosts each of a host's s ranks sends what `cross` sends of n / s floats; inside, 2 (s - 1) / s n floats at
    32 bits. Rounds as `cross` over the hosts.

    Raises:
        UsageError: hosts have unequal numbers of ranks.
    """
    inside, between = split_by_host(comm)
    part = add_rows(inside.alltoall(x.reshape(inside.size, -1)))
    total = cross.sum(part, between, wire) if between.size > 1 else part
    return inside.allgather(total).reshape(-1)


def scattered_between(x: jax.Array, comm: Comm, wire: Wire, cross: StrategySpec) -> jax.Array:
    """The first halves, inside, then between hosts: f32[n] -> f32[n / w]."""
    inside, between = split_by_host(comm)
    assert cross.halves
    part = add_rows(inside.alltoall(x.reshape(inside.size, -1)))
    return cross.halves.scatter(part, between, wire) if between.size > 1 else part


def gathered_inside(mine: jax.Array, comm: Comm, wire: Wire, cross: StrategySpec) -> jax.Array:
    """The second halves, between, then inside hosts: f32[n / w] -> f32[n]."""
    inside, between = split_by_host(comm)
    assert cross.halves
    total = cross.halves.gather(mine, between, wire) if between.size > 1 else mine
    return inside.allgather(total).reshape(-1)


def chunks_by_host(comm: Comm, cross: StrategySpec) -> tuple[int, ...]:
    """By rank, the number of its chunk.

    Ranks of one place in their hosts share a part, of which `cross` gives each host a chunk.
    """
    ranks = [[rank for rank in comm.order if comm.hosts[rank] == host] for host in sorted(set(comm.hosts))]
    assert cross.halves
    between = cross.halves.chunks(split_by_host(comm)[1])
    places = {rank: (place, host) for host, each in enumerate(ranks) for place, rank in enumerate(each)}
    return tuple(places[rank][0] * len(ranks) + between[places[rank][1]] for rank in range(comm.size))


def scatter_hierarchical(rows: Sequence[Span], group: Group, schedule: Schedule, cross: SumSchedule) -> None:
    """Sum this rank's part inside its host, then by `cross`, a sum or its first half, between hosts."""
    inside, parts = group.inside, parts_of(rows, group)
    mine, peers = parts[inside.place], [i for i in range(inside.size) if i != inside.place]
    with schedule.scratch():
        theirs = {i: [schedule.floats(row.floats) for row in mine] for i in peers}
        for i in peers:
            swap_inside(parts[i], theirs[i], inside.order[i], schedule)
        schedule.wait()
        for c, row in enumerate(mine if peers else ()):
            schedule.add(row, [theirs[i][c] if i in theirs else row for i in range(inside.size)])
    if group.between.size > 1:
        cross(mine, group.between, schedule)


def scatter_part(rows: Sequence[Span], group: Group, schedule: Schedule, cross: StrategySpec) -> None:
    """The first halves, inside, then between hosts."""
    assert cross.halves
    assert cross.halves.scatter_part
    scatter_hierarchical(rows, group, schedule, cross.halves.scatter_part)


def gather_part(rows: Sequence[Span], group: Group, schedule: Schedule, cross: StrategySpec) -> None:
    """The second half of `cross` between hosts, then share parts inside them."""
    assert cross.halves
    assert cross.halves.gather_part
    if group.between.size > 1:
        cross.halves.gather_part(parts_of(rows, group)[group.inside.place], group.between, schedule)
    gather_inside(rows, group, schedule)


def gather_inside(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
    """Each rank's part to all ranks of its host, at 32 bits."""
    inside, parts = group.inside, parts_of(rows, group)
    for i in range(inside.size):
        if i != inside.place:
            swap_inside(parts[inside.place], parts[i], inside.order[i], schedule)
    schedule.wait()


def swap_inside(sent: Sequence[Span], received: Sequence[Span], rank: int, schedule: Schedule) -> None:
    """Exchange equally many rows with a rank, at 32 bits."""
    for row, theirs in zip(sent, received, strict=True):
        schedule.receive(theirs, rank)
        schedule.send(row, rank)


def parts_of(rows: Sequence[Span], group: Group) -> list[Sequence[Span]]:
    """By place in its host: the rows that a rank sums there."""
    count = len(rows) // group.inside.size
    return [rows[i * count : (i + 1) * count] for i in range(group.inside.size)]


def hierarchical_parts(n: int, group: Group, wire: Wire, cross: StrategySpec) -> Iterator[Part]:
    """The parts of `cross`, of what each rank of a host holds."""
    assert cross.parts
    length = group.between.size * -(-n // group.size)
    for part in cross.parts(length, group.between, wire):
        rows = [(i * length + begin, i * length + end) for i in range(group.inside.size) for begin, end in part.rows]
        rows = [(min(n, begin), min(n, end)) for begin, end in rows]
        scatter = functools.partial(scatter_hierarchical, cross=part.sum)
        yield Part(rows, both_halves(scatter, gather_inside))


def hierarchical_seconds(net: Net, n: float, wire: str, cross: StrategySpec) -> float:
    """Seconds of the rounds inside hosts and of `cross` between them.

    Inside, s - 1 rounds of n / s at 32 bits before and after; between, `cross` of n / s by all s ranks at once.
    """
    assert cross.seconds
    host = net._replace(hosts=1)
    inside = 2 * (net.slots - 1) * turn(host, n / net.slots, "32", 0) + add(host, n)
    shared = Link(net.between.alpha_s, net.between.beta_s_per_byte * net.slots)
    across = net._replace(slots=1, between=shared, cores=net.cores / net.slots)
    return inside + (cross.seconds(across, n / net.slots, wire) if net.hosts > 1 else 0.0)


def hierarchical_pieces(hosts: Sequence[int], cross: StrategySpec) -> int:
    """The pieces of `cross`, of each rank of a host."""
    between = sorted(set(hosts))
    return len(hosts) // len(between) * (cross.pieces or len)(between)


HIERARCHICAL = StrategySpec(
    hierarchical,
    ALL,
    fits=is_even,
    parts=hierarchical_parts,
    fits_parts=lambda hosts, cross: is_even(hosts) and cross.fits_parts(sorted(set(hosts))),
    seconds=hierarchical_seconds,
    halves=Halves(
        scattered_between, gathered_inside, chunks_by_host, scatter_part=scatter_part, gather_part=gather_part
    ),
    pieces=hierarchical_pieces,
    spelled=("hier-asa", "hier-ring", "hier-tree", "hier-color4"),
)
