"""Loaders that MPI starts by `Comm.Spawn`, for `data.loader = spawn`, as Theano-MPI does (Ma et al. 2016, section 3.3).

Messages between a worker and each of its loaders, with the paper's tags:

    tag 40  to the loader   a `Note` or `Make`, as to loaders of other kinds, or "stop"
    tag 55  to the worker   "copy_finished <ticket>"; an `Answer` if something went wrong
                            "ended <how>": the loader has died
                            "stop": the loader has ended
"""

import contextlib
import os
import pickle
import select
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from jaxmpi.comm.polling import POLL_S, WaitClock, wait
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.shared_memory import Segment
from jaxmpi.data.loader_pool import JOIN_S, KINDS, LoaderProcess, python_line
from jaxmpi.data.loader_worker import Answer, answer_from_bytes, ignore_signals
from jaxmpi.runtime import failures, job_folder

TO_LOADER, TO_WORKER = 40, 55
STOP, ENDED = b"stop", b"ended"
LEAVE_S = 5.0  # after a request to leave, for MPI to start loaders: then there is a run that can save itself


class SpawnedLoader:
    """A loader that MPI has started on the worker's host, in a communicator of all its loaders with it alone."""

    JOIN_S = JOIN_S

    def __init__(self, number: int, mpi: Any, comm: Any, stopped: set[int]) -> None:
        self.number, self.mpi, self.comm = number, mpi, comm
        self.stopped = stopped  # numbers of those of the communicator that have ended
        self.death = ""  # how it has ended
        self.requests: list[tuple[Any, bytes]] = []  # requests with what they send

    def send(self, message: Any) -> None:
        self._send(pickle.dumps(message))

    def _send(self, message: bytes) -> None:
        self.requests = [(request, data) for request, data in self.requests if not request.Test()]
        self.requests.append((self.comm.Isend([message, self.mpi.BYTE], self.number, TO_LOADER), message))

    def receive(self, timeout_s: float) -> list[Answer]:
        answers: list[Answer] = []
        wait(partial(self.comm.Iprobe, self.number, TO_WORKER), timeout_s)
        while (message := _receive(self.mpi, self.comm, self.number, TO_WORKER)) is not None:
            if message.startswith(ENDED):
                self.death = message.partition(b" ")[2].decode()
            elif message == STOP:
                self.stopped.add(self.number)
            else:
                answers.append(answer_from_bytes(message))
        return answers

    def ended(self) -> str:
        return self.death

    def end(self) -> None:
        self._send(STOP)

    def join(self, timeout_s: float) -> None:  # MPI lets this process go only once they have gone
        def has_stopped() -> bool:
            self.receive(0)
            return self.number in self.stopped

        wait(has_stopped, timeout_s)
        if len(self.stopped) == self.comm.Get_remote_size():
            self.comm.Disconnect()


def start_spawned(size: int, board: Segment) -> list[SpawnedLoader]:
    """Loaders that MPI starts."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError(f"data.loader: got spawn, but there is no MPI ({error}); use processes") from error
    program, *arguments = python_line("jaxmpi.data.mpi_loaders", os.getpid(), board.address)
    # The launcher has given all its slots to workers; a loader sleeps most of the time.
    info = MPI.Info.Create({"host": MPI.Get_processor_name(), "map_by": "slot:oversubscribe"})
    started: Future[Any] = Future()

    def spawn() -> None:
        try:
            started.set_result(MPI.COMM_SELF.Spawn(program, arguments, size, info))
        except MPI.Exception as error:
            started.set_exception(error)

    # In a thread of its own: under load Open MPI may hang in this call, deaf to signals.
    threading.Thread(target=spawn, name="jaxmpi spawn", daemon=True).start()
    waited, asked = WaitClock(), WaitClock()
    while not started.done():
        if not failures.job.is_asked_to_leave():
            asked.restart()
        if max(waited.look() - failures.START_TIMEOUT_S, asked.look() - LEAVE_S) > 0:
            failures.job.has_spawned = True
            late = f"data.loader spawn: MPI has not started its loaders, {size} a worker, within {waited.look():.0f} s"
            if failures.job.is_asked_to_leave():
                failures.write_error(f"jaxmpi: {failures.describe_rank()}: asked to leave; {late}: not saved\n")
                failures.end_job(failures.PREEMPTED)
            raise TrainingError(
                f"{late} (JAXMPI_START_TIMEOUT_S sets the time); start the job again, as --restarts 1 does, or take "
                "--data.loader processes"
            )
        time.sleep(POLL_S)
    try:
        comm = started.result()
    except MPI.Exception as error:
        raise UsageError(
            f"data.loader: got spawn, but MPI cannot start {size} loaders a worker ({error}): no slots are left, or "
            "its launcher does not allow it; start the job with more slots than ranks, or use processes"
        ) from error
    failures.job.has_spawned = True
    stopped: set[int] = set()
    return [SpawnedLoader(number, MPI, comm, stopped) for number in range(size)]


def _receive(mpi: Any, comm: Any, rank: int, tag: int) -> bytes | None:
    """The next message of that rank, if one has come."""
    status = mpi.Status()
    if not comm.Iprobe(rank, tag, status):
        return None
    message = bytearray(status.Get_count(mpi.BYTE))
    comm.Recv([message, mpi.BYTE], rank, tag)
    return bytes(message)


KINDS["spawn"] = start_spawned


# ---------------------------------------------------------------- in a loader


def main(worker: int, board: tuple[int, ...]) -> None:
    """Pass messages between process `worker` of this host and a loader, whose board has this address, until "stop".

    The loader is a process of its own: with one of MPI's own processes MPI would end the whole job, and nobody could
    say at which file.
    """
    job_folder.end_with_supervisor()
    ignore_signals()
    threading.Thread(target=_end_with, args=(worker,), daemon=True).start()
    with failures.start_limit():
        from mpi4py import MPI
    comm, is_alive = MPI.Comm.Get_parent(), True
    loader = LoaderProcess(MPI.COMM_WORLD.rank, board)
    while True:  # not `polling.wait`: there is no time limit, and it sleeps in `pipe.poll`, which ends with a message
        while (message := _receive(MPI, comm, 0, TO_LOADER)) is not None:
            if message == STOP:
                loader.end()
                loader.join(loader.JOIN_S)
                comm.Send([STOP, MPI.BYTE], 0, TO_WORKER)
                return comm.Disconnect()
            loader.outbox.put(message)
        if not is_alive:
            time.sleep(POLL_S)
        elif loader.pipe.poll(POLL_S):
            try:
                answer = loader.pipe.recv_bytes()
            except (EOFError, OSError):
                loader.process.wait()
                answer, is_alive = ENDED + b" " + loader.ended().encode(), False
            comm.Send([answer, MPI.BYTE], 0, TO_WORKER)


def _end_with(worker: int) -> None:
    """End this process when that one ends: MPI does not."""
    with contextlib.suppress(ProcessLookupError):
        watched = os.pidfd_open(worker)
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
    os._exit(1)
