"""Messages of asynchronous rules over MPI: with a center, or by gossip.

All sends and receives are non-blocking and polled, and every receive names its sender. So any rank that comes is
served, and a rank that dies is known by its own messages. No two ranks can wait for each other. A server may be a
thread of a worker's process. It then shares the communicator with that worker, so messages and answers have tags of
their own.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from jaxmpi.allreduce.comm_thread import TIMEOUT_S
from jaxmpi.comm.polling import is_loss
from jaxmpi.core import scheduling
from jaxmpi.core.errors import TrainingError
from jaxmpi.rules.parameter_server import WINDOW, Server, ServerExchange
from jaxmpi.runtime import failures

SHORTEST_S, LONGEST_S = 0.0003, 0.005  # between looks
PATIENCE = 0.125  # share of the time in which nothing has come, that the next look may be late
LOOK_S = 0.5  # between two looks at who has fallen silent
SAID, ANSWERED = range(2)  # tags: to a server or a peer; from a server


class Backoff:
    """Sleeps between looks, longer if nothing has come for a while."""

    def __init__(self) -> None:
        """Begin with short sleeps."""
        self.moved_s = time.monotonic()

    def after(self, moved: bool) -> None:
        """Sleep, unless a look has found something."""
        now = time.monotonic()
        if moved:
            self.moved_s = now
            return
        time.sleep(min(max(PATIENCE * (now - self.moved_s), SHORTEST_S), LONGEST_S))


class Outbox:
    """Messages on their way; their memory is kept until they are out."""

    def __init__(self, mpi: Any, tag: int = SAID) -> None:
        """Send on one communicator, with one tag."""
        self.mpi, self.tag, self._under_way = mpi, tag, deque[tuple[Any, np.ndarray]]()

    def send(self, message: np.ndarray, to: int) -> None:
        """Begin to send u8[..]; it must not change any more."""
        self._under_way.append((self.mpi.Isend(message, to, self.tag), message))

    def is_empty(self) -> bool:
        """Return True if all messages have left."""
        for _ in range(len(self._under_way)):
            request, message = self._under_way.popleft()
            if not is_complete(request):
                self._under_way.append((request, message))
        return not self._under_way


def is_complete(request: Any) -> bool:
    """Return True if a send is over, or its rank is gone."""
    try:
        return request.Test()
    except Exception as error:
        if not is_loss(error):
            raise
        return True


# ---------------------------------------------------------------- at a server


class ServerEndpoint:
    """Endpoint that serves workers, in the main thread or beside a worker.

    A round takes one message of each worker that has sent any, and rounds begin with another worker each time. A worker
    of this process could call the server instead, and sends messages over MPI as the others do. So a worker's share of
    the service depends neither on its number nor on its way to the server.
    """

    def __init__(self, mpi: Any, server: Server, workers: Sequence[int], message_bytes: int) -> None:
        """Open for workers, of this rank or others.

        Args:
            workers: their ranks, which are their numbers.
            message_bytes: of the longest message.
        """
        self.mpi, self.server = mpi, server
        self._outbox, self._message_bytes = Outbox(mpi, ANSWERED), message_bytes
        self._coming = {worker: deque(self._post_receive(worker) for _ in range(WINDOW + 1)) for worker in workers}
        self._first = itertools.count()  # counts rounds, to begin each with another worker
        self.lost: list[int] = []
        self.heard_s: dict[int, float] = {}  # by worker: the time of the last message from it or to it

    def run(self, look: Callable[[], None] = lambda: None) -> None:
        """Serve until all is over.

        Args:
            look: called about once a second.
        """
        scheduling.take_short_turns()
        pauses = Backoff()
        with np.errstate(all="ignore"):  # NaN and infinity pass through; workers look for them
            looked_s = polled_s = time.monotonic()
            while not (self.server.is_over() and self._outbox.is_empty()):
                pauses.after(self.poll())
                now_s, before_s = time.monotonic(), polled_s
                polled_s = now_s
                if now_s - before_s > LOOK_S:  # this process was stopped itself: nobody is late on that account
                    self.heard_s = {worker: s + now_s - before_s for worker, s in self.heard_s.items()}
                if now_s - looked_s > LOOK_S:
                    looked_s = now_s
                    look()

    def silent_s(self) -> dict[int, float]:
        """Seconds since each worker's last message, but for those awaiting an answer."""
        now_s, progress = time.monotonic(), self.server.progress
        awaited = {
            worker for worker in (progress.expected_workers() if progress else ()) if not self.server.out.get(worker)
        }
        return {worker: now_s - self.heard_s.setdefault(worker, now_s) for worker in sorted(awaited)}

    def poll(self) -> bool:
        """A round; False if nothing has come."""
        workers = sorted(self._coming)
        first = next(self._first) % max(len(workers), 1)
        moved = any([self._take_message(worker) for worker in workers[first:] + workers[:first]])
        for worker, answers in list(self.server.out.items()):
            while answers and worker in self._coming:
                self.heard_s[worker] = time.monotonic()
                self._unless_lost(worker, partial(self._outbox.send, answers.popleft(), worker))
                moved = True
        self._outbox.is_empty()
        return moved

    def _post_receive(self, worker: int) -> tuple[Any, np.ndarray]:
        message = np.empty(self._message_bytes, np.uint8)
        return self.mpi.Irecv(message, worker, SAID), message

    def _take_message(self, worker: int) -> bool:
        """Take the oldest message of a worker; False if there is none."""
        coming = self._coming[worker]
        if not self._unless_lost(worker, lambda: coming[0][0].Test()):
            return False
        message = coming.popleft()[1]
        self._unless_lost(worker, lambda: coming.append(self._post_receive(worker)))
        self.heard_s[worker] = time.monotonic()
        self.server.take(worker, message)
        return True

    def _unless_lost(self, worker: int, act: Callable[[], Any]) -> Any:
        """Result of an act, or None if the worker is gone."""
        if worker not in self._coming:
            return None
        try:
            return act()
        except Exception as error:
            if not is_loss(error):
                raise
            del self._coming[worker]
            self.lost.append(worker)
            self.server.drop_worker(worker)
            # Nobody is left to say so; a server that keeps the progress of all knows the end by that.
            self.server.is_closed |= not (self._coming or self.server.progress)
            return None


# ---------------------------------------------------------------- at a worker


class ServerChannel:
    """A worker's way to one server, on this rank or another."""

    def __init__(self, mpi: Any, server_rank: int) -> None:
        """Use the server's communicator."""
        self.mpi, self.rank, self._outbox = mpi, server_rank, Outbox(mpi)
        self._coming: deque[tuple[Any, np.ndarray]] = deque()

    @contextmanager
    def _naming_the_server(self) -> Iterator[None]:
        """Raise `TrainingError` with the server's rank for an error of MPI that shows that it is gone."""
        try:
            yield
        except Exception as error:
            if not is_loss(error):
                raise
            raise TrainingError(
                f"rank {self.rank}, which keeps the center, is gone; go on from the last checkpoint with --resume"
            ) from error

    def send(self, message: np.ndarray, answer_bytes: int) -> None:
        """Send u8[..]; the answer will be that long."""
        answer = np.empty(answer_bytes, np.uint8)
        with self._naming_the_server():
            self._coming.append((self.mpi.Irecv(answer, self.rank, ANSWERED), answer))
            self._outbox.send(message, self.rank)

    def answer(self) -> np.ndarray | None:
        """The oldest answer that has not been taken, if it has come."""
        with self._naming_the_server():
            self._outbox.is_empty()
            if not self._coming[0][0].Test():
                return None
        return self._coming.popleft()[1]


def run_exchange(exchange: ServerExchange, lines: Sequence[ServerChannel]) -> float:
    """Exchange with all servers, to the end; polled.

    Returns: seconds at its end in which nothing but the answer to the report was missing.

    Raises:
        TrainingError: a server is gone, or has not answered within JAXMPI_EXCHANGE_TIMEOUT_S. The limit is six times
            that if only the answer to the report is missing.
    """
    pauses, since_s = Backoff(), None
    while not exchange.is_over():
        if since_s is None and exchange.lacks_only_report():
            since_s = time.perf_counter()
        with np.errstate(all="ignore"):  # NaN and infinity pass through; the loss shows them
            pauses.after(progress_exchange(exchange, lines))
        # Where only the report's answer is missing, the slowest worker is waited for, which may be evaluating.
        limit_s = TIMEOUT_S * (1.0 if since_s is None else failures.LONG)
        if time.monotonic() - pauses.moved_s > limit_s:
            raise TrainingError(
                f"the center has not answered for {limit_s:g} s; its rank is stuck, or with rule.staleness the "
                f"slowest worker is (JAXMPI_EXCHANGE_TIMEOUT_S sets the time, {TIMEOUT_S:g} s now)"
            )
    return 0.0 if since_s is None else time.perf_counter() - since_s


def progress_exchange(exchange: ServerExchange, lines: Sequence[ServerChannel]) -> bool:
    """Send ready messages, take answers; return False if none has come."""
    for sending in exchange.ready():
        lines[sending.server].send(sending.message, sending.answer_bytes)
    moved = False
    for server in exchange.pending_servers():
        answer = lines[server].answer()
        if answer is not None:
            exchange.take(server, answer)
            moved = True
    return moved
