"""A sum inside each host, another algorithm between hosts.

Ranks of a host reduce-scatter the vector among themselves, at 32 bits. Ranks of equal place then sum their parts by the
`cross` algorithm over their hosts, with its wire, and ranks of a host gather the sums. So between hosts each of a
host's s ranks sends what `cross` sends of n / s floats; inside, 2 (s - 1) / s n floats. It rounds as `cross` does.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax

from jaxmpi.allreduce.algorithms.ring import RING
from jaxmpi.allreduce.algorithms.spec import ALL, Halves, Link, Net, StrategySpec, add, is_even, turn
from jaxmpi.allreduce.building_blocks import split_by_host
from jaxmpi.allreduce.schedules import Group, Part, Parts, Schedule, Span, SumSchedule
from jaxmpi.allreduce.wires import Wire
from jaxmpi.comm.base import Comm, add_rows


def hierarchical(cross: StrategySpec) -> StrategySpec:
    """The row of hier-<cross>; what `cross` lacks the hierarchy lacks, too."""
    halves, pieces = cross.halves, cross.pieces or len
    return StrategySpec(
        partial(by_host, cross=cross.sum),
        ALL,
        fits=is_even,
        parts=cross.parts and partial(hierarchical_parts, cross=cross.parts),
        fits_parts=lambda hosts: is_even(hosts) and cross.fits_parts(sorted(set(hosts))),
        seconds=cross.seconds and partial(hierarchical_seconds, cross=cross.seconds),
        halves=halves
        and Halves(
            partial(by_host, cross=halves.scatter, gathers=False),
            partial(by_host, cross=halves.gather, reduces=False),
            partial(chunks_by_host, cross=halves),
            scatter_part=halves.scatter_part and partial(schedule_by_host, cross=halves.scatter_part, gathers=False),
            gather_part=halves.gather_part and partial(schedule_by_host, cross=halves.gather_part, reduces=False),
        ),
        pieces=lambda hosts: len(hosts) // len(set(hosts)) * pieces(sorted(set(hosts))),
    )


def by_host(
    x: jax.Array,
    comm: Comm,
    wire: Wire,
    cross: Callable[..., jax.Array],
    reduces: bool = True,
    gathers: bool = True,
) -> jax.Array:
    """f32[n] -> f32[n], the sum, or one of its halves.

    Args:
        cross: the sum between hosts, or a half of it.
        reduces: whether ranks reduce-scatter inside their host before; else x is what `cross` takes.
        gathers: whether they gather inside their host after; else the result is what `cross` gives.

    Raises:
        UsageError: hosts have unequal numbers of ranks.
    """
    inside, between = split_by_host(comm)
    if reduces:
        x = add_rows(inside.alltoall(x.reshape(inside.size, -1)))
    if between.size > 1:
        x = cross(x, between, wire)
    return inside.allgather(x).reshape(-1) if gathers else x


def chunks_by_host(comm: Comm, cross: Halves) -> tuple[int, ...]:
    """By rank, the number of its chunk.

    Ranks of one place in their hosts share a part, of which `cross` gives each host a chunk.
    """
    _, between = split_by_host(comm)
    chunks = [place * between.size + chunk for place in range(len(between.groups)) for chunk in cross.chunks(between)]
    ranks = [rank for group in between.groups for rank in group]
    return tuple(chunk for _, chunk in sorted(zip(ranks, chunks, strict=True)))


def hierarchical_parts(n: int, group: Group, wire: Wire, cross: Parts) -> Iterator[Part]:
    """The parts of `cross`, of what each rank of a host holds."""
    length = group.between.size * -(-n // group.size)
    for part in cross(length, group.between, wire):
        rows = [(i * length + begin, i * length + end) for i in range(group.inside.size) for begin, end in part.rows]
        rows = [(min(n, begin), min(n, end)) for begin, end in rows]
        yield Part(rows, partial(schedule_by_host, cross=part.sum))


def schedule_by_host(
    rows: Sequence[Span],
    group: Group,
    schedule: Schedule,
    cross: SumSchedule,
    reduces: bool = True,
    gathers: bool = True,
) -> None:
    """The steps of `by_host`; inside a host each rank exchanges with all others at once."""
    inside, count = group.inside, len(rows) // group.inside.size
    by_place = [rows[i * count : (i + 1) * count] for i in range(inside.size)]
    own_rows, peers = by_place[inside.place], [i for i in range(inside.size) if i != inside.place]
    if reduces:
        with schedule.scratch():
            received = {i: [schedule.floats(row.floats) for row in own_rows] for i in peers}
            for i in peers:
                swap(by_place[i], received[i], inside.order[i], schedule)
            schedule.wait()
            for c, row in enumerate(own_rows if peers else ()):
                schedule.add(row, [received[i][c] if i in received else row for i in range(inside.size)])
    if group.between.size > 1:
        cross(own_rows, group.between, schedule)
    if gathers:
        for i in peers:
            swap(own_rows, by_place[i], inside.order[i], schedule)
        schedule.wait()


def swap(outgoing: Sequence[Span], received: Sequence[Span], rank: int, schedule: Schedule) -> None:
    """Exchange equally many rows with a rank, at 32 bits."""
    for row, message in zip(outgoing, received, strict=True):
        schedule.receive(message, rank)
        schedule.send(row, rank)


def hierarchical_seconds(net: Net, n: float, wire: str, cross: Callable[..., float]) -> float:
    """Seconds of the rounds inside hosts and of `cross` between them.

    Inside, s - 1 rounds of n / s at 32 bits before and after; between, `cross` of n / s by all s ranks at once.
    """
    host = net._replace(hosts=1)
    inside = 2 * (net.slots - 1) * turn(host, n / net.slots, "32", 0) + add(host, n)
    shared = Link(net.between.alpha_s, net.between.beta_s_per_byte * net.slots)
    net_between = net._replace(slots=1, between=shared, cores=net.cores / net.slots)
    return inside + (cross(net_between, n / net.slots, wire) if net.hosts > 1 else 0.0)


HIERARCHICAL = hierarchical(RING)._replace(
    spelled=("hier-asa", "hier-ring", "hier-tree", "hier-color4"), fill=hierarchical
)
