"""`auto` on real ranks: run by tests/test_mpirun.py. The cache that counts is rank 0's."""

import copy
import json
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxmpi
from jaxmpi.allreduce import autotune, cost_model, measuring, overlap, prices
from jaxmpi.allreduce.probes import FORMAT
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
    """The ranks of this host, on which nothing is settled yet, as if dealt out to several."""
    assert isinstance(COMM, MpiComm)
    comm = copy.copy(COMM)
    comm.hosts = tuple(rank % hosts for rank in range(SIZE))
    comm.order = ring_order(comm.hosts)
    return comm


@pytest.fixture
def cache(monkeypatch):
    """A cache of this test's own, and time for two strategies only. Ranks would clean up each other's tmp_path."""
    monkeypatch.setattr(measuring, "BUDGET_S", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        yield Path(folder)


def probes(cache: Path) -> list[Path]:
    return sorted((cache / "jaxmpi" / "probes").glob("*"))


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
    assert len(probes(cache)) == (RANK == 0)


def test_every_size_class_has_a_choice_of_its_own_and_keeps_it(cache, monkeypatch, capsys):
    """Messages are said to be dear and additions too, so a scalar and 8 MB want different strategies."""
    comm, timed = workers(), []
    net = prices.Net(1, SIZE, prices.Link(1e-3, 1e-8), prices.Link(0.0, 0.0), 1e-9)
    monkeypatch.setattr(measuring, "BUDGET_S", 60.0)
    monkeypatch.setattr(measuring, "HOPELESS", 100.0)  # all are timed, however many the ranks
    monkeypatch.setattr(measuring, "measure_net", lambda comm: net)

    def time(comm, name, n):
        """A root is quick with short vectors, shared memory with long ones."""
        timed.append(name)
        return {"root": 1e-6 + 1e-7 * n, "shm": 1e-4 + 1e-10 * n}.get(name.partition(":")[0], 1e-2 + 1e-8 * n)

    monkeypatch.setattr(measuring, "time_strategy", time)
    monkeypatch.setattr(cost_model, "candidates", lambda net, wires: ["asa:32", "root:32", "shm:32"])
    monkeypatch.setenv("JAXMPI_PROBE", "fresh")
    total = jax.jit(lambda x: jaxmpi.exchange(x, "auto", op="sum", comm=comm))
    for call, length in ((total, 1), (total, 1 << 21), (lambda x: jaxmpi.exchange(x, "auto", "sum", comm), 5 << 18)):
        assert np.array_equal(np.asarray(call(np.full(length, RANK + 1, np.float32))), [SIZE * (SIZE + 1) / 2] * length)
    lines = [line for line in capsys.readouterr().out.splitlines() if "auto: " in line]
    assert re.findall(r"auto: (\w+)", "\n".join(lines)) == (["root", "shm", "shm"] if RANK == 0 else [])
    count = len(timed)
    for length in (1, (1 << 22) - 1, 1 << 20):
        assert float(jaxmpi.exchange(np.ones(length, np.float32), "auto", "sum", comm)[-1]) == SIZE
    assert len(timed) == count <= 6  # two lengths of each strategy, whatever the class
    assert "auto: " not in capsys.readouterr().out


def test_auto_beside_a_program_is_what_can_run_there(cache, capsys):
    comm = workers()
    total = jax.jit(lambda tree: overlap.exchange(jax.tree.map(lambda x: x * 1, tree), "auto", op="sum", comm=comm))
    for row, got in zip(rows(), total([row[RANK] for row in rows()]), strict=True):
        assert np.array_equal(np.asarray(got), row.sum(0))
    said = capsys.readouterr().out
    assert re.search("auto: (hier-)?(asa|ring|tree|color2|color4|pipering):32", said) if RANK == 0 else not said


def test_all_ranks_choose_alike_and_a_saved_probe_is_used_again(cache):
    first = autotune.choose(workers(), SIZES)
    kept = [path.stat().st_mtime_ns for path in probes(cache)]
    again = autotune.choose(workers(), SIZES)
    assert set(processes().allgather_object(json.dumps(first))) == {json.dumps(first)}
    assert (first.strategy, first.bucket_bytes) == (again.strategy, again.bucket_bytes)
    assert [path.stat().st_mtime_ns for path in probes(cache)] == kept


@pytest.mark.slow  # measures with time to spare
def test_with_time_several_strategies_are_measured_and_the_fastest_is_taken(cache, monkeypatch):
    if SIZE > 4:
        pytest.skip("8 ranks compile for long")
    monkeypatch.setattr(measuring, "BUDGET_S", 60.0)
    hosts = 2 if SIZE % 2 == 0 else 1
    comm = workers(hosts)
    got = autotune.probe(comm, measuring.AutotuneRequest((1 << 20,)))
    assert (got.net.hosts, got.net.slots, got.net.even) == (hosts, SIZE // hosts, True)
    assert len(got.seconds) >= 2
    assert all(len(times) == 2 and min(times.values()) > 0 for times in got.seconds.values())
    assert got.net.inside.beta_s_per_byte > 0 or got.net.slots == 1
    assert got.net.between.beta_s_per_byte > 0 or hosts == 1
    verdict = autotune.choose(comm, [1 << 20])
    seconds = {n: cost_model.step_seconds(got.net, [1 << 20], n, 4 << 20, got.fits()) for n in got.seconds}
    assert seconds[verdict.strategy] <= min(seconds.values()) / (1 - autotune.MARGIN)
    assert verdict.why.startswith(f"auto: {verdict.strategy}, ")


def test_a_wire_is_taken_only_where_it_is_asked_for(cache):
    autotune.choose(workers(), SIZES, "auto:16")
    assert autotune.choose(workers(), SIZES, "auto").strategy.endswith(":32")
    with pytest.raises(jaxmpi.UsageError, match="unknown wire '17'"):
        jaxmpi.exchange(np.ones(3, np.float32), "auto:17")


def test_a_damaged_file_is_measured_again(cache, capsys):
    autotune.choose(workers(), SIZES)
    for path in probes(cache):
        path.write_text(path.read_text()[:-30])
    assert autotune.choose(workers(), SIZES).why
    assert ("the saved probe cannot be used" in capsys.readouterr().err) == (RANK == 0)
    assert all(json.loads(path.read_text())["format"] == FORMAT for path in probes(cache))


def test_a_cache_that_cannot_be_written_is_named_and_does_without(cache, capsys):
    (cache / "jaxmpi").write_text("a file where a folder should be")
    assert autotune.choose(workers(), SIZES).why
    assert ("the probe is not kept" in capsys.readouterr().err) == (RANK == 0)


def test_a_fresh_probe_can_be_asked_for(cache, monkeypatch):
    autotune.choose(workers(), SIZES)
    before = [path.stat().st_mtime_ns for path in probes(cache)]
    monkeypatch.setenv("JAXMPI_PROBE", "fresh")
    autotune.choose(workers(), SIZES)
    assert all(path.stat().st_mtime_ns > old for path, old in zip(probes(cache), before, strict=True))


def test_ranks_that_disagree_are_named(cache):
    with pytest.raises(jaxmpi.UsageError, match=r"rank 1: floats: got \[3000, 6, 700\], expected \[3000, 5, 700\]"):
        autotune.choose(workers(), [3000, 5 + (RANK == 1), 700])
    with pytest.raises(jaxmpi.UsageError, match="different calls: rank 0 to 'auto', rank 1 to 'exchange'"):
        jaxmpi.exchange(np.ones(3, np.float32), "asa32" if RANK == 1 else "auto", comm=workers())
