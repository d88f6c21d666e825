"""The control plane of one process, which has nobody to wait for."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmpi.comm.agreement import Fingerprint, fingerprint, refuse_together
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, check_arrays
from jaxmpi.runtime.process import my_rank


class SoloProcesses:
    """The control plane of a single process, and what `MpiProcesses` has in common with it."""

    rank, size, local_rank, local_size = 0, 1, 0, 1
    hosts: tuple[int, ...] = (0,)  # hosts of all ranks, numbered in order of first appearance
    may_overlap = True
    message_count = 0  # of messages of all ranks that this one has begun

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """The launcher's numbers of all ranks."""
        return (my_rank(),)

    def in_job(self, ranks: Sequence[int]) -> list[int]:
        """The launcher's numbers of these ranks, as error messages give them."""
        return [self.numbers[rank] for rank in ranks]

    def on_own_communicator(self) -> "SoloProcesses":
        return self

    def iallreduce_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        return lambda: values

    def assert_same(self, what: str, value: Any) -> None:
        """Compare a JSON value over all ranks.

        Raises:
            UsageError: ranks differ: rank, path, got, expected; on all ranks alike.
            TrainingError: who is absent when time is up.
        """
        with refuse_together(self):
            mine = fingerprint(what, value)
        self.compare(mine)

    def compare(self, mine: Fingerprint) -> None: ...
    def refuse(self, error: Exception) -> None: ...
    def barrier(self) -> None: ...
    def host_barrier(self) -> None: ...
    def leave(self, code: int = 0) -> None: ...

    def leader_first(self, make: Callable[[], Any], timeout_s: float) -> Any:
        return make()

    def bcast_from_host_leader(self, make: Callable[[], Any]) -> Any:
        return make()

    def allreduce_sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def allgather_array(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(values, np.float64)[None]

    def bcast(self, tree: PyTree, root: int = 0) -> PyTree:
        """The tree itself, as NumPy arrays."""
        if root != 0:
            raise UsageError(f"broadcast: root: got {root}; expected a rank in [0, 1)")
        check_arrays("broadcast", tree)
        return jax.tree.map(np.asarray, tree)

    def allgather_object(self, value: Any) -> list[Any]:
        """Every rank's JSON value, on every rank; tuples arrive as lists."""
        return [json.loads(json.dumps(value))]

    def bcast_object(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank; no other value is sent."""
        return self.allgather_object(value if self.rank == 0 else None)[0]

    def pings(self) -> list[tuple[float, float]]:
        """Quickest round trip from rank 0 and clock offset of each rank, in seconds; zeros on other ranks.

        The offset is o_r = t_r - (t_send + t_recv) / 2 of the quickest of PINGS trips, by `time.perf_counter`, so it is
        off by half of that trip at most. All ranks call it together.
        """
        return [(0.0, 0.0)] * self.size
