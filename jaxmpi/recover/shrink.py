"""Training without a rank that has died: `--on-rank-loss shrink`.

A rank that dies makes the others' messages fail, on some of them or on all, at once or later. The rank that notices it
first makes all messages of all ranks fail, so that nobody waits, and votes No. So do the others at the end of their
step, and no rank applies it. Then they become a smaller job, and go on from the state that they hold. (ULFM; Bland et
al. 2013.)
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from jaxmpi.checkpoint.manager import Saver
from jaxmpi.comm import fault_tolerant
from jaxmpi.comm.base import Comm
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.fault_tolerant import FaultTolerantComm
from jaxmpi.comm.polling import is_mpi_error, survives_losses
from jaxmpi.comm.topology import Workers
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import AgreedError, UsageError
from jaxmpi.core.train_state import TrainState
from jaxmpi.observe.recorder import Recorder


class Lost(Exception):
    """A vote has failed, on all ranks that live."""


class CommittedState(NamedTuple):
    """The state after the last step that all ranks voted for."""

    step: int
    state: TrainState
    sums: np.ndarray  # sums of this process's metrics since the last progress line
    is_settled: bool  # True if this rank has done all that was due after the step


@dataclass
class ShrinkCoordinator:
    """Agreement, step by step, of ranks that go on without each other."""

    control: MpiProcesses
    comm: Comm
    initial_size: int  # how many ranks there were
    recorder: Recorder | None  # None on ranks that keep no record
    committed: CommittedState | None = None
    is_unsaved: bool = False  # True if a checkpoint was dropped after a loss, and none has been begun since
    lost_ranks: list[int] = field(default_factory=list)  # not in the record yet, by the launcher's numbers

    def keep(self, step: int, state: TrainState, sums: np.ndarray, is_settled: bool = False) -> None:
        """Hold a state, once all ranks have it.

        Communicates: a vote. Raises: `Lost` if a rank is gone.
        """
        jax.block_until_ready(state)
        self.vote()
        self.committed = CommittedState(step=step, state=state, sums=sums.copy(), is_settled=is_settled)

    def note_settled(self, sums: np.ndarray) -> None:
        """All that was due after the step is done here."""
        assert self.committed is not None
        self.committed = self.committed._replace(sums=sums.copy(), is_settled=True)

    def vote(self) -> None:
        """Go on together; raises `Lost` if a rank is gone."""
        why = self.comm.why_lost if isinstance(self.comm, FaultTolerantComm) else ""
        if not fault_tolerant.vote(self.control, not why):
            raise Lost(why)

    def after(self, error: Exception, saver: Saver) -> None:
        """Shrink to the remaining ranks after a loss; drop an unfinished checkpoint."""
        if not (isinstance(error, Lost) or is_mpi_error(error)):
            raise error
        # Others may wait for messages of ranks that have come here: revoked, these fail, and they come here, too.
        fault_tolerant.revoke(self.control)
        # A rank whose message has failed owes the vote in which those wait that have seen no failure.
        if not isinstance(error, Lost):
            fault_tolerant.vote(self.control, False)
        self.is_unsaved = saver.abandon() or self.is_unsaved
        # Programs that were dispatched run to their end with zeros for what does not come; their results are dropped.
        jax.effects_barrier()
        self.lost_ranks += fault_tolerant.shrink(self.control, str(error))
        if self.committed is None:
            raise AgreedError(f"{self.describe_gone()} before the first step: there is no state to go on from")

    def renew(self, workers: Workers) -> None:
        """Go on with these workers."""
        if isinstance(self.comm, FaultTolerantComm):
            self.comm.close()
        self.comm = workers.comm

    def describe_gone(self) -> str:
        """The ranks that are gone, for messages."""
        return f"rank {', '.join(map(str, self.lost_ranks))} of the launcher's is gone"


def shrinking(experiment: Experiment, workers: Workers, recorder: Recorder | None) -> ShrinkCoordinator | None:
    """Coordinator of `--on-rank-loss shrink` between several ranks; else None.

    Args:
        recorder: None on ranks that do not keep the record.
    """
    control = workers.processes
    if experiment.on_rank_loss != "shrink" or not isinstance(control, MpiProcesses):
        return None
    assert isinstance(workers.comm, FaultTolerantComm)
    return ShrinkCoordinator(control, workers.comm, control.size, recorder)


def check_mpi(control: MpiProcesses) -> None:
    """Refuse an MPI under which a job cannot outlive a rank."""
    if not (survives_losses() and fault_tolerant.can_shrink(control)):
        raise UsageError(
            "on_rank_loss: got shrink, but this MPI ends a job with its first rank; it takes Open MPI 5 or newer, "
            "mpi4py 4, and mpirun --with-ft ulfm, which jaxmpi train -n N adds"
        )
    if not control.may_overlap:
        raise UsageError("on_rank_loss: got shrink, but MPI gives MPI_THREAD_SERIALIZED; it takes MPI_THREAD_MULTIPLE")
