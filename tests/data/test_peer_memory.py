"""Reading another process's memory: a real one's."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxmpi.core.errors import TrainingError
from jaxmpi.data import peer_memory
from jaxmpi.data.memory_source import Arena
from launching import PATH, ROOT

LENGTHS = np.random.default_rng(0).integers(0, 9, 5000)
OTHER = """
import json, sys
from test_peer_memory import filled
from jaxmpi.data.peer_memory import arena_addresses
arena = filled()
print(json.dumps(arena_addresses(arena).tolist()), flush=True)
sys.stdin.read()
"""


def filled() -> Arena:
    arena = Arena(np.random.default_rng(1).permutation(5000)[:4000], LENGTHS)
    for record in arena.records:
        arena[record][:] = record % 251
    return arena


@contextlib.contextmanager
def other() -> Iterator[tuple[subprocess.Popen, np.ndarray]]:
    """A process that holds such an arena, and what it tells of it."""
    env = os.environ | {"PYTHONPATH": f"{PATH}:{ROOT / 'tests'}:{Path(__file__).parent}"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OTHER], stdin=pipe, stdout=pipe, env=env, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, np.array(json.loads(process.stdout.readline()), np.int64)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def there() -> Iterator[tuple[int, np.ndarray]]:
    with other() as (process, addresses):
        yield process.pid, addresses


@pytest.mark.parametrize("most", [None, 1000])
def test_records_are_read_in_any_order(there, most, monkeypatch):
    """More of them than one call takes, some of no bytes; also if the system copies less than it is asked for."""
    if most:
        whole = peer_memory._readv

        def partly(pid, here, one, there, count, flags):
            span = np.ctypeslib.as_array((peer_memory.ctypes.c_int64 * 2).from_address(here))
            span[1] = min(span[1], most)
            return whole(pid, here, one, there, count, flags)

        monkeypatch.setattr(peer_memory, "_readv", partly)
    wanted = np.random.default_rng(2).permutation(filled().records)
    out = np.zeros(LENGTHS[wanted].sum(), np.uint8)
    pid, addresses = there
    peer_memory.PeerArena(pid, addresses, LENGTHS).gather(wanted, out)
    assert out.tolist() == np.repeat(wanted % 251, LENGTHS[wanted]).tolist()


def test_a_process_that_has_ended(monkeypatch):
    monkeypatch.setattr(peer_memory, "LAUNCHER_FIRST_S", 0)
    arena = filled()
    with other() as (process, addresses):
        remote = peer_memory.PeerArena(process.pid, addresses, LENGTHS)
        process.kill()
        process.wait(10)
        said = f"cannot be read any more; .*memory of process {process.pid}: No such process"
        with pytest.raises(TrainingError, match=said):
            remote.gather(arena.records, np.empty(arena.bytes.size, np.uint8))


def test_another_process_of_that_number_is_none_of_the_group(there):
    """As in containers, where each counts its own."""
    pid, addresses = there
    token = filled().bytes[:16].view(np.int64)
    assert peer_memory._is_readable(np.array([pid, addresses[0], *token]))
    assert not peer_memory._is_readable(np.array([pid, addresses[0], *(token + 1)]))
    assert not peer_memory._is_readable(np.array([2**22 + 1, addresses[0], *token]))
