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
# Inside a host, where a receiver copies what is longer from the sender's memory, and a cache holds what is under way.
HOST_MESSAGE_BYTES, HOST_WINDOW = 256 << 10, 6
LINE_BYTES = 64  # of the processor's cache


MEMORIES = "RESULT", "SCRATCH", "OPERAND"  # in which a span lies; the first and the last may be the same
RESULT, SCRATCH, OPERAND = range(len(MEMORIES))


class Span(NamedTuple):
    """Floats, or their encoding, in the vector or in a part's scratch memory."""

    place: int  # 4 times the offset in bytes, plus RESULT, SCRATCH or OPERAND: one word for C
    floats: int
    size_bytes: int
    wire: int = 0  # number of its encoding; 0 is none


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
        self.is_one_host = len({self.hosts[rank] for rank in self.order}) == 1
        self.message_bytes = HOST_MESSAGE_BYTES if self.is_one_host else MESSAGE_BYTES
        self.window = HOST_WINDOW if self.is_one_host else WINDOW

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
        subgroup = Group(self.rank, order, self.hosts, range(len(order)))  # numbered as `building_blocks.SubComm` does
        subgroup.message_bytes = self.message_bytes
        return subgroup


class Schedule:
    """The steps of all parts of a sum on one rank."""

    def __init__(self, wire: Wire, message_bytes: int, operand_begin: int = 0) -> None:
        """Nothing is written down yet; the operand is the vector from float `operand_begin` on."""
        self.wire, self.is_exact, self.message_bytes = wire, wire.code == "F32", message_bytes
        self.operand_begin = operand_begin
        self.steps, self.parts = list[int](), list[int]()  # words; where each part begins
        self.scratch_bytes = self._used_bytes = 0  # of a part at most; in use
        self._written = set[int]()  # places of the vector that hold results; all others are read from the operand

    # ------------------------------------------------------------ memory

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Use what is allocated inside the block again after it."""
        used_bytes = self._used_bytes
        yield
        self._used_bytes = used_bytes

    def _allocate(self, floats: int, size_bytes: int) -> Span:
        span = Span(4 * self._used_bytes + SCRATCH, floats, size_bytes)
        self._used_bytes += -(-max(1, size_bytes) // LINE_BYTES) * LINE_BYTES
        self.scratch_bytes = max(self.scratch_bytes, self._used_bytes)
        return span

    def floats(self, count: int) -> Span:
        """Scratch memory for floats."""
        return self._allocate(count, 4 * count)

    def message(self, count: int) -> Span:
        """Scratch memory for so many encoded floats."""
        return self._allocate(count, self.wire.size_bytes(count))._replace(wire=self.wire.number)

    def landing(self, row: Span) -> Span:
        """Where a row's encoding is received: the row itself if nothing is to be decoded."""
        return row if self.is_exact else self.message(row.floats)

    # ------------------------------------------------------------ steps

    def send(self, span: Span, rank: int) -> None:
        """Send what is there to a rank."""
        self._message(SEND, self._source(span), span.size_bytes, rank)

    def receive(self, span: Span, rank: int) -> None:
        """Receive from a rank, in the order in which it sends."""
        self._message(RECEIVE, self._target(span), span.size_bytes, rank)

    def _message(self, step: int, place: int, size_bytes: int, rank: int) -> None:
        for start in range(0, max(1, size_bytes), self.message_bytes):
            self.steps += step, rank, place + 4 * start, min(self.message_bytes, size_bytes - start)

    def _source(self, span: Span) -> int:
        is_unchanged = span.place % 4 == RESULT and span.place not in self._written
        return span.place - 16 * self.operand_begin + OPERAND if is_unchanged else span.place

    def _target(self, span: Span) -> int:
        self._written.add(span.place)
        return span.place

    def wait(self) -> None:
        """Go on when all messages have come and gone."""
        self.steps.append(WAIT)

    def pass_on(self, outgoing: Span, received: Span, group: Group) -> None:
        """Send to the next place and receive from the one before."""
        self.receive(received, group.order[group.place - 1])
        self.send(outgoing, group.order[(group.place + 1) % group.size])
        self.wait()

    def add(self, to: Span, summands: Sequence[Span], from_zero: bool = False) -> None:
        """Sum equally long spans or messages from first to last, all on 0 if `from_zero`; `to` may be one of them."""
        places = [word for summand in summands for word in (summand.wire, self._source(summand))]
        self.steps += ADD, self._target(to), to.floats, int(from_zero), len(summands), *places

    def encode(self, row: Span) -> Span:
        """The row's encoding: the row itself if there is none."""
        if self.is_exact:
            return row
        message = self.message(row.floats)
        self.steps += ENCODE, self.wire.number, message.place, self._source(row), row.floats
        return message

    def decode(self, message: Span, to: Span) -> None:
        """Decode a message, which is there already if there is no encoding."""
        if not self.is_exact:
            self.steps += DECODE, self.wire.number, self._target(to), message.place, message.floats

    # ------------------------------------------------------------ parts

    def add_part(self, part: "Part", group: Group, is_whole: bool = True) -> None:
        """Write down the sum of another part, each row of which gets a result if it `is_whole`."""
        self.parts.append(len(self.steps))
        self._written.clear()
        rows = [Span(16 * begin + RESULT, end - begin, 4 * (end - begin)) for begin, end in part.rows]
        part.sum(rows, group, self)
        for row in rows:
            if is_whole and row.place not in self._written:  # as this rank's own chunk, which the others gather
                self.add(row, [row])
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


def columns(wire: Wire, group: Group) -> int:
    """How many floats of a row are sent at once."""
    return group.message_bytes // wire.size_bytes(BLOCK) * BLOCK


def in_columns(n: int, group: Group, wire: Wire, sum: SumSchedule) -> Iterator[Part]:
    """Parts of f32[n] that are some columns of all workers' rows.

    Row i of [size, ceil(n / size)] is worker i's, padded as by `exchange`.
    """
    length, width = -(-n // group.size), columns(wire, group)
    for start in range(0, max(1, length), width):
        rows = [(i * length + start, min(i * length + start + width, (i + 1) * length)) for i in range(group.size)]
        yield Part([(min(n, begin), min(n, end)) for begin, end in rows], sum)


def gather_round_ring(rows: Sequence[Span], group: Group, schedule: Schedule) -> None:
    """Pass encoded results round the ring: row 0 is this rank's, row i comes from i places back."""
    with schedule.scratch():
        outgoing = schedule.encode(rows[0])
        schedule.decode(outgoing, rows[0])
        longest = max(row.floats for row in rows)
        spare = [] if schedule.is_exact else [schedule.message(longest), schedule.message(longest)]
        for i, row in enumerate(rows[1:]):
            size_bytes = schedule.wire.size_bytes(row.floats)
            received = Span(spare[i % 2].place, row.floats, size_bytes) if spare else row
            schedule.pass_on(outgoing, received, group)
            schedule.decode(received, row)
            outgoing = received
