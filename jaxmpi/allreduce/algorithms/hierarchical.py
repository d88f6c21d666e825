"""A sum inside each host, another algorithm between hosts."""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxmpi.allreduce.algorithms.spec import (
    ALL,
    Cost,
    Halves,
    HalvesOnHost,
    Part,
    PartsOnHost,
    StrategySpec,
    Sum,
    SumOnHost,
    is_even,
)
from jaxmpi.allreduce.host_comm import HostComm, Requests, Rows
from jaxmpi.allreduce.prices import Link, Net, add, turn
from jaxmpi.allreduce.subgroups import split_by_host
from jaxmpi.allreduce.wires import HostWire, Wire
from jaxmpi.comm.axis import add_rows
from jaxmpi.comm.base import Comm


def hierarchical(x: jax.Array, comm: Comm, wire: Wire, cross: Sum) -> jax.Array:
    """Sum inside hosts, then `cross` between hosts, then share inside hosts.

    Between hosts each of a host's s ranks sends what `cross` sends of n / s floats; inside, 2 (s - 1) / s n floats at
    32 bits. Rounds as `cross` over the hosts.

    Raises:
        UsageError: hosts have unequal numbers of ranks.
    """
    inside, between = split_by_host(comm)
    part = add_rows(inside.alltoall(x.reshape(inside.size, -1)))
    total = cross(part, between, wire) if between.size > 1 else part
    return inside.allgather(total).reshape(-1)


def scattered_between(x: jax.Array, comm: Comm, wire: Wire, cross: Halves) -> jax.Array:
    """The first halves, inside, then between hosts: f32[n] -> f32[n / w]."""
    inside, between = split_by_host(comm)
    part = add_rows(inside.alltoall(x.reshape(inside.size, -1)))
    return cross.scatter(part, between, wire) if between.size > 1 else part


def gathered_inside(mine: jax.Array, comm: Comm, wire: Wire, cross: Halves) -> jax.Array:
    """The second halves, between, then inside hosts: f32[n / w] -> f32[n]."""
    inside, between = split_by_host(comm)
    total = cross.gather(mine, between, wire) if between.size > 1 else mine
    return inside.allgather(total).reshape(-1)


def chunks_by_host(comm: Comm, cross: Halves) -> tuple[int, ...]:
    """By rank, the number of its chunk.

    Ranks of one place in their hosts share a part, of which `cross` gives each host a chunk.
    """
    ranks = [[rank for rank in comm.order if comm.hosts[rank] == host] for host in sorted(set(comm.hosts))]
    between = cross.chunks(split_by_host(comm)[1])
    places = {rank: (place, host) for host, each in enumerate(ranks) for place, rank in enumerate(each)}
    return tuple(places[rank][0] * len(ranks) + between[places[rank][1]] for rank in range(comm.size))


def hierarchical_on_host(rows: Rows, comm: HostComm, wire: HostWire, tag: int, cross: SumOnHost) -> Iterator[Requests]:
    """The sum of `hierarchical`, in NumPy."""
    yield from scattered_on_host(rows, comm, wire, tag, cross)
    yield from shared_inside_on_host(rows, comm, tag)


def scattered_on_host(rows: Rows, comm: HostComm, wire: HostWire, tag: int, cross: SumOnHost) -> Iterator[Requests]:
    """Sum this rank's part inside its host, then by `cross` between hosts.

    `cross` is a sum, or its first half.
    """
    inside, between, parts = comm.inside, comm.between, parts_of(rows, comm)
    mine, peers = parts[inside.place], [i for i in range(inside.size) if i != inside.place]
    theirs = {i: [comm.empty(row.nbytes).view(np.float32) for row in mine] for i in peers}
    if peers:
        yield [request for i in peers for request in inside.swap_each(parts[i], theirs[i], inside.order[i], tag)]
        for c, row in enumerate(mine):
            inside.add(row, [row if i == inside.place else theirs[i][c] for i in range(inside.size)])
    if between.size > 1:
        yield from cross(mine, between, wire, tag)


def gathered_on_host(rows: Rows, comm: HostComm, wire: HostWire, tag: int, cross: SumOnHost) -> Iterator[Requests]:
    """The second half of `cross` between hosts, then share parts inside them."""
    if comm.between.size > 1:
        yield from cross(parts_of(rows, comm)[comm.inside.place], comm.between, wire, tag)
    yield from shared_inside_on_host(rows, comm, tag)


def shared_inside_on_host(rows: Rows, comm: HostComm, tag: int) -> Iterator[Requests]:
    """Each rank's part to all ranks of its host, at 32 bits."""
    inside, parts = comm.inside, parts_of(rows, comm)
    peers = [i for i in range(inside.size) if i != inside.place]
    if peers:
        mine = parts[inside.place]
        yield [request for i in peers for request in inside.swap_each(mine, parts[i], inside.order[i], tag)]


def parts_of(rows: Rows, comm: HostComm) -> list[Rows]:
    """By place in its host: the rows that a rank sums there."""
    count = len(rows) // comm.inside.size
    return [rows[i * count : (i + 1) * count] for i in range(comm.inside.size)]


def hierarchical_parts(n: int, comm: HostComm, wire: HostWire, cross: PartsOnHost) -> Iterator[Part]:
    """The parts of `cross`, of what each rank of a host holds."""
    held = comm.between.size * -(-n // comm.size)
    for part in cross(held, comm.between, wire):
        ends = [(i * held + row.start, i * held + row.stop) for i in range(comm.inside.size) for row in part.rows]
        rows = [slice(min(n, begin), min(n, end)) for begin, end in ends]
        yield Part(rows, functools.partial(hierarchical_on_host, cross=part.sum))


def hierarchical_seconds(net: Net, n: float, wire: str, cross: Cost) -> float:
    """Seconds of the rounds inside hosts and of `cross` between them.

    Inside, s - 1 rounds of n / s at 32 bits before and after; between, `cross` of n / s by all s ranks at once.
    """
    host = net._replace(hosts=1)
    inside = 2 * (net.slots - 1) * turn(host, n / net.slots, "32", 0) + add(host, n)
    shared = Link(net.between.alpha_s, net.between.beta_s_per_byte * net.slots)
    across = net._replace(slots=1, between=shared, cores=net.cores / net.slots)
    return inside + (cross(across, n / net.slots, wire) if net.hosts > 1 else 0.0)


def hierarchical_pieces(hosts: Sequence[int], cross: Callable[[Sequence[int]], int]) -> int:
    """The pieces of `cross`, of each rank of a host."""
    between = sorted(set(hosts))
    return len(hosts) // len(between) * cross(between)


HIERARCHICAL = StrategySpec(
    hierarchical,
    ALL,
    fits=is_even,
    on_host=hierarchical_parts,
    fits_on_host=is_even,
    seconds=hierarchical_seconds,
    is_candidate=lambda net: net.even and net.hosts > 1 and net.slots > 1,
    halves=Halves(
        scattered_between, gathered_inside, chunks_by_host, on_host=HalvesOnHost(scattered_on_host, gathered_on_host)
    ),
    pieces=hierarchical_pieces,
    spelled=("hier-asa", "hier-ring", "hier-tree", "hier-color4"),
)
