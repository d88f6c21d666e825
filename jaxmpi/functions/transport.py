"""Messages between processes of workers, over MPI or a fork's sockets, and the watch for workers that are stopped.

A transport carries commands from the master, and gathers reports and arrays of all. A message is a pickled value and
its arrays, which are sent separately and so are not copied; all processes are this user's. The master looks at its
workers' processes: one that is stopped or gone is named, one that computes is not late.
"""

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jaxmpi.comm.control import LATE_S, MAX_BYTES, MpiProcesses
from jaxmpi.comm.polling import POLL_S, wait
from jaxmpi.comm.shared_sync import TIMEOUT_S
from jaxmpi.core.errors import TrainingError
from jaxmpi.runtime import host_callbacks
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
    # Protocol 5 gives the arrays' own memory: what is broadcast to eight workers lies in this process once, not eight
    # times, although all messages are made before the first is sent.
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


# ---------------------------------------------------------------- who is stopped


WATCH_S = 0.5  # between looks at whether workers are stopped


def process_state(pid: int) -> str:
    """The system's letter for a process's state (T: stopped, t: by a debugger); empty if not shown."""
    try:
        return stat_of(pid)[0]
    except OSError:
        return ""


def watch_for_stopped(workers: dict[int, tuple[str, int]], end: Callable[[int], None]) -> Callable[[], None]:
    """Name workers that are stopped, and end them after the time limit; the returned function stops the watch.

    One that computes is not stopped, however long that takes. Looks are counted, not the clock: if the master is
    stopped as well, as by Ctrl-Z, nobody is late.

    Args:
        workers: by rank, name and process of each on this host.
        end: ends a worker, or the job.
    """
    over, looks = threading.Event(), dict.fromkeys(workers, 0)

    def watch() -> None:
        while not over.wait(WATCH_S):
            for rank, (name, pid) in workers.items():
                looks[rank] = looks[rank] + 1 if process_state(pid) in ("T", "t") else 0
                if looks[rank] == round(TIMEOUT_S / WATCH_S) + 1:
                    end(rank)
                elif looks[rank] == round(LATE_S / WATCH_S):
                    text = f"jaxmpi: {name} is stopped, and is ended after {TIMEOUT_S:.0f} s"
                    way_out = f"(JAXMPI_EXCHANGE_TIMEOUT_S); kill -CONT {pid} lets it go on"
                    print(text, way_out, file=sys.stderr, flush=True)

    def stop() -> None:
        over.set()
        thread.join()

    thread = threading.Thread(target=watch, name="jaxmpi watch", daemon=True)
    thread.start()
    return stop


STOPPED = f"been stopped for {TIMEOUT_S:.0f} s (JAXMPI_EXCHANGE_TIMEOUT_S sets the time)"


# ---------------------------------------------------------------- MPI


SHORT_S, SHORT_LOOKS = 0.0001, 5000  # the sleep between a wait's first looks, and how many these are
SHORT_BYTES = 2000  # of a value that one message carries


class MpiTransport:
    """Over a separate communicator, polled without spinning."""

    def __init__(self, control: MpiProcesses, is_led: bool) -> None:
        """Take a communicator for this transport alone; all ranks call this together.

        If rank 0 leads, all take part in every call, and rank 0 watches for ranks of its host that are stopped.
        """
        self.control = control.on_own_communicator()
        self.comm, self.rank, self.size = self.control.world, control.rank, control.size
        self.timeout_s = float("inf") if is_led else TIMEOUT_S
        if not is_led:
            return
        pids = self.control.allgather_object(os.getpid())
        names = {
            rank: (f"rank {rank} of {self.size} (process {pid})", pid)
            for rank, pid in enumerate(pids)
            if rank and self.control.hosts[rank] == self.control.hosts[0]
        }

        def end(rank: int) -> None:
            raise TrainingError(f"{names[rank][0]} has {STOPPED}")

        if self.rank == 0:
            call_before_finalize(watch_for_stopped(names, end))

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

    def gather(self, mine: Any, everywhere: bool) -> list[Any] | None:
        """Every rank's picklable value on all ranks, or on rank 0 alone; None on the others.

        All ranks call this together. The first message carries a short value whole, as reports are: to send lengths
        first costs a call another 0.1 ms, a tenth of its time. Longer ones follow in rounds that fit MPI's counts.
        """
        head, *arrays = encode(mine)
        data = np.concatenate([np.array([head.size]).view(np.uint8), head, *arrays])
        first, firsts = np.zeros(8 + SHORT_BYTES, np.uint8), np.empty((self.size, 8 + SHORT_BYTES), np.uint8)
        first[:8], start = np.array([data.size]).view(np.uint8), data[:SHORT_BYTES]
        first[8 : 8 + start.size] = start
        self._wait_for_all(self.comm.Iallgather(first, firsts))
        sizes = [int(row[:8].view(np.int64)[0]) for row in firsts]
        is_wanted = everywhere or self.rank == 0
        if max(sizes) <= SHORT_BYTES:
            return [_decode_vector(row[8:]) for row in firsts] if is_wanted else None
        out = [np.empty(size, np.uint8) for size in sizes] if is_wanted else []
        chunk = MAX_BYTES // self.size
        for begin in range(0, max(sizes), chunk):
            counts = [max(0, min(chunk, size - begin)) for size in sizes]
            part, received = data[begin : begin + chunk], np.empty(sum(counts) if is_wanted else 0, np.uint8)
            if everywhere:
                self._wait_for_all(self.comm.Iallgatherv(part, (received, counts)))
            else:
                self._wait_for_all(self.comm.Igatherv(part, (received, counts) if is_wanted else None, 0))
            for whole, piece in zip(out, np.split(received, np.cumsum(counts)[:-1]), strict=False):
                whole[begin : begin + piece.size] = piece
        return [_decode_vector(vector) for vector in out] if is_wanted else None

    def check_alive(self) -> None:
        """Do nothing: the launcher ends the job if a rank dies."""

    def _wait_for_all(self, request: Any) -> None:
        """Wait for what all ranks take part in; name one that has not come within the time limit, if none leads."""
        if not _wait_politely(request, self.timeout_s):
            late = self.control.in_job(self.control.late())
            raise OutOfStep(
                f"rank {late} did not come to this call within {TIMEOUT_S:.0f} s (JAXMPI_EXCHANGE_TIMEOUT_S sets it)"
            )


def _decode_vector(vector: np.ndarray) -> Any:
    """The value of a message that has come as one vector: the head's length, the head, the arrays."""
    start = 8

    def receive(size: int) -> np.ndarray:
        nonlocal start
        start += size
        return vector[start - size : start].copy()  # aligned

    return decode(receive(int(vector[:8].view(np.int64)[0])), receive)


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


@dataclass(frozen=True)
class ForkEffect(host_callbacks.OrderedEffect):
    """Effect that keeps the sums of one fork in order; a failed sum leaves nothing to the next fork."""

    number: int


host_callbacks.admit(ForkEffect(0))


class SocketTransport:
    """The master's sockets to workers, or a worker's; also `SharedSum`'s control plane."""

    def __init__(
        self, rank: int, size: int, connections: dict[int, Connection], jobs: dict[int, subprocess.Popen]
    ) -> None:
        """Take the sockets by rank, and on the master the processes."""
        self.rank, self.size, self.connections, self.jobs = rank, size, connections, jobs
        self.local_rank, self.local_size = rank, size
        # With more workers than cores, one that looks would take the core from one that computes.
        self.looks_s = LOOKS_S if size <= (os.cpu_count() or 1) else 0.0
        self.names = {rank: f"worker {rank} of {size} (process {job.pid})" for rank, job in jobs.items()}
        self.stopped: set[int] = set()  # workers that the watch has ended

        def end(rank: int) -> None:
            self.stopped.add(rank)
            jobs[rank].kill()  # enough: whoever waits for the worker learns of its end

        watched = {rank: (self.names[rank], job.pid) for rank, job in jobs.items()}
        self.stop_watching = watch_for_stopped(watched, end) if jobs else lambda: None

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
        if rank in self.stopped:
            how += f", having {STOPPED}"
        return WorkerDied(f"{self.names[rank]} has ended: {how}; jaxmpi.close(), then jaxmpi.fork() again")

    def check_alive(self) -> None:
        """Raise `WorkerDied` if a worker has gone."""
        for rank, job in self.jobs.items():
            if job.poll() is not None or process_state(job.pid) in ("Z", "X"):  # its other threads may end later
                raise self._death_error(rank)

    def send(self, rank: int, message: Message) -> None:
        """The head, then each array."""
        for part in message:
            self._send(rank, part)

    def receive(self, rank: int = 0) -> Any:
        """The next value; the kernel wakes this process."""
        return decode(np.frombuffer(self._receive(rank), np.uint8), lambda size: self._receive(rank))

    def gather(self, mine: Any, everywhere: bool) -> list[Any] | None:
        """Every worker's picklable value on all workers, or on the master alone; None on the others."""
        if self.rank != 0:
            self.send(0, encode(mine))
            return self.receive() if everywhere else None
        rows = [mine, *(self.receive(rank) for rank in range(1, self.size))]
        message = encode(rows) if everywhere else []
        for rank in range(1, self.size):
            self.send(rank, message)
        return rows

    def host_barrier(self) -> None:
        """Wait for all processes."""
        self.gather(None, True)

    def bcast_from_host_leader(self, make: Callable[[], Any]) -> Any:
        """The master's value, on all."""
        rows = self.gather(make() if self.rank == 0 else None, True)
        return rows and rows[0]
