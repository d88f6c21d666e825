"""Sums over MPI ranks in NumPy, for a thread that runs beside XLA.

A sum changes this rank's vector in place and is a generator: if it must wait it yields the requests it waits for. So
one thread carries any number of sums at once; a link is busy with one while another adds. Vectors, additions and
roundings are those of `algorithms` and `wires` in jit: the same bits.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.allreduce.algorithms import Strategy, is_even, parse
from jaxmpi.allreduce.host_wires import HOST_WIRES, HostWire
from jaxmpi.allreduce.wires import BLOCK

Rows = Sequence[np.ndarray]  # f32[<= n / size] each, views of one vector; row i is worker i's to sum
MESSAGE_BYTES = 63 << 10  # Open MPI sends up to 64 KiB, header included, without asking the receiver first


# ---------------------------------------------------------------- messages


Requests = list[Any]  # of mpi4py


class HostComm:
    """Messages between the workers of a job, sent and received without waiting, on a communicator of its own."""

    def __init__(self, mpi: Any, order: Sequence[int], hosts: Sequence[int]) -> None:
        """Take a communicator of mpi4py that is used here only, and which ranks talk, in which order.

        Args:
            order: ranks, those of one host side by side.
            hosts: of every rank of the communicator.
        """
        self.mpi, self.rank = mpi, mpi.rank
        self.order, self.hosts = tuple(order), tuple(hosts)
        self.size, self.place = len(self.order), self.order.index(self.rank)

    @functools.cached_property
    def inside(self) -> "HostComm":
        """The ranks of this host."""
        return HostComm(self.mpi, [r for r in self.order if self.hosts[r] == self.hosts[self.rank]], self.hosts)

    @functools.cached_property
    def between(self) -> "HostComm":
        """The ranks of equal place on all hosts, each of which has as many."""
        return HostComm(self.mpi, self.order[self.inside.place :: self.inside.size], self.hosts)

    def swap(self, sent: np.ndarray, to: int, received: np.ndarray, source: int, tag: int) -> Requests:
        """Send one u8[n] and receive another."""
        receiving = [self.mpi.Irecv(part, source, tag) for part in cut(received)]
        return [*receiving, *(self.mpi.Isend(part, to, tag) for part in cut(sent))]

    def swap_each(self, sent: Rows, received: Rows, to: int, tag: int) -> Requests:
        """Send arrays to a rank, and receive as many of any dtype from it, in the same order."""
        pairs = zip(sent, received, strict=True)
        return [request for a, b in pairs for request in self.swap(a.view(np.uint8), to, b.view(np.uint8), to, tag)]

    def shift(self, sent: np.ndarray, received: np.ndarray, tag: int) -> Requests:
        """Send to the next place, receive from the one before."""
        before, after = (self.order[(self.place + step) % self.size] for step in (-1, 1))
        return self.swap(sent, after, received, before, tag)


def some_are_complete(requests: Requests) -> bool:
    """Look once whether any are complete; those that are become false."""
    return bool(requests and type(requests[0]).Testsome(requests))


def cut(message: np.ndarray) -> list[np.ndarray]:
    """Parts of MESSAGE_BYTES at most; one if there is nothing to send."""
    return [message[start : start + MESSAGE_BYTES] for start in range(0, max(message.size, 1), MESSAGE_BYTES)]


# ---------------------------------------------------------------- strategies


Sum = Callable[[Rows, HostComm, HostWire, int], Iterator[Requests]]  # never yields an empty list


def ring(rows: Rows, comm: HostComm, wire: HostWire, tag: int) -> Iterator[Requests]:
    """Scatter-reduce, then allgather, around the ring of ranks ordered by host; as `algorithms.ring`."""
    size, place = comm.size, comm.place
    sent = wire.encode(rows[place])
    for hop in range(1, size):
        mine = rows[(place - hop) % size]
        received = np.empty(wire.size_bytes(mine.size), np.uint8)
        yield comm.shift(sent, received, tag)
        np.add(wire.decode(received), mine, out=mine)
        sent = wire.encode(mine)
    yield from pass_on(sent, [rows[(place + 1 - back) % size] for back in range(size)], comm, wire, tag)


def alltoall_sum_allgather(rows: Rows, comm: HostComm, wire: HostWire, tag: int) -> Iterator[Requests]:
    """ASA, its all-to-all as rotations: one partner at a time; as `algorithms.alltoall_sum_allgather`."""
    size, place, order = comm.size, comm.place, comm.order
    parts = {comm.rank: wire.encode(rows[comm.rank])}
    for step in range(1, size):
        to, source = order[(place + step) % size], order[(place - step) % size]
        parts[source] = np.empty(wire.size_bytes(rows[comm.rank].size), np.uint8)
        yield comm.swap(wire.encode(rows[to]), to, parts[source], source, tag)
    total = wire.decode(parts[0]).copy()
    for rank in range(1, size):
        total += wire.decode(parts[rank])
    whose = [order[(place - back) % size] for back in range(size)]
    yield from pass_on(wire.encode(total), [rows[rank] for rank in whose], comm, wire, tag)


def pass_on(sent: np.ndarray, rows: Rows, comm: HostComm, wire: HostWire, tag: int) -> Iterator[Requests]:
    """All workers' results round the ring: row 0 from `sent`, row i from i places back, forwarded as it came."""
    rows[0][:] = wire.decode(sent)
    for row in rows[1:]:
        received = row.view(np.uint8) if wire.is_exact else np.empty(wire.size_bytes(row.size), np.uint8)
        yield comm.shift(sent, received, tag)
        if not wire.is_exact:
            row[:] = wire.decode(received)
        sent = received


def hierarchical_ring(rows: Rows, comm: HostComm, wire: HostWire, tag: int) -> Iterator[Requests]:
    """Sum inside the host, a ring between hosts on each rank's part, share inside; as `algorithms.hierarchical`."""
    inside, between = comm.inside, comm.between
    parts = [rows[i * between.size : (i + 1) * between.size] for i in range(inside.size)]
    mine, peers = parts[inside.place], [i for i in range(inside.size) if i != inside.place]
    theirs = {i: [np.empty_like(row) for row in mine] for i in peers}
    if peers:
        yield [request for i in peers for request in inside.swap_each(parts[i], theirs[i], inside.order[i], tag)]
    for c, row in enumerate(mine):
        every = [row if i == inside.place else theirs[i][c] for i in range(inside.size)]
        row[:] = functools.reduce(np.add, every)
    if between.size > 1:
        yield from ring(mine, between, wire, tag)
    if peers:
        yield [request for i in peers for request in inside.swap_each(mine, parts[i], inside.order[i], tag)]


def pairwise(rows: Rows, comm: HostComm, wire: HostWire, tag: int) -> Iterator[Requests]:
    """Halve and add between partners 1, 2, 4, ... places apart, then double the way back; as `algorithms.pairwise`."""
    partners = [comm.order[comm.place ^ 1 << level] for level in range(comm.size.bit_length() - 1)]
    mine = list(range(comm.size))  # rows that are still summed here
    for level, partner in enumerate(partners):
        low, high = mine[: len(mine) // 2], mine[len(mine) // 2 :]
        given, mine = (low, high) if comm.place >> level & 1 else (high, low)
        received = [np.empty(wire.size_bytes(rows[i].size), np.uint8) for i in mine]
        yield comm.swap_each([wire.encode(rows[i]) for i in given], received, partner, tag)
        for i, theirs in zip(mine, received, strict=True):
            np.add(wire.decode(theirs), rows[i], out=rows[i])
    results = {mine[0]: wire.encode(rows[mine[0]])}
    rows[mine[0]][:] = wire.decode(results[mine[0]])
    for partner in reversed(partners):
        theirs = sorted(i ^ len(results) for i in results)
        received = [
            rows[i].view(np.uint8) if wire.is_exact else np.empty(wire.size_bytes(rows[i].size), np.uint8)
            for i in theirs
        ]
        yield comm.swap_each([results[i] for i in sorted(results)], received, partner, tag)
        for i, sent in zip(theirs, received, strict=True):
            results[i] = sent
            if not wire.is_exact:
                rows[i][:] = wire.decode(sent)


HOST_SUMS: dict[str, Sum] = {
    "ring": ring,
    "asa": alltoall_sum_allgather,
    "hier-ring": hierarchical_ring,
    "tree": pairwise,
}
FITS: dict[str, Callable[[Sequence[int]], bool]] = {  # by the hosts of all ranks, if not all will do
    "hier-ring": is_even,
    "tree": lambda hosts: len(hosts).bit_count() == 1,
}


def has(strategy: Strategy, hosts: Sequence[int]) -> bool:
    """Return True if there is a sum in NumPy that gives this strategy's bits over ranks on these hosts."""
    algorithm, _, wire = strategy.name.partition(":")
    fits = FITS.get(algorithm)
    return algorithm in HOST_SUMS and wire in HOST_WIRES and (fits is None or fits(hosts))


def fitting(hosts: Sequence[int]) -> tuple[str, ...]:
    """Algorithms that have a sum in NumPy over ranks on these hosts."""
    return tuple(name for name in HOST_SUMS if has(parse(name), hosts))


class HostSum(NamedTuple):
    """A strategy by its full name, such as `ring:16`, over a HostComm."""

    name: str
    comm: HostComm

    def segments(self, n: int) -> int:
        """How many sums f32[n] is cut into, each with a tag of its own; the same on all ranks."""
        return max(1, -(-n // self.comm.size // columns(self._parts()[1])))

    def of(self, x: np.ndarray, tags: Sequence[int]) -> Iterator[Iterator[Requests]]:
        """Generators which together make f32[n], C-contiguous, the sum over workers; in place.

        Row i of [size, ceil(n / size)] is worker i's, as where `exchange` pads; a segment is some columns.
        """
        algorithm, wire = self._parts()
        length = -(-x.size // self.comm.size)
        rows = [x[i * length : (i + 1) * length] for i in range(self.comm.size)]
        width = columns(wire)
        for i, tag in enumerate(tags):
            yield algorithm([row[i * width : (i + 1) * width] for row in rows], self.comm, wire, tag)

    def _parts(self) -> tuple[Sum, HostWire]:
        algorithm, _, wire = self.name.partition(":")
        return HOST_SUMS[algorithm], HOST_WIRES[wire]


def columns(wire: HostWire) -> int:
    """How many floats of a row travel at once."""
    return MESSAGE_BYTES // wire.size_bytes(BLOCK) * BLOCK
