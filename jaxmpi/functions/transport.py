"""Messages between processes of workers, over MPI or a fork's sockets.

A transport carries commands from the master, reports of all, and arrays of any length. A call ends with a report of
each worker. Mostly all are alike and well, so 48 bytes of each travel, a hash of the text among them; whole texts
follow if they differ or one has failed. The master looks at its workers' processes meanwhile: one that is stopped or
gone is named, one that computes is not late.
"""

import functools
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmpi.comm.control import LATE_S, MAX_BYTES, MpiProcesses
from jaxmpi.comm.polling import POLL_S, wait
from jaxmpi.comm.shared_sync import TIMEOUT_S
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.process_stat import stat_of
from jaxmpi.runtime import job_folder
from jaxmpi.runtime.mpi_end import call_before_finalize

Arrays = Sequence[np.ndarray]


class OutOfStep(TrainingError):
    """Workers are at different places, or gone; no call can follow."""


class CallReport(NamedTuple):
    """How one worker's part of a call went."""

    kind: str  # ok | missing (a program) | error
    text: str  # values that must be the same on all workers; name of the program; error message
    count: int = 0  # examples


SHORT_BYTES = 48


def pack_report(report: CallReport) -> bytes:
    """A report as its text's hash, its count and a not-ok flag."""
    count, is_bad = report.count.to_bytes(8, "little"), bytes([report.kind != "ok"])
    text = report.text.encode(errors="surrogatepass")  # an error may name a file that is no UTF-8
    return (hashlib.sha256(text).digest() + count + is_bad).ljust(SHORT_BYTES, b"\0")


def unpack_reports(rows: Sequence[bytes]) -> list[CallReport] | None:
    """Every worker's report without its text; None if their texts are needed."""
    if any(row[40] for row in rows) or len({row[:32] for row in rows}) > 1:
        return None
    return [CallReport("ok", "", int.from_bytes(row[32:40], "little")) for row in rows]


# ---------------------------------------------------------------- arrays as bytes


def pack(arrays: Arrays) -> np.ndarray:
    """Arrays as one message, u8[n]: length of the header, header (JSON), values."""
    header = json.dumps([[str(array.dtype), list(array.shape)] for array in arrays]).encode()
    parts = [np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8), *(as_bytes(a) for a in arrays)]
    return np.concatenate(parts)


def unpack(message: np.ndarray) -> list[np.ndarray]:
    """The inverse of `pack`."""
    start = 8 + int.from_bytes(message[:8].tobytes(), "little")
    arrays = []
    for dtype, shape in json.loads(message[8:start].tobytes()):
        array = np.empty(shape, jnp.dtype(dtype))
        as_bytes(array)[:] = message[start : start + array.nbytes]
        arrays.append(array)
        start += array.nbytes
    return arrays


def as_bytes(array: np.ndarray) -> np.ndarray:
    """C-contiguous values as u8[nbytes], without a copy."""
    return array.reshape(-1).view(np.uint8)


def as_c_contiguous(array: Any) -> np.ndarray:
    """Convert to C-contiguous NumPy; a copy only if it must be."""
    return np.asarray(array, order="C")


# ---------------------------------------------------------------- who is stopped


WATCH_S = 0.5  # between looks at whether workers are stopped


def is_stopped(pid: int) -> bool:
    """Return True if the system shows a process stopped (SIGSTOP or debugger)."""
    return process_state(pid) in ("T", "t")


def process_state(pid: int) -> str:
    """The system's letter for a process's state; empty if not shown."""
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
    """Monitor that names stopped workers, and ends them after the time limit.

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
            if self.has_ended(rank):
                continue
            if not worker.is_absent():
                self.absent_s[rank] = 0.0
                continue
            before, self.absent_s[rank] = self.absent_s[rank], self.absent_s[rank] + WATCH_S
            if self.has_ended(rank):
                self.end(rank)
            elif before < LATE_S <= self.absent_s[rank]:
                text = f"{worker.name} is stopped, and is ended after {worker.limit_s:.0f} s"
                way_out = f"(JAXMPI_EXCHANGE_TIMEOUT_S); kill -CONT {worker.pid} lets it go on"
                print(f"jaxmpi: {text} {way_out}", file=sys.stderr, flush=True)

    def has_ended(self, rank: int) -> bool:
        """Return True if a worker has been stopped beyond the time limit."""
        return rank in self.workers and self.absent_s[rank] > self.workers[rank].limit_s


# ---------------------------------------------------------------- MPI


SHORT_S, SHORT_LOOKS = 0.0001, 5000  # the sleep between a wait's first looks, and how many these are


class MpiTransport:
    """Over a communicator of its own, polled without spinning."""

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
        heard = set[int]()
        post = self.control.mailbox() if far and self.control.may_overlap else None
        received = post.received if post is not None else list

        def absence(rank: int) -> Callable[[], bool]:
            def is_silent() -> bool:
                heard.update(message["rank"] for message in received())
                was_heard = rank in heard
                heard.discard(rank)
                return not was_heard

            return is_silent if rank in far else functools.partial(is_stopped, rows[rank][3])

        def end(rank: int) -> None:
            raise TrainingError(
                f"{workers[rank].name} has been stopped for {workers[rank].limit_s:.0f} s (JAXMPI_EXCHANGE_TIMEOUT_S "
                "sets the time)"
            )

        workers = {
            rank: WatchedWorker(
                f"rank {rank} of {self.size} on {host} (process {pid})",
                pid,
                absence(rank),
                TIMEOUT_S + LATE_S * (rank in far),  # a report may be held up
            )
            for rank, (_, _, host, pid) in enumerate(rows)
            if rank != 0 and (rank not in far or post is not None)
        }
        if self.rank == 0:
            task = StoppedWorkerMonitor(workers, end).look
        elif self.rank in far and post is not None:
            task = functools.partial(post.send, 0, {"rank": self.rank})
        else:
            return
        call_before_finalize(repeat_in_thread(WATCH_S, task))

    def send(self, rank: int, header: str, arrays: Arrays) -> None:
        """Length of the header, header with the arrays' shapes, then their bytes."""
        arrays = [as_c_contiguous(array) for array in arrays]
        shapes = [[str(array.dtype), list(array.shape)] for array in arrays]
        first = np.frombuffer(json.dumps([header, shapes]).encode(), np.uint8)
        parts = [
            np.array([first.size], np.int64),
            first,
            *(part for array in arrays for part in split_message(as_bytes(array))),
        ]
        for request in [self.comm.Isend(part, rank, tag=3) for part in parts]:
            wait_politely(request, float("inf"))

    def receive(self) -> tuple[str, list[np.ndarray]]:
        """Receive by polling, often at first: a loop's next call comes soon."""
        length = np.empty(1, np.int64)
        wait_politely(self.comm.Irecv(length, 0, 3), float("inf"))
        first = np.empty(int(length[0]), np.uint8)
        wait_politely(self.comm.Irecv(first, 0, 3), float("inf"))
        header, shapes = json.loads(first.tobytes())
        arrays = [np.empty(shape, jnp.dtype(dtype)) for dtype, shape in shapes]
        for part in (part for array in arrays for part in split_message(as_bytes(array))):
            wait_politely(self.comm.Irecv(part, 0, 3), float("inf"))
        return header, arrays

    def reports(self, mine: CallReport) -> list[CallReport]:
        """48 bytes a rank; texts travel if they differ."""
        row, rows = np.frombuffer(pack_report(mine), np.uint8), np.empty((self.size, SHORT_BYTES), np.uint8)
        self._wait_for_all(self.comm.Iallgather(row, rows))
        agreed = unpack_reports([each.tobytes() for each in rows])
        return agreed or [CallReport(*each) for each in self.control.allgather_object(mine)]

    def gather(self, data: np.ndarray, everywhere: bool) -> list[np.ndarray] | None:
        """Every rank's u8[n] on all ranks, or on rank 0 alone.

        It is None on the other ranks unless `everywhere`. All ranks call this together; bytes travel in rounds that fit
        MPI's counts.
        """
        sizes = np.empty(self.size, np.int64)
        self._wait_for_all(self.comm.Iallgather(np.array([data.size], np.int64), sizes))
        out = [np.empty(size, np.uint8) for size in sizes.tolist()] if everywhere or self.rank == 0 else None
        chunk = MAX_BYTES // self.size
        for start in range(0, max(sizes.tolist()), chunk):
            counts = [max(0, min(chunk, size - start)) for size in sizes.tolist()]
            place = np.empty(sum(counts), np.uint8) if out is not None else None
            mine = data[start : start + chunk]
            if everywhere:
                self._wait_for_all(self.comm.Iallgatherv(mine, (place, counts)))
            else:
                self._wait_for_all(self.comm.Igatherv(mine, (place, counts) if self.rank == 0 else None, 0))
            if out is not None and place is not None:
                ends = np.cumsum(counts).tolist()
                for whole, end, count in zip(out, ends, counts, strict=True):
                    whole[start : start + count] = place[end - count : end]
        return out

    def _wait_for_all(self, request: Any) -> None:
        """Wait for what all ranks take part in.

        Raises:
            OutOfStep: a rank has not come to it within the time limit; it is named. If rank 0 leads all come, and
                computing is not late.
        """
        if not wait_politely(request, self.timeout_s):
            late = self.control.in_job(self.control.late())
            raise OutOfStep(
                f"rank {late} did not come to this call within {TIMEOUT_S:.0f} s; all ranks must make "
                "it (JAXMPI_EXCHANGE_TIMEOUT_S sets the time)"
            )


def split_message(message: np.ndarray) -> list[np.ndarray]:
    """Parts of MAX_BYTES at most; none if there is nothing."""
    return [message[start : start + MAX_BYTES] for start in range(0, message.size, MAX_BYTES)]


def wait_politely(request: Any, timeout_s: float) -> bool:
    """Wait for an MPI request without spinning; False if time ran out.

    Sleeps are short for about a second: in a loop of calls the next message comes soon.
    """
    return wait(request.Test, timeout_s, pause_s=lambda looks: SHORT_S if looks < SHORT_LOOKS else POLL_S)


# ---------------------------------------------------------------- sockets


class WorkerDied(OutOfStep):
    """A worker's process has ended, and with it what it held."""


LOOKS_S = 0.002  # before sleeping: in a loop the next message comes soon, and a core that sleeps takes 0.1 ms to wake


class SocketTransport:
    """The master's sockets to workers, or a worker's; also `SharedSum`'s control plane."""

    def __init__(self, rank: int, size: int, ends: dict[int, Connection], jobs: dict[int, subprocess.Popen]) -> None:
        """Take the sockets by rank, and on the master the processes."""
        self.rank, self.size, self.ends, self.jobs = rank, size, ends, jobs
        self.local_rank, self.local_size = rank, size
        self.looks_s = LOOKS_S if size <= (os.cpu_count() or 1) else 0.0
        workers = {
            rank: WatchedWorker(self.name(rank), job.pid, functools.partial(is_stopped, job.pid))
            for rank, job in jobs.items()
        }
        # Killing is enough: whoever waits for the worker learns of its end.
        self.monitor = StoppedWorkerMonitor(workers, lambda rank: jobs[rank].kill())
        self.stop_watching = repeat_in_thread(WATCH_S, self.monitor.look) if jobs else lambda: None

    def name(self, rank: int) -> str:
        """Name of a worker, for messages."""
        return f"worker {rank} of {self.size} (process {self.jobs[rank].pid})"

    def _send(self, rank: int, data: Any) -> None:
        try:
            self.ends[rank].send_bytes(data)
        except OSError as error:
            raise self.death_error(rank) from error

    def _receive(self, rank: int) -> bytes:
        try:
            self._poll(self.ends[rank].fileno())
            return self.ends[rank].recv_bytes()
        except (EOFError, OSError) as error:
            raise self.death_error(rank) from error

    def _poll(self, handle: int) -> None:
        poll, deadline = select.poll(), time.perf_counter() + self.looks_s
        poll.register(handle, select.POLLIN)
        while not poll.poll(0) and time.perf_counter() < deadline:
            os.sched_yield()

    def death_error(self, rank: int) -> WorkerDied:
        """The error for the end of a worker, or of the master."""
        if rank not in self.jobs:
            return WorkerDied("the master has ended")
        try:
            code = self.jobs[rank].wait(5)
        except subprocess.TimeoutExpired:
            return WorkerDied(f"worker {rank} of {self.size} no longer answers")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self.monitor.has_ended(rank):
            how += f", having been stopped for {TIMEOUT_S:.0f} s (JAXMPI_EXCHANGE_TIMEOUT_S sets the time)"
        return WorkerDied(
            f"{self.name(rank)} has ended: {how}. What the workers held is gone: jaxmpi.close(), then jaxmpi.fork() "
            "again"
        )

    def check_alive(self) -> None:
        """Raise `WorkerDied` if a worker has gone."""
        for rank, job in self.jobs.items():
            if job.poll() is not None or process_state(job.pid) in ("Z", "X"):  # its other threads may end later
                raise self.death_error(rank)

    def send(self, rank: int, header: str, arrays: Arrays) -> None:
        """Header with the arrays' shapes, then each array."""
        arrays = [as_c_contiguous(array) for array in arrays]
        shapes = [[str(array.dtype), list(array.shape)] for array in arrays]
        self._send(rank, json.dumps([header, shapes]).encode())
        for array in arrays:
            self._send(rank, as_bytes(array))

    def receive(self) -> tuple[str, list[np.ndarray]]:
        """Block: the kernel wakes this process."""
        header, shapes = json.loads(self._receive(0))
        arrays = []
        for dtype, shape in shapes:
            data = np.frombuffer(bytearray(self._receive(0)), np.uint8)
            arrays.append(data.view(jnp.dtype(dtype)).reshape(shape))
        return header, arrays

    def reports(self, mine: CallReport) -> list[CallReport]:
        """Exchange 48 bytes a worker through the master; texts if they differ."""
        row = pack_report(mine)
        if self.rank != 0:
            self._send(0, row)
            rows = self._receive(0)
        else:
            rows = b"".join([row, *(self._receive(rank) for rank in range(1, self.size))])
            for rank in range(1, self.size):
                self._send(rank, rows)
        agreed = unpack_reports([rows[i : i + SHORT_BYTES] for i in range(0, len(rows), SHORT_BYTES)])
        return agreed or [CallReport(*report) for report in self._allgather_json(list(mine))]

    def _allgather_json(self, mine: Any) -> list[Any]:
        """Every process's JSON value, on all."""
        if self.rank != 0:
            self._send(0, json.dumps(mine).encode())
            return json.loads(self._receive(0))
        rows = [mine, *(json.loads(self._receive(rank)) for rank in range(1, self.size))]
        for rank in range(1, self.size):
            self._send(rank, json.dumps(rows).encode())
        return rows

    def host_barrier(self) -> None:
        self._allgather_json(None)

    def bcast_from_host_leader(self, make: Callable[[], Any]) -> Any:
        """The master's JSON value, on all."""
        return self._allgather_json(make() if self.rank == 0 else None)[0]
