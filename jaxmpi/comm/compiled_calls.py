"""MPI's operations and their comparison in programs, by handlers in C.

The handlers are in `compiled_calls.c`, which is compiled at the first use. They call the MPI functions that mpi4jax
calls, or do the same through shared memory (`compiled_slots.h`). A program that calls them holds numbers alone, which
are the same on all ranks, and nothing of a process.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmpi.comm import c_handlers
from jaxmpi.comm.shared_sync import SEGMENT_BYTES, map_together, reserved_anywhere
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime.host_callbacks import DTYPES

KINDS = BEGIN, END, *OPERATIONS = (
    *("begin", "end", "barrier", "allreduce", "reduce", "scan", "bcast", "allgather", "gather", "scatter", "alltoall"),
)
OPS = "SUM", "PROD", "MAX", "MIN", "BAND", "BOR", "BXOR"
# In the order of `struct setup`.
FUNCTIONS = "Send", "Recv", "Iprobe", *(name.capitalize() for name in OPERATIONS), "Reduce_local"
MOST_COMPARISONS, TYPES = 1 << 16, 64
PLACES, PLACE_WORDS = 256, 72  # places of a rank, the calls it may be ahead; words of each: a number, a short array
NUMBERS_WORDS = 8  # words of each of two places, for numbers alone
ROUNDS_WORDS = 8  # a cache line for the count of rounds through slots
SLOT_BYTES = 256 << 10  # bytes of a chunk: a core's second-level cache holds it with what is made of it
SLOTS_BYTES = 4 << 20  # bytes of all ranks' slots, about: with many ranks each has less
LEAST_BYTES = 16 << 10  # bytes of a slot at least
MOST_SHARED = 16  # communicators with slots: a script may split a thousand times
TURN_BIT, MOST_TURNS = (
    24,
    128,
)  # of a number that is published: the exchange's in the bits below, its turn in those above
MOST_PASSED = 1 << 20  # runs of an executable between two exchanges; ids of two executables are further apart
NUMBERS_WITH_TURNS = 256  # exchanges whose turns are kept
SOURCE = c_handlers.CSource(
    Path(__file__).with_suffix(".c"),
    [Path(__file__).with_name("compiled_slots.h")],
    KINDS=",".join(map(str.upper, KINDS)),
    OPS=len(OPS),
    MOST_COMPARISONS=MOST_COMPARISONS,
    TYPES=TYPES,
    ROUNDS_WORDS=ROUNDS_WORDS,
    TURN_BIT=TURN_BIT,
    MOST_TURNS=MOST_TURNS,
    MOST_PASSED=MOST_PASSED,
    NUMBERS_WITH_TURNS=NUMBERS_WITH_TURNS,
)
_call_p = SOURCE.primitive()
Differs = ctypes.CFUNCTYPE(None, c_int32, POINTER(c_int32))


@functools.cache
def setup_type() -> type[ctypes.Structure]:
    """`struct setup`."""
    handle = c_handlers.handle_type()

    class Setup(ctypes.Structure):
        _fields_ = (
            ("functions", c_void_p * len(FUNCTIONS)),
            ("differs", Differs),
            ("failed", c_handlers.Failed),
            *((name, c_void_p) for name in ("board", "slots")),
            *((name, handle) for name in ("comm", "messages", "int32")),
            ("types", handle * TYPES),
            ("ops", handle * len(OPS)),
            ("item_bytes", c_int64 * TYPES),
            *((name, c_int64) for name in ("slot_bytes", "part_bytes")),
            *((name, c_int32) for name in ("rank", "size", "places", "place_words")),
        )

    assert ctypes.sizeof(Setup) == SOURCE.library().jaxmpi_setup_bytes()
    return Setup


class CompiledCalls:
    """A communicator's calls in C."""

    def __init__(
        self,
        comm: Any,
        messages: Any,
        index: int,
        differs: Callable[[int, dict[int, int]], None],
        failed: Callable[[int, int], None],
    ) -> None:
        """All ranks come here together; the handlers can be called on each.

        Args:
            comm: of the operations.
            messages: a communicator of mpi4py for the comparison.
            index: of this object, the same on all ranks.
            differs: ends the job if ranks have come to calls of other numbers: mine, and theirs by rank.
            failed: ends the job if MPI has returned an error: number of the call, MPI's code.
        """
        from mpi4py import MPI

        self.comm, self._index, self._library = comm, index, SOURCE.library()
        self._library.jaxmpi_held.restype = c_int64
        self._may_share = index < MOST_SHARED
        self._places, place_words = (PLACES, PLACE_WORDS) if self._may_share else (2, NUMBERS_WORDS)
        row_words = self._places * place_words + ROUNDS_WORDS
        is_one_host = len(set(comm.hosts)) == 1
        self._board = shared_by_all(comm, comm.size * row_words * 8) if is_one_host else None
        self._slots: mmap.mmap | None = None
        self._numbers = None  # [rank, place]
        if self._board:
            words = np.frombuffer(self._board, np.int64, comm.size * row_words).reshape(comm.size, row_words)
            self._numbers = words[:, : self._places * place_words : place_words]

        def on_difference(number: int, theirs: Any) -> None:
            differs(number, {rank: theirs[rank] for rank in range(comm.size) if theirs[rank]})

        setup = setup_type()()
        setup.functions[:] = c_handlers.addresses(FUNCTIONS)
        setup.differs, setup.failed = Differs(on_difference), c_handlers.Failed(failed)
        setup.board = ctypes.addressof(ctypes.c_char.from_buffer(self._board)) if self._board else None
        setup.comm, setup.messages, setup.int32 = map(MPI._handleof, (comm.mpi, messages, MPI.INT32_T))
        for number, dtype in DTYPES.items():
            setup.item_bytes[number] = dtype.itemsize
            if dtype.isbuiltin == 1 and dtype != np.float16:  # others travel as integers
                setup.types[number] = MPI._handleof(MPI.Datatype.fromcode(dtype.char))
        for number, op in enumerate(OPS):
            setup.ops[number] = MPI._handleof(getattr(MPI, op))
        setup.rank, setup.size = comm.rank, comm.size
        setup.places, setup.place_words = self._places, place_words
        self._kept = setup  # which the handler has the addresses of its functions from
        self._library.jaxmpi_open(index, ctypes.byref(setup))

    def share_slots(self) -> None:
        """Map the memory for arrays, once; all ranks come here together."""
        if self._board is None or not self._may_share:
            return
        self._may_share, size, page = False, self.comm.size, mmap.PAGESIZE
        slot_bytes = -(-max(LEAST_BYTES, min(SLOT_BYTES, SLOTS_BYTES // (2 * size))) // page) * page
        part_bytes = -(-slot_bytes // (size * page)) * page
        self._slots = shared_by_all(self.comm, size * (2 * slot_bytes + part_bytes))
        if self._slots:
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._slots))
            self._library.jaxmpi_share(self._index, c_void_p(address), c_int64(slot_bytes), c_int64(part_bytes))

    def close(self) -> None:
        """Let go of the memory; a program that still calls the handlers gets an error."""
        self._library.jaxmpi_close(self._index)
        self._numbers = self._board = self._slots = self._kept = None

    # ------------------------------------------------------------ in a program

    def begin(self, number: int, is_published_later: bool = False, has_turn: bool = False) -> None:
        """Wait for this process's other calls and publish the number, unless its operation does.

        Args:
            has_turn: compare how often the program has run, too.
        """
        self._bind(BEGIN, number, int(is_published_later), int(has_turn))

    def end(self, number: int) -> None:
        """Compare with the others' numbers, and give the turn away."""
        self._bind(END, number)

    def call(self, kind: str, number: int, x: Any = None, y: Any = None, op: Any = None, root: int = 0) -> Any:
        """Trace an operation, which compares at its end."""
        from mpi4py import MPI

        ops = [getattr(MPI, name) for name in OPS]
        return self._bind(kind, number, 0 if op is None else ops.index(op), root, x, y)

    def _bind(self, kind: str, number: int, op: int = 0, root: int = 0, x: Any = None, y: Any = None) -> Any:
        operands, results = [] if x is None else [x], () if y is None else c_handlers.shaped(y)
        words = (self._index, number, KINDS.index(kind), op, root)
        return _call_p.bind(*operands, results=results, effect=self.comm.effect, words=words)

    # ------------------------------------------------------------ outside, of the program that runs

    def held(self) -> tuple[int, int]:
        """Number under way, and how many have begun; zeros if none."""
        held = self._library.jaxmpi_held(self._index)
        return held >> 32, held & 0xFFFFFFFF

    def waits(self) -> int:
        """Number of a call that waits for the turn, or 0."""
        return self._library.jaxmpi_waits(self._index)

    def begun(self) -> int:
        """How many calls have begun."""
        return self._library.jaxmpi_begun(self._index)

    def turn(self, number: int) -> int:
        """How often this rank's program has run since the first exchange of this number, that one included."""
        return self._library.jaxmpi_turn(self._index, number)

    def number_of(self, rank: int, count: int) -> int | None:
        """Number of a rank's call of a count, or 0.

        None if numbers are messages.
        """
        if self._numbers is None:
            return None
        published = int(self._numbers[rank, count % self._places])
        return published >> 32 if published & 0xFFFFFFFF == count else 0


class NumberedCalls:
    """mpi4jax's functions with a number, each of which compares."""

    def __init__(self, calls: CompiledCalls, number: int) -> None:
        """Nothing is traced yet."""
        self._calls, self._number = calls, number

    def begin(self, has_array: bool) -> None:
        """Take the turn; what has an array publishes the number with it."""
        self._calls.begin(self._number, is_published_later=has_array)

    def _call(self, kind: str, x: jax.Array, shape: Sequence[int] | None = None, **options: Any) -> jax.Array:
        like = jax.ShapeDtypeStruct(x.shape if shape is None else tuple(shape), x.dtype)
        return self._calls.call(kind, self._number, x, like, **options)[0]

    def _at_root(self, kind: str, x: jax.Array, root: int, at_root: Any, elsewhere: Any, **options: Any) -> jax.Array:
        """Call with results of other shapes at root; None is x itself."""
        shape = at_root if self._calls.comm.rank == root else elsewhere
        result = self._call(kind, x, (0,) if shape is None else shape, root=root, **options)
        return x if shape is None else result

    def allreduce(self, x: jax.Array, op: Any, comm: Any) -> jax.Array:
        """`MPI_Allreduce`."""
        return self._call("allreduce", x, op=op)

    def reduce(self, x: jax.Array, op: Any, root: int, comm: Any) -> jax.Array:
        """`MPI_Reduce`."""
        return self._at_root("reduce", x, root, x.shape, None, op=op)

    def scan(self, x: jax.Array, op: Any, comm: Any) -> jax.Array:
        """`MPI_Scan`."""
        return self._call("scan", x, op=op)

    def bcast(self, x: jax.Array, root: int, comm: Any) -> jax.Array:
        """`MPI_Bcast`."""
        return self._at_root("bcast", x, root, None, x.shape)

    def allgather(self, x: jax.Array, comm: Any) -> jax.Array:
        """`MPI_Allgather`."""
        return self._call("allgather", x, (self._calls.comm.size, *x.shape))

    def gather(self, x: jax.Array, root: int, comm: Any) -> jax.Array:
        """`MPI_Gather`."""
        return self._at_root("gather", x, root, (self._calls.comm.size, *x.shape), None)

    def scatter(self, x: jax.Array, root: int, comm: Any) -> jax.Array:
        """`MPI_Scatter`."""
        return self._at_root("scatter", x, root, x.shape[1:], x.shape)

    def alltoall(self, x: jax.Array, comm: Any) -> jax.Array:
        """`MPI_Alltoall`."""
        return self._call("alltoall", x)

    def barrier(self, comm: Any) -> None:
        """`MPI_Barrier`."""
        self._calls.call("barrier", self._number)


def shared_by_all(comm: Any, size_bytes: int) -> mmap.mmap | None:
    """Zeros that all ranks have mapped; None if one cannot.

    All ranks come here together.
    """
    start, marks_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, -(-comm.size // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        memory, _ = map_together(comm.processes, lambda: reserved_anywhere(start + marks_bytes, SEGMENT_BYTES))
    except UsageError:  # no room, of which all ranks hear
        return None
    marks = np.frombuffer(memory, np.uint8, comm.size, start)
    marks[comm.rank] = 1
    comm.processes.allreduce_sum(np.zeros(1))
    are_here = bool(marks.all())
    return memory if comm.processes.allreduce_sum(np.array([are_here]))[0] == comm.size else None
