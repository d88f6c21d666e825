"""Messages between processes of workers, over MPI or a fork's sockets, and the watch for workers that are stopped.

A transport carries commands from the master, reports of all, and arrays of any length. A message is a pickled value and
its arrays, which are sent separately and so are not copied; all processes are this user's. The master looks at its
workers' processes: one that is stopped or gone is named, one that computes is not late.
"""

import functools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.comm.control import LATE_S, MAX_BYTES, MpiProcesses
from jaxmpi.comm.polling import POLL_S, wait
from jaxmpi.comm.shared_sum import SharedSum
from jaxmpi.comm.shared_sync import ARRIVED, TIMEOUT_S, digest
from jaxmpi.core.errors import TrainingError
from jaxmpi.functions.reports import SHORT_BYTES, CallReport, pack_report, unpack_reports
from jaxmpi.runtime import host_callbacks, job_folder
from jaxmpi.runtime.failures import call_before_finalize
from jaxmpi.runtime.process import stat_of


class OutOfStep(TrainingError):
    """Workers are at different calls, or have ended; no call can follow."""


class WorkerDied(OutOfStep):
    """A worker's process has ended; its variables are lost."""


# ---------------------------------------------------------------- messages


Message = list[np.ndarray]  # u8 vectors: the head, then the bytes of each array


def encode(value: Any) -> Message:
    """A picklable value as a message; contiguous arrays in it are not copied."""
    arrays: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    parts = [np.frombuffer(array.raw(), np.uint8) for array in arrays]
    sizes = np.array([len(parts), *(part.size for part in parts)], np.int64)
    return [np.concatenate([sizes.view(np.uint8), np.frombuffer(pickled, np.uint8)]), *parts]


def decode(head: np.ndarray, receive: Callable[[int], Any]) -> Any:
    """The value of a message; `receive` gives its next array, of so many bytes."""
    count = int(head[:8].view(np.int64)[0])
    sizes = head[8 : 8 * (1 + count)].view(np.int64).tolist()
    return pickle.loads(head[8 * (1 + count) :].data, buffers=[receive(size) for size in sizes])


def decode_message(message: Message) -> Any:
    """The value of a message that has come whole."""
    head, *arrays = message
    rest = iter(arrays)
    return decode(head, lambda size: next(rest))


def pack(value: Any) -> np.ndarray:
    """A message as one vector, in which the arrays are aligned."""
    head, *parts = encode(value)
    every = [np.array([head.size], np.int64).view(np.uint8), head, *parts]
    return np.concatenate([piece for part in every for piece in (part, np.zeros(-part.size % 64, np.uint8))])


def unpack(vector: np.ndarray) -> Any:
    """The inverse of `pack`; arrays are views of the vector."""
    start = 64

    def receive(size: int) -> np.ndarray:
        nonlocal start
        start, begin = start + size + -size % 64, start
        return vector[begin : begin + size]

    return decode(receive(int(vector[:8].view(np.int64)[0])), receive)


# ---------------------------------------------------------------- who is stopped


WATCH_S = 0.5  # between looks at whether workers are stopped


def process_state(pid: int) -> str:
    """The system's letter for a process's state (T: stopped, t: by a debugger); empty if not shown."""
    try:
        return stat_of(pid)[0]
    except OSError:
        return ""


class WatchedWorker(NamedTuple):
    """One worker as the master watches it."""

    name: str  # for messages
    pid: int
    is_absent: Callable[[], bool]  # returns True if the worker is stopped now, or has been silent since the last look
    limit_s: float = TIMEOUT_S


def repeat_in_thread(seconds: float, task: Callable[[], None]) -> Callable[[], None]:
    """Repeat a task in a thread; the returned function ends it."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            task()

    def stop() -> None:
        over.set()
        thread.join()

    thread = threading.Thread(target=repeat, name="jaxmpi watch", daemon=True)
    thread.start()
    return stop


class StoppedWorkerMonitor:
    """Names stopped workers, and ends them after the time limit.

    One that computes is not stopped, however long that takes. Looks are counted, not the clock: if the master is
    stopped as well, as by Ctrl-Z, nobody is late.
    """

    def __init__(self, workers: dict[int, WatchedWorker], end: Callable[[int], None]) -> None:
        """Take workers by rank, and how to end one, or the job."""
        self.workers, self.end = workers, end
        self.absent_s = dict.fromkeys(workers, 0.0)  # for how long each has been seen absent without a break

    def look(self) -> None:
        """Look once at all workers; called every WATCH_S seconds."""
        for rank, worker in self.workers.items():
            if self.is_over_limit(rank):
                continue
            before = self.absent_s[rank]
            self.absent_s[rank] = before + WATCH_S if worker.is_absent() else 0.0
            if self.is_over_limit(rank):
                self.end(rank)
            elif before < LATE_S <= self.absent_s[rank]:
                text = f"{worker.name} is stopped, and is ended after {worker.limit_s:.0f} s"
                way_out = f"(JAXMPI_EXCHANGE_TIMEOUT_S); kill -CONT {worker.pid} lets it go on"
                print(f"jaxmpi: {text} {way_out}", file=sys.stderr, flush=True)

    def is_over_limit(self, rank: int) -> bool:
        """Return True if a worker has been stopped beyond the time limit."""
        return self.absent_s[rank] > self.workers[rank].limit_s


# ---------------------------------------------------------------- MPI


SHORT_S, SHORT_LOOKS = 0.0001, 5000  # the sleep between a wait's first looks, and how many these are


class MpiTransport:
    """Over a separate communicator, polled without spinning."""

    def __init__(self, control: MpiProcesses, is_led: bool) -> None:
        """Take a communicator for this transport alone; all ranks call this together.

        If rank 0 leads, all take part in every call, and rank 0 watches for stopped ones.
        """
        self.control = control.on_own_communicator()
        self.comm, self.rank, self.size = self.control.world, control.rank, control.size
        self.timeout_s = float("inf") if is_led else TIMEOUT_S
        if is_led:
            self._watch()

    def _watch(self) -> None:
        """Watch for stopped ranks: rank 0 looks, other hosts report to it.

        Rank 0 sees processes of its own host; the others report from a thread that they live. If MPI does not take
        calls of several threads at a time (MPI_THREAD_SERIALIZED) nobody reports.
        """
        mine = [self.control.hosts[self.rank], job_folder.pid_space(), socket.gethostname(), os.getpid()]
        rows = self.control.allgather_object(mine)
        far = {rank for rank, row in enumerate(rows) if row[:2] != rows[0][:2] or row[1] == 0}
        mailbox = self.control.mailbox() if far and self.control.may_overlap else None
        heard = set[int]()

        def is_silent(rank: int) -> bool:
            if mailbox is not None:
                heard.update(message["rank"] for message in mailbox.received())
            was_heard = rank in heard
            heard.discard(rank)
            return not was_heard

        def end(rank: int) -> None:
            raise TrainingError(
                f"{workers[rank].name} has been stopped for {workers[rank].limit_s:.0f} s (JAXMPI_EXCHANGE_TIMEOUT_S "
                "sets the time)"
            )

        workers = {}
        for rank, (_, _, host, pid) in enumerate(rows):
            name = f"rank {rank} of {self.size} on {host} (process {pid})"
            if rank in far and mailbox is not None:  # a report may be held up
                workers[rank] = WatchedWorker(name, pid, functools.partial(is_silent, rank), TIMEOUT_S + LATE_S)
            elif rank not in far and rank != 0:
                workers[rank] = WatchedWorker(name, pid, lambda pid=pid: process_state(pid) in ("T", "t"))
        if self.rank == 0:
            call_before_finalize(repeat_in_thread(WATCH_S, StoppedWorkerMonitor(workers, end).look))
        elif self.rank in far and mailbox is not None:
            report = functools.partial(mailbox.send, 0, {"rank": self.rank})
            call_before_finalize(repeat_in_thread(WATCH_S, report))

    def send(self, rank: int, message: Message) -> None:
        """The head's length, the head, and the arrays."""
        parts = [np.array([message[0].size]).view(np.uint8), *message]
        for request in [self.comm.Isend(piece, rank, tag=3) for part in parts for piece in _mpi_pieces(part)]:
            _wait_politely(request, float("inf"))

    def receive(self) -> Any:
        """The next value, received by polling, often at first: a loop's next call comes soon."""

        def receive(size: int) -> np.ndarray:
            data = np.empty(size, np.uint8)
            for piece in _mpi_pieces(data):
                _wait_politely(self.comm.Irecv(piece, 0, 3), float("inf"))
            return data

        return decode(receive(int(receive(8).view(np.int64)[0])), receive)

    def reports(self, mine: CallReport) -> list[CallReport]:
        """48 bytes a rank; texts are sent if they differ."""
        row, rows = np.frombuffer(pack_report(mine), np.uint8), np.empty((self.size, SHORT_BYTES), np.uint8)
        self._wait_for_all(self.comm.Iallgather(row, rows))
        agreed = unpack_reports(rows.tobytes())
        return agreed or [CallReport(*each) for each in self.control.allgather_object(mine)]

    def gather(self, data: np.ndarray, everywhere: bool) -> list[np.ndarray] | None:
        """Every rank's u8[n] on all ranks, or on rank 0 alone; None on the others.

        All ranks call this together. Bytes are sent in rounds that fit MPI's counts.
        """
        sizes = np.empty(self.size, np.int64)
        self._wait_for_all(self.comm.Iallgather(np.array([data.size], np.int64), sizes))
        out = [np.empty(size, np.uint8) for size in sizes.tolist()] if everywhere or self.rank == 0 else None
        chunk = MAX_BYTES // self.size
        for start in range(0, max(sizes.tolist()), chunk):
            counts = [max(0, min(chunk, size - start)) for size in sizes.tolist()]
            received = np.empty(sum(counts), np.uint8) if out is not None else None
            mine = data[start : start + chunk]
            if everywhere:
                self._wait_for_all(self.comm.Iallgatherv(mine, (received, counts)))
            else:
                self._wait_for_all(self.comm.Igatherv(mine, (received, counts) if self.rank == 0 else None, 0))
            if out is not None and received is not None:
                ends = np.cumsum(counts).tolist()
                for whole, end, count in zip(out, ends, counts, strict=True):
                    whole[start : start + count] = received[end - count : end]
        return out

    def _wait_for_all(self, request: Any) -> None:
        """Wait for what all ranks take part in.

        Raises:
            OutOfStep: a rank has not come to it within the time limit; it is named. If rank 0 leads all come, and
                computing is not late.
        """
        if not _wait_politely(request, self.timeout_s):
            late = self.control.in_job(self.control.late())
            raise OutOfStep(
                f"rank {late} did not come to this call within {TIMEOUT_S:.0f} s; all ranks must make "
                "it (JAXMPI_EXCHANGE_TIMEOUT_S sets the time)"
            )


def _mpi_pieces(message: np.ndarray) -> list[np.ndarray]:
    """Parts of MAX_BYTES at most; none if there is nothing."""
    return [message[start : start + MAX_BYTES] for start in range(0, message.size, MAX_BYTES)]


def _wait_politely(request: Any, timeout_s: float) -> bool:
    """Wait for an MPI request without spinning; False if time ran out.

    Sleeps are short for about a second: in a loop of calls the next message comes soon.
    """
    return wait(request.Test, timeout_s, pause_s=lambda looks: SHORT_S if looks < SHORT_LOOKS else POLL_S)


# ---------------------------------------------------------------- a fork's sockets


LOOKS_S = 0.002  # before sleeping: in a loop the next message comes soon, and a core that sleeps takes 0.1 ms to wake


class SocketTransport:
    """The master's sockets to workers, or a worker's; also `SharedSum`'s control plane."""

    def __init__(
        self, rank: int, size: int, connections: dict[int, Connection], jobs: dict[int, subprocess.Popen]
    ) -> None:
        """Take the sockets by rank, and on the master the processes."""
        self.rank, self.size, self.connections, self.jobs = rank, size, connections, jobs
        self.local_rank, self.local_size = rank, size
        self.looks_s = LOOKS_S if size <= (os.cpu_count() or 1) else 0.0
        workers = {
            rank: WatchedWorker(self._name(rank), job.pid, lambda pid=job.pid: process_state(pid) in ("T", "t"))
            for rank, job in jobs.items()
        }
        # Killing is enough: whoever waits for the worker learns of its end.
        self.monitor = StoppedWorkerMonitor(workers, lambda rank: jobs[rank].kill())
        self.stop_watching = repeat_in_thread(WATCH_S, self.monitor.look) if jobs else lambda: None

    def _name(self, rank: int) -> str:
        return f"worker {rank} of {self.size} (process {self.jobs[rank].pid})"

    def _send(self, rank: int, data: Any) -> None:
        try:
            self.connections[rank].send_bytes(data)
        except OSError as error:
            raise self._death_error(rank) from error

    def _receive(self, rank: int) -> bytes:
        try:
            poll, deadline = select.poll(), time.perf_counter() + self.looks_s
            poll.register(self.connections[rank].fileno(), select.POLLIN)
            while not poll.poll(0) and time.perf_counter() < deadline:
                os.sched_yield()
            return self.connections[rank].recv_bytes()
        except (EOFError, OSError) as error:
            raise self._death_error(rank) from error

    def _death_error(self, rank: int) -> WorkerDied:
        if rank not in self.jobs:
            return WorkerDied("the master has ended")
        try:
            code = self.jobs[rank].wait(5)
        except subprocess.TimeoutExpired:
            return WorkerDied(f"worker {rank} of {self.size} no longer answers")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self.monitor.is_over_limit(rank):
            how += f", having been stopped for {TIMEOUT_S:.0f} s (JAXMPI_EXCHANGE_TIMEOUT_S sets the time)"
        return WorkerDied(
            f"{self._name(rank)} has ended: {how}. What the workers held is gone: jaxmpi.close(), then jaxmpi.fork() "
            "again"
        )

    def check_alive(self) -> None:
        """Raise `WorkerDied` if a worker has gone."""
        for rank, job in self.jobs.items():
            if job.poll() is not None or process_state(job.pid) in ("Z", "X"):  # its other threads may end later
                raise self._death_error(rank)

    def send(self, rank: int, message: Message) -> None:
        """The head, then each array."""
        for part in message:
            self._send(rank, part)

    def receive(self) -> Any:
        """The next value; the kernel wakes this process."""
        return decode(np.frombuffer(self._receive(0), np.uint8), lambda size: self._receive(0))

    def reports(self, mine: CallReport) -> list[CallReport]:
        """Exchange 48 bytes a worker through the master; texts if they differ."""
        agreed = unpack_reports(b"".join(self._allgather(pack_report(mine))))
        return agreed or [CallReport(*report) for report in self._allgather(tuple(mine))]

    def _allgather(self, mine: Any) -> list[Any]:
        """Every process's picklable value, on all."""
        if self.rank != 0:
            self._send(0, pickle.dumps(mine))
            return pickle.loads(self._receive(0))
        rows = [mine, *(pickle.loads(self._receive(rank)) for rank in range(1, self.size))]
        for rank in range(1, self.size):
            self._send(rank, pickle.dumps(rows))
        return rows

    def host_barrier(self) -> None:
        """Wait for all processes."""
        self._allgather(None)

    def bcast_from_host_leader(self, make: Callable[[], Any]) -> Any:
        """The master's value, on all."""
        return self._allgather(make() if self.rank == 0 else None)[0]


# ---------------------------------------------------------------- a fork's shared memory


@dataclass(frozen=True)
class ForkEffect(host_callbacks.OrderedEffect):
    """Effect that keeps the sums of one fork in order; a failed sum leaves nothing to the next fork."""

    number: int


host_callbacks.admit(ForkEffect(0))


class ForkMemory:
    """Sums and gathers over forked workers, outside jit, without MPI: they share a host."""

    def __init__(self, transport: SocketTransport, number: int) -> None:
        """Map the memory; all workers of the fork of this number call it together."""
        instead = f'take devices of one process: JAX_NUM_CPU_DEVICES={transport.size} and fork(kind="devices")'
        self.sums = SharedSum(transport, f"sum of fork {number}", effect=ForkEffect(number), instead=instead)
        self.board = self.sums.board
        self.rows = self.sums.rows.view(np.uint8)  # u8[2, workers, n]: of even and of odd calls, one a worker

    def close(self) -> None:
        """Unmap the memory."""
        self.sums.close()
        del self.sums, self.board, self.rows

    def gather(self, data: np.ndarray, is_wanted: bool) -> list[np.ndarray] | None:
        """Every worker's u8[n] of any n, if wanted; a collective call."""
        size, room = np.array([data.size]).view(np.uint8), self.rows.shape[2]
        start, end = 0, room - size.size  # the first piece also says how many bytes there are
        try:
            rows = self._gather_piece(np.concatenate([size, data[:end]]))
            sizes = rows[:, : size.size].copy().view(np.int64)[:, 0].tolist()
            out = [np.empty(n, np.uint8) for n in sizes] if is_wanted else None
            rows = rows[:, size.size :]
            while True:
                for whole, row in zip(out or (), rows, strict=False):
                    whole[start:end] = row[: whole[start:end].size]
                if end >= max(sizes):
                    return out
                start, end = end, end + room
                rows = self._gather_piece(data[start:end])
        except BaseException:
            self.board.fail()  # the others learn that this worker does not go on
            raise

    def _gather_piece(self, mine: np.ndarray) -> np.ndarray:
        """All workers' rows, u8[workers, n], valid until the call after the next.

        A row is free: all have come to the call before this one, and so have left the one before that.
        """
        board = self.board
        board.begin((digest((-1,), 0.0), 1, -1))  # the header of no sum
        rows = self.rows[board.call % 2]
        rows[board.rank, : mine.size] = mine
        board.post(ARRIVED, board.call)
        for rank in range(board.size):
            board.wait(rank, ARRIVED, board.call)
            board.check_same(rank)
        return rows
