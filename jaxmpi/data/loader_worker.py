"""A loader: it receives requests for rows, makes them, and answers.

Decoding images in the worker's own thread would delay its training steps. A loader therefore runs in a thread or in a
process of its own, with the same code. It writes rows into a ring of batches and answers each request. A process must
not import JAX, which would cost seconds and hundreds of megabytes a loader. The board in shared memory has the example
that each loader is at, and since when. Loader processes can answer with `copy_finished`, the message of Theano-MPI.
"""

import ctypes
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.shared_memory import GoneError, Segment
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.example import Example, ExampleReader
from jaxmpi.data.ring_buffer import Ring, SharedPickle
from jaxmpi.data.sources.base import Source, where

# Columns of a loader's row on the board: JOB and INDEX tell the example that it is at, NOTHING between two messages;
# SINCE is the time from which it is there, in ns of time.monotonic_ns, 0 before its first message.
# HERE is its process once it has started; STOP is set by the worker if all work is to be dropped.
JOB, INDEX, SINCE, HERE, STOP = range(5)
NOTHING = -1
COPY_FINISHED = b"copy_finished"  # as Theano-MPI says it
BOARD_ROW = 8  # i64 a loader: one line of cache


class Open(NamedTuple):
    """The reader of `job` from now on; in a `SharedPickle` for processes."""

    job: int
    reader: ExampleReader | SharedPickle


class Attach(NamedTuple):
    """The job's batches lie here."""

    job: int
    ring: Ring


class FirstRowRequest(NamedTuple):
    """Request for the first good row among `indices`.

    The answer's `row` is None if none is good.
    """

    job: int
    ticket: int
    epoch: int
    indices: Sequence[int]


class Make(NamedTuple):
    """Make every `stride`-th row of a slot, from `first` on."""

    job: int
    ticket: int
    slot: int
    epoch: int
    first: int
    stride: int
    indices: np.ndarray  # i64[n]


class Close(NamedTuple):
    """The job is done with."""

    job: int


class Hello(NamedTuple):
    """First message to a loader process: its number, and the board.

    The board is i64[loaders, BOARD_ROW].
    """

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


class LoaderWorker:
    """State of a loader: its jobs, and its row of the board."""

    def __init__(self, board: np.ndarray) -> None:
        self.board = board  # i64[8]
        board[HERE] = os.getpid()
        self.readers: dict[int, ExampleReader | Exception] = {}
        self.rings: dict[int, Ring] = {}

    def handle(self, message: Any) -> LoaderAnswer | None:
        """Do what one message says."""
        if isinstance(message, Open):
            self.readers[message.job] = opened(message.reader)
        elif isinstance(message, Attach):
            self.rings[message.job] = message.ring
        elif isinstance(message, Close):
            self.readers.pop(message.job, None)
            self.rings.pop(message.job, None)
        else:
            try:
                return self._make(message) if isinstance(message, Make) else self._first_row(message)
            except BaseException as error:  # whatever it is, the worker raises it
                return LoaderAnswer(message.ticket, [RowFailure(0, error)])
            finally:
                self._at(message.job, NOTHING)
        return None

    def _reader(self, job: int) -> ExampleReader:
        reader = self.readers.get(job)
        if isinstance(reader, ExampleReader):
            return reader
        raise reader or UsageError(f"a loader knows nothing of job {job}")

    def _at(self, job: int, index: int) -> None:
        self.board[SINCE] = time.monotonic_ns()  # first: who reads between two of these must not see an old one
        self.board[JOB], self.board[INDEX] = job, index

    def _first_row(self, message: FirstRowRequest) -> LoaderAnswer:
        reader = self._reader(message.job)
        for index in message.indices:
            if self.board[STOP]:
                break
            self._at(message.job, reader.number(message.epoch, int(index)))
            try:
                return LoaderAnswer(message.ticket, [], reader.row(message.epoch, int(index)))
            except CorruptExample as error:
                if not reader.skip:
                    return LoaderAnswer(message.ticket, [RowFailure(0, error)])
        return LoaderAnswer(message.ticket, [])

    def _make(self, message: Make) -> LoaderAnswer:
        reader, ring = self._reader(message.job), self.rings[message.job]
        rows = ring.rows(message.slot)
        failures: list[RowFailure] = []
        for i, index in enumerate(message.indices.tolist()):
            if ring.closed[0] or self.board[STOP]:
                break
            position = message.first + i * message.stride
            number = reader.number(message.epoch, index)
            self._at(message.job, number)
            try:
                place(reader.row(message.epoch, index), rows, position, reader.source, number)
            except BaseException as error:
                failures.append(RowFailure(position, error))
                if not (reader.skip and isinstance(error, CorruptExample)):
                    break
                # Frames would keep what was read, and so a whole part of a data set in memory.
                error.__traceback__ = error.__cause__ = error.__context__ = None
        return LoaderAnswer(message.ticket, failures)


def opened(reader: ExampleReader | SharedPickle) -> ExampleReader | Exception:
    """The reader, or why there is none."""
    if isinstance(reader, ExampleReader):
        return reader
    try:
        return reader.open()
    except Exception as error:  # a class whose module this process cannot import, above all
        return UsageError(
            f"a loader process cannot have this source, or data.augment ({type(error).__name__}: {error}); use "
            "data.loader = threads, or functions and classes of a module: an experiment file is none"
        )


def place(row: Example, rows: dict[str, np.ndarray], position: int, source: Source, number: int) -> None:
    """Copy a row to where it belongs: rows[field][position].

    Raises:
        UsageError: it is no such row as the first one was.
    """
    if row.keys() != rows.keys():
        raise UsageError(
            f"{where(source, number)}: got the fields {', '.join(sorted(row))}; expected "
            f"{', '.join(sorted(rows))} as before it"
        )
    for field, got in row.items():
        into = rows[field][position : position + 1]
        fits = got.dtype == into.dtype or got.dtype.kind == into.dtype.kind == "f"
        if got.shape != into.shape[1:] or not fits:
            is_image = field == "image"
            what, way_out = ("an image", "set data.crop") if is_image else (field, "pad it, with a mask beside it")
            of_type, asked = (f" of {x.dtype}" * (got.shape == into.shape[1:]) for x in (got, into))
            raise UsageError(
                f"{where(source, number)}: got {what} of shape {got.shape}{of_type}; expected "
                f"{into.shape[1:]}{asked} as before it; {way_out}"
            )
        copy(into, got)


def copy(into: np.ndarray, got: np.ndarray) -> None:
    """Copy `got` to `into[0]`.

    A grey image that is broadcast to channels goes channel by channel, which is five times as fast.
    """
    if isinstance(got, np.ndarray) and got.ndim == 3 and got.strides[2] == 0:
        for channel in range(got.shape[2]):
            into[0, ..., channel] = got[..., channel]
    else:
        into[0] = got


# ---------------------------------------------------------------- in a process of its own


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM: the worker, which receives them too, decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def keep_freed_memory() -> None:
    """Have glibc keep the memory that an image frees for the next.

    Fresh pages cost a tenth of the decoding.
    """
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def main(fd: int, parent: int, dies_with_thread: bool, in_words: bool) -> None:
    """Serve the worker behind socket `fd` until it ends or closes `fd`.

    Args:
        in_words: whether to answer in the paper's words if they say all.
    """
    ignore_signals()
    keep_freed_memory()
    if dies_with_thread:
        die_with(parent)
    worker = Connection(fd)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read_all, args=(worker, inbox.put), daemon=True).start()
    serve(worker, inbox, words if in_words else packed)


def die_with(parent: int) -> None:
    """Have Linux kill this process, even if stopped, when the worker ends."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def read_all(worker: Connection, put: Callable[[bytes], None]) -> None:
    """Queue the worker's messages; end this process at once when they end."""
    try:
        while True:
            put(worker.recv_bytes())
    except (EOFError, OSError):  # the worker has closed its end, or is gone
        os._exit(0)


def serve(worker: Connection, inbox: "queue.SimpleQueue[bytes]", pack: Callable[[LoaderAnswer], bytes]) -> None:
    """Handle messages one after another."""
    member = greeted(inbox.get())
    while True:
        answer = handled(member, inbox.get())
        if answer is not None:
            worker.send_bytes(pack(answer))


def greeted(hello: bytes) -> LoaderWorker:
    """A loader that has its number and its row of the board."""
    number, board = pickle.loads(hello)
    return LoaderWorker(board.array(number * BOARD_ROW * 8, (BOARD_ROW,), np.int64))


def handled(member: LoaderWorker, message: bytes) -> LoaderAnswer | None:
    """The next order to answer, if any."""
    try:
        return member.handle(pickle.loads(message))
    except GoneError:
        return None  # the job was closed meanwhile


def words(answer: LoaderAnswer) -> bytes:
    """That the copy is finished, or what went wrong."""
    is_plain = not answer.failures and answer.row is None
    return b"%s %d" % (COPY_FINISHED, answer.ticket) if is_plain else packed(answer)


def packed(answer: LoaderAnswer) -> bytes:
    """The answer, its errors as texts if they cannot travel."""
    for failure in answer.failures:
        failure.error.add_note("in a loader process:\n" + "".join(traceback.format_exception(failure.error)))
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
    except Exception:  # some errors cannot be taken apart, or not be put together: whatever theirs is
        texts = [f"{type(f.error).__name__}: {f.error}" for f in answer.failures]
        told = [RowFailure(f.position, RuntimeError(t)) for f, t in zip(answer.failures, texts, strict=True)]
        data = pickle.dumps(answer._replace(failures=told))
    return data
