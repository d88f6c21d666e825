"""Pushes of params between workers, in a thread: nobody waits for them. Blot et al. 2016.

A push is a request with the sender's share and requests with pieces of the params. The last piece is answered when the
receiver has room for one more push. So a worker that does not merge, as in an evaluation, is soon pushed nothing, and
no memory fills, whatever MPI buffers.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core import scheduling
from jaxmpi.core.errors import TrainingError
from jaxmpi.rules.asynchronous import transport
from jaxmpi.rules.asynchronous.transport import NOTHING, Backoff, RankLost, Request, Responder, carry_out
from jaxmpi.runtime import failures

SHARE, PIECE, ENDED = range(3)  # kinds of requests
PIECE_BYTES = transport.MESSAGE_BYTES - transport.HEADER_BYTES
MOST = 2  # pushes to one worker that it has yet to take


class Push(NamedTuple):
    """Params from another worker."""

    share: float
    body: np.ndarray  # u8[..], as the wire has it


class GossipThread:
    """A thread that sends and receives pushes while this rank computes."""

    def __init__(self, mpi: Any, worker: int, workers: int, body_bytes: int) -> None:
        """Start the thread on its own communicator; all workers call it together."""
        self.mpi, self.body_bytes = mpi, body_bytes
        self.arrived: deque[Push] = deque()  # for the main thread to take
        self.ended: set[int] = set()  # workers that will push no more
        self.gone: set[int] = set()
        self.answers: defaultdict[int, deque[np.ndarray]] = defaultdict(deque)
        self._peers = [peer for peer in range(workers) if peer != worker]
        self._outgoing: dict[int, deque[Iterator[bool]]] = {peer: deque() for peer in self._peers}
        self._incoming: dict[int, Push] = {}
        self._complete: dict[int, Push] = {}  # not yet answered
        self._is_ending = False
        self._responder = Responder(mpi, self, self._peers)
        self._thread = threading.Thread(target=self._run, name="jaxmpi gossip", daemon=True)
        self._thread.start()

    def push(self, to: int, share: float, body: np.ndarray) -> None:
        """Have params sent to another worker; u8[body_bytes] must not change any more."""
        self._outgoing[to].append(carry_out(self.mpi, {to: push_requests(share, body)}))

    def closed_peers(self) -> frozenset[int]:
        """Workers to push nothing to: gone, or behind with earlier pushes."""
        return frozenset(peer for peer, pushes in self._outgoing.items() if len(pushes) >= MOST or peer in self.gone)

    def end(self, meanwhile: Callable[[], Any] = lambda: None) -> None:
        """Push no more, and wait for all others' pushes in `arrived`.

        Args:
            meanwhile: called ten times a second or so: another may be evaluating, or slow.
        """
        for peer in self._peers:
            self._outgoing[peer].append(carry_out(self.mpi, {peer: [Request(ENDED, 0)]}))
        self._is_ending = True
        limit_s = transport.TIMEOUT_S * failures.LONG
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive():
            self._thread.join(0.1)
            meanwhile()
            if time.monotonic() > deadline:
                late = sorted(set(self._peers) - self.ended - self.gone)
                raise TrainingError(f"ranks {late} have not ended their gossip for {limit_s:.0f} s")

    # ------------------------------------------------------------ in the thread

    def take(self, rank: int, kind: int, number: int, body: np.ndarray) -> None:
        """Take a request of another worker; `number` is where a piece begins."""
        if kind == SHARE:
            self._incoming[rank] = Push(float(body[:8].view(np.float64)[0]), np.empty(self.body_bytes, np.uint8))
        elif kind == PIECE:
            push = self._incoming[rank]
            piece = push.body[number : number + PIECE_BYTES]
            piece[:] = body[: piece.size]
            if number + piece.size == self.body_bytes:
                self._complete[rank] = self._incoming.pop(rank)
                return
        else:
            self.ended.add(rank)
        self.answers[rank].append(NOTHING)

    def drop(self, rank: int) -> None:
        """Another worker is gone."""
        self.gone.add(rank)
        self._complete.pop(rank, None)

    def _run(self) -> None:
        scheduling.take_short_turns()
        backoff = Backoff()
        while not (self._is_ending and self._is_flushed()):
            moved = self._responder.poll()
            for peer, pushes in self._outgoing.items():
                moved |= self._send(peer, pushes)
            for peer in list(self._complete):
                # At the end this rank waits for all pushes.
                if self._is_ending or len(self.arrived) < len(self._peers):
                    self.arrived.append(self._complete.pop(peer))
                    self.answers[peer].append(NOTHING)
            backoff.after(moved)

    def _send(self, peer: int, pushes: deque[Iterator[bool]]) -> bool:
        """Go on with the oldest push to a worker; True if something has moved."""
        if peer in self.gone:
            pushes.clear()
        try:
            moved = next(pushes[0], None) if pushes else False
        except RankLost:
            self.drop(peer)
            return True
        if moved is None:  # it has been taken
            pushes.popleft()
        return moved is not False

    def _is_flushed(self) -> bool:
        has_pushed = not any(self._outgoing.values()) and self._responder.is_flushed()
        return has_pushed and self.ended | self.gone >= set(self._peers)


def push_requests(share: float, body: np.ndarray) -> Iterator[Request]:
    """The requests of a push."""
    yield Request(SHARE, 0, np.array([share]).view(np.uint8))
    for begin in range(0, body.size, PIECE_BYTES):
        yield Request(PIECE, begin, body[begin : begin + PIECE_BYTES])
