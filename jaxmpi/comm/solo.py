"""The control plane of one process, which has nobody to wait for."""

import collections
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmpi.comm.agreement import Fingerprint, fingerprint
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree, check_arrays
from jaxmpi.runtime import process


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


class SoloProcesses:
    """The control plane of a single process."""

    rank, size, local_rank, local_size = 0, 1, 0, 1
    hosts, may_overlap = (0,), True

    @property
    def numbers(self) -> tuple[int, ...]:
        """By rank here: the launcher's number."""
        return (process.my_rank(),)

    def in_job(self, ranks: Sequence[int]) -> list[int]:
        """The launcher's numbers of these ranks, as error messages give them."""
        return [self.numbers[rank] for rank in ranks]

    def on_own_communicator(self) -> "SoloProcesses":
        """The same: nothing is sent."""
        return self

    def iallreduce_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        """The values themselves, when asked for."""
        return lambda: values

    def assert_same(self, what: str, value: Any) -> None:
        """One rank agrees with itself, on what several could compare."""
        fingerprint(what, value)

    def compare(self, mine: Fingerprint) -> None:
        """As `assert_same`, of a fingerprint made before."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def leave(self, code: int = 0) -> None:
        """Nobody to wait for."""

    def host_barrier(self) -> None:
        """Nobody to wait for."""

    def leader_first(self, make: Callable[[], Any], timeout_s: float) -> Any:
        """The value that this process makes."""
        del timeout_s
        return make()

    def bcast_from_host_leader(self, make: Callable[[], Any]) -> Any:
        """The value that this process makes."""
        return make()

    def allreduce_sum(self, values: np.ndarray) -> np.ndarray:
        """The values themselves."""
        return values

    def allgather_array(self, values: np.ndarray) -> np.ndarray:
        """The values as the one row."""
        return np.asarray(values, np.float64)[None]

    def bcast(self, tree: PyTree, root: int = 0) -> PyTree:
        """The tree itself, as NumPy arrays."""
        check(root == 0, f"broadcast: root: got {root}; expected a rank in [0, 1)")
        check_arrays("broadcast", tree)
        return jax.tree.map(np.asarray, tree)

    def allgather_object(self, value: Any) -> list[Any]:
        """The one value, as JSON gives it back."""
        return [json.loads(json.dumps(value))]

    def bcast_object(self, value: Any) -> Any:
        """The value, as JSON gives it back."""
        return self.allgather_object(value)[0]

    def mailbox(self) -> Mailbox:
        """Nobody to write to."""
        return Mailbox()
