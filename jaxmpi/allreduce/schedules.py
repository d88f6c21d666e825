"""Schedules of sums between processes: what a rank sends, receives and adds, as numbers for C (`host_engine.c`).

A strategy cuts f32[n] into parts, each of some rows of the vector. It describes the sum of a part on one rank by calls
of a `Schedule`, which writes them down: C carries out many parts at once, each whenever its messages have come. No
number of the vector is needed for that, so a schedule is made once for a length.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from jaxmpi.allreduce.wires import BLOCK, Wire

STEPS = "SEND", "RECEIVE", "WAIT", "ADD", "ENCODE", "DECODE", "END"  # names in C
SEND, RECEIVE, WAIT, ADD, ENCODE, DECODE, END = range(len(STEPS))
WINDOW = 24  # parts of a vector under way at once; with more of a tree's, what goes up holds up what comes down
MESSAGE_BYTES = 63 << 10  # Open MPI sends up to 64 KiB, header included, without asking the receiver first
LINE_BYTES = 64  # of the processor's cache


class Span(NamedTuple):
    """Floats, or their encoding, in the vector or in a part's scratch memory."""

    place: int  # bytes from the beginning, times 2, and 1 more in scratch memory: as C reads it
    floats: int
    size_bytes: int


class Group:
    """Ranks that sum, as one of them sees them."""

    def __init__(self, rank: int, order: Sequence[int], hosts: Sequence[int], numbers: Sequence[int] | None = None):
        """Take this rank and all that take part.

        Args:
            rank: of the communicator.
            order: ranks, those of one host side by side.
            hosts: of every rank of the communicator.
            numbers: by place, the worker's number among those that take part; default: its rank.
        """
        self.rank, self.order, self.hosts = rank, tuple(order), tuple(hosts)
        self.size, self.place = len(self.order), self.order.index(rank)
        self.numbers = tuple(numbers or order)

    @functools.cached_property
    def inside(self) -> "Group":
        """The ranks of this host."""
        host = self.hosts[self.rank]
        return self._subgroup([rank for rank in self.order if self.hosts[rank] == host])

    @functools.cached_property
    def between(self) -> "Group":
        """The ranks of equal place on hosts with equally many ranks."""
        return self._subgroup(self.order[self.inside.place :: self.inside.size])

    def _subgroup(self, order: Sequence[int]) -> "Group":
        return Group(self.rank, order, self.hosts, range(len(order)))  # numbered as `subgroups.SubComm` does


class Schedule:
    """The steps of all parts of a sum on one rank."""

    def __init__(self, wire: Wire) -> None:
        """Nothing is written down yet."""
        self.wire, self.is_exact = wire, wire.code == "F32"
        self.steps, self.parts = list[int](), list[int]()  # words; where each part begins
        self.scratch_bytes = self._used_bytes = 0  # of a part at most; in use

    # ------------------------------------------------------------ memory

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Use what is allocated inside the block again after it."""
        used_bytes = self._used_bytes
        yield
        self._used_bytes = used_bytes

    def _allocate(self, floats: int, size_bytes: int) -> Span:
        made = Span(2 * self._used_bytes + 1, floats, size_bytes)
        self._used_bytes += -(-max(1, size_bytes) // LINE_BYTES) * LINE_BYTES
        self.scratch_bytes = max(self.scratch_bytes, self._used_bytes)
        return made

    def floats(self, count: int) -> Span:
        """Scratch memory for floats."""
        return self._allocate(count, 4 * count)

    def message(self, count: int) -> Span:
        """Scratch memory for so many encoded floats."""
        return self._allocate(count, self.wire.size_bytes(count))

    def landing(self, row: Span) -> Span:
        """Where a row's encoding is received: the row itself if nothing is to be decoded."""
        return row if self.is_exact else self.message(row.floats)

    # ------------------------------------------------------------ steps

    def send(self, span: Span, rank: int) -> None:
        """Send what is there to a rank."""
        self._message(SEND, span, rank)

    def receive(self, span: Span, rank: int) -> None:
        """Receive from a rank, in the order in which it sends."""
        self._message(RECEIVE, span, rank)

    def _message(self, step: int, span: Span, rank: int) -> None:
        for start in range(0, max(1, span.size_bytes), MESSAGE_BYTES):
            size_bytes = min(MESSAGE_BYTES, span.size_bytes - start)
            self.steps += step, rank, span.place + 2 * start, size_bytes

    def wait(self) -> None:
        """Go on when all messages have come and gone."""
        self.steps.append(WAIT)

    def pass_on(self, sent: Span, received: Span, group: Group) -> None:
        """Send to the next place and receive from the one before."""
        self.receive(received, group.order[group.place - 1])
        self.send(sent, group.order[(group.place + 1) % group.size])
        self.wait()

    def add(self, to: Span, summands: Sequence[Span], from_zero: bool = False) -> None:
        """Sum equally long spans from first to last, all on 0 if `from_zero`; `to` may be one of them."""
        places = [summand.place for summand in summands]
        self.steps += ADD, to.place, to.floats, int(from_zero), len(places), *places

    def encode(self, row: Span) -> Span:
        """The row's encoding: the row itself if there is none."""
        if self.is_exact:
            return row
        made = self.message(row.floats)
        self.steps += ENCODE, self.wire.number, made.place, row.place, row.floats
        return made

    def decode(self, message: Span, to: Span | None = None) -> Span:
        """Decode a message, into new scratch memory if no place is given."""
        if self.is_exact:
            return message
        to = to or self.floats(message.floats)
        self.steps += DECODE, self.wire.number, to.place, message.place, message.floats
        return to

    # ------------------------------------------------------------ parts

    def add_part(self, part: "Part", group: Group) -> None:
        """Write down the sum of another part."""
        self.parts.append(len(self.steps))
        part.sum([Span(8 * begin, end - begin, 4 * (end - begin)) for begin, end in part.rows], group, self)
        self.steps.append(END)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """`steps` and `parts`, i64."""
        return np.array(self.steps, np.int64), np.array(self.parts, np.int64)


# Writes down the sum of some rows, of which row i is worker i's to sum, or of one row.
SumSchedule = Callable[[Sequence[Span], Group, Schedule], None]


class Part(NamedTuple):
    """Rows of a vector that are summed by themselves, beside other parts."""

    rows: Sequence[tuple[int, int]]  # [begin, end) of each in the vector
    sum: SumSchedule


Parts = Callable[[int, Group, Wire], Iterator[Part]]  # those of f32[n], the same on all ranks


def columns(wire: Wire) -> int:
    """How many floats of a row are sent at once."""
    return MESSAGE_BYTES // wire.size_bytes(BLOCK) * BLOCK


def in_columns(n: int, group: Group, wire: Wire, sum: SumSchedule) -> Iterator[Part]:
    """Parts of f32[n] that are some columns of all workers' rows.

    Row i of [size, ceil(n / size)] is worker i's, padded as by `exchange`.
    """
    length, width = -(-n // group.size), columns(wire)
    for start in range(0, max(1, length), width):
        rows = [(i * length + start, min(i * length + start + width, (i + 1) * length)) for i in range(group.size)]
        yield Part([(min(n, begin), min(n, end)) for begin, end in rows], sum)


def gather_round_ring(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
    """Pass encoded results round the ring: row 0 is this rank's, row i comes from i places back."""
    with schedule.scratch():
        sent = schedule.encode(rows[0])
        schedule.decode(sent, rows[0])
        longest = max(row.floats for row in rows)
        spare = [] if schedule.is_exact else [schedule.message(longest), schedule.message(longest)]
        for i, row in enumerate(rows[1:]):
            size_bytes = schedule.wire.size_bytes(row.floats)
            received = Span(spare[i % 2].place, row.floats, size_bytes) if spare else row
            schedule.pass_on(sent, received, group)
            schedule.decode(received, row)
            sent = received
