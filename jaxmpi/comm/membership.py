"""The ranks and their communicators, also after a death.

A rank that dies makes others block, or gives only some of them an error. MPI alone ends the job then. ULFM (Bland et
al. 2013) lets the ranks that live go on. The first rank with an error revokes all communicators, so no rank blocks. All
then vote, and the vote gives every living rank the same answer. `shrink` makes a smaller communicator, clones it for
each use, and tries again if another rank dies meanwhile. Ranks keep handles of each other's processes, by which one
that hangs is killed.
"""

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmpi.comm.polling import is_mpi_error
from jaxmpi.core.errors import AgreedError, check
from jaxmpi.runtime import failures, job_folder


class Membership:
    """Ranks of a job, some of which may die, and their communicators.

    A subclass has the messages, and finds which hosts the ranks are on.
    """

    hosts: tuple[int, ...]  # hosts of all ranks, numbered in order of first appearance

    def __init__(self) -> None:
        """Begin with all ranks of the job; MPI runs."""
        from mpi4py import MPI

        self._own: list[Any] = []  # communicators, which `revoke` ends
        self._made: list[Any] = []  # those that were made for `world`, which `MpiProcesses.free` frees
        self._others: dict[int, int] = {}  # if ranks are outlived: handles of the others' processes
        self._on_host = MPI.COMM_TYPE_SHARED
        self._votes = self.clone(MPI.COMM_WORLD)
        self._number, self.numbers = self._votes.rank, tuple(range(self._votes.size))  # the launcher's, of all ranks
        self._meet()

    def allgather_object(self, value: Any) -> list[Any]:
        """Every rank's JSON value, on every rank."""
        raise NotImplementedError

    def _meet(self) -> None:
        """Make communicators of the ranks that vote; all these call it together."""
        self.world = self.clone(self._votes)
        self.rank, self.size = self.world.rank, self.world.size
        self._exit = self.clone()  # a communicator of its own: a rank may be at its end while others still talk
        self._local = self.world.Split_type(self._on_host, key=self.rank)
        self._keep(self._local)
        self.local_rank, self.local_size = self._local.rank, self._local.size

    def clone(self, of: Any = None) -> Any:
        """Clone a communicator for one thread alone, on all ranks together."""
        return self._keep((of or self.world).Clone())

    def split(self, color: int, key: int) -> Any:
        """Split the communicator for one thread alone, on all ranks together."""
        return self._keep(self.world.Split(color, key))

    def _keep(self, made: Any) -> Any:
        self._own.append(made)
        self._made.append(made)
        return made

    def outlive(self) -> None:
        """Let a rank that fails by itself end alone; others can `shrink`.

        Raises:
            UsageError: on all ranks alike: they are on several hosts, or do not see each other's processes.
        """
        pids = self.allgather_object([os.getpid(), job_folder.pid_space()])
        is_one = len(set(self.hosts)) == 1 and len({space for _, space in pids}) == 1 and job_folder.pid_space() != 0
        check(
            is_one,
            "on_rank_loss: got shrink with ranks on several hosts, or in several containers; take --on-rank-loss end",
        )
        self._know([pid for pid, _ in pids])
        failures.survive_losses(self._kill)

    def _know(self, pids: list[int]) -> None:
        """The other ranks' processes, by handles that never stand for another process."""
        for handle in self._others.values():
            os.close(handle)
        self._others = {}
        for rank in set(range(self.size)) - {self.rank}:
            with contextlib.suppress(ProcessLookupError):  # it has died meanwhile
                self._others[rank] = os.pidfd_open(pids[rank])

    def _kill(self, ranks: Sequence[int]) -> bool:
        """Kill these ranks, if `outlive` was called; False if one had ended."""
        handles = [self._others[rank] for rank in set(ranks) & set(self._others)]
        ended = select.select(handles, [], [], 0)[0]
        for handle in set(handles) - set(ended):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        return not ended

    def vote(self, holds: bool) -> bool:
        """Return True if all ranks are alive and give True (ULFM's agree).

        All that live get the same answer, whoever dies. After False all of them must `shrink`. The launcher must go on
        without ranks that die.
        """
        try:
            return bool(self._votes.Agree(int(holds)))
        except Exception as error:
            if not is_mpi_error(error):
                raise
            return False

    def revoke(self) -> None:
        """Make all messages fail, so that nobody waits for a lost rank."""
        for comm in list(self._own):
            if not comm.Is_revoked():
                comm.Revoke()

    def can_shrink(self) -> bool:
        """Return True if this MPI and mpi4py have what that takes."""
        return all(hasattr(self.world, name) for name in ("Agree", "Shrink", "Revoke", "Is_revoked"))

    def shrink(self, why: str) -> list[int]:
        """Renumber the ranks left; return the launcher's numbers of those gone.

        All that live come here together, once a vote has failed, with no message under way. Copies of before, for other
        threads, are of no more use.

        Args:
            why: the error after which this is done; empty on ranks that have seen none.

        Raises:
            AgreedError: nobody is gone, so something else was wrong.
        """
        self.revoke()
        before = self.numbers
        while True:
            self._votes = self._votes.Shrink()
            self._own, self._made = [self._votes], []
            if self._has_met():
                break
        gone = sorted(set(before) - set(self.numbers))
        if not gone:
            why = next(filter(None, self.allgather_object(why)), "no rank knows why")  # reason of a rank that knows it
            raise AgreedError(f"a message between ranks has failed though none of them is gone: {why}")
        self.hosts = tuple(self.hosts[before.index(rank)] for rank in self.numbers)
        return gone

    def _has_met(self) -> bool:
        """Make communicators of the ranks left; False if another has died meanwhile.

        All that live return the same.
        """
        met = False
        try:
            self._meet()
            rows = np.empty((self.size, 2), np.int64)
            self.world.Allgather(np.array([self._number, os.getpid()], np.int64), rows)
            self.numbers, met = tuple(rows[:, 0].tolist()), True
            self._know(rows[:, 1].tolist())
        except Exception as error:
            if not is_mpi_error(error):
                raise
            self.revoke()
        return self.vote(met)
