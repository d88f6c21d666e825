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
from multiprocessing.connection import Connection
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
from jaxmpi.data.sources.grain_datasets import StreamSource

JOIN_S = 5.0  # a loader stuck in a read must not keep an error from being shown
END_S = 1.0  # a process ends as soon as its pipe is closed, unless it has been stopped
START_S = 120.0  # at least, for a process to start: a network file system may have to deliver all of Python
POLL_S = 0.1  # between looks at whether loaders are well, while an answer is waited for
MOST_BY_CORES = 8  # of a worker that decode, unless `data.loaders` says more: each process takes about 100 MB
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
        self._loaders: Sequence[Any] = ()  # made by a row of KINDS
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
        if not self._loaders:
            board = Segment(self._board.nbytes)
            self._board = board.array(0, self._board.shape, BOARD)
            self._loaders = self._start(self.size, board)
            # Not a method of the pool, which the finalizer would keep alive. The board's address holds as long as it.
            self._stop_loaders = weakref.finalize(self, _stop, self._loaders, self._board, board)
        job = next(self._numbers)
        try:
            prepared = reader if self.kind == "threads" else SharedPickle(reader)  # kept until the job is closed
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{reader.source.name}{' or data.augment' * bool(reader.augment.config.augment)}: cannot be sent to a "
                f"loader process ({error}); use data.loader = threads, or functions and classes of a module"
            ) from error
        self.jobs[job] = Job(reader, prepared)
        self._send_all(Note(job, prepared))
        return job

    def attach(self, job: int, ring: Ring) -> None:
        """Say where the job's batches lie."""
        if (opened := self.jobs.get(job)) is None:
            raise CancelledError  # another thread has closed it
        opened.ring = ring
        self._send_all(Note(job, ring))

    def _send_all(self, note: Note) -> None:
        for loader in self._loaders:
            loader.send(note)

    def request(self, number: int, job: int, *fields: Any) -> int:
        """Send a loader `Make(job, ticket, *fields)`; return the ticket."""
        ticket = next(self._numbers)
        self._tickets[ticket] = job, number
        for loader in self._loaders[number : number + 1]:  # none if it has been stopped, which whoever waits will see
            loader.send(Make(job, ticket, *fields))
        return ticket

    def has(self, ticket: int) -> bool:
        """Return True if `answer` would not wait."""
        self._receive(ticket, 0)
        return ticket in self._answers

    def answer(self, ticket: int) -> Answer:
        """Wait for the answer to a ticket.

        Raises:
            CancelledError: its job was closed, or the pool stopped.
            TrainingError: the loader that has the ticket died or stalls; its file is named.
        """
        begin = time.monotonic()
        while ticket not in self._answers:
            if ticket not in self._tickets or not self._loaders:
                raise CancelledError
            if not self._receive(ticket, POLL_S):
                self._check_alive(ticket, begin)
        self._tickets.pop(ticket, None)
        return self._answers.pop(ticket)

    def _receive(self, ticket: int, timeout_s: float) -> bool:
        """Take what the loader of a ticket has answered, if anything within the time."""
        with self._lock:
            _, number = self._tickets.get(ticket, (0, 0))
            answers = [answer for loader in self._loaders[number : number + 1] for answer in loader.receive(timeout_s)]
            self._answers |= {answer.ticket: answer for answer in answers if answer.ticket in self._tickets}
            return bool(answers)

    def _check_alive(self, ticket: int, begin: float) -> None:
        loaders, (job, number) = self._loaders, self._tickets.get(ticket, (0, 0))
        if not job or not loaders:  # another thread has closed the job, or stopped the pool
            return
        how, (place, since_s) = loaders[number].ended(), self.current_example(number)
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
        self._send_all(Note(job, None))

    def stop(self) -> None:
        """End the loaders. A job that is opened later starts new ones."""
        self._loaders = ()
        self.jobs.clear()
        self._stop_loaders()

    def __enter__(self) -> "LoaderPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _stop(loaders: Sequence[Any], board: np.ndarray, _segment: Segment) -> None:
    board["stop"] = 1  # queued requests are passed over
    for loader in loaders:
        loader.end()
    deadline = time.monotonic() + max(loader.JOIN_S for loader in loaders)
    for loader in loaders:
        loader.join(max(0.0, deadline - time.monotonic()))


def make_pool(config: Data, source: Source, cores: int, workers: int = 1) -> LoaderPool:
    """The pool of a process's workers, not yet started: `data.loaders` each, or as many as its cores allow.

    Of kind `data.loader`; if that is auto, processes to decode images, and threads for all else. Threads also read
    sources that change meanwhile, and all of them if the system has no `memfd_create`.
    """
    in_process, kind = bool(getattr(source, "in_process", False)), config.loader
    decodes = getattr(source, "encoded", None) is not None
    if kind not in ("auto", "threads") and in_process:
        raise UsageError(f"data.loader: got {kind}; {source.name} can only be read by threads")
    if kind == "auto":
        kind = "processes" if decodes and not in_process and hasattr(os, "memfd_create") else "threads"
    # Threads that do not decode wait for files or hold Python's lock, on any number of cores.
    each = config.loaders or (max(1, min(cores // workers, MOST_BY_CORES)) if decodes or kind != "threads" else 2)
    size = 1 if isinstance(source, StreamSource) else each * workers  # a stream has one order
    return LoaderPool(kind, size, config.stall_timeout_s)


class ThreadLoader:
    """A loader that is a thread of this process; decoding releases the GIL."""

    JOIN_S = JOIN_S

    def __init__(self, number: int, board: np.ndarray) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        name = f"jaxmpi-loader-{number}"
        # The thread does not have this object, so that a pool that nobody has ends.
        arguments = board[number : number + 1], self.inbox, self.answers
        self.thread = threading.Thread(target=_work, args=arguments, daemon=True, name=name)
        self.thread.start()

    def send(self, message: Any) -> None:
        self.inbox.put(message)

    def receive(self, timeout_s: float) -> list[Answer]:
        answers: list[Answer] = []
        with contextlib.suppress(queue.Empty):
            while True:
                answers.append(self.answers.get(block=timeout_s > 0 and not answers, timeout=timeout_s))
        return answers

    def ended(self) -> str:
        return ""  # a thread does not end before `end`

    def end(self) -> None:
        self.inbox.put(None)

    def join(self, timeout_s: float) -> None:
        self.thread.join(timeout_s)


def _work(board: np.ndarray, inbox: "queue.SimpleQueue[Any]", answers: "queue.SimpleQueue[Answer]") -> None:
    loader = LoaderWorker(board)
    while (message := inbox.get()) is not None:
        answer = loader.handle(message)
        if answer is not None:
            answers.put(answer)
        del message, answer  # else an idle thread keeps its last batch alive


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
    """A loader that is a process, whose board has this address; it ends with this one (`loader_worker.main`).

    It starts from scratch and is not forked: MPI and JAX have threads by then.
    """

    JOIN_S = END_S

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

    def send(self, message: Any) -> None:
        self.outbox.put(pickle.dumps(message))

    def receive(self, timeout_s: float) -> list[Answer]:
        answers: list[Answer] = []
        # It may have ended, and `ended` says how; or another thread has stopped the pool.
        with contextlib.suppress(EOFError, OSError, TypeError):
            while self.pipe.poll(0 if answers else timeout_s):
                answers.append(answer_from_bytes(self.pipe.recv_bytes()))
        return answers

    def ended(self) -> str:
        """How the process ended; empty while it lives."""
        code = self.process.poll()
        if code is None:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"(process {self.process.pid}) {how}"

    def end(self) -> None:
        """Have the process end, whatever it is at."""
        self.pipe.close()
        self.outbox.put(None)

    def join(self, timeout_s: float) -> None:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:  # stopped, perhaps
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)


def _send_all(pipe: Connection, outbox: "queue.SimpleQueue[bytes | None]") -> None:
    while (message := outbox.get()) is not None:
        with contextlib.suppress(OSError, TypeError):  # it has died, or was closed: whoever waits will see that
            pipe.send_bytes(message)


# By kind, what starts `size` loaders. Each has `send(message)`, `receive(timeout_s)`, which waits for the first of its
# answers, `ended()`, empty while it lives, `end()` and `join(timeout_s)`. `mpi_loaders` adds `spawn`.
KINDS: dict[str, Callable[[int, Segment], Sequence[Any]]] = {
    "threads": lambda size, board: [ThreadLoader(number, board.array(0, (size,), BOARD)) for number in range(size)],
    "processes": lambda size, board: [LoaderProcess(number, board.address) for number in range(size)],
}
