"""Records the steps of a sum on the host, for C.

A strategy has one form outside programs: a generator for each part of a vector (`algorithms.spec`). The generator
sends, receives, waits and adds. The strategy is run with a communicator that sends nothing, on a vector of zeros; one
of a user's own also on NaN and on noise, and the steps must be the same. Its arrays are only places: in the vector, or
in the memory that a part uses. Memory that nobody holds any more is used again.

Only what computes by `HostComm.add`, by wires that C has, and on memory of `HostComm.empty`, is recorded. Anything else
that the strategy does leaves the sum to Python. It meets numbers that cannot be looked at, an array that cannot be
written, or one of unknown memory.
"""

import bisect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jaxmpi.allreduce.algorithms.table import HostSum
from jaxmpi.allreduce.host_comm import HostComm, Requests
from jaxmpi.allreduce.wires import PACKAGED_WIRES, HostWire

NAMES = "SEND", "RECEIVE", "WAIT", "ADD", "ENCODE", "DECODE", "END"  # names of steps, in the source
SEND, RECEIVE, WAIT, ADD, ENCODE, DECODE, END = range(len(NAMES))
CODED = {"16": "F16", "bf16": "BF16", "8": "I8"}  # wires, and their names in the source
OUR_WIRES = [PACKAGED_WIRES[name].on_host for name in CODED]
LINE_BYTES, MOST_BYTES = 64, np.iinfo(np.int32).max
TAG = 0  # tag of a recorded message; a part has one tag


class Unrecordable(Exception):
    """A sum takes a step that C does not have."""


class RecordedSteps(NamedTuple):
    """The steps of a sum of f32[n] on one rank."""

    steps: np.ndarray  # i64: words, one step after another
    parts: np.ndarray  # i64: where in them each part begins
    memory_bytes: int  # bytes of a part, in whole lines
    floats: int

    def words(self) -> tuple[int, ...]:
        """Two addresses, the number of parts, bytes of a part, n."""
        return self.steps.ctypes.data, self.parts.ctypes.data, len(self.parts), self.memory_bytes, self.floats


def recorded(total: HostSum, n: int, is_ours: bool = False) -> RecordedSteps | None:
    """The steps of a sum; None if C lacks one.

    Also None if they depend on numbers: one that is not the package's is run on several, and its steps must be the
    same.
    """
    try:
        recorder = _run(total, n, zeros)
        if any(_run(total, n, numbers).steps != recorder.steps for numbers in (() if is_ours else NUMBERS)):
            return None  # it has looked at numbers, in a way in which a `Place` does not see it
    except Exception:  # Unrecordable, no memory, or whatever a strategy of one's own runs into on read-only numbers
        return None
    steps, parts = (np.array(words, np.int64) for words in (recorder.steps, recorder.parts))
    return RecordedSteps(steps, parts, in_lines(recorder.memory_bytes), n)


def zeros(size_bytes: int) -> np.ndarray:
    """Memory of zeros, which takes none until somebody writes."""
    return np.zeros(size_bytes, np.uint8)


def nans(size_bytes: int) -> np.ndarray:
    """Memory of NaN, as floats of any type."""
    return np.full(size_bytes, 0xFF, np.uint8)


def noise(size_bytes: int) -> np.ndarray:
    """Memory of numbers of all magnitudes and both signs."""
    return np.random.default_rng(size_bytes).integers(0, 256, size_bytes, np.uint8)


NUMBERS = nans, noise


def _run(total: HostSum, n: int, numbers: Callable[[int], np.ndarray]) -> "SumRecorder":
    """Run a sum on memory of such numbers; return what was recorded."""
    of = total.comm
    recorder = SumRecorder(of.mpi.rank, n, numbers)
    comm, wire = RecordedComm(recorder, of.order, of.hosts, of.numbers), recorder.wire(total.wire)
    for part in total.parts(n, comm, wire):
        recorder.begin_part()
        for requests in part.of(recorder.x, comm, wire, TAG):
            recorder.wait(requests)
        recorder.end_part()
    return recorder


def in_lines(size_bytes: int) -> int:
    """Bytes, rounded up to whole lines of the cache."""
    return -(-size_bytes // LINE_BYTES) * LINE_BYTES


class Place(np.ndarray):
    """An array of which only the place is known.

    Whoever looks at its numbers is refused.
    """

    def __getitem__(self, key: Any) -> Any:
        """A part, which is an array."""
        if not isinstance(part := super().__getitem__(key), Place):
            raise Unrecordable("a sum looks at numbers")
        return part

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Refuse NumPy's operations."""
        self._refuse()

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        """Refuse NumPy's functions."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise Unrecordable("a sum looks at numbers")

    __bool__ = __int__ = __float__ = _refuse


class SumRecorder:
    """Records steps, in the place of a communicator of mpi4py."""

    def __init__(self, rank: int, n: int, numbers: Callable[[int], np.ndarray]) -> None:
        """Nothing is recorded yet; `numbers` makes memory of a size in bytes."""
        self.rank, self._numbers, self._vector = rank, numbers, numbers(4 * n)
        self._vector.flags.writeable = False
        self.x = self._vector.view(np.float32).view(Place)
        self.steps, self.parts, self.memory_bytes = list[int](), list[int](), 0
        self._under_way = list[np.ndarray]()  # arrays of messages
        self._places = list[tuple[int, int]]()  # (begin, end) of the part's memory in use, in order
        self._begins = dict[int, int]()  # by the id of an array that owns it

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
        if tag != TAG or part.nbytes > MOST_BYTES:
            raise Unrecordable("a message has a tag of its own, or more bytes than MPI counts")
        self.steps += step, rank, self._place(part), part.nbytes
        self._under_way.append(part)
        return True

    def empty(self, size_bytes: int) -> np.ndarray:
        """Memory, u8[size_bytes]."""
        made = self._numbers(size_bytes)
        made.flags.writeable = False
        place, lines_bytes = 0, in_lines(max(1, size_bytes))
        for begin, end in self._places:  # the first gap that is wide enough
            if begin - place >= lines_bytes:
                break
            place = end
        bisect.insort(self._places, (place, place + lines_bytes))
        self._begins[id(made)] = place
        weakref.finalize(made, self._free, id(made), (place, place + lines_bytes))
        self.memory_bytes = max(self.memory_bytes, place + size_bytes)
        return made.view(Place)

    def _free(self, owner: int, place: tuple[int, int]) -> None:
        """The sum and its messages have done with memory."""
        del self._begins[owner]
        self._places.remove(place)

    def add(self, to: np.ndarray, summands: Sequence[np.ndarray], from_zero: bool) -> None:
        """An addition of arrays, one after another."""
        if any(array.dtype != np.float32 or array.shape != to.shape for array in (to, *summands)):
            raise Unrecordable("arrays that are added are not f32 of one length")
        begins = [self._place(array) for array in (to, *summands)]
        if any(0 < abs(begin - begins[0]) < 2 * to.nbytes and (begin - begins[0]) % 2 == 0 for begin in begins[1:]):
            raise Unrecordable("a sum lies across one of its summands")
        self.steps += ADD, begins[0], to.size, int(from_zero), len(summands), *begins[1:]

    def wire(self, wire: HostWire) -> HostWire:
        """A wire whose encodings and decodings are recorded."""
        number = next((i for i, ours in enumerate(OUR_WIRES) if ours is wire), None)
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
        """The place of an array, as C reads it.

        In the vector 2 * offset, in the part's memory 1 more.
        """
        if not array.size:
            return 0
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        is_known = owner is self._vector or id(owner) in self._begins
        if not (is_known and array.flags.c_contiguous):
            raise Unrecordable("an array has gaps, or is neither of the vector nor of HostComm.empty")
        offset = array.ctypes.data - owner.ctypes.data
        if offset % array.itemsize:
            raise Unrecordable("an array is not aligned")
        return 2 * offset if owner is self._vector else 2 * (self._begins[id(owner)] + offset) + 1


class RecordedComm(HostComm):
    """A HostComm whose messages and additions a `SumRecorder` records."""

    def empty(self, size_bytes: int) -> np.ndarray:
        return self.mpi.empty(size_bytes)

    def add(self, to: np.ndarray, summands: Sequence[np.ndarray], from_zero: bool = False) -> None:
        self.mpi.add(to, summands, from_zero)
