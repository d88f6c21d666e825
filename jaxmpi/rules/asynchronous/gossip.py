"""Pushes of params between workers, by a thread: nobody waits for them. Blot et al. 2016.

A push is one message, f64[..]: the sender's share of the weight, then the bytes of the params. Its sends are
*synchronous* in MPI's sense, so they complete only when the receiver has taken them up, however small they are. A
worker has one push to each other one under way and the receiver has room for one of each. So a worker that does not
merge, as in an evaluation, is soon pushed nothing, and no memory fills, whatever MPI buffers.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core import scheduling
from jaxmpi.core.errors import TrainingError
from jaxmpi.rules.asynchronous import transport
from jaxmpi.rules.asynchronous.transport import Backoff, RankLost, naming_lost_rank
from jaxmpi.runtime import failures

ENDED = np.zeros(1)  # a share of 0: its sender will push no more


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
        self._peers = [peer for peer in range(workers) if peer != worker]
        self._outgoing: dict[int, deque[np.ndarray]] = {peer: deque() for peer in self._peers}
        self._sending: dict[int, Any] = {}  # MPI's request of the first outgoing message, by peer
        self._receiving = {peer: self._post_receive(peer) for peer in self._peers}
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="jaxmpi gossip", daemon=True)
        self._thread.start()

    def push(self, to: int, share: float, body: np.ndarray) -> None:
        """Have params, u8[body_bytes], sent to another worker."""
        # Words of 8 bytes: counts of MPI end at 2^31, which bytes of a large model exceed.
        message = np.zeros(1 + -(-self.body_bytes // 8))
        message[0] = share
        message[1:].view(np.uint8)[: body.size] = body
        self._outgoing[to].append(message)

    def closed_peers(self) -> frozenset[int]:
        """Workers to push nothing to: gone, or behind with an earlier push."""
        return frozenset(peer for peer, messages in self._outgoing.items() if messages or peer in self.gone)

    def end(self, meanwhile: Callable[[], Any] = lambda: None) -> None:
        """Push no more, and wait for all others' pushes in `arrived`.

        Args:
            meanwhile: called ten times a second or so: another may be evaluating, or slow.
        """
        for messages in self._outgoing.values():
            messages.append(ENDED)
        self._is_ending = True
        limit_s = transport.TIMEOUT_S * failures.LONG_FACTOR
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive():
            self._thread.join(0.1)
            meanwhile()
            if time.monotonic() > deadline:
                late = sorted(set(self._peers) - self.ended - self.gone)
                raise TrainingError(f"ranks {late} have not ended their gossip for {limit_s:.0f} s")

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        scheduling.take_short_turns()
        backoff = Backoff()
        while not (self._is_ending and all(map(self._is_through, self._peers))):
            progressed = False
            for peer in self._peers:
                if peer in self.gone:
                    continue
                try:
                    with naming_lost_rank(peer):
                        progressed |= self._receive(peer) | self._send(peer)
                except RankLost:
                    self.gone.add(peer)
                    self._outgoing[peer].clear()
                    progressed = True
            backoff.after(progressed)

    def _is_through(self, peer: int) -> bool:
        return peer in self.gone or (peer in self.ended and not self._outgoing[peer])

    def _receive(self, peer: int) -> bool:
        """Take a push that has come, if there is room: at the end this rank waits for all."""
        has_room = self._is_ending or len(self.arrived) < len(self._peers)
        if peer in self.ended or not has_room or not self._receiving[peer][0].Test():
            return False
        _, message = self._receiving[peer]
        if message[0] == 0:
            self.ended.add(peer)
        else:
            self.arrived.append(Push(float(message[0]), message[1:].view(np.uint8)[: self.body_bytes]))
            self._receiving[peer] = self._post_receive(peer)
        return True

    def _send(self, peer: int) -> bool:
        """Send the oldest message to a worker; return True if it begins or has been taken up."""
        messages = self._outgoing[peer]
        if messages and peer not in self._sending:
            self._sending[peer] = self.mpi.Issend(messages[0], peer)
            return True
        if peer in self._sending and self._sending[peer].Test():
            del self._sending[peer]
            messages.popleft()
            return True
        return False

    def _post_receive(self, peer: int) -> tuple[Any, np.ndarray]:
        # Memory that is not yet written to takes none: a buffer for each worker costs nothing until a push comes.
        message = np.empty(1 + -(-self.body_bytes // 8))
        return self.mpi.Irecv(message, peer), message
