"""Reading another process's memory: a real one's."""

import contextlib
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from jaxmpi import neighbours
from jaxmpi.config import TrainingError
from jaxmpi.data.memory import Arena

LENGTHS = np.random.default_rng(0).integers(0, 9, 5000)


@contextlib.contextmanager
def child() -> Iterator[int]:
    """A process with a copy of this one's memory, which does nothing."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def filled() -> Arena:
    arena = Arena(np.random.default_rng(1).permutation(5000)[:4000], LENGTHS)
    for record in arena.records:
        arena[record][:] = record % 251
    return arena


@pytest.mark.parametrize("most", [None, 1000])
def test_records_are_read_in_any_order(most, monkeypatch):
    """More of them than one call takes, some of no bytes; also where the system copies less than it is asked for."""
    if most:
        whole = neighbours._readv

        def partly(pid, here, one, there, count, flags):
            span = np.ctypeslib.as_array((neighbours.ctypes.c_int64 * 2).from_address(here))
            span[1] = min(span[1], most)
            return whole(pid, here, one, there, count, flags)

        monkeypatch.setattr(neighbours, "_readv", partly)
    arena = filled()
    with child() as pid:
        arena_there = neighbours.told(arena)
        wanted = np.random.default_rng(2).permutation(arena.records)
        out = np.zeros(LENGTHS[wanted].sum(), np.uint8)
        remote = neighbours.Remote(pid, arena_there, LENGTHS)
        arena.bytes[:] = 255  # the other process keeps its own
        remote.gather(wanted, out)
    assert out.tolist() == np.repeat(wanted % 251, LENGTHS[wanted]).tolist()


def test_a_process_that_has_ended(monkeypatch):
    monkeypatch.setattr(neighbours, "LAUNCHER_FIRST_S", 0)
    arena = filled()
    with child() as pid:
        remote = neighbours.Remote(pid, neighbours.told(arena), LENGTHS)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        with pytest.raises(TrainingError, match=f"cannot be read any more; .*memory of process {pid}: No such process"):
            remote.gather(arena.records, np.empty(arena.bytes.size, np.uint8))


def test_memory_that_is_not_there():
    with child() as pid, pytest.raises(OSError, match="Bad address"):
        neighbours.read(pid, np.array([4096]), np.array([8]), np.empty(8, np.uint8))


def test_a_system_without_the_call(monkeypatch):
    monkeypatch.setattr(neighbours, "_readv", None)
    with pytest.raises(OSError, match="not implemented"):
        neighbours.read(os.getpid(), np.array([0]), np.array([8]), np.empty(8, np.uint8))


def test_another_process_of_that_number_is_none_of_the_group():
    """As in containers, where each counts its own."""
    token = np.arange(2) + 7
    with child() as pid:
        assert neighbours._is_readable(np.array([pid, token.ctypes.data, *token]))
        assert not neighbours._is_readable(np.array([pid, token.ctypes.data, 7, 9]))
        assert not neighbours._is_readable(np.array([2**22 + 1, token.ctypes.data, *token]))
