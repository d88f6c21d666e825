"""Every strategy x wire x number of workers, under `vmap` and on fake devices, against NumPy."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxmpi.comm import AxisComm
from jaxmpi.config import UsageError
from jaxmpi.exchange import exchange
from jaxmpi.strategies import ALIASES, STRATEGIES, parse
from references import asa, ring, sum_over_workers
from tolerances import bound

SUMS = [f"{name}:{wire}" for name, row in STRATEGIES.items() if name != "none" for wire in row.wires]
WORKERS = [1, 2, 3, 8]
LENGTHS = [0, 1, 5, 1009]
SCALES = [1e-12, 1.0, 1e6]


class OrderedComm(AxisComm):
    """Workers whose ring goes another way round, as where ranks of one host are not neighbours."""

    def __init__(self, axis: str, order: tuple[int, ...]) -> None:
        super().__init__(axis, len(order))
        self.order = order


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
        return exchange(tree, strategy, op="sum", comm=AxisComm("w", workers), bucket_bytes=4)

    return run, traces


def trees(workers: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    return {str(n): gauss(workers, n, scale) for n in LENGTHS}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("strategy", SUMS)
def test_sum_is_that_of_numpy_and_bitwise_equal_on_all_workers(strategy, workers):
    run, traces = exchanged(strategy, workers)
    for scale in SCALES:
        rows = trees(workers, scale)
        for n, got in run(rows).items():
            got = np.asarray(got)
            assert same_on_all_workers(got)
            assert (np.abs(got[0] - sum_over_workers(rows[n])) <= bound(strategy, rows[n])).all()
    assert len(traces) == 1


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("strategy", SUMS)
def test_nan_of_one_worker_is_nan_on_all(strategy, workers):
    run, _ = exchanged(strategy, workers)
    rows = trees(workers)
    for n in LENGTHS[1:]:
        rows[str(n)][workers - 1, n - 1] = np.nan
    for n, got in run(rows).items():
        assert np.isnan(np.asarray(got)[:, -1:]).all(), n


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("strategy", [s for s in SUMS if not s.startswith("ar")])
def test_bits_are_those_of_the_oracle_that_rounds_and_adds_in_the_same_order(strategy, workers):
    algorithm, _, wire = strategy.partition(":")
    rows = gauss(workers, 24 * workers)
    got = np.asarray(direct(strategy, AxisComm("w", workers))(rows))
    expected = asa(rows, wire) if algorithm == "asa" else ring(rows, wire, range(workers))
    assert same_on_all_workers(got)
    assert got[0].tobytes() == expected.tobytes()


def direct(strategy: str, comm: AxisComm):
    chosen = parse(strategy)
    return jax.jit(jax.vmap(lambda x: chosen.sum(x, comm, chosen.wire), axis_name=comm.axis))


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 2, 4, 1, 3), (3, 7, 0, 5, 1, 6, 2, 4)], ids=str)
@pytest.mark.parametrize("wire", ["32", "16"])
def test_ring_in_any_order_of_ranks(wire, order):
    rows = gauss(len(order), 6 * len(order))
    got = np.asarray(direct(f"ring:{wire}", OrderedComm("w", order))(rows))
    assert same_on_all_workers(got)
    assert got[0].tobytes() == ring(rows, wire, order).tobytes()
    assert got[0].tobytes() != ring(rows, wire, range(len(order))).tobytes()
    assert (np.abs(got[0] - sum_over_workers(rows)) <= bound(f"ring:{wire}", rows)).all()


@pytest.mark.parametrize("devices", [3, 8])
@pytest.mark.parametrize("strategy", ["ar:32", "asa:32", "asa:16", "ring:16"])
def test_the_same_on_devices_through_shard_map(strategy, devices):
    mesh = Mesh(np.array(jax.devices("cpu")[:devices]), ("w",))
    comm = AxisComm("w", devices)

    def one(x):
        return exchange(x[0], strategy, op="sum", comm=comm)[None]

    rows = gauss(devices, 1009)
    got = np.asarray(jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("w"), out_specs=P("w"), check_vma=False))(rows))
    assert same_on_all_workers(got)
    assert (np.abs(got[0] - sum_over_workers(rows)) <= bound(strategy, rows)).all()


@pytest.mark.parametrize("n", [0, 1, 7])
def test_none_exchanges_nothing(n):
    rows = gauss(4, n)
    got = jax.vmap(lambda x: exchange(x, "none", comm=AxisComm("w", 4)), axis_name="w")(rows)
    assert np.asarray(got).tobytes() == rows.tobytes()  # times 4, divided by 4


@pytest.mark.parametrize("strategy", ["ar:32", "asa:16", "ring:16", "none:32"])
def test_trace_and_compile_at_64_workers_in_5_s(strategy):
    run = direct(strategy, AxisComm("w", 64))
    x = jax.ShapeDtypeStruct((64, 64 * 1024), jnp.float32)
    begin = time.perf_counter()
    run.lower(x).compile()
    assert time.perf_counter() - begin <= 5


@pytest.mark.parametrize(
    ("spelling", "name"),
    [*ALIASES.items(), ("ar", "ar:32"), ("asa", "asa:32"), ("ring:bf16", "ring:bf16"), ("none", "none:32")],
)
def test_spellings(spelling, name):
    strategy = parse(spelling)
    assert strategy.name == name
    assert strategy.sum is STRATEGIES[name.split(":")[0]].sum


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("rings", r"unknown strategy 'rings'; did you mean 'ring'\? there are: ar, asa, none, ring"),
        ("", "unknown strategy ''"),
        ("asa:17", r"unknown wire '17'; did you mean '16'\? there are: 16, 32, bf16"),
        ("asa16:16", r"unknown strategy 'asa16'"),
        ("ar:16", "strategy 'ar' cannot use wire '16'; it takes 32"),
        ("none:bf16", "strategy 'none' cannot use wire 'bf16'"),
    ],
)
def test_unknown_spellings_name_what_exists(spelling, message):
    with pytest.raises(UsageError, match=message):
        parse(spelling)
