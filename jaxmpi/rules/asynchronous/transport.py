"""Messages between ranks that wait for nobody: requests to the servers of a center, and their answers.

All sends and receives are non-blocking and polled, and every receive names its sender. So any rank that comes is
served, a rank that dies is known by its own messages, and no two ranks can wait for each other. A server may be a
thread of a worker's process, on the communicator of that worker, so requests and answers have tags of their own.

    request   i64[2] (kind, number), then a body of u8[..]
    answer    u8[..], as long as the sender of the request has said or shorter
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.allreduce.schedules import MESSAGE_BYTES as MESSAGE_BYTES
from jaxmpi.comm.polling import is_loss
from jaxmpi.core.env import seconds_from

TIMEOUT_S = seconds_from("JAXMPI_EXCHANGE_TIMEOUT_S", 1800)
HEADER_BYTES = 16
WINDOW = 8  # requests to one rank that may be unanswered
REQUEST, ANSWER = range(2)  # tags
SHORTEST_S, LONGEST_S = 0.0003, 0.005  # between looks
PATIENCE = 0.125  # share of the time in which nothing has come, that the next look may be late
NOTHING = np.empty(0, np.uint8)


class RankLost(Exception):
    """A message shows that a rank is gone."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


@contextmanager
def naming_lost_rank(rank: int) -> Iterator[None]:
    """Raise `RankLost` for an error of MPI that shows that the rank is gone."""
    try:
        yield
    except Exception as error:
        if not is_loss(error):
            raise
        raise RankLost(rank) from error


class Backoff:
    """Sleeps between looks, longer if nothing has come for a while."""

    def __init__(self) -> None:
        self.moved_s = time.monotonic()

    def after(self, progressed: bool) -> None:
        """Sleep, unless a look has found something."""
        now_s = time.monotonic()
        if progressed:
            self.moved_s = now_s
        else:
            time.sleep(min(max(PATIENCE * (now_s - self.moved_s), SHORTEST_S), LONGEST_S))


class Outbox:
    """Messages that are being sent; their memory is kept until they are out."""

    def __init__(self, mpi: Any, tag: int) -> None:
        self.mpi, self.tag = mpi, tag
        self._sending: list[tuple[Any, np.ndarray]] = []

    def send(self, message: np.ndarray, rank: int) -> None:
        """Begin to send u8[..], which must not change any more."""
        self._sending.append((self.mpi.Isend(message, rank, self.tag), message))

    def drop_sent(self) -> None:
        """Free the memory of messages that have left, or whose ranks are gone."""
        self._sending = [entry for entry in self._sending if not is_sent(entry[0])]

    def is_empty(self) -> bool:
        """Return True if no message is on its way."""
        self.drop_sent()
        return not self._sending


def is_sent(request: Any) -> bool:
    """Return True for a send that is complete, or whose receiver is gone."""
    try:
        return request.Test()
    except Exception as error:
        if not is_loss(error):
            raise
        return True


class Request(NamedTuple):
    """A request, and what becomes of its answer."""

    kind: int
    number: int
    body: np.ndarray = NOTHING  # u8[..]
    answer_bytes: int = 0
    take: Callable[[np.ndarray], None] = lambda answer: None


def carry_out(mpi: Any, requests: Mapping[int, Iterable[Request]]) -> Iterator[bool]:
    """Send requests to some ranks, at most WINDOW unanswered at each, until all are answered.

    Yields: whether an answer has come since the look before.

    Raises:
        RankLost: one of the ranks is gone.
    """
    outbox = Outbox(mpi, REQUEST)
    ahead = {rank: iter(each) for rank, each in requests.items()}  # bodies are made when they are sent
    unanswered: dict[int, deque[tuple[Any, np.ndarray, Request]]] = {rank: deque() for rank in ahead}
    while True:
        for rank, requests_ahead in ahead.items():
            for request in itertools.islice(requests_ahead, WINDOW - len(unanswered[rank])):
                with naming_lost_rank(rank):
                    answer = np.empty(request.answer_bytes, np.uint8)
                    unanswered[rank].append((mpi.Irecv(answer, rank, ANSWER), answer, request))
                    head = np.array([request.kind, request.number], np.int64).view(np.uint8)
                    outbox.send(np.concatenate([head, request.body]), rank)
        if outbox.is_empty() and not any(unanswered.values()):
            return
        progressed = False
        for rank, waiting in unanswered.items():
            with naming_lost_rank(rank):
                while waiting and waiting[0][0].Test():
                    _, answer, request = waiting.popleft()
                    request.take(answer)
                    progressed = True
        yield progressed
