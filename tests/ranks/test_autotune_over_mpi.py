"""`auto` on real ranks. The cache that counts is rank 0's."""

import copy
import json
import re
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxmpi
from jaxmpi.allreduce import autotune, measuring, overlap
from jaxmpi.comm.base import ring_order
from jaxmpi.comm.job import processes
from jaxmpi.comm.mpi import MpiComm

COMM = jaxmpi.world()
SIZE, RANK = COMM.size, int(COMM.rank)
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not isinstance(COMM, MpiComm), reason="one rank has nothing to choose"),
]
SIZES = [3000, 5, 700]


def workers(hosts: int = 1) -> MpiComm:
    """The ranks of this host, without cached choices, as if they were on several."""
    assert isinstance(COMM, MpiComm)
    comm = copy.copy(COMM)
    comm._cache = {}
    comm.hosts = tuple(rank % hosts for rank in range(SIZE))
    comm.order = ring_order(comm.hosts)
    return comm


@pytest.fixture
def cache(monkeypatch):
    """A cache of this test's own, filled also while others compute. Ranks would clean up each other's tmp_path."""
    monkeypatch.setattr(autotune, "BUDGET_S", 1e-9)
    monkeypatch.setattr(autotune, "STEADY", float("inf"))
    monkeypatch.setattr(autotune, "CHANGED", 1e6)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        yield Path(folder)


@pytest.fixture
def timed(cache, monkeypatch):
    """The same for choices of which it matters that they are made: all strategies take a millisecond."""
    monkeypatch.setattr(autotune.Trials, "seconds", lambda *_: 1e-3)
    return cache


def choices(cache: Path) -> list[Path]:
    return sorted((cache / "jaxmpi" / "auto").glob("*"))


def rows() -> list[np.ndarray]:
    """Small whole numbers: their sums are exact, whatever the strategy."""
    rng = np.random.default_rng(7)
    return [rng.integers(-99, 99, (SIZE, n)).astype(np.float32) for n in SIZES]


def test_auto_sums_inside_and_outside_jit_and_says_once_what_it_chose(cache, capsys):
    comm = workers()

    def total(tree):
        return jaxmpi.exchange(tree, "auto", op="sum", comm=comm)

    mine = [row[RANK] for row in rows()]
    for call in (jax.jit(total), total):
        for row, got in zip(rows(), call(mine), strict=True):
            assert np.array_equal(np.asarray(got), row.sum(0))
    lines = [line for line in capsys.readouterr().out.splitlines() if "auto: " in line]
    assert len(lines) == (RANK == 0)
    assert len(choices(cache)) == (RANK == 0)


def test_each_size_has_a_choice_of_its_own_and_keeps_it(timed, capsys):
    comm = workers()
    for length in (1, 1 << 16, 3, 1 << 16, (1 << 17) - 1):
        assert float(jaxmpi.exchange(np.ones(length, np.float32), "auto", "sum", comm)[-1]) == SIZE
    lines = [line for line in capsys.readouterr().out.splitlines() if "auto: " in line]
    assert len(lines) == 3 * (RANK == 0)  # 1, 3, and 2^16 to 2^17 - 1 floats
    assert len(choices(timed)) == 3 * (RANK == 0)


def test_auto_for_overlap_chooses_what_can_overlap(timed, capsys):
    comm = workers()
    total = jax.jit(lambda tree: overlap.exchange(jax.tree.map(lambda x: x * 1, tree), "auto", op="sum", comm=comm))
    for row, got in zip(rows(), total([row[RANK] for row in rows()]), strict=True):
        assert np.array_equal(np.asarray(got), row.sum(0))
    said = capsys.readouterr().out
    assert re.search("auto: (hier-)?(asa|ring|tree|color2|color4|pipering):32", said) if RANK == 0 else not said


def test_all_ranks_choose_alike_and_reuse_a_cached_choice_unless_a_fresh_one_is_requested(cache, monkeypatch):
    first = autotune.choose(workers(), SIZES)
    before = [path.stat().st_mtime_ns for path in choices(cache)]
    again = autotune.choose(workers(), SIZES)
    assert set(processes().allgather_object(json.dumps(first))) == {json.dumps(first)}
    assert first.strategy == again.strategy
    assert "cached" in again.why
    assert [path.stat().st_mtime_ns for path in choices(cache)] == before
    monkeypatch.setenv("JAXMPI_PROBE", "fresh")
    autotune.choose(workers(), SIZES)
    assert all(path.stat().st_mtime_ns > old for path, old in zip(choices(cache), before, strict=True))


def test_all_are_timed_again_if_the_cached_one_takes_another_time_now(timed, monkeypatch):
    """As after a change of the network, or if other processes computed when it was timed."""
    autotune.choose(workers(), SIZES)
    monkeypatch.setattr(autotune, "CHANGED", 3.0)
    for path in choices(timed):  # on rank 0
        value = json.loads(path.read_text())
        value["strategy"], value["seconds"] = "ring:32", {"ring:32": 1e3}
        path.write_text(json.dumps(value))
    again = autotune.choose(workers(), SIZES)
    assert "when it was cached" in again.why
    assert set(processes().allgather_object(again.strategy)) == {again.strategy}
    for path in choices(timed):
        assert len(json.loads(path.read_text())["seconds"]) == 4


def test_what_was_timed_while_others_compute_is_not_cached(timed, monkeypatch):
    monkeypatch.setattr(autotune, "STEADY", 0.0)
    assert "other processes compute" in autotune.choose(workers(), SIZES).why
    assert not choices(timed)


def test_the_fastest_is_found_while_others_compute(cache, monkeypatch):
    """Seconds as they came on 8 ranks while two other processes computed; undisturbed, 0.2, 0.5, 0.5 and 0.5."""
    came = {
        "shm:32": [3.3, 1.79, 1.5, 0.6, 1.6, 0.2, 1.5],
        "asa:32": [2.5, 2.0, 1.5, 2.5],
        "ring:32": [4.2, 3.3, 3.3, 3.2],
        "ar:32": [2.7, 0.5, 0.57, 0.65, 0.53, 0.65],
    }
    monkeypatch.setattr(
        autotune.Trials, "seconds", lambda _, name: came[name].pop(0) if len(came[name]) > 1 else came[name][0]
    )
    assert autotune.choose(workers(), SIZES).strategy == "shm:32"


def test_interleaved_timing_ends_in_time_if_exchanges_become_slower(cache, monkeypatch):
    calls = []

    def seconds(_, name):
        calls.append(name)
        time.sleep(0.05 * (calls.count(name) > 1 + autotune.WARM))
        return 1e-3

    monkeypatch.setattr(autotune, "BUDGET_S", 0.1)
    monkeypatch.setattr(autotune.Trials, "seconds", seconds)
    autotune.choose(workers(), SIZES)
    assert calls.count(calls[0]) == 1 + autotune.WARM + autotune.ROUNDS[0]


@pytest.mark.slow  # compiles at several lengths
def test_a_probe_for_plan_has_prices_and_seconds(cache):
    if SIZE > 4:
        pytest.skip("8 ranks compile for long")
    hosts = 2 if SIZE % 2 == 0 else 1
    comm = workers(hosts)
    got = measuring.probe(comm, ("32",))
    assert (got.net.hosts, got.net.slots, got.net.even) == (hosts, SIZE // hosts, True)
    assert len(got.seconds) >= 2
    assert all(len(times) == 2 and min(times.values()) > 0 for times in got.seconds.values())
    assert got.net.inside.beta_s_per_byte > 0 or got.net.slots == 1
    assert got.net.between.beta_s_per_byte > 0 or hosts == 1
    assert measuring.probe(comm, ("32",)) == got


def test_a_wire_is_used_only_when_asked_for(timed):
    autotune.choose(workers(), SIZES, "auto:16")
    assert autotune.choose(workers(), SIZES, "auto").strategy.endswith(":32")
    with pytest.raises(jaxmpi.UsageError, match="unknown wire '17'"):
        jaxmpi.exchange(np.ones(3, np.float32), "auto:17")


@pytest.mark.parametrize("text", ["{", '{"strategy": "warp:32", "seconds": {}, "floats": 1}'])
def test_a_damaged_file_is_timed_again(timed, text):
    autotune.choose(workers(), SIZES)
    for path in choices(timed):
        path.write_text(text)
    assert "cached)" not in autotune.choose(workers(), SIZES).why
    assert all(json.loads(path.read_text())["seconds"] for path in choices(timed))


def test_ranks_that_disagree_are_named(timed):
    with pytest.raises(jaxmpi.UsageError, match=r"rank 1: floats: got \[3000, 6, 700\], expected \[3000, 5, 700\]"):
        autotune.choose(workers(), [3000, 5 + (RANK == 1), 700])
    with pytest.raises(jaxmpi.UsageError, match="different calls: rank 0 to 'auto', rank 1 to 'exchange'"):
        jaxmpi.exchange(np.ones(3, np.float32), "asa32" if RANK == 1 else "auto", comm=workers())
