"""Waits for messages of MPI that poll, yield and give up."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator

GAP_S = 1.0  # between two looks of a wait at most, if this process runs: looks come at least every 50 ms
POLL_S = 0.001  # between looks at a pending message: a blocking MPI call would spin on a core
PROBES = 3  # MPI may fetch a message in the first, and find it in the next
YIELDS = 200  # looks before the first sleep: a message between ranks that are in step takes microseconds


class WaitClock:
    """Seconds of a wait in which this process ran.

    A process that was stopped, by SIGSTOP or with its whole machine, finds hours gone by. The others may have been
    stopped as well, and have had no time to come: it must not accuse them. So a longer gap counts as `GAP_S`.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Something has come."""
        self._seconds, self._looked_s = 0.0, time.monotonic()

    def look(self) -> float:
        """Seconds waited so far."""
        before_s, self._looked_s = self._looked_s, time.monotonic()
        self._seconds += min(self._looked_s - before_s, GAP_S)
        return self._seconds


def wait(
    is_there: Callable[[], bool],
    timeout_s: float,
    is_over: Callable[[], bool] = lambda: False,
    pause_s: Callable[[int], float] = lambda looks: POLL_S,
) -> bool:
    """Poll, yielding between looks; False after `timeout_s`, or earlier if `is_over`.

    Args:
        is_there: `request.Test` of an MPI request, or another look that lets MPI go on.
        pause_s: seconds of the sleep before the next look, by the number of looks so far, from `YIELDS` on.
    """
    waited = WaitClock()
    for looks in itertools.count():
        if is_there():
            return True
        if waited.look() > timeout_s:
            return False
        if looks < YIELDS:
            os.sched_yield()
        elif is_over():
            return is_there()
        else:
            time.sleep(pause_s(looks))
    return False


def survives_losses() -> bool:
    """Return True if the job survives dead ranks (Open MPI's `--with-ft ulfm`)."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"


def is_mpi_error(error: BaseException) -> bool:
    """Return True if MPI has raised it."""
    from mpi4py import MPI

    return isinstance(error, MPI.Exception)


def is_loss(error: Exception) -> bool:
    """Return True for errors of a lost peer, if the job survives."""
    from mpi4py import MPI

    revoked = getattr(MPI, "ERR_REVOKED", None)
    return survives_losses() and is_mpi_error(error) and error.Get_error_class() != revoked  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def lost_ranks_left_out() -> Iterator[None]:
    """Suppress errors of messages with a lost rank, if the job survives."""
    try:
        yield
    except Exception as error:
        if not is_loss(error):
            raise
