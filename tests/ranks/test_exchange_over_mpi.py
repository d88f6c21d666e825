"""MpiComm against NumPy."""

import copy
import re
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi.allreduce import call_order
from jaxmpi.comm.base import ring_order
from jaxmpi.comm.job import processes
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.runtime import progress
from launching import wait_until
from references import sum_over_workers
from tolerances import bound

STRATEGIES = ["ar", "asa32", "asa8", "ring16", "tree:32", "color4:16", "pipering:32", "root:16", "shm"]
ACROSS = ["asa16", "hier-ring32", "hier-color2:8"]
COMM = jaxmpi.world()
SIZE, RANK = COMM.size, int(COMM.rank)
HOSTS = 2 if SIZE % 2 == 0 else SIZE


def vectors(n: int, seed: int = 0) -> np.ndarray:
    """f32[size, n]: every rank knows what every rank holds."""
    return np.random.default_rng(seed).standard_normal((SIZE, n)).astype(np.float32)


def same_bits_everywhere(array: jax.Array) -> bool:
    local_bits = np.asarray(array).tobytes().hex()
    return set(processes().allgather_object(local_bits)) == {local_bits}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sum_equals_numpy_and_is_bitwise_equal_on_all_ranks(strategy):
    rows = [vectors(n, seed=n) for n in (0, 1, 13, 1000)]
    total = jaxmpi.exchange([row[RANK] for row in rows], strategy, op="sum")
    for row, got in zip(rows, total, strict=True):
        # They share a bucket and its scales, so each is off by as much as the largest of all may be.
        bucket = np.concatenate([row, np.full((SIZE, 1), np.abs(rows[-1]).max(), np.float32)], 1)
        assert (np.abs(np.asarray(got) - sum_over_workers(row)) <= bound(strategy, bucket)[:-1]).all()
        assert same_bits_everywhere(got)
    rows[-1][SIZE - 1, 7] = np.nan
    assert np.isnan(np.asarray(jaxmpi.exchange([row[RANK] for row in rows], strategy, op="sum")[-1])[7])


@pytest.mark.parametrize("way", [lambda f: f, lambda f: jax.jit(lambda: f())], ids=["now", "in jit"])
def test_python_and_float64_numbers_are_exchanged_together_with_gradients(way):
    with jax.enable_x64(True):
        tree = {"loss": 1.5 * RANK, "n": 2**30 + 1, "ok": RANK == 0, "mean": np.mean([1.0, 1.0 + 2.0**-39 * RANK])}
        tree["grads"] = jnp.full((2, 2), RANK, jnp.float32)
        total, mean = way(lambda: [jaxmpi.exchange(tree, "ring16", op) for op in ("sum", "mean")])()
        among = sum(range(SIZE))
        expected = {"loss": 1.5 * among, "n": SIZE * (2**30 + 1), "ok": 1, "mean": SIZE + 2.0**-40 * among}
        assert {name: total[name].item() for name in expected} == expected
        assert {name: mean[name].item() for name in expected} == {name: x / SIZE for name, x in expected.items()}
        assert total["grads"].dtype == mean["grads"].dtype == jnp.float32
        assert total["grads"].tolist() == [[among, among]] * 2
        slope = jax.grad(lambda x: jaxmpi.exchange({"x": x, "n": 3}, op="sum")["x"] * RANK)(jnp.float64(1))
        assert (slope.item(), slope.dtype) == (among, jnp.float64)


@pytest.mark.parametrize("strategy", ["pipering:32", "color4:32", "topk1"])
def test_a_program_takes_two_and_a_half_times_the_gradients(strategy):
    tx = jaxmpi.exchange_gradients(strategy)
    grads = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1500, 1024), (1000, 1024), (9,))]
    memory = jax.jit(tx.update).lower(grads, jax.eval_shape(tx.init, grads)).compile().memory_analysis()
    assert memory is not None
    taken = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert taken <= 2.5 * 4 * sum(leaf.size for leaf in grads)


def spread_over_hosts() -> MpiComm:
    """The ranks of this host as if they were on several."""
    if not isinstance(COMM, MpiComm):
        pytest.skip("one rank cannot be on several hosts")
    comm = copy.copy(COMM)
    comm.hosts = tuple(rank % HOSTS for rank in range(SIZE))
    comm.order = ring_order(comm.hosts)
    return comm


@pytest.mark.parametrize("strategy", ACROSS)
def test_sum_between_hosts(strategy):
    row = vectors(997)
    [got] = jaxmpi.exchange([row[RANK]], strategy, op="sum", comm=spread_over_hosts())
    assert (np.abs(np.asarray(got) - sum_over_workers(row)) <= bound(strategy, row, HOSTS)).all()
    assert same_bits_everywhere(got)


@pytest.mark.parametrize("spelling", ["lowrank2", "topk5/ring16"])
def test_compressors_send_the_same_bits_to_all_ranks(spelling):
    """Inside and outside jit; what is not sent is kept in the residual."""
    tx = jaxmpi.exchange_gradients(spelling)
    state: Any
    grads = {"dense": vectors(40 * 24)[RANK].reshape(40, 24), "bias": vectors(24)[RANK]}
    total = jax.tree.map(np.zeros_like, grads)
    state = tx.init(grads)
    for step in range(4):
        mean, state = (jax.jit(tx.update) if step % 2 else tx.update)(grads, state)
        assert all(same_bits_everywhere(leaf) for leaf in jax.tree.leaves(mean))
        total = jax.tree.map(np.add, total, jax.tree.map(np.asarray, mean))
    residual = processes().allreduce_sum(np.asarray(state.error["dense"], np.float64).reshape(-1)) / SIZE
    expected = 4 * vectors(40 * 24).astype(np.float64).mean(0)
    # 4 steps of fewer than 8 + 2 SIZE roundings of numbers below 64.
    assert np.abs(total["dense"].reshape(-1) + residual - expected).max() <= 4 * (8 + 2 * SIZE) * 64 * 2.0**-24


@pytest.mark.parametrize("strategy", ["asa32", "shm", "lowrank1"])
def test_mapped_values_can_be_exchanged_but_exchanges_cannot_be_mapped(strategy):
    xs = jnp.full((3, 4, 5), RANK, jnp.float32)
    tx = jaxmpi.exchange_gradients(strategy)
    run: Any = lambda x: tx.update(x, tx.init(x))[0]  # noqa: E731
    assert np.allclose(run(jax.vmap(lambda x: 2 * x)(xs)), SIZE - 1)
    for mapped in (jax.vmap(run), jax.jit(jax.vmap(run)), jax.vmap(jax.jit(run))):
        if SIZE == 1:
            assert np.array_equal(mapped(xs), xs)
        else:
            with pytest.raises(jaxmpi.UsageError, match=r"cannot map an exchange over MPI ranks.*exchange\(jax.vmap"):
                mapped(xs)


@pytest.mark.parametrize(("strategy", "op"), [("asa32", "sum"), ("ring16", "mean")])
def test_an_exchange_is_its_own_transpose_in_its_wire(strategy, op):
    x = {"a": jnp.arange(5.0) + RANK, "b": jnp.full((2,), RANK, jnp.bfloat16)}
    exchanged = lambda x: jaxmpi.exchange(x, strategy, op)  # noqa: E731
    _, back = jax.vjp(exchanged, x)
    cotangent = jax.tree.map(lambda leaf: leaf / 3, x)
    transposed = jax.linear_transpose(exchanged, x), jax.linear_transpose(jax.jit(exchanged), x)
    expected = exchanged(cotangent)

    @jax.jit
    def in_jit(c: Any) -> tuple:
        return (
            jax.vjp(exchanged, x)[1](c)[0],
            jax.linear_transpose(exchanged, x)(c)[0],
            jax.jvp(exchanged, (x,), (c,))[1],
        )

    for got in (*(pulled(cotangent)[0] for pulled in (back, *transposed)), *in_jit(cotangent)):
        same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), got, expected)
        assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("around", ["scan", "cond", "checkpoint"])
def test_the_derivative_of_an_exchange_goes_through_loops_and_branches(around):
    """f = sum of (mean over ranks)^2 of each step: df/dx = 2 mean, through the transposed mean again 2 mean."""
    x = jnp.arange(4.0) + RANK
    mean = jnp.arange(4.0) + (SIZE - 1) / 2

    def square(x: Any) -> Any:
        return (jaxmpi.exchange(x, "ring32") ** 2).sum()

    ways = {
        "scan": lambda x: jax.lax.scan(lambda total, _: (total + square(x) / 2, None), 0.0, length=2)[0],
        "cond": lambda x: jax.lax.cond(x[0] > -1.0, square, lambda x: 0 * x.sum(), x),
        "checkpoint": jax.checkpoint(square),
    }
    for way in (ways[around], jax.jit(ways[around])):
        assert np.allclose(jax.grad(way)(x), 2 * mean)
        assert np.allclose(jax.jvp(way, (x,), (x,))[1], 2 * (mean**2).sum())


@pytest.mark.skipif(SIZE == 1, reason="one rank sends nothing")
def test_a_bucket_that_mpi_cannot_count_is_refused_while_tracing():
    """Traced only: it would have 8 GiB. Neither shared memory nor messages of C have such a limit."""
    half, whole = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (2**30, 2**31))
    cases: list[tuple[Any, dict[str, Any]]] = [
        ([half, half], {"strategy": "ar", "bucket_bytes": None}),
        (whole, {"strategy": "root:16"}),
    ]
    for tree, options in cases:
        with pytest.raises(jaxmpi.UsageError, match=r"got a bucket of 2,147,483,648 floats; expected fewer than 2\^31"):
            jax.eval_shape(lambda x, options=options: jaxmpi.exchange(x, **options), tree)
    assert jax.eval_shape(lambda x: jaxmpi.exchange(x, "shm"), whole).shape == (2**31,)
    assert jax.eval_shape(jaxmpi.exchange, [half, half])[1].shape == (2**30,)


def test_the_wait_for_a_sum_is_measured_in_the_program():
    if SIZE == 1 or jax.default_backend() != "cpu":
        pytest.skip("C sums between processes on CPUs")
    program = jax.jit(lambda x: jaxmpi.exchange(x, "asa32"))
    program(jnp.ones(1000)).block_until_ready()
    progress.drain()
    begin_s = time.perf_counter()
    program(jnp.ones(1000)).block_until_ready()
    [wait] = progress.drain()
    assert wait.track == "wait"
    assert begin_s < wait.begin_s < wait.end_s < time.perf_counter()


def test_permute_with_idle_ranks():
    moved = jax.jit(lambda x: COMM.permute(x, [(0, SIZE - 1)]))(jnp.full(3, RANK + 1.0))
    assert np.asarray(moved).tolist() == [1.0 if RANK == SIZE - 1 else 0.0] * 3


def test_broadcast_gives_the_roots_values():
    tree = jaxmpi.broadcast({"w": np.full((2, 3), RANK, np.int64), "none": None}, root=SIZE - 1)
    assert (tree["w"] == SIZE - 1).all()
    columns = np.arange(6.0).reshape(2, 3) * (RANK + 1)
    assert (jaxmpi.broadcast(columns.T) == np.arange(6.0).reshape(2, 3).T).all()  # whatever the order in memory
    with pytest.raises(jaxmpi.UsageError, match=rf"root: got {SIZE}; expected a rank in \[0, {SIZE}\)"):
        jaxmpi.broadcast(np.ones(1), root=SIZE)
    with pytest.raises(jaxmpi.UsageError, match="leaf 'a': got str"):
        jaxmpi.broadcast({"a": "text"})


def test_a_program_is_compiled_by_one_rank_and_run_by_all():
    step = COMM.jit(lambda tree, x: {"y": (tree["a"] * x, tree["b"])}, donate_argnums=(0,))
    for _ in range(2):
        y, b = step({"a": jnp.arange(3.0) + RANK, "b": jnp.int32(RANK)}, np.float32(2))["y"]
        assert np.asarray(y).tolist() == [2.0 * (i + RANK) for i in range(3)]
        assert int(b) == RANK


def test_a_program_with_a_call_that_xla_does_not_export_runs_too():
    x = np.random.default_rng(RANK).standard_normal((4, 3)).astype(np.float32)
    factor = COMM.jit(lambda x: jax.lax.linalg.qr(x, full_matrices=False, pivoting=True))
    q, r, pivots = factor(x)
    # Householder QR of 4 x 3 is backward stable: some 10 roundings an entry, of entries below 4.
    assert np.abs(np.asarray(q) @ np.asarray(r) - x[:, np.asarray(pivots)]).max() < 40 * 4 * 2**-24


@pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")
def test_what_differs_is_named_by_rank_and_path():
    """JAX flattens an OrderedDict in the order of its making. It would call float64 float32, half as long."""
    odd, a = RANK == 1, np.ones(3, np.float32)
    turned = OrderedDict(b=a, a=a) if odd else OrderedDict(a=a, b=a)
    order = r"rank 1: order: got .*b, .*a; expected .*a, .*b \(rank 0\)"
    cases: list[tuple[Any, str]] = [
        (lambda: jaxmpi.exchange(turned), order),
        (lambda: jaxmpi.broadcast(turned), order),
        (lambda: jaxmpi.broadcast({"a": a.astype(np.float64) if odd else a}), r"rank 1: a: got float64\[3\]"),
        (lambda: jaxmpi.exchange({"c": {"k": np.ones((3, 3 + odd))}}), r"rank 1: leaf.c/k: got float\d\d\[3, 4\], exp"),
        (lambda: jaxmpi.exchange(jnp.zeros(2, jnp.float16 if odd else jnp.bfloat16)), r"rank 1: leaf.*: got float16"),
        (lambda: jaxmpi.exchange(a, bucket_bytes=8 if odd else 4), r"rank 1: bucket_bytes: got 8, expected 4"),
        (lambda: jaxmpi.exchange(a, "ring:32" if odd else "asa:32"), r"strategy: got ring:32, expected asa:32"),
        (lambda: jaxmpi.same_on_all_ranks("plan", {"lr": int(odd)}), r"plan differs.*\n.*rank 1: lr: got 1"),
        (lambda: jaxmpi.same_on_all_ranks("end" if odd else "plan", 1), "calls: rank 0 to 'plan', rank 1 to 'end'"),
    ]
    for call, message in cases:
        with pytest.raises(jaxmpi.UsageError, match=message):
            call()
    jaxmpi.same_on_all_ranks("plan", {"lr": 0.1, "sizes": [1, 2]})


@pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")
def test_ranks_that_trace_in_another_order_are_named():
    """Both traced exchange 1, and so would exchange with each other for good."""

    def same_lines(x: Any) -> Any:
        return jaxmpi.exchange(x)

    f = jax.jit(lambda x: same_lines(x))
    g = jax.jit(
        lambda x: same_lines(2 * x))  # fmt: skip
    place = r"\S+:\d+ in <lambda>, \S+:\d+ in same_lines"
    with pytest.raises(jaxmpi.UsageError, match=rf"rank 1: .*\bat: got \S*{place}.* expected .*{place}") as error:
        (g if RANK == 1 else f)(jnp.ones(8))
    lines = set(re.findall(r":(\d+) in <lambda>", str(error.value)))
    assert len(lines) == 2


def test_ranks_may_skip_alike_with_equal_bits(standard_promotion):
    tx = optax.chain(jaxmpi.exchange_gradients("asa32"), optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3))
    params, update = jnp.ones(4), jax.jit(tx.update)
    state = tx.init(params)
    for step in range(4):
        updates, state = update(jnp.full(4, jnp.nan if step == 2 and RANK == SIZE - 1 else 1.0 + RANK), state, params)
        jnp.sin(RANK + jnp.ones(RANK + 1))  # ranks run other programs in between, each its own
        params = jax.block_until_ready(optax.apply_updates(params, updates))
    assert same_bits_everywhere(params)
    assert np.isfinite(params).all()


def test_ranks_may_call_a_program_from_different_lines():
    tx, x = jaxmpi.exchange_gradients(), jnp.full(3, 1.0 + RANK)
    step = jax.jit(tx.update)
    if RANK == 0:
        total, _ = step(x, step(x, tx.init(x))[1])
    else:
        total, _ = step(x, step(x, tx.init(x))[1])
    assert total.tolist() == [(SIZE + 1) / 2] * 3


@pytest.mark.skipif(SIZE == 1, reason="one rank waits for nobody")
def test_a_second_thread_may_not_exchange_meanwhile(tmp_path):
    found, x, refused = list[Any](), jnp.full(3, 1.0 + RANK), Path(processes().bcast_object(str(tmp_path / "refused")))
    trainer = threading.Thread(target=lambda: found.append(jaxmpi.exchange(x).tolist()), name="trainer")
    if RANK == 0:  # whose exchange waits for the others'
        trainer.start()
        wait_until(lambda: call_order._door.holder == "trainer")
        with pytest.raises(jaxmpi.UsageError, match="thread 'MainThread' calls it while thread 'trainer' is in an"):
            jaxmpi.exchange(x)
        refused.touch()
    else:
        wait_until(refused.exists)
        trainer.start()
    trainer.join()
    assert [*found, jaxmpi.exchange(x).tolist()] == [[(SIZE + 1) / 2] * 3] * 2
