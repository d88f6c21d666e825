"""Small messages between ranks that need not be waited for."""

import collections
from typing import Any


class Mailbox:
    """Messages between threads of ranks, which never wait.

    This is the mailbox of a single process, which has nobody to write to.
    """

    def send(self, to: int, message: dict[str, Any]) -> None:
        """Send, unless earlier messages to this rank have not been taken yet."""

    def received(self) -> list[dict[str, Any]]:
        """Messages since the last call."""
        return []


class MpiMailbox(Mailbox):
    """Pickled messages over its own communicator, between ranks of one job only."""

    MOST = 4  # messages under way to a rank: one that is stopped takes none

    def __init__(self, comm: Any) -> None:
        """Take the communicator."""
        self.comm = comm
        self._sent: dict[int, list[Any]] = collections.defaultdict(list)

    def send(self, to: int, message: dict[str, Any]) -> None:
        self._sent[to] = [request for request in self._sent[to] if not request.Test()]
        if len(self._sent[to]) < self.MOST:
            self._sent[to].append(self.comm.isend(message, to))

    def received(self) -> list[dict[str, Any]]:
        taken = []
        while (message := self.comm.improbe()) is not None:
            taken.append(message.recv())
        return taken
