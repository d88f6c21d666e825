"""Sums through shared memory, with threads for ranks: each has its own mapping and its own end of the chain."""

import mmap
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxmpi.comm import shared_sum, shared_sync
from jaxmpi.comm.shared_sum import SharedSum
from jaxmpi.comm.shared_sync import ARRIVED, HEADER, ROW, SharedCounters, table_bytes
from jaxmpi.core import shared_memory
from jaxmpi.core.errors import TrainingError, UsageError


class Threads:
    """The control plane between threads that stand for ranks."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, box: list) -> None:
        self.local_rank, self.local_size, self.barrier, self.box = rank, size, barrier, box

    def host_barrier(self) -> None:
        self.barrier.wait(timeout=60)

    def bcast_from_host_leader(self, make: Callable[[], Any]) -> Any:
        if self.local_rank == 0:
            self.box[:] = [make()]
        self.host_barrier()
        return self.box[0]


class Containers(Threads):
    """Ranks that do not see the processes of the others."""

    def bcast_from_host_leader(self, make: Callable[[], Any]) -> Any:
        pid, *rest = super().bcast_from_host_leader(make)
        return 0 * pid, *rest


def together(size: int, work: Callable[[SharedSum, int], Any], host: type = Threads, **options) -> list[Any]:
    """Return what `work(engine, rank)` gives or raises, on every rank."""
    barrier, box = threading.Barrier(size), []
    came: list[Any] = [None] * size

    def rank_of(rank: int) -> None:
        try:
            engine = SharedSum(host(rank, size, barrier, box), f"sum {rank}", **options)
            try:
                came[rank] = work(engine, rank)
            finally:
                engine.close()
        except Exception as error:
            came[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return came


def sums(size: int, lists: list[tuple[str, list[list[np.ndarray]]]], divisor: float = 1, each: bool = True) -> list:
    """[rank][call][vector]: the results of one call after another; each is a half, and vectors by rank."""

    def work(engine: SharedSum, rank: int) -> list[list[np.ndarray]]:
        made, engine.each_divides = [], each
        for half, vectors in lists:
            like = {"scatter": lambda x: x[: x.size // size], "gather": lambda x: np.tile(x, size)}.get(half, np.copy)
            made.append([np.full_like(like(x), 77) for x in vectors[rank]])
            engine.add(vectors[rank], made[-1], divisor, half)
        return made

    came = together(size, work)
    for result in came:
        if isinstance(result, Exception):
            raise result
    return came


def random_vectors(size: int, shapes: list, seed: int = 0) -> list[list[np.ndarray]]:
    """[rank][vector] f32."""
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(shape).astype(np.float32) for shape in shapes] for _ in range(size)]


def in_rank_order(rows: list[np.ndarray], divisor: float = 1) -> np.ndarray:
    """Return what every strategy that adds in f32 in the order of ranks gives, bit for bit."""
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total / np.float32(divisor)


def check_calls(size: int, lists: list, divisor: float = 1, each: bool = True) -> None:
    """A scatter gives each rank its slice of the sum, a gather all ranks' slices."""
    for rank, made in enumerate(sums(size, lists, divisor, each)):
        for (half, vectors), results in zip(lists, made, strict=True):
            for rows, got in zip(zip(*vectors, strict=True), results, strict=True):
                want = np.concatenate(rows) if half == "gather" else in_rank_order([*rows], divisor)
                want = want.reshape(size, -1)[rank] if half == "scatter" else want
                assert got.tobytes() == want.tobytes()


SIZES = {
    "nothing": [],
    "empty": [0, 0],
    "one": [1],
    "largest small": [shared_sum.SMALL],
    "smallest chain": [shared_sum.SMALL + 1],
    "many small": [1] * 300,
    "no multiple of ranks or lines": [shared_sum.CHUNK + 13, 0, 5, 3 * shared_sum.CHUNK - 1, 17],
    "slots used again": [shared_sum.CHUNK] * 40,
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_sum_is_that_of_rank_order_in_every_bit(size, sizes):
    check_calls(size, [("", random_vectors(size, sizes))])


@pytest.fixture
def tiny(monkeypatch):
    """Chunks so small that short vectors go many times round."""
    for name, floats in {"CHUNK": 48, "SHORT": 32, "LEAST": 16, "SMALL": 96}.items():
        monkeypatch.setattr(shared_sum, name, floats)


widths = st.lists(st.integers(0, 70) | st.sampled_from([32, 48, 700, 3000]), max_size=6)
calls = st.lists(st.tuples(st.sampled_from(["", "", "scatter", "gather"]), widths), min_size=1, max_size=6)


def test_any_sums_and_halves_one_after_another(tiny):
    """Ranks leave a scatter at once."""

    @given(st.integers(1, 6), calls, st.sampled_from([1, 3, 8]), st.booleans())
    def holds(size: int, calls: list[tuple[str, list[int]]], divisor: float, each: bool) -> None:
        halves = {half for half, _ in calls}
        shapes = [(half, [size * n if half == "scatter" else n for n in widths]) for half, widths in calls]
        lists = [(half, random_vectors(size, each, i)) for i, (half, each) in enumerate(shapes)]
        check_calls(size, lists, 1 if "gather" in halves else divisor, each)

    holds()


def test_ranks_in_different_halves_are_refused(tiny):
    def work(engine: SharedSum, rank: int) -> None:
        half, sizes = [("scatter", (60, 30)), ("gather", (30, 60))][rank]
        engine.add([np.ones(sizes[0], np.float32)], [np.ones(sizes[1], np.float32)], half=half)

    came = together(2, work)
    assert any("another divisor or half" in str(error) for error in came), came


def test_results_may_be_the_operands_and_have_any_shape(tiny):
    vectors = random_vectors(3, [(), (4, 50), (0, 3), (500,)])
    expected = [in_rank_order([vectors[rank][i].copy() for rank in range(3)]) for i in range(4)]

    def work(engine: SharedSum, rank: int) -> None:
        engine.add(vectors[rank], vectors[rank])

    assert together(3, work) == [None] * 3
    for rank in range(3):
        for got, want in zip(vectors[rank], expected, strict=True):
            assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("size_of_vector", [10, 300])
def test_nan_and_infinity_of_one_rank_reach_all(size_of_vector, tiny):
    vectors = [[np.ones(size_of_vector, np.float32)] for _ in range(3)]
    vectors[0][0][0], vectors[1][0][1], vectors[2][0][2] = np.nan, np.inf, -np.inf
    vectors[0][0][2] = np.inf
    vectors[0][0][3] = vectors[1][0][3] = 3e38
    for [[total]] in sums(3, [("", vectors)], 3):
        assert np.isnan(total[[0, 2]]).all()
        assert (total[[1, 3]] == np.inf).all()
        assert (total[4:] == 1).all()


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("odd", [[5, 5], [300], []])
@pytest.mark.parametrize("expected", [[4, 6], [100, 200]])
def test_a_rank_with_another_list_is_found_before_results_are_used(expected, odd, tiny):
    lists = [[np.ones(n, np.float32) for n in (odd if rank == 1 else expected)] for rank in range(3)]
    came = together(3, lambda engine, rank: engine.add(lists[rank], [x.copy() for x in lists[rank]]), timeout_s=20)
    assert all(isinstance(error, (UsageError, TrainingError)) for error in came), came
    found = [str(error) for error in came if isinstance(error, UsageError)]
    assert found
    assert "all ranks must sum the same list" in found[0]


@pytest.mark.e2e
@pytest.mark.parametrize("n", [3, 900])
def test_an_absent_rank_is_named_when_time_is_up(n, tiny):
    def work(engine: SharedSum, rank: int) -> None:
        x = np.ones(n, np.float32)
        for _ in range(2 if rank == 1 else 3):
            engine.add([x], [x.copy()])

    came = together(3, work, timeout_s=1.5)
    assert came[1] is None
    assert all(isinstance(came[rank], TrainingError) for rank in (0, 2))
    texts = [str(came[rank]) for rank in (0, 2)]
    assert any("s in a sum for local rank 1; all ranks must come to it as often" in text for text in texts), texts


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when a test says so."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    return clock


def test_a_rank_that_was_stopped_itself_accuses_nobody(clock, monkeypatch):
    waiting, looks = SharedCounters(mmap.mmap(-1, table_bytes(2)), 0, 2, timeout_s=60.0), iter(range(1000))
    waiting.begin((1, 2, 3))
    waiting.post(ARRIVED, 1)

    def sleep_on(address: int, seen: int, timeout_s: float) -> None:
        look = next(looks)
        clock.now_s += 3600.0 if look in (8, 12) else timeout_s
        if look == 20:  # the other was stopped as well, and needs a moment to come
            waiting.words[ROW + HEADER + 3 : ROW + HEADER + 6] = memoryview(array("q", (1, 2, 3)))
            waiting.words[ROW + ARRIVED] = 1

    monkeypatch.setattr(shared_sync, "sleep_on", sleep_on)
    waiting.wait(1, ARRIVED, 1)
    assert next(looks) == 21


def test_a_failed_rank_ends_the_sums_of_all_and_later_ones(tiny):
    def work(engine: SharedSum, rank: int) -> list[str]:
        x, texts = np.ones(900, np.float32), []
        odd = x.astype(np.float64) if rank == 2 else x
        for _ in range(2):
            try:
                engine.add([x], [x.copy()])
                engine.add([odd], [x.copy()])
            except (UsageError, TrainingError) as error:
                texts.append(str(error))
        return texts

    came = together(3, work, timeout_s=20)
    assert "got float64[900]" in came[2][0]
    assert "expected float32, C-contiguous" in came[2][0]
    for texts in (came[0], came[1], [came[2][1]]):
        assert all("local rank 2 failed in a sum over this host" in text for text in texts)


def test_ranks_that_share_no_memory_are_told_so():
    came = together(3, lambda engine, rank: None, host=Containers)
    assert [str(error).split(" share")[0] for error in came] == [
        "local ranks [1, 2]",
        "local ranks [0, 2]",
        "local ranks [0, 1]",
    ]


def test_no_room_is_an_error_on_all_ranks(monkeypatch):
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 1000)
    came = together(2, lambda engine, rank: None)
    assert all(isinstance(error, UsageError) and "asa" in str(error) for error in came), came


# ---------------------------------------------------------------- in programs


def test_one_rank_in_jit_means_its_own_and_keeps_shapes():
    [came] = together(
        1,
        lambda engine, rank: jax.jit(lambda x: engine.sum(x, 4))(
            [jnp.arange(6.0).reshape(2, 3), jnp.zeros((0, 2)), jnp.float32(8)]
        ),
    )
    assert [x.tolist() for x in came] == [[[0, 0.25, 0.5], [0.75, 1, 1.25]], [], 2]
    assert [x.shape for x in came] == [(2, 3), (0, 2), ()]


def test_a_thousand_sums_leave_no_map(tiny):
    def maps() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    def work(engine: SharedSum, rank: int) -> tuple[int, int]:
        x, counts = np.ones(100, np.float32), []
        for i in range(1000):
            engine.add([x], [x.copy()])
            if i in (10, 999):
                counts.append(maps())
        return counts[0], counts[1]

    for before, after in together(2, work):
        assert after <= before + 4  # what malloc does meanwhile
