"""The engine in C beside the algorithms in JAX: all ranks in one process, whose messages come in a random order."""

import collections
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, POINTER, c_int, c_int32, c_int64, c_void_p
from typing import Any

import jax
import numpy as np
import pytest

from jaxmpi.allreduce import schedules
from jaxmpi.allreduce.algorithms import color_trees, parse
from jaxmpi.allreduce.algorithms.color_trees import most_edges, tree_shape
from jaxmpi.allreduce.algorithms.table import STRATEGIES
from jaxmpi.allreduce.dispatch import sum_bucket
from jaxmpi.allreduce.host_engine import SOURCE
from jaxmpi.allreduce.schedules import Group, Schedule
from jaxmpi.allreduce.wires import BLOCK, WIRES
from jaxmpi.comm.axis import AxisComm
from jaxmpi.core import scheduling
from jaxmpi.runtime import compile_cache


def rows_of(workers: int, n: int) -> np.ndarray:
    """f32[w, n] of many magnitudes, zeros of either sign among them."""
    rng = np.random.default_rng(n)
    rows = (rng.standard_normal((workers, n)) * np.exp2(rng.integers(-9, 9, (workers, n)))).astype(np.float32)
    rows[:, ::5] = -0.0
    return rows


Isend = CFUNCTYPE(c_int, c_void_p, c_int, c_int, c_int, c_int, c_int, POINTER(c_int))
SomeAreComplete = CFUNCTYPE(c_int, c_int, POINTER(c_int), POINTER(c_int), POINTER(c_int), c_void_p)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """The source as for an MPI whose handles are numbers."""
    made = compile_cache.load_c(SOURCE._path, SOURCE._headers, {"HANDLE": "int", **SOURCE._constants})
    made.jaxmpi_sum_begin.restype = c_void_p
    return made


class Pace(ctypes.Structure):
    _fields_ = tuple((name, c_int32) for name in ("is_woken", "yields", "pause_us"))


class Engine:
    """Sums of all ranks, which one thread carries on; a rank's number is its communicator's handle.

    Messages of one sender, receiver and tag come in order, all others in any.
    """

    def __init__(self, library: ctypes.CDLL, seed: int = 0) -> None:
        self.results, self.is_in_place = dict[int, np.ndarray](), bool(seed % 2)
        self.library, self.rng, self.sent_bytes = library, np.random.default_rng(seed), collections.Counter[int]()
        self.under_way = dict[int, np.ndarray]()  # by request: a message's buffer, which is MPI's until it has come
        self.ends = collections.defaultdict[Any, tuple[list[int], list[int]]](lambda: ([], []))  # requests to match
        self._functions = Isend(self._isend), Isend(self._irecv), SomeAreComplete(self._testsome)
        pointers = [ctypes.cast(function, c_void_p) for function in self._functions]
        library.jaxmpi_sum_setup((c_void_p * 6)(*pointers), 0)  # no callbacks
        self._kept, self.sums, self.requests = list[Any](), dict[int, int](), itertools.count(1)

    def _posted(self, address: int, size: int, queue: list[int], request: Any) -> int:
        request[0] = next(self.requests)
        buffer = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)) if size else np.empty(0, np.uint8)
        self.under_way[request[0]] = buffer
        queue.append(request[0])
        return 0

    def _isend(self, address: int, size: int, byte: int, to: int, tag: int, comm: int, request: Any) -> int:
        self.sent_bytes[comm] += size
        return self._posted(address, size, self.ends[comm, to, tag][0], request)

    def _irecv(self, address: int, size: int, byte: int, source: int, tag: int, comm: int, request: Any) -> int:
        return self._posted(address, size, self.ends[source, comm, tag][1], request)

    def _testsome(self, count: int, requests: Any, found: Any, indices: Any, statuses: int) -> int:
        if ready := [queues for queues in self.ends.values() if all(queues)]:
            sent, received = (queue.pop(0) for queue in ready[self.rng.integers(len(ready))])
            assert self.under_way[sent].size == self.under_way[received].size
            self.under_way.pop(received)[:] = self.under_way.pop(sent)
        ended = [i for i in range(count) if requests[i] not in self.under_way]
        found[0] = len(ended)
        for i, index in enumerate(ended):
            indices[i] = index
        return 0

    def begin(self, rank: int, schedule: Schedule, x: np.ndarray) -> None:
        steps, parts = schedule.arrays()
        scratch_bytes = -(-schedule.scratch_bytes // 64) * 64
        facts = steps.ctypes.data, parts.ctypes.data, len(parts), 2 + 22 * self.is_in_place, scratch_bytes
        record, to = np.array(facts, np.int64), x if self.is_in_place else np.full_like(x, 0.5)
        self._kept += record, steps, parts, x
        self.results[rank] = to
        pointers = c_void_p(x.ctypes.data), c_void_p(to.ctypes.data)
        options = c_int(rank), c_int64(1 << 20), *pointers, c_int64(5)
        self.sums[rank] = self.library.jaxmpi_sum_begin(c_void_p(record.ctypes.data), *options)

    def go_on(self, most_s: float) -> None:
        """Carry them on until the first has ended; forget that one."""
        pace, moved = Pace(yields=1), c_int32()
        assert not self.library.jaxmpi_sums_go_on(int(1e6 * most_s), ctypes.byref(pace), ctypes.byref(moved))
        self.sums = {rank: at for rank, at in self.sums.items() if not self.library.jaxmpi_sum_ended(c_void_p(at))}


def in_thread(run: Callable[[], Any]) -> Any:
    """The result of a thread of its own, which flushes what is subnormal, as the threads of programs do."""
    with ThreadPoolExecutor(1, initializer=scheduling.flush_subnormals) as thread:
        return thread.submit(run).result()


def sums(library: ctypes.CDLL, strategy: str, rows: np.ndarray, hosts: tuple[int, ...], half: str = ""):
    """f32[w, n] -> what each rank has after the sum or a half of it, and the bytes that each has sent."""

    def run() -> tuple[np.ndarray, collections.Counter[int]]:
        given, engine = rows.copy(), Engine(library, seed=rows.shape[1])
        order = AxisComm("w", len(rows), hosts).order
        for rank, x in enumerate(given):
            engine.begin(rank, parse(strategy).schedule(x.size, Group(rank, order, hosts), half), x)
        while engine.sums:
            engine.go_on(20)
        assert not engine.under_way
        return np.stack([engine.results[rank] for rank in range(len(rows))]), engine.sent_bytes

    return in_thread(run)


def sums_in_jax(strategy: str, rows: np.ndarray, hosts: tuple[int, ...]) -> np.ndarray:
    run = functools.partial(sum_bucket, strategy=parse(strategy), comm=AxisComm("w", len(rows), hosts))
    return np.asarray(jax.jit(jax.vmap(run, axis_name="w"))(rows))


def extremes(rows: np.ndarray) -> np.ndarray:
    """Rows with blocks of extreme numbers.

    Such a block has numbers that are not finite, or are subnormal, zeros, or of one magnitude. Nothing of them is added
    up to a NaN.
    """
    n = rows.shape[1]
    for block, x in enumerate((np.inf, np.nan, 1e-40, 0.0, 3e38, 65_519.9, 2.0**-14, -(2.0**-24) / 3)):
        start = BLOCK * block
        if start < n:
            rows[block % len(rows), start : start + BLOCK // 2] = x
    return rows


def cases() -> Iterator[Any]:
    for workers in (2, 3, 4, 6, 8):
        for wire in WIRES:
            is_quick = workers < 4 or (workers == 4 and wire == "8")
            yield pytest.param(workers, wire, marks=[] if is_quick else pytest.mark.slow)  # compiling takes long


@pytest.mark.parametrize(("workers", "wire"), list(cases()))
def test_the_engine_gives_the_bits_of_the_algorithms_in_jax(workers, wire, library, monkeypatch):
    """One packet and several; parts of which more wait than may be under way; zeros, tiny and huge numbers, NaN."""
    monkeypatch.setattr(color_trees, "PRICE", 256)
    for name in ("MESSAGE_BYTES", "HOST_MESSAGE_BYTES"):
        monkeypatch.setattr(schedules, name, 4 * BLOCK + 300)
    apart = tuple(np.random.default_rng(workers).permutation(workers).tolist())
    names = ["asa", "ring"]
    if wire == "8" and workers > 2:  # trees take long to compile, and encode as the others do
        names += ["pipering", f"color{workers}", *(["tree"] if workers.bit_count() == 1 else [])]
    places = [*((name, apart) for name in names), ("asa", (0,) * workers), ("ring", (0,) * workers)]
    if workers in (4, 6):
        hosts = tuple(i % 2 for i in range(workers))
        places += [(f"hier-{cross}", hosts) for cross in ("ring", "color2", *(("asa", "tree") if workers == 6 else ()))]
    for name, hosts in places:
        assert parse(name).is_in_c(hosts)
        for n in (30 * BLOCK * workers - 5, *([7] if wire == "8" and workers == 3 else [])):
            rows = extremes(rows_of(workers, n))
            expected, got = sums_in_jax(f"{name}:{wire}", rows, hosts), sums(library, f"{name}:{wire}", rows, hosts)[0]
            assert bits_of(got, name).tobytes() == bits_of(expected, name).tobytes(), (name, n)


def bits_of(x: np.ndarray, name: str) -> np.ndarray:
    """With one kind of NaN, since there are many, and one zero for trees: XLA may leave out their addition to 0."""
    return np.where(np.isnan(x), np.float32(np.nan), x + np.float32(0) if "color" in name or name == "pipering" else x)


@pytest.mark.parametrize("strategy", ["asa:32", "ring:16", "hier-asa:8", "hier-ring:32"])
def test_the_halves_are_the_sum_in_every_bit(strategy, library, monkeypatch):
    """Between the halves a rank has its own chunk alone: the others are zeros."""
    monkeypatch.setattr(schedules, "MESSAGE_BYTES", 4 * BLOCK)
    hosts, rows = (1, 2, 0, 1, 0, 2), rows_of(6, 6006)
    comm, halves = AxisComm("w", 6, hosts), parse(strategy).spec.halves
    assert halves
    expected, _ = sums(library, strategy, rows, hosts)
    mine, scatter_bytes = sums(library, strategy, rows, hosts, "scatter")
    chunks, own = np.zeros((6, 6, 1001), np.float32), list(halves.chunks(comm))
    chunks[range(6), own] = mine.reshape(chunks.shape)[range(6), own]
    whole, gather_bytes = sums(library, strategy, chunks.reshape(rows.shape), hosts, "gather")
    assert whole.tobytes() == expected.tobytes()
    assert scatter_bytes == gather_bytes


@pytest.mark.parametrize("workers", [2, 3, 5, 8, 17])
def test_the_busiest_rank_sends_what_the_cost_formula_counts(workers, library):
    for colours in range(1, min(workers, 6) + 1):
        k, arity, _ = tree_shape(workers, colours)
        rows = np.ones((workers, workers * k * BLOCK), np.float32)
        _, sent_bytes = sums(library, f"color{colours}", rows, tuple(range(workers)))
        assert max(sent_bytes.values()) == most_edges(workers, k, arity) * 4 * rows.shape[1] / k


@pytest.mark.parametrize("name", ["color<k>", "hier-<cross>", "ring", "bf16"])
def test_what_a_user_has_replaced_is_not_c_s(name, monkeypatch):
    spelled = {"color<k>": "color4:16", "hier-<cross>": "hier-asa:32", "ring": "hier-ring:8", "bf16": "ring:bf16"}[name]
    assert parse(spelled).is_in_c((0, 0, 1, 1))
    table: dict[str, Any] = WIRES if name in WIRES else STRATEGIES
    monkeypatch.setitem(table, name, table[name]._replace())
    assert not parse(spelled).is_in_c()
