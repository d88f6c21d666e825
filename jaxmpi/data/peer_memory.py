"""Reads of other processes' memory on this host, by Linux's `process_vm_readv`.

A read is one copy, and needs no help of the other process. That what is read is complete and stays must be agreed on by
other means.
"""

import ctypes
import errno
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmpi.core.errors import TrainingError
from jaxmpi.data.memory_source import Arena

MOST_SPANS = 1024  # spans in one call, by POSIX's IOV_MAX
LAUNCHER_FIRST_S = 5.0  # for the launcher to say which process is gone, and to end this one
_readv: Any = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    _readv.restype = ctypes.c_ssize_t


def read_memory(pid: int, begins: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> None:
    """Copy spans of process `pid`'s memory, i64[k] addresses and lengths, one after another into u8 `out`.

    Raises:
        OSError: the system does not permit it, the process has ended, or there is no such memory.
    """
    if _readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    ends, at = np.cumsum(lengths), 0
    while at < out.size:  # the system may copy less than asked for: at most 2 GiB at once
        first = int(np.searchsorted(ends, at, "right"))
        spans = np.stack([begins[first : first + MOST_SPANS], lengths[first : first + MOST_SPANS]], axis=1)
        done = at - int(ends[first] - lengths[first])
        spans[0] += done, -done
        target = np.array([out.ctypes.data + at, spans[:, 1].sum()], np.int64)
        copied = _readv(pid, target.ctypes.data, 1, spans.ctypes.data, len(spans), 0)
        if copied <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"memory of process {pid}: {os.strerror(error)}")
        at += copied


class PeerMemory:
    """The members of a group (of mpi4py, on these hosts) that read each other's memory.

    Communicates: once when made, two allgathers over the group.

    Attributes:
        is_forbidden: whether the system of this host does not permit it.
        near: bool[members], this process included. All members of a host are near to each other, or none.
    """

    def __init__(self, group: Any, hosts: Sequence[int]) -> None:
        token = np.frombuffer(os.urandom(16), np.int64)  # in containers a process number may be another's
        rows = np.empty((group.size, 4), np.int64)
        group.Allgather(np.array([os.getpid(), token.ctypes.data, *token], np.int64), rows)
        self.pids = rows[:, 0]
        is_here = np.array(hosts) == hosts[group.rank]
        can_read = np.empty(group.size, np.uint8)
        group.Allgather(np.array([all(map(_is_readable, rows[is_here]))], np.uint8), can_read)
        self.is_forbidden = not can_read[is_here].all()
        self.near = is_here & (not self.is_forbidden)
        self.near[group.rank] = True


def _is_readable(row: np.ndarray) -> bool:
    pid, address, *token = row.tolist()
    got = np.empty(2, np.int64)
    try:
        read_memory(pid, np.array([address]), np.array([got.nbytes]), got.view(np.uint8))
    except OSError:
        return False
    return got.tolist() == token


def arena_addresses(arena: Arena) -> np.ndarray:
    """i64[4]: addresses of an arena's bytes, records and begins, and the count."""
    return np.array([*(x.ctypes.data for x in (arena.bytes, arena.records, arena.begins)), arena.records.size])


class PeerArena:
    """An arena of another process, which keeps it while this is used; `addresses` are `arena_addresses` there."""

    def __init__(self, pid: int, addresses: np.ndarray, lengths: np.ndarray) -> None:
        self.pid, self.lengths = pid, lengths
        at_bytes, at_records, at_begins, count = addresses.tolist()
        self.records, begins = np.empty((2, count), np.int64)
        for table, address in ((self.records, at_records), (begins, at_begins)):
            self._read(np.array([address]), np.array([table.nbytes]), table.view(np.uint8))
        self.begins = begins + at_bytes

    def gather(self, records: np.ndarray, out: np.ndarray) -> None:
        """Copy these records, one after another, into u8 of their length; raise `TrainingError` if it has ended."""
        self._read(self.begins[np.searchsorted(self.records, records)], self.lengths[records], out)

    def _read(self, begins: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> None:
        try:
            read_memory(self.pid, begins, lengths, out)
        except OSError as error:
            time.sleep(LAUNCHER_FIRST_S)
            what = "the data set in memory: records of another worker of this host cannot be read any more"
            raise TrainingError(f"{what}; {error}") from error
