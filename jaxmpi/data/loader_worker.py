"""A loader: it receives requests for rows, makes them, and answers.

Decoding images in the worker's own thread would delay its training steps. A loader therefore runs in a thread or in a
process of its own, with the same code. It writes rows into a ring of batches and answers each request. A process must
not import JAX, which would cost seconds and hundreds of megabytes a loader. The board in shared memory shows which
example each loader is at, and since when. All shared memory is without a name, so none is left behind. Loader
processes answer `copy_finished`, the message of Theano-MPI, if there is no more to say.
"""

import ctypes
import math
import os
import pickle
import queue
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.shared_memory import PAGE, GoneError, Segment
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.example import Example, ExampleReader
from jaxmpi.data.sources.base import Source, where

# Columns of a loader's row on the board: JOB and INDEX tell the example that it is at, NOTHING between two messages;
# SINCE is the time from which it is there, in ns of time.monotonic_ns, 0 before its first message.
# PID is its process once it has started; STOP is set by the worker if all work is to be dropped.
JOB, INDEX, SINCE, PID, STOP = range(5)
NOTHING = -1
BOARD_ROW = 8  # i64 a loader: one line of cache
COPY_FINISHED = b"copy_finished"  # as Theano-MPI says it


# ---------------------------------------------------------------- memory that a worker shares with its loaders


class SharedPickle:
    """Any object for several loaders, pickled once, its arrays in shared memory."""

    def __init__(self, content: Any) -> None:
        parts: list[pickle.PickleBuffer] = []
        self.text = pickle.dumps(content, protocol=5, buffer_callback=parts.append)
        raws = [part.raw() for part in parts]
        self.sizes = [raw.nbytes for raw in raws]
        self.segment = Segment(sum(map(_round_up, self.sizes)))
        for array, raw in zip(self._arrays(), raws, strict=True):
            array[:] = np.frombuffer(raw, np.uint8)

    def _arrays(self) -> list[np.ndarray]:
        ends = np.cumsum([0, *map(_round_up, self.sizes)])
        return [self.segment.array(int(end), (size,), np.uint8) for end, size in zip(ends, self.sizes, strict=False)]

    def open(self) -> Any:
        """The object; its arrays are read-only."""
        arrays = self._arrays()
        for array in arrays:
            array.flags.writeable = False
        return pickle.loads(self.text, buffers=arrays)


class Ring:
    """Slots for batches, and a flag `closed` that makes loaders drop queued work.

    In a slot the rows of a field lie together, from the start of a page.

    Args:
        slots: number of batches.
        batch: rows of a batch.
        fields: by name, the shape and dtype of one row.

    Attributes:
        largest: name of the field with the most bytes; the first of several.
    """

    def __init__(
        self, slots: int, batch: int, fields: dict[str, tuple[tuple[int, ...], str]], segment: Segment | None = None
    ) -> None:
        self.slots, self.batch, self.fields = slots, batch, fields
        sizes = {name: batch * math.prod(shape) * np.dtype(dtype).itemsize for name, (shape, dtype) in fields.items()}
        self.largest = max(sizes, key=sizes.__getitem__)
        self.slot_bytes = sum(map(_round_up, sizes.values()))
        self.segment = segment or Segment(PAGE + slots * self.slot_bytes)
        self.closed = self.segment.array(0, (1,), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ring, (self.slots, self.batch, self.fields, self.segment)

    def rows(self, slot: int) -> dict[str, np.ndarray]:
        """[batch, ...] of every field of a slot, new views."""
        views, offset = {}, PAGE + slot * self.slot_bytes
        for name, (shape, dtype) in self.fields.items():
            views[name] = self.segment.array(offset, (self.batch, *shape), dtype)
            offset += _round_up(views[name].nbytes)
        return views

    def lend(self, slot: int, take_back: Callable[[int], None]) -> np.ndarray:
        """Return a view of a slot's largest field, lent to the caller.

        `take_back(slot)` is called once nothing in the process, a device included, uses the memory any more.
        """
        lent = self.rows(slot)[self.largest]
        assert isinstance(lent.base, np.ndarray)  # the array that all views of it keep alive, and no others
        weakref.finalize(lent.base, take_back, slot).atexit = False
        return lent


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


# ---------------------------------------------------------------- messages


class Open(NamedTuple):
    """The reader of `job` from now on; in a `SharedPickle` for processes."""

    job: int
    reader: ExampleReader | SharedPickle


class Attach(NamedTuple):
    """The memory of the job's batches."""

    job: int
    ring: Ring


class FirstRowRequest(NamedTuple):
    """Request for the first good row among `indices`; the answer's `row` is None if none is good."""

    job: int
    ticket: int
    epoch: int
    indices: Sequence[int]


class Make(NamedTuple):
    """Request for every `stride`-th row of a slot, from `first` on."""

    job: int
    ticket: int
    slot: int
    epoch: int
    first: int
    stride: int
    indices: np.ndarray  # i64[n]


class Close(NamedTuple):
    """The job is done."""

    job: int


class Hello(NamedTuple):
    """First message to a loader process: its number, and the board, i64[loaders, BOARD_ROW]."""

    number: int
    board: Segment


class RowFailure(NamedTuple):
    """A row that could not be made."""

    position: int
    error: BaseException


class LoaderAnswer(NamedTuple):
    """Answer to a ticket: failures, and the row of a `FirstRowRequest`."""

    ticket: int
    failures: list[RowFailure]
    row: Example | None = None


# ---------------------------------------------------------------- work


class LoaderWorker:
    """State of a loader: its jobs, and its row of the board."""

    def __init__(self, board: np.ndarray) -> None:
        self.board = board  # i64[8]
        board[PID] = os.getpid()
        self.readers: dict[int, ExampleReader | Exception] = {}
        self.rings: dict[int, Ring] = {}

    def handle(self, message: Any) -> LoaderAnswer | None:
        """Do what one message says."""
        if isinstance(message, Open):
            reader: Any = message.reader
            if isinstance(reader, SharedPickle):
                try:
                    reader = reader.open()
                except Exception as error:  # a class whose module this process cannot import, above all
                    reader = UsageError(
                        "a loader process cannot have this source, or data.augment "
                        f"({type(error).__name__}: {error}); use data.loader = threads, or functions and classes of a "
                        "module: an experiment file is none"
                    )
            self.readers[message.job] = reader
        elif isinstance(message, Attach):
            self.rings[message.job] = message.ring
        elif isinstance(message, Close):
            self.readers.pop(message.job, None)
            self.rings.pop(message.job, None)
        else:
            try:
                reader = self.readers.get(message.job)
                if not isinstance(reader, ExampleReader):
                    raise reader or UsageError(f"a loader knows nothing of job {message.job}")
                if isinstance(message, Make):
                    return self._make_rows(message, reader)
                return self._find_first_row(message, reader)
            except BaseException as error:  # whatever it is, the worker raises it
                return LoaderAnswer(message.ticket, [RowFailure(0, error)])
            finally:
                self._note(message.job, NOTHING)
        return None

    def _note(self, job: int, index: int) -> None:
        self.board[SINCE] = time.monotonic_ns()  # first: who reads between two of these must not see an old one
        self.board[JOB], self.board[INDEX] = job, index

    def _find_first_row(self, message: FirstRowRequest, reader: ExampleReader) -> LoaderAnswer:
        for index in message.indices:
            if self.board[STOP]:
                break
            self._note(message.job, reader.number(message.epoch, int(index)))
            try:
                return LoaderAnswer(message.ticket, [], reader.row(message.epoch, int(index)))
            except CorruptExample as error:
                if not reader.skip:
                    return LoaderAnswer(message.ticket, [RowFailure(0, error)])
        return LoaderAnswer(message.ticket, [])

    def _make_rows(self, message: Make, reader: ExampleReader) -> LoaderAnswer:
        ring = self.rings[message.job]
        rows = ring.rows(message.slot)
        failures: list[RowFailure] = []
        for i, index in enumerate(message.indices.tolist()):
            if ring.closed[0] or self.board[STOP]:
                break
            position = message.first + i * message.stride
            number = reader.number(message.epoch, index)
            self._note(message.job, number)
            try:
                _place(reader.row(message.epoch, index), rows, position, reader.source, number)
            except BaseException as error:
                failures.append(RowFailure(position, error))
                if not (reader.skip and isinstance(error, CorruptExample)):
                    break
                # Frames would keep what was read, and so a whole part of a data set in memory.
                error.__traceback__ = error.__cause__ = error.__context__ = None
        return LoaderAnswer(message.ticket, failures)


def _place(row: Example, rows: dict[str, np.ndarray], position: int, source: Source, number: int) -> None:
    """Copy a row to rows[field][position]; raise `UsageError` if it is not shaped as the first one was."""
    if row.keys() != rows.keys():
        got, expected = (", ".join(sorted(fields)) for fields in (row, rows))
        raise UsageError(f"{where(source, number)}: got the fields {got}; expected {expected} as before it")
    for field, got in row.items():
        target = rows[field][position : position + 1]
        fits = got.dtype == target.dtype or got.dtype.kind == target.dtype.kind == "f"
        if got.shape != target.shape[1:] or not fits:
            is_image = field == "image"
            what, way_out = ("an image", "set data.crop") if is_image else (field, "pad it, with a mask beside it")
            types = (f" of {x.dtype}" * (got.shape == target.shape[1:]) for x in (got, target))
            shapes = f" of shape {got.shape}{next(types)}; expected {target.shape[1:]}{next(types)}"
            raise UsageError(f"{where(source, number)}: got {what}{shapes} as before it; {way_out}")
        if isinstance(got, np.ndarray) and got.ndim == 3 and got.strides[2] == 0:
            for channel in range(got.shape[2]):  # a grey image broadcast to channels: five times as fast so
                target[0, ..., channel] = got[..., channel]
        else:
            try:
                with np.errstate(over="raise"):
                    target[0] = got
            except FloatingPointError as error:
                name = where(source, number)
                raise UsageError(f"{name}: {field}: got {got.dtype} beyond 3.4e38; expected 32-bit floats") from error


# ---------------------------------------------------------------- in a process of its own


def main(fd: int, parent: int, dies_with_thread: bool) -> None:
    """Serve the worker behind socket `fd` until it ends or closes `fd`."""
    ignore_signals()
    # Have glibc keep the memory that an image frees for the next: fresh pages cost a tenth of the decoding.
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
    if dies_with_thread:  # Linux then kills this process, even if stopped, when the worker ends
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)
    worker = Connection(fd)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(worker, inbox.put), daemon=True).start()
    hello: Hello = pickle.loads(inbox.get())
    member = LoaderWorker(hello.board.array(hello.number * BOARD_ROW * 8, (BOARD_ROW,), np.int64))
    while True:
        try:
            answer = member.handle(pickle.loads(inbox.get()))
        except GoneError:  # the job was closed meanwhile
            continue
        if answer is not None:
            worker.send_bytes(answer_to_bytes(answer))


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM: the worker, which receives them too, decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _receive(worker: Connection, put: Callable[[bytes], None]) -> None:
    """Queue the worker's messages; end this process at once when they end."""
    try:
        while True:
            put(worker.recv_bytes())
    except (EOFError, OSError):  # the worker has closed its end, or is gone
        os._exit(0)


def answer_to_bytes(answer: LoaderAnswer) -> bytes:
    """That the copy is finished, or what went wrong."""
    if not answer.failures and answer.row is None:
        return b"%s %d" % (COPY_FINISHED, answer.ticket)
    for failure in answer.failures:
        failure.error.add_note("in a loader process:\n" + "".join(traceback.format_exception(failure.error)))
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
        return data
    except Exception:  # some errors cannot be pickled, or not be unpickled: their text is sent
        failures = [RowFailure(at, RuntimeError(f"{type(error).__name__}: {error}")) for at, error in answer.failures]
        return pickle.dumps(answer._replace(failures=failures))


def answer_from_bytes(message: bytes) -> LoaderAnswer:
    """The inverse of `answer_to_bytes`."""
    word, _, ticket = message.partition(b" ")
    return LoaderAnswer(int(ticket), []) if word == COPY_FINISHED else pickle.loads(message)
