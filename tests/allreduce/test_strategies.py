"""Every strategy x wire x number of workers, under `vmap` and on fake devices, against NumPy."""

import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import references
from jaxmpi.allreduce import compression
from jaxmpi.allreduce.algorithms import STRATEGIES, color_trees, exchanges, in_shared_memory, parse
from jaxmpi.allreduce.algorithms.color_trees import build_trees
from jaxmpi.allreduce.api import Choice, Op, exchange
from jaxmpi.allreduce.local_devices import over_local_devices
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm
from jaxmpi.core.errors import UsageError
from references import sum_over_workers
from tolerances import USUAL_EMITTERS, bound, height

FILLED = {"color<k>": ["color4"], "hier-<cross>": ["hier-ring"]}
ROWS = {name: row.wires for key, row in STRATEGIES.items() if key != "none" for name in FILLED.get(key, [key])}
SUMS = [f"{name}:{wire}" for name, wires in ROWS.items() for wire in wires]
# Every wire with three workers; with another number each algorithm on one wire, as a wire sees blocks, not workers.
CASES = [(name, 3) for name in SUMS]
CASES += [(f"{name}:32", w) for name in ROWS for w in (1, 2)]
CASES += [(f"{name}:{'16' if '16' in wires else '32'}", 8) for name, wires in ROWS.items()]
SCALES = [1e-12, 1.0, 1e6]
HOSTS = {1: (0,), 2: (0, 1), 3: (0, 1, 2), 8: (0, 1, 0, 1, 2, 3, 2, 3)}  # for hier


class OrderedComm(AxisComm):
    """Workers whose ring goes another way round, as where ranks of one host are not neighbours."""

    def __init__(self, axis: str, order: tuple[int, ...]) -> None:
        super().__init__(axis, len(order))
        self.order = order


def axis(strategy: str, workers: int) -> AxisComm:
    return AxisComm("w", workers, HOSTS[workers] if strategy.startswith("hier") else None)


def gauss(workers: int, n: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(n).standard_normal((workers, n)) * scale).astype(np.float32)


def same_on_all_workers(rows: np.ndarray) -> bool:
    return all(row.tobytes() == rows[0].tobytes() for row in rows)


@functools.cache
def exchanged(strategy: str, workers: int):
    """Sum of a dict of vectors over a leading axis of workers, each a bucket of its own; counts its traces."""
    traces = []

    @jax.jit
    @functools.partial(jax.vmap, axis_name="w")
    def run(tree):
        traces.append(1)
        return exchange(tree, strategy, op="sum", comm=axis(strategy, workers), bucket_bytes=4)

    return run, traces


def trees(workers: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Vectors of no float, of one where few workers share it, and of many."""
    return {str(n): gauss(workers, n, scale) for n in ([0, 1, 1009] if workers < 8 else [0, 1009])}


@pytest.mark.parametrize(("strategy", "workers"), CASES)
def test_sum_is_that_of_numpy_and_the_oracle_s_bits_on_all_workers(strategy, workers):
    """The oracle rounds and adds in the same order."""
    run, traces = exchanged(strategy, workers)
    for scale in SCALES:
        rows = trees(workers, scale)
        for n, got in run(rows).items():
            got = np.asarray(got)
            assert same_on_all_workers(got)
            error = bound(strategy, rows[n], hosts=len(set(HOSTS[workers])))
            assert (np.abs(got[0] - sum_over_workers(rows[n])) <= error).all()
            if workers > 1 and scale == 1 and not strategy.startswith("ar"):
                expected = references.by_name(
                    strategy, references.padded(rows[n], workers), range(workers), HOSTS[workers]
                )
                assert got[0].tobytes() == expected[: int(n)].tobytes()
    assert len(traces) == 1


@pytest.mark.parametrize(("strategy", "workers"), CASES)
def test_nan_of_one_worker_is_nan_and_infinity_finite_on_none(strategy, workers):
    run, _ = exchanged(strategy, workers)
    for odd, worker in ((np.nan, workers - 1), (np.inf, 0)):
        rows = trees(workers)
        for row in rows.values():
            row[worker, -1:] = odd
        for n, got in run(rows).items():
            last = np.asarray(got)[:, -1:]
            assert not np.isfinite(last).any(), n
            assert np.isnan(last).all() or np.isinf(odd), n


def direct(strategy: str, comm: AxisComm):
    """The sum alone. The other emitters would write out a chain of 17 sums 2^17 times."""
    chosen = parse(strategy)
    run = jax.vmap(lambda x: chosen.spec.sum(x, comm, chosen.wire), axis_name=comm.axis)
    return jax.jit(run, compiler_options=USUAL_EMITTERS)


class Rotating(AxisComm):
    """Workers without collectives: what they send goes to one at a time."""

    def alltoall(self, x):
        raise AssertionError("all at once")

    allgather = alltoall


SCATTERED = (0, 1, 2, 0, 1, 2)  # hosts
COMMS = {
    "another order of 3": (OrderedComm("w", (2, 1, 0)), ["tree:16"]),
    "another order of 8": (OrderedComm("w", (3, 7, 0, 5, 1, 6, 2, 4)), ["ring:16", "color2:16", "pipering:8"]),
    "5": (AxisComm("w", 5), ["tree:16", "color3:16"]),
    "17": (AxisComm("w", 17), ["color16:32"]),
    "rotations between hosts": (Rotating("w", 6, SCATTERED), ["asa:32", "asa:16"]),
    "hosts": (AxisComm("w", 6, SCATTERED), ["hier-asa:16", "hier-tree:32", "hier-color2:8", "hier-root:bf16"]),
}


@pytest.mark.parametrize(
    ("where", "strategy"), [(where, strategy) for where, (_, strategies) in COMMS.items() for strategy in strategies]
)
def test_bits_in_any_order_number_and_place_of_workers(where, strategy):
    comm = COMMS[where][0]
    rows = gauss(comm.size, 24 * comm.size)
    got = np.asarray(direct(strategy, comm)(rows))
    assert same_on_all_workers(got)
    assert got[0].tobytes() == references.by_name(strategy, rows, comm.order, comm.hosts)[: rows.shape[1]].tobytes()
    assert (np.abs(got[0] - sum_over_workers(rows)) <= bound(strategy, rows, hosts=len(set(comm.hosts)))).all()
    if isinstance(comm, OrderedComm):
        assert got[0].tobytes() != references.by_name(strategy, rows, range(comm.size), ())[: rows.shape[1]].tobytes()


@pytest.mark.parametrize("strategy", ["color3:16", "pipering:8"])
def test_several_packets_follow_each_other(strategy, monkeypatch):
    monkeypatch.setattr(color_trees, "PRICE", 4)
    rows = gauss(5, 125)
    got = np.asarray(direct(strategy, AxisComm("w", 5))(rows))
    colours = 3 if strategy.startswith("color") else 1
    packets = round(math.sqrt(2 * height(5, colours) * 125 / colours / 4))
    assert packets > 3
    assert same_on_all_workers(got)
    assert got[0].tobytes() == references.by_name(strategy, rows, range(5), (), packets)[:125].tobytes()


@pytest.mark.parametrize("strategy", ["ar:32", "asa:16", "tree:8", "color4:16"])
def test_the_same_on_devices_through_shard_map(strategy):
    devices = 3
    mesh = Mesh(np.array(jax.devices("cpu")[:devices]), ("w",))
    comm = AxisComm("w", devices)

    def one(x):
        return exchange(x[0], strategy, op="sum", comm=comm)[None]

    rows = gauss(devices, 1009)
    got = np.asarray(jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("w"), out_specs=P("w"), check_vma=False))(rows))
    assert same_on_all_workers(got)
    assert (np.abs(got[0] - sum_over_workers(rows)) <= bound(strategy, rows)).all()


def test_a_row_says_what_it_does_whatever_its_name(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "still", STRATEGIES["none"])
    monkeypatch.setitem(STRATEGIES, "held", STRATEGIES["shm"])
    with pytest.raises(UsageError, match="strategy still exchanges nothing, compressed or not"):
        compression.parse("topk1/still")
    assert (exchanges("still"), in_shared_memory("held"), in_shared_memory("lowrank4/held")) == (False, True, True)
    mesh = Mesh(np.array(jax.devices()[:2]), ("devices",))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    ops: dict[Op, int] = {"mean": 1, "sum": 2}
    for op, times in ops.items():
        run = over_local_devices(Choice("still:32", op, SoloComm(), None), mesh)
        np.testing.assert_array_equal(run([x])[0], times * x)


@pytest.mark.parametrize(("n", "workers"), [(0, 4), (7, 7)])
def test_none_exchanges_nothing(n, workers):
    rows = gauss(workers, n) * np.float32(1e38)  # 7 times these is infinite
    got = jax.vmap(lambda x: exchange(x, "none", comm=AxisComm("w", workers)), axis_name="w")(rows)
    assert np.asarray(got).tobytes() == rows.tobytes()


SPELLINGS = {  # and a word of the way out
    "rings": "'ring'",
    "ASA16": "'asa16'",
    None: "asa32",
    "asa:17": "there are: 16",
    "color": "color4",
    "color0": "color1 to color16",
    "hier-<cross>": "hier-ring",
    "hier": "hier-ring",
    "hier-ar": "pipering",
    "hier-hier-ring": "pipering",
    "ar:16": "32",
}


@pytest.mark.parametrize(("spelling", "way_out"), SPELLINGS.items())
def test_unknown_spellings_name_what_exists(spelling, way_out):
    with pytest.raises(UsageError, match=way_out):
        parse(spelling)


# ---------------------------------------------------------------- trees


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 13, 16, 33, 64])
def test_trees_span_have_disjoint_interiors_and_use_each_edge_once(workers):
    for colours in range(1, 17):
        forest = build_trees(workers, colours)
        assert len(forest.parent) == min(colours, workers)
        interiors = [set(parents) - {-1} for parents in forest.parent]
        assert sum(map(len, interiors)) == len(set().union(*interiors))
        assert forest.height == forest.depth.max() == height(workers, colours)
        for c, parents in enumerate(forest.parent):
            root = parents.index(-1)
            assert parents.count(-1) == 1
            assert all(way_up(parents, place)[-1] == root for place in range(workers))
            assert [len(way_up(parents, place)) - 1 for place in range(workers)] == forest.depth[c].tolist()
            assert all(forest.interior_tree[place] == c for place in interiors[c])
        edges = [(c, i, above) for c, row in enumerate(forest.parent) for i, above in enumerate(row) if above >= 0]
        assert sorted(edge for used in forest.rounds for edge in used) == sorted(edges)
        for used, colour in zip(forest.rounds, forest.colour, strict=True):
            assert len({child for _, child, _ in used}) == len({above for _, _, above in used}) == len(used)
            assert {(c, child) for c, child, _ in used} == {(c, i) for i, c in enumerate(colour) if c < len(interiors)}
        counts = [[edge[end] for edge in edges].count(place) for end in (1, 2) for place in range(workers)]
        assert len(forest.rounds) == max(counts)


def way_up(parents: list[int], place: int) -> list[int]:
    path = [place]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
        assert len(path) <= len(parents)
    return path


# ---------------------------------------------------------------- hosts


def test_hier_refuses_hosts_with_unequal_numbers_of_ranks():
    with pytest.raises(UsageError, match=r"hosts with 2, 1 ranks; expected equally many on each.*use ring or tree"):
        direct("hier-ring", AxisComm("w", 3, (0, 1, 0)))(gauss(3, 6))
