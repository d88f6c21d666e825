"""Sums on the host, in Python and in C, of all ranks in one process: their messages come in a random order."""

import collections
import ctypes
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, POINTER, c_int, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import pytest

import references
from jaxmpi.allreduce import compiled_sums, host_comm
from jaxmpi.allreduce.algorithms import color_trees, parse
from jaxmpi.allreduce.algorithms.color_trees import forest, most_edges, packets_of, plant
from jaxmpi.allreduce.algorithms.spec import Part
from jaxmpi.allreduce.algorithms.table import STRATEGIES, HostSum
from jaxmpi.allreduce.compiled_sums import SOURCE, Pace
from jaxmpi.allreduce.host_comm import HostComm, Requests
from jaxmpi.allreduce.sum_recorder import RecordedSteps, recorded
from jaxmpi.allreduce.wires import BLOCK, WIRES, HostWire
from jaxmpi.comm.axis import AxisComm
from jaxmpi.runtime import c_library


class Request:
    """A message sent or received, true until it is complete; its buffer is MPI's until then."""

    def __init__(self, buffer: np.ndarray) -> None:
        self.buffer, self.is_under_way = buffer, True

    def __bool__(self) -> bool:
        return self.is_under_way


class Network:
    """Messages between ranks of this process, those of one sender, receiver and tag in order, all others in any."""

    def __init__(self, seed: int) -> None:
        self.rng, self.sent_bytes = np.random.default_rng(seed), collections.Counter[int]()
        self.ends: dict[tuple[int, int, int], tuple[list[Request], list[Request]]] = collections.defaultdict(
            lambda: ([], [])
        )

    def deliver_one(self) -> None:
        """Copy one message that both sides have asked for."""
        ready = [key for key, (sends, receives) in self.ends.items() if sends and receives]
        assert ready, "all ranks wait"
        sent, received = (queue.pop(0) for queue in self.ends[ready[self.rng.integers(len(ready))]])
        assert sent.buffer.size == received.buffer.size
        received.buffer[:] = sent.buffer
        sent.is_under_way = received.is_under_way = False


class Rank:
    """The communicator of one of them."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    def Isend(self, buffer: np.ndarray, to: int, tag: int) -> Request:
        self.network.sent_bytes[self.rank] += buffer.size
        return self._posted((self.rank, to, tag), 0, buffer)

    def Irecv(self, buffer: np.ndarray, source: int, tag: int) -> Request:
        return self._posted((source, self.rank, tag), 1, buffer)

    def _posted(self, key: tuple[int, int, int], end: int, buffer: np.ndarray) -> Request:
        request = Request(buffer)
        self.network.ends[key][end].append(request)
        return request


def sums(strategy: str, rows: np.ndarray, order: tuple[int, ...], hosts: Any = None, seed: int = 0, half: str = ""):
    """f32[w, n] of all ranks -> what each holds and has sent.

    The first result is what each rank holds after the sum or a half. The second is the bytes that each has sent.
    """
    network, held = Network(seed), rows.copy()
    segments: list[tuple[Iterator, list[Request]]] = []
    for rank in range(len(rows)):
        total = HostSum.named(strategy, HostComm(Rank(network, rank), order, hosts or range(len(rows))), half)
        tags = range(total.segments(rows.shape[1]))
        segments += [(part, []) for part in total.of(held[rank], tags)]
    while segments:
        ready = [part for part, requests in segments if not any(requests)]
        segments = [(part, requests) for part, requests in segments if any(requests)]
        for i in network.rng.permutation(len(ready)):
            requests = next(ready[i], None)
            assert requests is None or requests
            segments += [(ready[i], requests)] if requests else []
        if segments and not ready:
            network.deliver_one()
    assert not any(queue for ends in network.ends.values() for queue in ends)
    return held, network.sent_bytes


def rows_of(workers: int, n: int) -> np.ndarray:
    """f32[w, n] of many magnitudes, zeros of either sign among them."""
    rng = np.random.default_rng(n)
    rows = (rng.standard_normal((workers, n)) * np.exp2(rng.integers(-9, 9, (workers, n)))).astype(np.float32)
    rows[:, ::5] = -0.0
    return rows


@pytest.mark.parametrize("wire", ["32", "8"])
@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_sums_of_any_order_of_arrival_are_those_of_the_program_in_every_bit(workers, wire, monkeypatch):
    """The oracle is that of programs, `test_strategies.py`. Sizes: one packet, several, several messages each."""
    monkeypatch.setattr(color_trees, "PRICE", 256)
    monkeypatch.setattr(host_comm, "MESSAGE_BYTES", 4 * BLOCK + 300)
    order = tuple(np.random.default_rng(workers).permutation(workers).tolist())
    for colours in range(1, workers + 1):
        strategy = f"color{colours}:{wire}"
        for n in (1, 7, 1009, 6007):
            rows, (k, _, height) = rows_of(workers, n), forest(workers, colours)
            padded = references.padded(rows, workers)
            packets = packets_of(padded.shape[1], k, height)
            expected = references.color(padded, wire, order, colours, packets)[:n]
            held, _ = sums(strategy, rows, order, seed=n)
            for mine in held:
                assert mine.tobytes() == expected.tobytes(), (strategy, n)
    assert packets > 1


def test_a_hierarchy_of_trees_is_that_of_the_program_in_every_bit(monkeypatch):
    monkeypatch.setattr(color_trees, "PRICE", 256)
    monkeypatch.setattr(host_comm, "MESSAGE_BYTES", 4 * BLOCK)
    hosts, n = (0, 0, 1, 1, 2, 2), 6007
    packets = packets_of(-(-n // 6) * 3, 2, plant(3, 2).height)

    def cross(parts: np.ndarray, wire: str) -> np.ndarray:
        return references.color(parts, wire, range(3), 2, packets)

    rows = rows_of(6, n)
    expected = references.hier(references.padded(rows, 6), "8", hosts, cross)[:n]
    for mine in sums("hier-color2:8", rows, tuple(range(6)), hosts)[0]:
        assert mine.tobytes() == expected.tobytes()


@pytest.mark.parametrize("strategy", ["hier-asa:32", "hier-ring:32", "hier-asa:8", "hier-ring:16"])
def test_the_halves_of_a_hierarchy_are_its_sum_in_every_bit(strategy, monkeypatch):
    """Between the halves a rank has its own chunk alone: the others are zeros."""
    monkeypatch.setattr(host_comm, "MESSAGE_BYTES", 4 * BLOCK)
    hosts, rows = (1, 2, 0, 1, 0, 2), rows_of(6, 6006)
    comm, halves = AxisComm("w", 6, hosts), parse(strategy).spec.halves
    order = comm.order
    assert halves
    expected, _ = sums(strategy, rows, order, hosts)
    mine, scatter_bytes = sums(strategy, rows, order, hosts, half="scatter")
    chunks, own = np.zeros((6, 6, 1001), np.float32), list(halves.chunks(comm))
    chunks[range(6), own] = mine.reshape(chunks.shape)[range(6), own]
    whole, gather_bytes = sums(strategy, chunks.reshape(rows.shape), order, hosts, half="gather")
    assert whole.tobytes() == expected.tobytes()
    assert scatter_bytes == gather_bytes


@pytest.mark.parametrize("workers", [2, 3, 5, 8, 17])
def test_the_busiest_rank_sends_what_the_cost_formula_counts(workers):
    for colours in range(1, min(workers, 6) + 1):
        k, arity, _ = forest(workers, colours)
        rows = np.ones((workers, workers * k * BLOCK), np.float32)
        _, sent_bytes = sums(f"color{colours}", rows, tuple(range(workers)))
        assert max(sent_bytes.values()) == most_edges(workers, k, arity) * 4 * rows.shape[1] / k


def test_pipering_is_one_tree():
    rows = rows_of(5, 1009)
    assert sums("pipering", rows, tuple(range(5)))[0].tobytes() == sums("color1", rows, tuple(range(5)))[0].tobytes()
    assert parse("pipering").has_sum_on_host((0, 1, 2, 3, 4))


# ---------------------------------------------------------------- in C

Isend = CFUNCTYPE(c_int, c_void_p, c_int, c_int, c_int, c_int, c_int, POINTER(c_int))
SomeAreComplete = CFUNCTYPE(c_int, c_int, POINTER(c_int), POINTER(c_int), POINTER(c_int), c_void_p)


class Setup(ctypes.Structure):
    _fields_ = (
        *(("isend", Isend), ("irecv", Isend), ("testsome", SomeAreComplete)),
        *((name, c_int64) for name in ("status_bytes", "error_at", "in_status")),
        *(("failed", c_void_p), ("waits", c_void_p), ("byte", c_int)),
    )


class RecordStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("steps", "parts")),
        *((name, c_int64) for name in ("count", "memory_bytes", "floats", "digest")),
        ("comm", c_int),
    )


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """The source as for an MPI whose handles are numbers."""
    made = c_library.load(SOURCE._path, SOURCE._headers, {"HANDLE": "int", **SOURCE._constants})
    made.jaxmpi_sum_begin.restype = c_void_p
    assert made.jaxmpi_sum_setup_bytes() == ctypes.sizeof(Setup)
    assert made.jaxmpi_sum_record_bytes() == ctypes.sizeof(RecordStruct)
    return made


class InC:
    """Sums of all ranks, which one thread carries on; a rank's number is its communicator's handle."""

    def __init__(self, library: ctypes.CDLL, seed: int = 0) -> None:
        self.library, self.network, self.requests = library, Network(seed), dict[int, Request]()
        self._setup = Setup(Isend(self._isend), Isend(self._irecv), SomeAreComplete(self._testsome))
        library.jaxmpi_sum_setup(ctypes.byref(self._setup))
        self._kept, self.sums = list[Any](), dict[int, int]()

    def _posted(self, address: int, size: int, key: tuple[int, int, int], end: int, request: Any) -> int:
        buffer = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)) if size else np.empty(0, np.uint8)
        made = Request(buffer)
        self.network.ends[key][end].append(made)
        request[0] = len(self.requests) + 1
        self.requests[request[0]] = made
        return 0

    def _isend(self, address: int, size: int, byte: int, to: int, tag: int, comm: int, request: Any) -> int:
        return self._posted(address, size, (comm, to, tag), 0, request)

    def _irecv(self, address: int, size: int, byte: int, source: int, tag: int, comm: int, request: Any) -> int:
        return self._posted(address, size, (source, comm, tag), 1, request)

    def _testsome(self, count: int, requests: Any, found: Any, indices: Any, statuses: int) -> int:
        if any(sends and receives for sends, receives in self.network.ends.values()):
            self.network.deliver_one()
        ended = [i for i in range(count) if not self.requests[requests[i]].is_under_way]
        found[0] = len(ended)
        for i, index in enumerate(ended):
            indices[i] = index
        return 0

    def begin(self, rank: int, made: RecordedSteps, x: np.ndarray) -> None:
        record = RecordStruct(*made.words(), 0, rank)
        self._kept += record, made, x
        at, numbers = c_void_p(x.ctypes.data), (c_int64(5), c_int64(1 << 20))
        self.sums[rank] = self.library.jaxmpi_sum_begin(ctypes.byref(record), at, *numbers)

    def go_on(self, most_s: float) -> None:
        """Carry them on until the first has ended; forget that one."""
        pace, moved = Pace(yields=1), c_int32()
        assert not self.library.jaxmpi_sums_go_on(int(1e6 * most_s), ctypes.byref(pace), ctypes.byref(moved))
        self.sums = {rank: at for rank, at in self.sums.items() if not self.library.jaxmpi_sum_ended(c_void_p(at))}


def summed_in_c(library: ctypes.CDLL, strategy: str, rows: np.ndarray, order: Sequence[int], hosts: Any, seed: int):
    held, of_all = rows.copy(), InC(library, seed)
    for rank, x in enumerate(held):
        total = HostSum.named(strategy, HostComm(Rank(of_all.network, rank), order, hosts or range(len(rows))))
        made = recorded(total, x.size)
        assert made, strategy
        of_all.begin(rank, made, x)
    while of_all.sums:
        of_all.go_on(20)
    assert not any(queue for ends in of_all.network.ends.values() for queue in ends)
    return held


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


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("workers", [2, 3, 4, pytest.param(8, marks=pytest.mark.e2e)])  # eight take 6 s a wire
def test_c_gives_the_bits_of_python_whatever_the_order_of_arrival(workers, wire, library, monkeypatch):
    """One packet and several; parts of which more wait than may be under way; zeros, tiny and huge numbers, NaN."""
    monkeypatch.setattr(color_trees, "PRICE", 256)
    monkeypatch.setattr(host_comm, "MESSAGE_BYTES", 4 * BLOCK + 300)
    order = tuple(np.random.default_rng(workers).permutation(workers).tolist())
    names = ["asa", "ring", "pipering", "color2", f"color{workers}", *(["tree"] if workers.bit_count() == 1 else [])]
    cases = [(name, order, None) for name in names]
    if workers == 4:
        cases += [(f"hier-{cross}", (0, 2, 1, 3), (0, 1, 0, 1)) for cross in ("ring", "asa", "tree", "color2")]
    for name, places, hosts in cases:
        for n in (1, 7, 1009, 6007 * workers):
            rows = extremes(rows_of(workers, n))
            with np.errstate(all="ignore"):
                expected, _ = sums(f"{name}:{wire}", rows, places, hosts, seed=n)
            held = summed_in_c(library, f"{name}:{wire}", rows, places, hosts, seed=n)
            is_nan = np.isnan(expected)
            np.testing.assert_array_equal(np.isnan(held), is_nan)
            assert np.where(is_nan, 0, held).tobytes() == np.where(is_nan, 0, expected).tobytes(), (name, n)


@pytest.mark.parametrize("found", [1, 2])
def test_the_error_of_one_message_is_that_of_the_sum(library, found):
    """MPI says that it stands in a status. The sum is a thread's, which leaves it there."""
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(error_in_status, library, found, 15).result() == 15


def error_in_status(library: ctypes.CDLL, found: int, bad: int) -> int:
    in_status, status_bytes, error_at = 17, 24, 8
    both = InC(library)

    def testsome(count: int, requests: Any, ended: Any, indices: Any, statuses: int) -> int:
        ended[0] = found
        for i in range(found):
            c_int.from_address(statuses + i * status_bytes + error_at).value = bad * (i == found - 1)
        return in_status

    functions = Isend(both._isend), Isend(both._irecv), SomeAreComplete(testsome)
    setup = Setup(*functions, status_bytes, error_at, in_status)
    library.jaxmpi_sum_setup(ctypes.byref(setup))
    x = np.ones(8, np.float32)
    made = recorded(HostSum.named("ring:32", HostComm(Rank(both.network, 0), (0, 1), (0, 1))), 8)
    assert made
    both.begin(0, made, x)
    pace, moved = Pace(yields=1), c_int32()
    return library.jaxmpi_sums_go_on(1000, ctypes.byref(pace), ctypes.byref(moved))


def numpy_adds(rows, comm, wire, tag):
    received = comm.empty(rows[0].nbytes)
    yield comm.shift(rows[0].view(np.uint8), received, tag)
    rows[0] += received.view(np.float32)


def own_memory(rows, comm, wire, tag):
    yield comm.shift((2 * rows[0]).view(np.uint8), rows[1].view(np.uint8), tag)


def waits_for_one(rows, comm, wire, tag):
    requests = comm.shift(rows[0].view(np.uint8), rows[1].view(np.uint8), tag)
    yield requests[:1]
    yield requests[1:]


def waits_for_none(rows, comm, wire, tag) -> Iterator[Requests]:
    comm.shift(rows[0].view(np.uint8), rows[1].view(np.uint8), tag)
    yield from ()


def another_tag(rows, comm, wire, tag):
    yield comm.shift(rows[0].view(np.uint8), rows[1].view(np.uint8), tag + 1)


def waits_itself(rows, comm, wire, tag) -> Iterator[Requests]:
    for request in comm.shift(rows[0].view(np.uint8), rows[1].view(np.uint8), tag):
        request.Wait()
    yield from ()


def looks_at_one(rows, comm, wire, tag):
    if rows[0][0] == 0:
        yield comm.shift(rows[0].view(np.uint8), rows[1].view(np.uint8), tag)


def looks_at_all(rows, comm, wire, tag):
    if not rows[0].any():
        yield comm.shift(rows[0].view(np.uint8), rows[1].view(np.uint8), tag)


def looks_at_the_largest(rows, comm, wire, tag):
    if np.max(np.abs(rows[0])) < 1:
        yield comm.shift(rows[0].view(np.uint8), rows[1].view(np.uint8), tag)


def looks_through_an_array(rows, comm, wire, tag):
    if not np.asarray(rows[0]).any():
        yield comm.shift(rows[0].view(np.uint8), rows[1].view(np.uint8), tag)


def looks_at_what_has_come(rows, comm, wire, tag):
    received = comm.empty(rows[1].nbytes)
    yield comm.shift(rows[0].view(np.uint8), received, tag)
    if np.asarray(received).view(np.float32).max() > 1:
        comm.add(rows[1], [received.view(np.float32)])


def adds_to_a_neighbour(rows, comm, wire, tag):
    yield comm.shift(rows[0].view(np.uint8), rows[1].view(np.uint8), tag)
    comm.add(rows[0][1:], [rows[0][:-1], rows[1][1:]])


def adds_between_floats(rows, comm, wire, tag):
    received = comm.empty(rows[1].nbytes + 1)
    yield comm.shift(rows[0].view(np.uint8), received[1:], tag)
    comm.add(rows[1], [received[1:].view(np.float32)])


def a_copy(rows, comm, wire, tag):
    received = comm.empty(rows[1].nbytes)
    yield comm.shift(rows[0].view(np.uint8), received, tag)
    comm.add(rows[1], [received.view(np.float32)])


@pytest.mark.parametrize(
    ("steps", "is_recorded"),
    [
        (a_copy, True),
        *((each, False) for each in (numpy_adds, own_memory, waits_for_one, waits_for_none, waits_itself)),
        *((each, False) for each in (another_tag, looks_at_one, looks_at_all, looks_at_the_largest)),
        *((each, False) for each in (looks_through_an_array, looks_at_what_has_come)),
        *((each, False) for each in (adds_to_a_neighbour, adds_between_floats)),
    ],
)
def test_a_sum_that_c_would_make_otherwise_is_left_to_python(steps, is_recorded):
    comm = HostComm(Rank(Network(0), 0), (0, 1), (0, 1))
    wire = WIRES["32"].on_host
    assert wire
    total = HostSum(lambda n, comm, wire: iter([Part([slice(0, 4), slice(4, 8)], steps)]), wire, comm)
    assert bool(recorded(total, 8)) == is_recorded


def test_a_wire_of_ones_own_is_left_to_python():
    wire = HostWire(lambda n: 4 * n, lambda x: x.view(np.uint8), lambda sent: sent.view(np.float32))
    ring = HostSum.named("ring:32", HostComm(Rank(Network(0), 0), (0, 1), (0, 1)))
    assert recorded(ring, 8)
    assert not recorded(ring._replace(wire=wire), 8)


def test_rows_of_a_script_that_are_there_first_are_not_the_packages():
    """A script may replace rows before anything is exchanged."""
    script = (
        "from jaxmpi.allreduce.algorithms.table import STRATEGIES\n"
        "from jaxmpi.allreduce.wires import WIRES\n"
        "STRATEGIES['tree'], WIRES['8'] = STRATEGIES['tree']._replace(), WIRES['8']._replace()\n"
        "from jaxmpi.allreduce import compiled_sums as sums\n"
        "print([sums._ours.issuperset(sums._rows(name)) for name in ('ring:16', 'tree:32', 'ring:8')])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[True, False, False]\n"


@pytest.mark.parametrize("name", ["color<k>", "hier-<cross>", "ring"])
def test_a_row_that_is_replaced_is_recorded_anew(name, monkeypatch):
    spelled = {"color<k>": "color4:16", "hier-<cross>": "hier-asa:32", "ring": "hier-ring:bf16"}[name]
    before = compiled_sums._rows(spelled)
    assert compiled_sums._ours.issuperset(before)
    monkeypatch.setitem(STRATEGIES, name, STRATEGIES[name]._replace())
    after = compiled_sums._rows(spelled)
    assert after != before
    assert not compiled_sums._ours.issuperset(after)
