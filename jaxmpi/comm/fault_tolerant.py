"""MPI ranks of which some may die, under a launcher that goes on without them (ULFM, Bland et al. 2013).

It is another policy for errors of MPI. mpi4jax ends the job on any error, so programs call mpi4py instead, whose errors
return (`FaultTolerantComm`): a collective that fails because a rank is gone gives zeros, and so does every later one.
The first rank with an error revokes all communicators, so that no rank blocks, and programs run to their end on all
ranks that live. Then all vote, which gives every living rank the same answer, and discard the results. `shrink` makes
smaller communicators, and tries again if another rank dies meanwhile.
"""

import contextlib
import functools
import itertools
import os
import select
import signal
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.mpi import RankComm
from jaxmpi.comm.mpi_calls import run_mpi
from jaxmpi.comm.polling import is_mpi_error
from jaxmpi.comm.shared_sum import SharedSum
from jaxmpi.core.errors import AgreedError, TrainingError, UsageError
from jaxmpi.runtime import failures, host_callbacks, job_folder

# ---------------------------------------------------------------- collectives in programs

_tolerant_numbers = itertools.count()  # the same on all ranks


class FaultTolerantComm(RankComm):
    """MPI ranks under a launcher that goes on without those that die; all come here together.

    After `shrink` the ranks left make a new one.
    """

    def __init__(self, processes: MpiProcesses) -> None:
        super().__init__(processes)
        self.why_lost = ""  # the error of a collective that has failed, after which results are worth nothing
        self._name = f"fault-tolerant comm {next(_tolerant_numbers)}"
        host_callbacks.register(self._name, functools.partial(self._unless_lost, self._run))

    def close(self) -> None:
        """Let go of what programs call, and of shared memory."""
        host_callbacks.forget(self._name)
        host_callbacks.forget(f"{self._name}: sum")
        self._cache.clear()

    def _move(self, kind: str, x: jax.Array, shape: tuple[int, ...], **options: int) -> jax.Array:
        like = jax.ShapeDtypeStruct(shape, x.dtype)
        attributes: dict[str, Any] = {"kind": kind, **options}
        return host_callbacks.call(self._name, [x], [like], **attributes)[0]

    def _make_shared_sum(self) -> SharedSum:
        name = f"{self._name}: sum"
        shared = SharedSum(self.processes, name)
        host_callbacks.forget(name)
        host_callbacks.register(name, functools.partial(self._unless_lost, shared.add))
        return shared

    def _unless_lost(self, move: Callable[..., None], operands: Sequence, results: Sequence, **options: Any) -> None:
        """Run a move; once a rank is lost, revoke, and give zeros."""
        if not self.why_lost:
            try:
                return move(operands, results, **options)
            except Exception as error:
                if not (is_mpi_error(error) or isinstance(error, TrainingError)):
                    raise
                self.why_lost = str(error) or type(error).__name__
                revoke(self.processes)
        for result in results:
            result[...] = np.zeros((), result.dtype)

    def _run(self, operands: Sequence, results: Sequence, kind: str, **ranks: int) -> None:
        from mpi4py import MPI

        function, op = "sendrecv" if kind == "permute" else kind, MPI.SUM if kind == "allreduce" else None
        run_mpi(self.mpi, operands, results, function, op, **{k: rank for k, rank in ranks.items() if rank >= 0})


# ---------------------------------------------------------------- votes, and fewer ranks

_processes: dict[int, int] = {}  # handles of the other ranks' processes, which never stand for another process


def outlive(control: MpiProcesses) -> None:
    """Let a rank that fails by itself end alone; others can `shrink`.

    Raises:
        UsageError: on all ranks alike: they are on several hosts, or do not see each other's processes.
    """
    space = job_folder.pid_space()
    pids = control.allgather_object([os.getpid(), space])
    if len(set(control.hosts)) > 1 or len({other for _, other in pids}) > 1 or space == 0:
        raise UsageError(
            "on_rank_loss: got shrink with ranks on several hosts, or in several containers; take --on-rank-loss end"
        )
    _open_processes(control, [pid for pid, _ in pids])
    failures.job.kill = _kill


def _open_processes(control: MpiProcesses, pids: Sequence[int]) -> None:
    for handle in _processes.values():
        os.close(handle)
    _processes.clear()
    for rank in set(range(control.size)) - {control.rank}:
        with contextlib.suppress(ProcessLookupError):  # it has died meanwhile
            _processes[rank] = os.pidfd_open(pids[rank])


def _kill(ranks: Sequence[int]) -> bool:
    """Kill these ranks; False if one had ended."""
    handles = [_processes[rank] for rank in set(ranks) & set(_processes)]
    ended = select.select(handles, [], [], 0)[0]
    for handle in set(handles) - set(ended):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    return not ended


def vote(control: MpiProcesses, holds: bool) -> bool:
    """Return True if all ranks are alive and give True (ULFM's agree).

    All that live get the same answer, whoever dies. After False all of them must `shrink`.
    """
    try:
        return bool(control.votes.Agree(int(holds)))
    except Exception as error:
        if not is_mpi_error(error):
            raise
        return False


def revoke(control: MpiProcesses) -> None:
    """Make all messages fail, so that nobody waits for a lost rank."""
    for comm in [*control.comms]:
        if not comm.Is_revoked():
            comm.Revoke()


def can_shrink(control: MpiProcesses) -> bool:
    """Return True if this MPI and mpi4py have what that takes."""
    return all(hasattr(control.world, name) for name in ("Agree", "Shrink", "Revoke", "Is_revoked"))


def shrink(control: MpiProcesses, why: str) -> list[int]:
    """Renumber the ranks left in `control`; return the launcher's numbers of those gone.

    All that live come here together, once a vote has failed, with no message under way. Copies made before, for other
    threads, are of no more use.

    Args:
        why: the error after which this is done; empty on ranks that have seen none.

    Raises:
        AgreedError: nobody is gone, so something else was wrong.
    """
    revoke(control)
    before, is_agreed = control.numbers, False
    mine = np.array([before[control.rank], os.getpid()], np.int64)
    while not is_agreed:
        votes, has_met = control.votes.Shrink(), False
        control.comms[:] = [votes]
        try:
            control.make_communicators(votes)
            rows = np.empty((control.size, 2), np.int64)
            control.world.Allgather(mine, rows)
            control.numbers, has_met = tuple(rows[:, 0].tolist()), True
            _open_processes(control, rows[:, 1].tolist())
        except Exception as error:
            if not is_mpi_error(error):
                raise
            revoke(control)
        is_agreed = vote(control, has_met)  # False if another has died meanwhile
    lost_ranks = sorted(set(before) - set(control.numbers))
    if not lost_ranks:
        why = next(filter(None, control.allgather_object(why)), "no rank knows why")  # reason of a rank that knows it
        raise AgreedError(f"a message between ranks has failed though none of them is gone: {why}")
    control.hosts = tuple(control.hosts[before.index(rank)] for rank in control.numbers)
    return lost_ranks
