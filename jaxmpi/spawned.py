"""Loaders that MPI starts: `Comm.Spawn`, as in Theano-MPI (Ma et al. 2016, section 3.3), for `data.loader = spawn`.

The paper's messages are train, val, stop or a file's name to the loader, and "copy finished" back. Here a recipe stands
for train or val, numbers of examples with a place in the ring for the file, and an answer for the copy.
"""

import os
import pickle
import select
import signal
import threading
import time
from typing import Any

from jaxmpi.config import UsageError
from jaxmpi.data.crew import JOIN_S, KINDS, parcel_of, python_line
from jaxmpi.data.member import BOARD_ROW, HERE, Answer, Hello, greeted, handled, ignore_signals, keep_freed_memory
from jaxmpi.data.recipe import Recipe
from jaxmpi.data.segments import Parcel, Segment

TO_LOADER, TO_WORKER = 40, 55  # tags, the paper's own
POLL_S = 0.001  # between looks for a message: a blocking MPI call would spin on a core
STOP = b""  # the message that ends a loader; its answer, too


class SpawnedLoaders:
    """Loaders that are MPI processes, on this worker's host and in a communicator with it alone."""

    def __init__(self, size: int, board: Segment) -> None:
        self.board, self.size = board, size
        self.rows = board.array(0, (size, BOARD_ROW), "i8")
        self.mpi, self.comm = _spawned(size)
        self.sent: list[tuple[Any, bytes]] = []  # requests with what they send
        for number in range(size):
            self.send(number, Hello(number, board))

    def open(self, job: int, recipe: Recipe) -> Parcel:
        """Tell all of a job."""
        parcel, message = parcel_of(job, recipe)
        for number in range(self.size):
            self._send(number, message)
        return parcel

    def send(self, number: int, message: Any) -> None:
        """Tell one."""
        self._send(number, pickle.dumps(message))

    def _send(self, number: int, message: bytes) -> None:
        self.sent = [(request, data) for request, data in self.sent if not request.Test()]
        self.sent.append((self.comm.Isend([message, self.mpi.BYTE], number, TO_LOADER), message))

    def answers(self, timeout_s: float) -> list[Answer]:
        """What has been answered."""
        deadline = time.monotonic() + timeout_s
        while not (found := self._received()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return [pickle.loads(message) for message in found if message != STOP]

    def _received(self) -> list[bytes]:
        found = []
        while (message := _received(self.mpi, self.comm, TO_WORKER)) is not None:
            found.append(message)
        return found

    def ended(self, number: int) -> str:
        """MPI ends the job where a process it has spawned dies; this is for one that has died just now."""
        pid = int(self.rows[number, HERE])
        return f"(process {pid}) has ended" if pid and not os.path.exists(f"/proc/{pid}") else ""

    def stop(self) -> None:
        """End them: MPI lets this process go only once they have gone."""
        for number in range(self.size):
            self._send(number, STOP)
        deadline, left = time.monotonic() + JOIN_S, self.size
        while left and time.monotonic() < deadline:
            left -= self._received().count(STOP)
            time.sleep(POLL_S)
        if left:  # stuck in a read; with them gone MPI ends the job, which a stop with stuck loaders is about to do
            for pid in self.rows[:, HERE].tolist():
                os.kill(pid, signal.SIGKILL)
        else:
            self.comm.Disconnect()


def _spawned(size: int) -> tuple[Any, Any]:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError(f"data.loader: got spawn, but there is no MPI ({error}); use processes") from error
    program, *arguments = python_line("jaxmpi.spawned", os.getpid())
    # The launcher has given all its slots to workers; a loader sleeps most of the time.
    info = MPI.Info.Create({"host": MPI.Get_processor_name(), "map_by": "slot:oversubscribe"})
    try:
        return MPI, MPI.COMM_SELF.Spawn(program, arguments, size, info)
    except MPI.Exception as error:
        raise UsageError(
            f"data.loader: got spawn, but MPI cannot start {size} loaders a worker ({error}): no slots are left, or "
            "its launcher does not allow it; start the job with more slots than ranks, or use processes"
        ) from error


def _received(mpi: Any, comm: Any, tag: int) -> bytes | None:
    status = mpi.Status()
    if not comm.Iprobe(mpi.ANY_SOURCE, tag, status):
        return None
    message = bytearray(status.Get_count(mpi.BYTE))
    comm.Recv([message, mpi.BYTE], status.Get_source(), tag)
    return bytes(message)


KINDS["spawn"] = SpawnedLoaders


# ---------------------------------------------------------------- in a loader


def main(worker: int) -> None:
    """Serve the worker, process `worker` of this host, until it says stop or ends."""
    ignore_signals()
    keep_freed_memory()
    threading.Thread(target=end_with, args=(worker,), daemon=True).start()
    from mpi4py import MPI

    comm = MPI.Comm.Get_parent()
    member = None
    while True:
        message = _received(MPI, comm, TO_LOADER)
        if message is None:
            time.sleep(POLL_S)
        elif message == STOP:
            comm.Send([STOP, MPI.BYTE], 0, TO_WORKER)
            return comm.Disconnect()
        elif member is None:
            member = greeted(message)
        elif (answer := handled(member, message)) is not None:
            comm.Send([answer, MPI.BYTE], 0, TO_WORKER)


def end_with(worker: int) -> None:
    """End this process when that one ends: MPI does not."""
    try:
        watched = os.pidfd_open(worker)
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
    except ProcessLookupError:
        pass
    os._exit(1)
