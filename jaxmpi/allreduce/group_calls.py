"""Comparison of calls between the ranks of any communicator.

Over all ranks of the job `call_order` compares numbers that ranks agree on as they trace. The ranks of a part of the
job trace programs of which others know nothing, so there are no such numbers. They compare texts by a message instead,
whenever the program runs: 32 bytes a rank, for which each waits.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from jaxmpi.allreduce import call_order
from jaxmpi.allreduce.comm_thread_calls import mpi_effect
from jaxmpi.comm.agreement import Fingerprint
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.comm.shared_sync import TIMEOUT_S
from jaxmpi.runtime import host_callbacks

COMPARE = "jaxmpi: ranks of a part of the job compare a call"
Mark = int | str | None  # a number that all ranks know, a text, or nothing to compare


def is_part(comm: Comm) -> bool:
    """Return True if these are some of the job's ranks, not all."""
    return isinstance(comm, MpiComm) and comm is not world()


def mark_of(comm: Comm, what: str) -> Mark:
    """Mark by which programs compare a call; all ranks of the communicator come here together as they trace.

    Args:
        comm: who takes part.
        what: the call, for messages.
    """
    if not is_part(comm):
        return call_order.number_of(comm, what)
    return None if comm.size == 1 or host_callbacks.why_not() else what


@contextmanager
def compared(comm: Comm, mark: Mark) -> Iterator[None]:
    """Compare the call that is traced inside with those of the other ranks; nothing if there is no mark.

    Ranks that differ end the job, with the call that each of them has come to.
    """
    if isinstance(mark, str):
        assert isinstance(comm, MpiComm)
        number = number_here(comm)
        host_callbacks.call(COMPARE, [], [], effect=mpi_effect(comm), comm=number, what=mark)
        yield
    else:
        with call_order.compared(comm, mark):
            yield


_controls: list = []  # of parts of the job, by their number in this process


@functools.cache
def number_here(comm: MpiComm) -> int:
    """Number of a part of the job in this process; all its ranks come here together for the first time."""
    if not _controls:
        host_callbacks.register(COMPARE, _compare, ends_job=True)
    control = comm.processes.apart()
    control.may_overlap = True  # it speaks from programs, and so must not wait for their end
    _controls.append(control)
    return len(_controls) - 1


def _compare(operands: Sequence[np.ndarray], results: Sequence[np.ndarray], comm: int, what: str) -> None:
    """Handler that programs call before a call on a part of the job."""
    _controls[comm].compare(Fingerprint(what, what, hashlib.sha256(what.encode()).digest()), TIMEOUT_S)
