"""Records the steps of a sum on the host, for C.

A strategy has one form outside programs, a generator for each part of a vector, which sends, receives, waits and adds
(`algorithms.spec`). It is run once with a communicator that sends nothing, on a vector of zeros. Its arrays are only
places: in the vector, or in the memory that a part uses, of which what nobody holds any more is used again.

A generator must not look at numbers, for it sees zeros. Only what computes by `HostComm.add`, by wires that C has, and
on memory of `HostComm.empty`, is recorded. Whatever else it does meets an array that cannot be written, or one of
unknown memory, and the sum is left to Python.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmpi.allreduce.algorithms.table import HostSum
from jaxmpi.allreduce.host_comm import HostComm, Requests
from jaxmpi.allreduce.wires import WIRES, HostWire

STEPS = SEND, RECEIVE, WAIT, ADD, ENCODE, DECODE, END = range(7)
NAMES = "SEND", "RECEIVE", "WAIT", "ADD", "ENCODE", "DECODE", "END"  # in the source
CODED = {"16": "F16", "bf16": "BF16", "8": "I8"}  # wires, and their names in the source
LINE_BYTES = 64
TAG = 0  # of a recorded message; a part has one tag


class Unrecordable(Exception):
    """A sum takes a step that C does not have."""


class RecordedSteps(NamedTuple):
    """The steps of a sum of f32[n] on one rank."""

    steps: np.ndarray  # i64: words, one step after another
    parts: np.ndarray  # i64: where in them each part begins
    memory_bytes: int  # of a part

    def words(self) -> tuple[int, int, int, int]:
        """Two addresses, the number of parts, bytes of a part."""
        return self.steps.ctypes.data, self.parts.ctypes.data, len(self.parts), self.memory_bytes


def recorded(total: HostSum, n: int) -> RecordedSteps | None:
    """The steps of a sum of f32[n]; None if C does not have one of them."""
    of = total.comm
    recorder = SumRecorder(of.mpi.rank, n)
    comm = RecordedComm(recorder, of.order, of.hosts, of.numbers)
    try:
        wire = recorder.wire(total.wire)
        for part in total.parts(n, comm, wire):
            recorder.begin_part()
            for requests in part.of(recorder.x, comm, wire, TAG):
                recorder.wait(requests)
            recorder.end_part()
    except (Unrecordable, ValueError):  # ValueError: NumPy's, of an array that cannot be written
        return None
    return RecordedSteps(np.array(recorder.steps, np.int64), np.array(recorder.parts, np.int64), recorder.memory_bytes)


class Memory(NamedTuple):
    """Where an array is while a sum is recorded."""

    address: int
    size_bytes: int


class SumRecorder:
    """Records steps, in the place of a communicator of mpi4py."""

    def __init__(self, rank: int, n: int) -> None:
        """Nothing is recorded yet.

        The vector f32[n] takes no memory, since nobody writes to it.
        """
        self.rank, self.x = rank, np.zeros(n, np.float32)
        self.x.flags.writeable = False
        self.steps, self.parts, self.memory_bytes = list[int](), list[int](), 0
        self._under_way = list[np.ndarray]()  # of messages
        self._memory = dict[int, Memory]()  # of the part, in use, by its place

    def begin_part(self) -> None:
        """Record the steps of another part."""
        self.parts.append(len(self.steps))

    def wait(self, requests: Requests) -> None:
        """Wait for all messages under way."""
        if len(requests) != len(self._under_way):
            raise Unrecordable("a part waits for some of its messages only")
        self.steps.append(WAIT)
        self._under_way.clear()

    def end_part(self) -> None:
        """The part is summed."""
        if self._under_way:
            raise Unrecordable("a part ends before its messages have come")
        self.steps.append(END)

    # ------------------------------------------------------------ a communicator's

    def Isend(self, part: np.ndarray, to: int, tag: int) -> bool:
        """A message to a rank."""
        return self._message(SEND, part, to, tag)

    def Irecv(self, part: np.ndarray, source: int, tag: int) -> bool:
        """A message from a rank."""
        return self._message(RECEIVE, part, source, tag)

    def _message(self, step: int, part: np.ndarray, rank: int, tag: int) -> bool:
        if tag != TAG:
            raise Unrecordable("a part has tags of its own")
        self.steps += step, rank, self._place(part), part.nbytes
        self._under_way.append(part)
        return True

    def empty(self, size_bytes: int) -> np.ndarray:
        """Memory, u8[size_bytes]."""
        made = np.zeros(size_bytes, np.uint8)
        made.flags.writeable = False
        place, lines_bytes = 0, -(-max(1, size_bytes) // LINE_BYTES) * LINE_BYTES
        for other in sorted(self._memory):  # the first gap that is wide enough
            if other - place >= lines_bytes:
                break
            place = other + -(-max(1, self._memory[other].size_bytes) // LINE_BYTES) * LINE_BYTES
        self._memory[place] = Memory(made.ctypes.data, size_bytes)
        weakref.finalize(made, self._memory.pop, place)  # once the sum and its messages have done with it
        self.memory_bytes = max(self.memory_bytes, place + size_bytes)
        return made

    def add(self, to: np.ndarray, summands: Sequence[np.ndarray], from_zero: bool) -> None:
        """An addition of arrays, one after another."""
        if any(array.dtype != np.float32 or array.shape != to.shape for array in (to, *summands)):
            raise Unrecordable("arrays that are added are not f32 of one length")
        self.steps += ADD, self._place(to), to.size, int(from_zero), len(summands), *map(self._place, summands)

    def wire(self, wire: HostWire) -> HostWire:
        """A wire whose encodings and decodings are recorded."""
        number = next((i for i, name in enumerate(CODED) if WIRES[name].on_host is wire), None)
        if wire.is_exact:
            return wire
        if number is None:
            raise Unrecordable("C does not have the wire")
        floats = dict[int, int]()  # by the size of their message

        def size_bytes(n: int) -> int:
            size = wire.size_bytes(n)
            floats[size] = n
            return size

        def encode(x: np.ndarray) -> np.ndarray:
            made = self.empty(size_bytes(x.size))
            self.steps += ENCODE, number, self._place(made), self._place(x), x.size
            return made

        def decode(sent: np.ndarray) -> np.ndarray:
            made = self.empty(4 * floats[sent.size]).view(np.float32)
            self.steps += DECODE, number, self._place(made), self._place(sent), made.size
            return made

        return HostWire(size_bytes, encode, decode)

    def _place(self, array: np.ndarray) -> int:
        """Where an array is, as C reads it.

        In the vector 2 * offset, in the part's memory 1 more.
        """
        if array.size and not array.flags.c_contiguous:
            raise Unrecordable("an array has gaps")
        if not array.size:
            return 0
        vector = Memory(self.x.ctypes.data, self.x.nbytes)
        for kind, begin, whole in ((0, 0, vector), *((1, *each) for each in self._memory.items())):
            offset = array.ctypes.data - whole.address
            if 0 <= offset <= whole.size_bytes - array.nbytes:
                return 2 * (begin + offset) + kind
        raise Unrecordable("an array is neither of the vector nor of HostComm.empty")


class RecordedComm(HostComm):
    """A HostComm whose messages and additions a `SumRecorder` records."""

    def empty(self, size_bytes: int) -> np.ndarray:
        """As of HostComm."""
        return self.mpi.empty(size_bytes)

    def add(self, to: np.ndarray, summands: Sequence[np.ndarray], from_zero: bool = False) -> None:
        """As of HostComm."""
        self.mpi.add(to, summands, from_zero)
