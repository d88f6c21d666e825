"""Exchanges that overlap with XLA's computation, between real processes."""

import gc
import threading
from functools import partial
from typing import cast

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
import references
from jaxmpi.allreduce import overlap, schedules
from jaxmpi.allreduce.algorithms.color_trees import packets_of, tree_shape
from jaxmpi.allreduce.algorithms.table import algorithms_in_c
from jaxmpi.allreduce.buckets import Order
from jaxmpi.allreduce.comm_thread import THREAD, exchange_handlers
from jaxmpi.allreduce.schedules import WINDOW
from jaxmpi.allreduce.wires import BLOCK
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.runtime import host_callbacks, progress

COMM = jaxmpi.world()
pytestmark = pytest.mark.e2e  # programs of many steps
if COMM.size == 1:
    pytest.skip("one worker has nobody to exchange with", allow_module_level=True)
CONTROL: MpiProcesses = cast(MpiComm, COMM).processes
SIZE, RANK = COMM.size, int(COMM.rank)
ALIKE = ("color2", "pipering", "hier-color4")  # color4's code: tests/allreduce/test_host_engine.py
STRATEGIES = [f"{name}:{wire}" for name in algorithms_in_c(COMM.hosts) if name not in ALIKE for wire in ("32", "8")]
ROW = schedules.MESSAGE_BYTES // 4  # floats of a row that are sent at once on wire 32
# The last has more segments than may be under way at once, its last rows are short or empty.
LENGTHS = [1, 2, SIZE + 1, 1009, SIZE * ROW, SIZE * ROW * (WINDOW + 2) + BLOCK + 1]


def vectors(n: int, seed: int = 0) -> np.ndarray:
    """f32[size, n]: every rank knows what every rank holds."""
    rng = np.random.default_rng(seed + n)
    return (rng.standard_normal((SIZE, n)) * np.exp2(rng.integers(-9, 9, (SIZE, 1)))).astype(np.float32)


def oracle(strategy: str, rows: np.ndarray) -> np.ndarray:
    """Return what all ranks must hold, bit for bit."""
    padded = references.padded(rows, SIZE)
    sums = references.by_name(strategy, padded, COMM.order, COMM.hosts, packets(padded.shape[1]))
    return sums[: rows.shape[1]]


def packets(n: int) -> int:
    k, _, height = tree_shape(SIZE, 4)
    return packets_of(n, k, height)


# ---------------------------------------------------------------- sums


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_are_the_oracles_in_every_bit(strategy):
    rows = [vectors(n) for n in LENGTHS]
    step = jax.jit(lambda xs: overlap.exchange([x * 1 for x in xs], strategy, "sum", bucket_bytes=4))
    for _ in range(2):
        for row, total in zip(rows, step([row[RANK] for row in rows]), strict=True):
            np.testing.assert_array_equal(np.asarray(total).view(np.uint32), oracle(strategy, row).view(np.uint32))


def test_a_tree_keeps_shapes_and_dtypes_and_a_mean_divides():
    tree = {"a": jnp.full((3, 5), RANK, jnp.bfloat16), "b": [jnp.float32(RANK), jnp.zeros((0, 2), jnp.float16)]}
    mean = jax.jit(lambda t: overlap.exchange(jax.tree.map(lambda x: x * 1, t)))(tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), mean) == jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert float(mean["b"][0]) == (SIZE - 1) / 2


def test_accumulated_gradients_are_sent_once_during_the_last_backward_pass():
    order, batches = Order(), jnp.asarray(vectors(24).reshape(SIZE, 3, 4, 2))
    loss = lambda w, x: (jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"]), x[0, 0])  # noqa: E731
    gradient, last_gradient = jax.grad(loss, has_aux=True), order.record(jax.grad(loss, has_aux=True))
    add = partial(jax.tree.map, jnp.add)

    @jax.jit
    def step(w, batches):
        zeros = jax.tree.map(jnp.zeros_like, w)
        total, _ = jax.lax.scan(lambda total, x: (add(total, gradient(w, x)[0]), None), zeros, batches[:-1])
        grads = last_gradient(w, batches[-1])[0]
        return overlap.exchange(jax.tree.map(lambda t, g: (t + g) / 3, total, grads), "ring32", order=order)

    w = {"a": jnp.array([[0.5, -1.0], [2.0, 0.1]]), "b": jnp.array([1.0, -2.0])}
    progress.drain()
    means = step(w, batches[RANK])
    expected = jax.jit(gradient)(w, batches.reshape(-1, 2))[0]
    assert all(np.allclose(means[name], expected[name], rtol=1e-5, atol=1e-6) for name in w)
    assert [span.track for span in progress.drain()].count("travel") == 1


def test_operands_that_are_used_elsewhere_are_not_overwritten():
    x = jnp.arange(1000.0) + RANK
    for step in (jax.jit(lambda v: (overlap.exchange(v, op="sum"), v)), jax.jit(lambda v: late_use(v * 1))):
        total, same = step(x)
        assert np.asarray(total).tolist() == [SIZE * i + SIZE * (SIZE - 1) / 2 for i in range(1000)]
        assert np.asarray(same).tolist() == (np.arange(1000) + RANK).tolist()


def late_use(x):
    total = overlap.exchange(x, op="sum")
    return total, x + 0 * total  # x is read after the sum has taken its buffer


def test_exchanges_of_concurrent_programs_do_not_mix():
    slow, fast = (jax.jit(lambda v, n=n: overlap.exchange([spin(v, n), spin(v, n // 2)], op="sum")) for n in (200, 2))
    x = jnp.full((50, 50), 1.0 + RANK)
    results = [program(x * k) for k in range(1, 5) for program in (slow, fast)]
    for i, result in enumerate(results):
        assert (np.asarray(result) == (i // 2 + 1) * SIZE * (SIZE + 1) / 2).all()


def spin(x, n):
    """X itself, later."""
    return jax.lax.fori_loop(0, n, lambda _, y: jnp.sin(y @ y), x) * 0 + x


def test_overlapped_exchanges_and_mpi_calls_share_a_program():
    """Ranks differ in what is ready first."""

    @jax.jit
    def program(x, before, after):
        late = jax.lax.fori_loop(0, after, lambda _, y: jnp.sin(y @ y), x) * 0 + x
        early = jax.lax.fori_loop(0, before, lambda _, y: jnp.sin(y @ y), x) * 0 + x
        first = jaxmpi.exchange(early, "asa32", "sum")
        return first, overlap.exchange([late, x + 0], op="sum"), jaxmpi.exchange(late, "ring32", "sum")

    x = jnp.ones((100, 100))
    for total in jax.tree.leaves(program(x, *((100, 0) if RANK % 2 else (0, 100)))):
        assert (np.asarray(total) == SIZE).all()


def test_an_exported_program_runs_on_all_ranks():
    """The first rank of the host traces for all."""
    exchange_handlers()
    x = jnp.arange(1000.0) * (RANK + 1)

    def trace() -> bytes:
        step = jax.jit(lambda v: overlap.exchange(v * 1, "asa32", "sum", portable=True))
        exported = jax.export.export(step, disabled_checks=host_callbacks.EXPORTABLE)
        return bytes(exported(jax.ShapeDtypeStruct(x.shape, x.dtype)).serialize())

    call = jax.jit(jax.export.deserialize(bytearray(CONTROL.bcast_from_host_leader(trace))).call)
    for total in (call(x), call.lower(x).compile()(x)):
        assert np.asarray(total).tolist() == (np.arange(1000.0) * SIZE * (SIZE + 1) / 2).tolist()


@pytest.mark.slow  # hundreds of exchanges
def test_many_exchanges_leave_nothing():
    step = jax.jit(lambda v: overlap.exchange([v * 1, v[:3] * 1], "ring32", "sum", bucket_bytes=16))
    rounds, x = 1000 if SIZE == 2 else 20, jnp.ones(100)
    jax.block_until_ready(step(x))
    before = live_objects()
    for _ in range(rounds):
        jax.block_until_ready(step(x))
    objects, *others = (after - start for after, start in zip(live_objects(), before, strict=True))
    assert objects < 20  # not one an exchange
    assert others == [0]
    assert [thread.name for thread in threading.enumerate()].count(THREAD) == 1


def live_objects() -> list[int]:
    """Python objects and threads."""
    progress.drain()
    gc.collect()
    return [len(gc.get_objects()), threading.active_count()]


def test_what_cannot_overlap_is_said_on_all_ranks(monkeypatch):
    with pytest.raises(jaxmpi.UsageError, match="got on, but strategy root:32 does not run beside a program; asa, rin"):
        overlap.resolve("on", "root:32", COMM)
    with pytest.raises(jaxmpi.UsageError, match=r"rank 1: bucket_bytes: got 5, expected 4 \(rank 0\)"):
        jax.jit(lambda x: overlap.exchange(x * 2, bucket_bytes=4 + (RANK == 1)))(jnp.ones(1000))
    monkeypatch.setattr(CONTROL, "may_overlap", False)
    with pytest.raises(jaxmpi.UsageError, match="MPI_THREAD_MULTIPLE"):
        overlap.resolve("on", "ring32", COMM)
    assert CONTROL.allgather_object(str(RANK)) == [*map(str, range(SIZE))]  # after what runs, then
