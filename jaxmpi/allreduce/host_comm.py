"""Non-blocking messages between ranks, for sums outside XLA.

A sum is written as a generator, in NumPy. If it adds by `HostComm.add`, and takes memory from `HostComm.empty`, C can
carry it out (`compiled_sums`).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxmpi.allreduce.wires import BLOCK, HostWire

Requests = list[Any]  # requests of mpi4py
Rows = Sequence[np.ndarray]  # f32[<= n / size] each, views of one vector; row i is worker i's to sum
WINDOW = 24  # parts of a vector under way at once; with more of a tree's, what goes up holds up what comes down
MESSAGE_BYTES = 63 << 10  # Open MPI sends up to 64 KiB, header included, without asking the receiver first


class HostComm:
    """Non-blocking messages between workers, on a communicator of their own."""

    def __init__(
        self, mpi: Any, order: Sequence[int], hosts: Sequence[int], numbers: Sequence[int] | None = None
    ) -> None:
        """Take a communicator of mpi4py that is used here only, and ranks.

        Args:
            order: ranks, those of one host side by side.
            hosts: of every rank of the communicator.
            numbers: of each place, its worker's among those that take part; none given: the rank.
        """
        self.mpi, self.order, self.hosts = mpi, tuple(order), tuple(hosts)
        self.size, self.place = len(self.order), self.order.index(mpi.rank)
        self.numbers = tuple(numbers or order)

    @functools.cached_property
    def inside(self) -> "HostComm":
        """The ranks of this host."""
        here = self.hosts[self.order[self.place]]
        return self._part([rank for rank in self.order if self.hosts[rank] == here])

    @functools.cached_property
    def between(self) -> "HostComm":
        """The ranks of equal place on hosts with equally many ranks."""
        return self._part(self.order[self.inside.place :: self.inside.size])

    def _part(self, order: Sequence[int]) -> "HostComm":
        return type(self)(self.mpi, order, self.hosts, range(len(order)))  # numbered as `subgroups.SubComm` does

    def empty(self, size_bytes: int) -> np.ndarray:
        """Memory, u8[size_bytes]."""
        return np.empty(size_bytes, np.uint8)

    def add(self, to: np.ndarray, summands: Sequence[np.ndarray], from_zero: bool = False) -> None:
        """Sum f32[n] arrays from first to last, all on 0 if `from_zero`.

        `to` may be one of them.
        """
        if len(summands) == 2 and not from_zero:
            np.add(*summands, out=to)
        else:
            to[:] = functools.reduce(np.add, [*([np.float32(0)] if from_zero else []), *summands])

    def send(self, sent: np.ndarray, to: int, tag: int) -> Requests:
        """Send u8[n] to a rank."""
        return [self.mpi.Isend(part, to, tag) for part in cut(sent)]

    def receive(self, received: np.ndarray, source: int, tag: int) -> Requests:
        """Receive u8[n] from a rank."""
        return [self.mpi.Irecv(part, source, tag) for part in cut(received)]

    def swap(self, sent: np.ndarray, to: int, received: np.ndarray, source: int, tag: int) -> Requests:
        """Send one u8[n] and receive another."""
        return [*self.receive(received, source, tag), *self.send(sent, to, tag)]

    def swap_each(self, sent: Rows, received: Rows, to: int, tag: int) -> Requests:
        """Exchange equally many arrays of any dtypes with a rank, in order."""
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


def columns(wire: HostWire) -> int:
    """How many floats of a row travel at once."""
    return MESSAGE_BYTES // wire.size_bytes(BLOCK) * BLOCK


def pass_on(sent: np.ndarray, rows: Rows, comm: HostComm, wire: HostWire, tag: int) -> Iterator[Requests]:
    """Pass encoded results round the ring, and decode them into `rows`.

    Row 0 is that of `sent`; row i comes from i places back, and is forwarded as it came.
    """
    if not wire.is_exact:
        comm.add(rows[0], [wire.decode(sent)])
    for row in rows[1:]:
        received = row.view(np.uint8) if wire.is_exact else comm.empty(wire.size_bytes(row.size))
        yield comm.shift(sent, received, tag)
        if not wire.is_exact:
            comm.add(row, [wire.decode(received)])
        sent = received
