"""Sums of the communication thread, with generators for ranks: their messages come in a random order."""

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import references
from jaxmpi.allreduce import host_comm
from jaxmpi.allreduce.algorithms import color_trees, parse
from jaxmpi.allreduce.algorithms.color_trees import forest, most_edges, packets_of, plant
from jaxmpi.allreduce.algorithms.table import HostSum
from jaxmpi.allreduce.host_comm import HostComm
from jaxmpi.allreduce.wires import BLOCK
from jaxmpi.comm.axis import AxisComm


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
    """f32[w, n] of all ranks -> what each holds after the sum or a half, and the bytes that each has sent."""
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
