"""The work of one loader, in a thread or a process: it receives requests for rows, makes them and answers.

A process must not import JAX, which would cost seconds and hundreds of megabytes a loader. All shared memory is
anonymous, so none is left behind, however a process ends.
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
from jaxmpi.core.shared_memory import PAGE, GoneError, Segment, attached
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.example import Example, ExampleReader
from jaxmpi.data.sources.base import Source, where

# A loader's row on the board, by which the worker names the file at which a loader died or stalled: one cache line.
# job and index: the example that it is at, NOTHING between two messages. since: from when, in ns of time.monotonic_ns,
# 0 before its first message. pid: its process, once it has started. stop: set by the worker to drop all work.
BOARD = np.dtype({"names": ["job", "index", "since", "pid", "stop"], "formats": ["i8"] * 5, "itemsize": 64})
NOTHING = -1
NO_SLOT = -1
COPY_FINISHED = b"copy_finished"  # Theano-MPI's message


class SharedPickle:
    """An object for several loaders, pickled once into shared memory: text first, then its arrays."""

    def __init__(self, content: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        text = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
        parts = [np.frombuffer(part, np.uint8) for part in (text, *(buffer.raw() for buffer in buffers))]
        self.sizes = [part.nbytes for part in parts]
        self.segment = Segment(sum(map(_round_up, self.sizes)))
        for array, part in zip(self._arrays(), parts, strict=True):
            array[:] = part

    def _arrays(self) -> list[np.ndarray]:
        begins = np.cumsum([0, *map(_round_up, self.sizes)])[:-1].tolist()
        return [self.segment.array(begin, (size,), np.uint8) for begin, size in zip(begins, self.sizes, strict=True)]

    def open(self) -> Any:
        """The object; its arrays are read-only."""
        text, *arrays = self._arrays()
        for array in arrays:
            array.flags.writeable = False
        return pickle.loads(text.data, buffers=arrays)


class Ring:
    """Slots for batches of rows; in a slot the rows of a field lie together, from the start of a page.

    Attributes:
        fields: by name, the shape and dtype of one row.
        closed: i64[1], set to have loaders drop queued work.
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
        """A view of a slot's largest field; `take_back(slot)` is called once nothing uses that memory any more."""
        view = self.rows(slot)[self.largest]
        # The base is what all arrays made of the view keep alive, one of a device on the host included.
        assert isinstance(view.base, np.ndarray)
        weakref.finalize(view.base, take_back, slot).atexit = False
        return view


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


class Note(NamedTuple):
    """What loaders must know of a job beforehand: who reads its examples, then where its rows lie; None: its end."""

    job: int
    content: "ExampleReader | SharedPickle | Ring | None"


class Make(NamedTuple):
    """Request for every `stride`-th row of a slot, from `first` on; with NO_SLOT for the first good row, as `row`."""

    job: int
    ticket: int
    slot: int
    epoch: int
    first: int
    stride: int
    indices: Sequence[int] | np.ndarray


class Answer(NamedTuple):
    """Answer to a ticket."""

    ticket: int
    failures: list[tuple[int, BaseException]]  # positions of rows that could not be made, and why
    row: Example | None = None


class LoaderWorker:
    """State of a loader: its jobs, and its row of the board, BOARD[1]."""

    def __init__(self, board: np.ndarray) -> None:
        self.board = board
        board["pid"] = os.getpid()
        self.readers: dict[int, ExampleReader | Exception] = {}
        self.rings: dict[int, Ring] = {}

    def handle(self, message: Note | Make) -> Answer | None:
        """Do what one message says."""
        match message:
            case Note(job, None):
                self.readers.pop(job, None)
                self.rings.pop(job, None)
            case Note(job, Ring() as ring):
                self.rings[job] = ring
            case Note(job, SharedPickle() as shared):
                try:
                    self.readers[job] = shared.open()
                except Exception as error:  # mostly a class whose module this process cannot import
                    self.readers[job] = UsageError(
                        "a loader process cannot have this source, or data.augment "
                        f"({type(error).__name__}: {error}); use data.loader = threads, or functions and classes of a "
                        "module: an experiment file is none"
                    )
            case Note(job, ExampleReader() as reader):
                self.readers[job] = reader
            case Make():
                try:
                    return self._make(message)
                except BaseException as error:  # the worker raises it, whatever it is
                    return Answer(message.ticket, [(0, error)])
                finally:
                    self._note(message.job, NOTHING)
        return None

    def _note(self, job: int, index: int) -> None:
        # The time first: whoever reads between the two must not combine an old time with a new example.
        self.board["since"] = time.monotonic_ns()
        self.board["job"], self.board["index"] = job, index

    def _make(self, message: Make) -> Answer:
        reader = self.readers[message.job]
        if not isinstance(reader, ExampleReader):
            raise reader
        ring = None if message.slot == NO_SLOT else self.rings[message.job]
        rows = ring.rows(message.slot) if ring else {}
        failures: list[tuple[int, BaseException]] = []
        for i, index in enumerate(np.asarray(message.indices).tolist()):
            if self.board["stop"][0] or (ring and ring.closed[0]):
                break
            position, number = message.first + i * message.stride, reader.number(message.epoch, index)
            self._note(message.job, number)
            try:
                row = reader.row(message.epoch, index)
                if ring is None:
                    return Answer(message.ticket, [], row)
                _write_row(row, rows, position, reader.source, number)
            except BaseException as error:
                is_skipped = reader.skip and isinstance(error, CorruptExample)
                if ring or not is_skipped:
                    failures.append((position, error))
                if not is_skipped:
                    break
                # Frames would keep what was read, and so a worker's whole part of a data set, in memory.
                error.__traceback__ = error.__cause__ = error.__context__ = None
        return Answer(message.ticket, failures)


def _write_row(row: Example, rows: dict[str, np.ndarray], position: int, source: Source, number: int) -> None:
    """Copy a row to rows[field][position]; refuse one that is not shaped as the first one was."""
    if row.keys() != rows.keys():
        got, expected = (", ".join(sorted(fields)) for fields in (row, rows))
        raise UsageError(f"{where(source, number)}: got the fields {got}; expected {expected} as before it")
    for field, got in row.items():
        target = rows[field][position]
        fits = got.dtype == target.dtype or got.dtype.kind == target.dtype.kind == "f"
        if got.shape != target.shape or not fits:
            way_out = "set data.crop" if field == "image" else "pad it, and give the mask as a field"
            raise UsageError(
                f"{where(source, number)}: got {field} {got.dtype}{list(got.shape)}; expected "
                f"{target.dtype}{list(target.shape)} as before it; {way_out}"
            )
        if isinstance(got, np.ndarray) and got.ndim == 3 and got.strides[2] == 0:
            for channel in range(got.shape[2]):  # a grey image broadcast to channels: five times as fast so
                target[..., channel] = got[..., channel]
            continue
        rows[field][position : position + 1] = got  # a slice: a row may be a number


# ---------------------------------------------------------------- in a process of its own


def main(fd: int, parent: int, dies_with_thread: bool, number: int, board: tuple[int, int, int, int]) -> None:
    """Serve the worker behind socket `fd`, as loader `number`, until it ends or closes `fd`.

    With `dies_with_thread` the kernel ends this process with the parent's thread that has started it. `board` is the
    address of BOARD[loaders].
    """
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
    loader = LoaderWorker(attached(*board).array(number * BOARD.itemsize, (1,), BOARD))
    while True:
        try:
            answer = loader.handle(pickle.loads(inbox.get()))
        except GoneError:  # the job was closed meanwhile
            continue
        if answer is not None:
            message = answer_to_bytes(answer)
            try:
                worker.send_bytes(message)
            except OSError:  # the worker has closed its end meanwhile
                os._exit(0)


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM: the worker, which receives them too, decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _receive(worker: Connection, put: Callable[[bytes], None]) -> None:
    """Queue the worker's messages; end this process at once, whatever it is at, when they end."""
    try:
        while True:
            put(worker.recv_bytes())
    except (EOFError, OSError):  # the worker has closed its end, or is gone
        os._exit(0)


def answer_to_bytes(answer: Answer) -> bytes:
    """An answer as a message."""
    if not answer.failures and answer.row is None:
        return b"%s %d" % (COPY_FINISHED, answer.ticket)
    for _, error in answer.failures:
        error.add_note("in a loader process:\n" + "".join(traceback.format_exception(error)))
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
        return data
    except Exception:  # some errors cannot be pickled, or not be unpickled: their text is sent
        failures = [(at, RuntimeError(f"{type(error).__name__}: {error}")) for at, error in answer.failures]
        return pickle.dumps(answer._replace(failures=failures))


def answer_from_bytes(message: bytes) -> Answer:
    """The inverse of `answer_to_bytes`."""
    word, _, ticket = message.partition(b" ")
    return Answer(int(ticket), []) if word == COPY_FINISHED else pickle.loads(message)
