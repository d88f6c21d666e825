"""The loaders of one worker: threads, or processes that see the same memory.

One core often decodes more slowly than a device trains, so a worker has several loaders. Each receives requests
(`loader_worker`) and writes rows where they belong. A ticket is a request that has been sent; its answer ends it. The
rows of a batch are dealt in turn, from a loader that changes with the step.
"""

import contextlib
import itertools
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import TrainingError, UsageError, lookup
from jaxmpi.core.shared_memory import Segment
from jaxmpi.data.example import ExampleReader
from jaxmpi.data.loader_worker import (
    BOARD,
    NOTHING,
    Answer,
    LoaderWorker,
    Make,
    Note,
    Ring,
    SharedPickle,
    answer_from_bytes,
)
from jaxmpi.data.sources.base import Source, where

JOIN_S = 5.0  # a loader stuck in a read must not keep an error from being shown
END_S = 1.0  # a process ends as soon as its pipe is closed, unless it has been stopped
START_S = 120.0  # at least, for a process to start: a network file system may have to deliver all of Python
POLL_S = 0.1  # between looks at whether loaders are well, while an answer is waited for
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass
class Job:
    """One reader's rows."""

    reader: ExampleReader
    prepared: Any  # keeps the memory in which loaders have the reader
    ring: Ring | None = None


class LoaderPool:
    """A worker's loaders, started by the first job, for training and evaluation.

    Args:
        kind: a row of `KINDS`.
        size: how many.
        stall_timeout_s: seconds that a loader may be at one example, or say nothing.
    """

    def __init__(self, kind: str, size: int, stall_timeout_s: float) -> None:
        self.kind, self.size, self.stall_timeout_s = kind, size, stall_timeout_s
        self._start = lookup(KINDS, kind, "data.loader")
        self._loaders: Any = None  # made by a row of KINDS
        self._stop_loaders: Callable[[], object] = lambda: None
        self._board = np.zeros(size, BOARD)
        self.jobs: dict[int, Job] = {}  # that are not closed
        self._tickets: dict[int, tuple[int, int]] = {}  # ticket -> job, loader
        self._answers: dict[int, Answer] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # a `Loader` that is collected while it is taken closes its job

    def open(self, reader: ExampleReader) -> int:
        """Announce a new job to all loaders; return its number.

        Raises:
            UsageError: loader processes cannot have its source.
        """
        if self._loaders is None:
            board = Segment(self._board.nbytes)
            self._board = board.array(0, self._board.shape, BOARD)
            self._loaders = self._start(self.size, board)
            self._stop_loaders = weakref.finalize(self, _stop, self._loaders, self._board)
        job, prepared = next(self._numbers), self._loaders.prepare(reader)
        self.jobs[job] = Job(reader, prepared)
        self.note(job, prepared)
        return job

    def attach(self, job: int, ring: Ring) -> None:
        """Say where the job's batches lie."""
        if (opened := self.jobs.get(job)) is None:
            raise CancelledError  # another thread has closed it
        opened.ring = ring
        self.note(job, ring)

    def note(self, job: int, content: Any) -> None:
        """Send all loaders a `Note`."""
        if self._loaders is not None:
            for number in range(self.size):
                self._loaders.send(number, Note(job, content))

    def request(self, number: int, job: int, *fields: Any) -> int:
        """Send a loader `Make(job, ticket, *fields)`; return the ticket."""
        ticket = next(self._numbers)
        self._tickets[ticket] = job, number
        if self._loaders is not None:  # else it has been stopped, which whoever waits will see
            self._loaders.send(number, Make(job, ticket, *fields))
        return ticket

    def has(self, ticket: int) -> bool:
        """Return True if `answer` would not wait."""
        self._receive(0)
        return ticket in self._answers

    def answer(self, ticket: int) -> Answer:
        """Wait for the answer to a ticket.

        Raises:
            CancelledError: its job was closed, or the pool stopped.
            TrainingError: the loader that has the ticket died or stalls; its file is named.
        """
        begin = time.monotonic()
        while ticket not in self._answers:
            if ticket not in self._tickets or self._loaders is None:
                raise CancelledError
            if not self._receive(POLL_S):
                self._check_alive(ticket, begin)
        self._tickets.pop(ticket, None)
        return self._answers.pop(ticket)

    def _receive(self, timeout_s: float) -> bool:
        with self._lock:
            loaders = self._loaders  # another thread may stop the pool
            answers = loaders.answers(timeout_s) if loaders is not None else []
            self._answers |= {answer.ticket: answer for answer in answers if answer.ticket in self._tickets}
            return bool(answers)

    def _check_alive(self, ticket: int, begin: float) -> None:
        loaders, (job, number) = self._loaders, self._tickets.get(ticket, (0, 0))
        if not job or loaders is None:
            return
        how, (place, since_s) = loaders.ended(number), self.current_example(number)
        if how:
            raise TrainingError(f"loader {number} of {self.size} {how} {place or 'between examples'}")
        silent_s = time.monotonic() - (since_s if place else max(begin, since_s))  # since its last message
        if silent_s > max(self.stall_timeout_s, 0 if self._board["pid"][number] else START_S):
            raise TrainingError(
                f"loader {number} of {self.size} has been {place or 'silent'} for {silent_s:.0f} s; "
                "data.stall_timeout_s sets how long it may"
            )

    def current_example(self, number: int) -> tuple[str, float]:
        """A loader's example, empty if none, and since when by `time.monotonic`; 0 before its first message."""
        job, index, since_ns = (int(self._board[field][number]) for field in ("job", "index", "since"))
        if not since_ns or index == NOTHING or job not in self.jobs:
            return "", since_ns / 1e9
        source = self.jobs[job].reader.source
        awaited_s = getattr(source, "awaited_s", lambda index: 0.0)(index)
        return f"at {where(source, index)} (example {index})", max(since_ns / 1e9, awaited_s)

    def close(self, job: int) -> None:
        """Drop a job, and its queued work wherever it is; answers to its tickets are thrown away."""
        closed = self.jobs.pop(job, None)
        if closed is None:
            return
        if closed.ring is not None:
            closed.ring.closed[0] = 1
        with self._lock:
            for ticket in [ticket for ticket, (other, _) in self._tickets.items() if other == job]:
                del self._tickets[ticket]
                self._answers.pop(ticket, None)
        self.note(job, None)

    def stop(self) -> None:
        """End the loaders. A job that is opened later starts new ones."""
        self._loaders = None
        self.jobs.clear()
        self._stop_loaders()

    def __enter__(self) -> "LoaderPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _stop(loaders: Any, board: np.ndarray) -> None:
    board["stop"] = 1
    loaders.stop()


def kind_for(config: Data, source: Source) -> str:
    """`data.loader`; if that is auto, processes to decode images, and threads for all else.

    Threads also read sources that change meanwhile, and all of them if the system has no `memfd_create`.
    """
    in_process = bool(getattr(source, "in_process", False))
    if config.loader not in ("auto", "threads") and in_process:
        raise UsageError(f"data.loader: got {config.loader}; {source.name} can only be read by threads")
    if config.loader != "auto":
        return config.loader
    decodes = getattr(source, "encoded", None) is not None
    return "processes" if decodes and not in_process and hasattr(os, "memfd_create") else "threads"


class Threads:
    """Loaders that are threads of this process; decoding releases the GIL."""

    def __init__(self, size: int, board: Segment) -> None:
        self.done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        rows = board.array(0, (size,), BOARD)
        self.threads = [
            threading.Thread(
                target=_work,
                args=(rows[number : number + 1], inbox, self.done),
                daemon=True,
                name=f"jaxmpi-loader-{number}",
            )
            for number, inbox in enumerate(self.inboxes)
        ]
        for thread in self.threads:
            thread.start()

    def prepare(self, reader: ExampleReader) -> ExampleReader:
        return reader

    def send(self, number: int, message: Any) -> None:
        self.inboxes[number].put(message)

    def answers(self, timeout_s: float) -> list[Answer]:
        answers: list[Answer] = []
        with contextlib.suppress(queue.Empty):
            answers.append(self.done.get(block=timeout_s > 0, timeout=timeout_s))
            while True:
                answers.append(self.done.get_nowait())
        return answers

    def ended(self, number: int) -> str:
        return ""  # a thread does not end before `stop`

    def stop(self) -> None:  # queued requests are passed over, since the board says so
        for inbox in self.inboxes:
            inbox.put(None)
        deadline = time.monotonic() + JOIN_S
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _work(board: np.ndarray, inbox: "queue.SimpleQueue[Any]", done: "queue.SimpleQueue[Answer]") -> None:
    loader = LoaderWorker(board)
    while (message := inbox.get()) is not None:
        answer = loader.handle(message)
        if answer is not None:
            done.put(answer)
        del message, answer  # else an idle thread keeps its last batch alive


class LoaderProcesses:
    """Loaders that are processes, which end with this one, however it ends.

    They start from scratch and are not forked: MPI and JAX have threads by then.
    """

    def __init__(self, size: int, board: Segment) -> None:
        self.board = board  # its address is valid while it lives
        self.loaders = [LoaderProcess(number, board.address) for number in range(size)]
        self.open_pipes = {loader.pipe for loader in self.loaders}

    def prepare(self, reader: ExampleReader) -> SharedPickle:
        return pickle_reader(reader)

    def send(self, number: int, message: Any) -> None:
        self.loaders[number].outbox.put(pickle.dumps(message))

    def answers(self, timeout_s: float) -> list[Answer]:
        answers = []
        try:
            ready = wait([*self.open_pipes], timeout_s)
        except OSError:  # another thread has stopped the pool
            return answers
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                while pipe.poll():
                    answers.append(answer_from_bytes(pipe.recv_bytes()))
            except (EOFError, OSError):  # it has ended; `ended` says how
                self.open_pipes.discard(pipe)
        return answers

    def ended(self, number: int) -> str:
        return self.loaders[number].ended()

    def stop(self) -> None:
        end_processes(self.loaders)


def pickle_reader(reader: ExampleReader) -> SharedPickle:
    """A reader pickled for loader processes, to be kept until its job is closed."""
    try:
        return SharedPickle(reader)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{reader.source.name}{' or data.augment' * bool(reader.augment.config.augment)}: cannot be sent to a "
            f"loader process ({error}); use data.loader = threads, or functions and classes of a module"
        ) from error


# Not `python -m`: the package, and modules of the user's, may lie in folders that only this process has on sys.path.
# The new process imports the same package first, and then has this process's path as it is.
_START = """
import importlib, json, sys
home, path, module, arguments = json.loads(sys.argv[1])
sys.path.insert(0, home)
import jaxmpi
sys.path[:] = path
importlib.import_module(module).main(*arguments)
"""


def python_line(module: str, *arguments: Any) -> list[str]:
    """Command line of a process that runs `main(*arguments)` of a module, with this process's `sys.path`."""
    home = str(Path(__file__).parents[2])
    return [sys.executable, "-c", _START, json.dumps([home, sys.path, module, arguments])]


class LoaderProcess:
    """A process of loader `number`, whose board has this address; it ends with this one (`loader_worker.main`)."""

    def __init__(self, number: int, board: tuple[int, ...] | None) -> None:
        if board is None:
            raise UsageError("data.loader: got processes, which need Linux; use threads")
        worker_end, loader_end = socket.socketpair()
        in_main = threading.current_thread() is threading.main_thread()
        with loader_end:
            self.process = subprocess.Popen(
                python_line("jaxmpi.data.loader_worker", loader_end.fileno(), os.getpid(), in_main, number, board),
                stdin=subprocess.DEVNULL,
                pass_fds=[loader_end.fileno()],
                process_group=0,  # Ctrl-C in a terminal is the worker's to see
                env=os.environ | ONE_THREAD,
            )
        self.pipe = Connection(worker_end.detach())
        # A queue, since a finalizer may send while this thread is about to, and a pipe may block.
        self.outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=_send_all, args=(self.pipe, self.outbox), daemon=True, name="jaxmpi-outbox").start()

    def ended(self) -> str:
        """How the process ended; empty while it lives."""
        code = self.process.poll()
        if code is None:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"(process {self.process.pid}) {how}"


def _send_all(pipe: Connection, outbox: "queue.SimpleQueue[bytes | None]") -> None:
    while (message := outbox.get()) is not None:
        with contextlib.suppress(OSError, TypeError):  # it has died, or was closed: whoever waits will see that
            pipe.send_bytes(message)


def end_processes(loaders: Sequence[LoaderProcess]) -> None:
    """End loader processes, whatever they are at, by closing their pipes."""
    for loader in loaders:
        loader.pipe.close()
        loader.outbox.put(None)
    deadline = time.monotonic() + END_S
    for loader in loaders:
        try:
            loader.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # stopped, perhaps
            loader.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                loader.process.wait(1)


# Each row has `prepare(reader)`, whose result is sent and kept until the job is closed, `send(number, message)`,
# `answers(timeout_s)`, which waits for the first, `ended(number)`, empty while a loader lives, and `stop()`.
# `mpi_loaders` adds `spawn`.
KINDS: dict[str, Callable[[int, Segment], Any]] = {"threads": Threads, "processes": LoaderProcesses}
