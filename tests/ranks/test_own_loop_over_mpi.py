"""What a custom training loop uses around the exchange; each rank knows the values of all."""

import json
import math
import re
import socket
import time
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import jaxmpi
from jaxmpi import collectives as mpi
from jaxmpi.allreduce.overlap import exchange as overlapped
from jaxmpi.checkpoint import manager
from jaxmpi.comm import diagnosis
from jaxmpi.comm.base import SoloComm
from jaxmpi.comm.job import processes
from jaxmpi.core.pytrees import named_leaves

COMM: Any = jaxmpi.world()
SIZE, RANK = COMM.size, int(COMM.rank)
ADAM, LARS = optax.adam(1e-2), optax.lars(1e-2, momentum=0.5)  # one of each, since each is tried out once


def values_of_rank(rank: int) -> dict:
    rng = np.random.default_rng(rank)
    return {
        "double": rng.standard_normal((2, 3)) * 10.0 ** rng.integers(-9, 9, (2, 3)),
        "half": jnp.asarray(rng.random(4), jnp.bfloat16),
        "loss": float(rng.random()),
        "seen": 2**60 + rank,
        "hits": jnp.arange(3) == rank,
        "least": np.int64(-(2**40) - rank),
        "many": rng.integers(2**31, 2**33, 64),
        "none": np.zeros((0, 2), np.float32),
    }


def exactly(leaf) -> list[Fraction]:
    return [Fraction(x) for x in np.asarray(leaf, object if isinstance(leaf, int) else None).reshape(-1).tolist()]


@pytest.mark.skipif(SIZE == 1, reason="one rank has no other")
def test_a_rank_at_another_call_root_or_step_is_named_on_all():
    tree = {"w": jnp.zeros(3)}
    calls: list[tuple[Any, str]] = [
        (lambda: COMM.split(0), "'split'"),
        (lambda: next(jaxmpi.join([1])), "'jaxmpi.join'"),
        (lambda: jaxmpi.Checkpoints("unused").save(1, tree), "'jaxmpi.Checkpoints.save'"),
        (lambda: jaxmpi.broadcast(tree, root=1), "'the tree to broadcast from rank 1'"),
    ]
    for call, what in calls:
        with pytest.raises(jaxmpi.UsageError, match=f"rank 0 to {what}, rank 1 to 'the tree to broadcast from rank 0'"):
            call() if RANK == 0 else jaxmpi.broadcast(tree)
    with pytest.raises(jaxmpi.UsageError, match=r"Checkpoints.save differs between ranks:\n.*step: got 1, expected 0"):
        jaxmpi.Checkpoints("unused").save(RANK, tree)


X, ONES = {"w": jnp.ones(3)}, jnp.ones(SIZE)
TX = {"topk": jaxmpi.exchange_gradients("topk5"), "sharded": jaxmpi.sharded(optax.sgd(1.0), "element")}
MASKED = {"w": np.ma.masked_array([1.0, 2.0, 3.0], [False, True, False], np.float32)}
# A call of all ranks, what they give, what rank 1 gives in its place, and how its error begins.
REFUSED_ON_RANK_1: dict[str, tuple[Any, Any, Any, str]] = {
    "strategy": (lambda y: jaxmpi.exchange(X, y), "asa32", "best", "unknown strategy 'best'"),
    "op": (lambda y: jaxmpi.exchange(X, op=y), "sum", "max", "unknown op 'max'"),
    "bucket_bytes": (lambda y: jaxmpi.exchange(X, bucket_bytes=y), None, -1, ".*bucket_bytes: got -1"),
    "order": (lambda y: jaxmpi.exchange(X, order=y), None, "text", "AttributeError"),
    "in jit": (lambda y: jax.jit(lambda x: jaxmpi.exchange(x, y))(X), "shm", "best", "unknown strategy 'best'"),
    "overlapped": (lambda y: jax.jit(lambda x: overlapped(x, y))(X), "asa32", "best", "unknown strategy 'best'"),
    "auto": (lambda y: jaxmpi.exchange(y, "auto"), X, "text", "exchange: leaf .* is str; expected floats"),
    "gradients": (lambda y: TX["topk"].update(y, TX["topk"].init(X)), X, "text", "exchange: leaf .* is str"),
    "params": (lambda y: TX["sharded"].update(X, TX["sharded"].init(X), y), X, None, "sharded: got no params"),
    "allreduce": (lambda y: mpi.allreduce(X, y), "sum", "plus", "allreduce: op: got 'plus'"),
    "dtype": (lambda y: mpi.scan(X, dtype=y), None, "text", "scan: dtype: got 'text'"),
    "root": (lambda y: mpi.bcast(X, y), 0, None, "bcast: root: got None"),
    "template": (lambda y: mpi.bcast(y, 0), X, "text", "bcast: leaf .*: got <U4"),
    "masked": (lambda y: jax.jit(lambda: mpi.allgather(y))(), X, MASKED, "allgather: leaf 'w': got a masked array"),
    "numbers": (mpi.allreduce, ONES, np.full(SIZE, 1e300), "allreduce: leaf .*: got 1e.300, which float32 cannot hold"),
    "rows": (mpi.alltoall, ONES, jnp.ones(SIZE + 1), "alltoall: leaf .* has shape"),
    "counts": (lambda y: mpi.allgatherv(ONES, counts=y), None, 5, "TypeError"),
    "send_counts": (lambda y: mpi.alltoallv(ONES, y), [1] * SIZE, [SIZE + 1], "alltoallv: send_counts: got"),
    "start": (lambda y: jax.jit(lambda: mpi.wait(mpi.start(mpi.allreduce, X, y)))(), "sum", "no", "allreduce: op: got"),
    "count": (lambda y: jaxmpi.metrics.mean(X, y), 1, -1, "jaxmpi.metrics.mean: count: got -1"),
    "broadcast": (lambda y: jaxmpi.broadcast(X, y), 0, None, "broadcast: root: got None"),
    "statistics": (jaxmpi.average_statistics, X, MASKED, "exchange: leaf 'w': got a masked array"),
    "same": (lambda y: jaxmpi.same_on_all_ranks("plan", y), 1, {1}, "plan: ranks cannot compare it"),
    "color": (COMM.split, 0, -1, "split: color"),
    "key": (lambda y: COMM.split(0, y), 0, "text", "TypeError"),
    "local_batch": (lambda y: jaxmpi.InMemory("unused", y), 1, 0, "local_batch: got 0"),
}


@pytest.mark.skipif(SIZE == 1, reason="one rank is alone")
@pytest.mark.parametrize("name", REFUSED_ON_RANK_1)
def test_what_one_rank_refuses_is_raised_on_all_ranks(name):
    call, usual, odd, sentence = REFUSED_ON_RANK_1[name]
    with pytest.raises((jaxmpi.UsageError, jaxmpi.TrainingError, TypeError, AttributeError)) as error:
        call(odd if RANK == 1 else usual)
    assert re.search(sentence if RANK == 1 else f"Error: rank 1: {sentence}", f"{error.typename}: {error.value}")
    jaxmpi.same_on_all_ranks("the next call", 1)


COUNTS = {
    "largest that are taken": [2**26 - 3 * rank - 1 for rank in range(SIZE)],
    "fractions": [2.5 + rank for rank in range(SIZE)],
    "tiny": [1e-300 * (rank + 1) for rank in range(SIZE)],
    "equal": [2**30] * SIZE,
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_metrics_of_any_dtype_are_exact_for_any_counts(counts):
    by_rank = [dict(named_leaves(values_of_rank(rank))) for rank in range(SIZE)]
    total = jaxmpi.metrics.sum(values_of_rank(RANK))
    mean = jaxmpi.metrics.mean(values_of_rank(RANK), np.asarray(counts[RANK]))
    assert jax.tree.structure(total) == jax.tree.structure(mean) == jax.tree.structure(values_of_rank(RANK))
    for name in by_rank[0]:
        columns = list(zip(*(exactly(each[name]) for each in by_rank), strict=True))
        is_float = name in ("double", "half", "loss", "none")
        number = float if is_float else int
        assert np.ravel(total[name]).tolist() == [number(sum(column)) for column in columns]
        weights = [*map(Fraction, counts)]
        weighted = [sum(n * x for n, x in zip(weights, column, strict=True)) for column in columns]
        assert np.ravel(mean[name]).tolist() == [float(Fraction(x) / sum(weights)) for x in weighted]
    assert (type(total["seen"]), type(total["loss"]), total["double"].shape) == (int, float, (2, 3))


@pytest.mark.skipif(SIZE == 1, reason="one rank is alone")
def test_ranks_without_examples_do_not_matter_but_their_nan_does():
    assert jaxmpi.metrics.mean(math.nan if RANK else 2.5, 0 if RANK else 7) == 2.5
    assert math.isnan(jaxmpi.metrics.mean({"x": math.nan if RANK else 2.5})["x"])
    assert jaxmpi.metrics.sum(math.inf if RANK == 0 else 1.0) == math.inf
    with pytest.raises(jaxmpi.UsageError, match="a count of 0 on every rank"):
        jaxmpi.metrics.mean(1.0, 0)
    with pytest.raises(jaxmpi.UsageError, match=r"leaf 'x' is traced; inside jit take jaxmpi.collectives.allreduce"):
        jax.jit(jaxmpi.metrics.sum)({"x": 1.0})
    with pytest.raises(jaxmpi.UsageError, match=r"rank 1: b: got floats\[2\], expected floats\[1\]"):
        jaxmpi.metrics.sum({"a": 1, "b": np.ones(1 + (RANK == 1))})
    with pytest.raises(jaxmpi.UsageError, match=r"leaf 'a': got a sum beyond 64 bits; expected one of int64: give"):
        jaxmpi.metrics.sum({"a": np.array([1, 2**64 - 1], np.uint64)})


def test_metrics_near_the_limits_of_floats_and_beyond_64_bits():
    assert jaxmpi.metrics.mean(1e308, 100) == 1e308
    assert jaxmpi.metrics.mean(1.0, 0.5) == 1.0
    assert jaxmpi.metrics.mean(-math.inf if RANK == 0 else 1e308, 100) == -math.inf
    assert SIZE == 1 or math.isnan(jaxmpi.metrics.sum(-math.inf if RANK else math.inf))
    assert jaxmpi.metrics.sum(complex(RANK, 2)) == complex(sum(range(SIZE)), 2 * SIZE)
    assert jaxmpi.metrics.sum(1.7e308) == (1.7e308 if SIZE == 1 else math.inf)
    assert jaxmpi.metrics.sum(2**70 + RANK) == SIZE * 2**70 + sum(range(SIZE))
    small = jaxmpi.metrics.sum({"a": jnp.ones(3, jnp.int4), "b": jnp.ones((), jnp.uint2)})
    assert (small["a"].dtype, small["a"].tolist(), small["b"]) == (np.int64, [SIZE] * 3, SIZE)


@pytest.mark.parametrize(
    "call",
    [jaxmpi.metrics.sum, jaxmpi.metrics.mean, jaxmpi.broadcast, lambda x: jaxmpi.Checkpoints("never").save(1, x)],
)
def test_masks_and_gradients_of_integers_are_refused_on_all_ranks(call):
    for leaf in (MASKED["w"] if RANK == SIZE - 1 else np.ones(3, np.float32), np.zeros(3, jax.dtypes.float0)):
        with pytest.raises(jaxmpi.UsageError, match=r"w: got|'(shared/)?w'"):
            call({"w": leaf})


def test_all_64_bits_of_a_seed_are_used():
    data = [jax.random.key_data(jaxmpi.rank_key(seed)).tolist() for seed in (0, 2**32, 2**63, 2**64 - 1, 2**32 - 1)]
    assert len({*map(tuple, data)}) == len(data)
    same = jax.random.fold_in(jax.random.key(7), RANK)
    seeds: list[Any] = [7, np.int64(7), np.uint64(7), jnp.int32(7)]
    for seed in seeds:
        assert jnp.array_equal(jax.random.key_data(jaxmpi.rank_key(seed)), jax.random.key_data(same))
    refused: list[Any] = [2**64, -1, 1.5, "7"]
    for seed in refused:
        with pytest.raises(jaxmpi.UsageError, match="rank_key: seed"):
            jaxmpi.rank_key(seed)


def test_keys_differ_and_rank_0_alone_acts(capsys):
    keys = jaxmpi.collectives.allgather(jax.random.key_data(jaxmpi.rank_key(5)))
    assert len({tuple(key) for key in keys.tolist()}) == SIZE
    jaxmpi.print0("once")
    assert capsys.readouterr().out == "once\n" * (RANK == 0)
    assert jaxmpi.on_rank0(lambda x, y: x + y, 1, y=2) == (None if RANK else 3)
    if RANK == 0:
        with pytest.raises(jaxmpi.UsageError, match=r"on_rank0.*jaxmpi.exchange on rank 0 alone.*call it on all ranks"):
            jaxmpi.on_rank0(lambda: jaxmpi.exchange(jnp.ones(2)))


@pytest.mark.skipif(SIZE == 1, reason="one rank is alone")
def test_a_rank_that_is_waited_for_is_named_with_its_line(monkeypatch, capfd):
    monkeypatch.setattr(diagnosis, "SAID_AFTER_S", 0.6)
    waits, last, said, deadline_s = COMM.processes.waits, SIZE - 1, "", time.monotonic() + 60
    host = socket.gethostname()
    line = r"test_own_loop_over_mpi.py:\d+ in test_a_rank_that_is_waited_for_is_named_with_its_line"
    late = f"waits in a call for rank {last}, for 0.6 s now; all ranks must call it as often; rank {last} on {host}"
    if RANK != last:
        with waits.waiting(diagnosis.BESIDE, "a call"):
            while late not in said and time.monotonic() < deadline_s:
                time.sleep(0.05)
                said += capfd.readouterr().err
        assert re.search(rf"{late} waits in a barrier, {line}\n", said), said
    COMM.processes.barrier()
    if RANK == last:  # has called it as often now, for tests to come
        with waits.waiting(diagnosis.BESIDE, "a call"):
            pass


@pytest.mark.skipif(SIZE == 1, reason="one rank is alone")
def test_loops_of_uneven_length_end_together():
    seen = [(batch, is_new) for batch, is_new in jaxmpi.join(range(RANK + 1)) if jaxmpi.exchange(jnp.ones(1)) == 1]
    assert seen == [(min(step, RANK), step <= RANK) for step in range(SIZE)]
    assert not list(jaxmpi.join([]))
    with pytest.raises(jaxmpi.UsageError, match=r"no batch on rank \[0\]"):
        list(jaxmpi.join(range(RANK)))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(x))


def test_an_nnx_module_with_dropout_starts_alike_and_its_statistics_are_averaged():
    net = Net(nnx.Rngs(RANK))
    sent = jaxmpi.broadcast(nnx.state(net))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(sent))
    nnx.update(net, sent)
    x = jnp.arange(12.0).reshape(4, 3)
    outputs = np.asarray(jaxmpi.collectives.allgather(net(x)))
    assert (outputs == outputs[0]).all()
    net(x + RANK)
    assert jaxmpi.average_statistics({"mean": float(RANK), "n": RANK}) == {"mean": (SIZE - 1) / 2, "n": RANK}
    nnx.update(net, jaxmpi.average_statistics(nnx.state(net, nnx.BatchStat)))
    middle = 0.99 * 0.01 * 5.5 + 0.01 * (5.5 + (SIZE - 1) / 2)  # of the second column, whose mean is 5.5
    assert float(net.norm.mean[1]) == pytest.approx(middle, rel=1e-6)


def test_accumulated_gradients_are_exchanged_once_and_then_clipped(standard_promotion):
    exchanged = []

    def noted(updates, params):
        jax.debug.callback(lambda: exchanged.append(1))
        return updates

    descend = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    chain = optax.chain(optax.stateless(noted), jaxmpi.exchange_gradients(), descend)
    tx = jaxmpi.accumulate_gradients(chain, 3)
    params: Any = {"w": jnp.zeros(2)}
    state = tx.init(params)
    update = jax.jit(tx.update)
    rows = np.random.default_rng(0).random((3, SIZE, 2), np.float32) * 5
    for row in rows:
        updates, state = update({"w": jnp.asarray(row[RANK])}, state, params)
        params = optax.apply_updates(params, updates)
    mean = rows.mean((0, 1))
    jax.effects_barrier()
    assert len(exchanged) == 1
    assert np.allclose(params["w"], -mean / np.linalg.norm(mean), rtol=1e-6)


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["in jit", "outside"])
def test_accumulation_by_tokens_is_that_of_one_process_with_all_of_them(jit, standard_promotion):
    """Rank 0 has a batch of no token, whose gradient is NaN."""
    counts = np.random.default_rng(1).integers(1, 50, (SIZE, 3))
    rows = np.random.default_rng(0).standard_normal((SIZE, 3, 4), np.float32)  # mean gradients of the batches
    counts[0, 1] = 0
    tx = jaxmpi.accumulate_gradients(optax.chain(jaxmpi.exchange_gradients(), optax.sgd(1.0)), every=3, weighted=True)
    params, update = jnp.zeros(4), jit(tx.update)
    state = tx.init(params)
    for row, count in zip(rows[RANK], counts[RANK], strict=True):
        updates, state = update(jnp.asarray(row if count else row * np.nan), state, params, weight=count)
    oracle = np.average(rows.reshape(-1, 4).astype(np.float64), 0, counts.reshape(-1))
    np.testing.assert_allclose(-np.asarray(updates), oracle, rtol=1e-5, atol=1e-6)


def test_complex_numbers_have_the_bits_of_their_two_parts(standard_promotion):
    def complexes(rank: int) -> np.ndarray:
        return np.random.default_rng(rank).standard_normal((5, 7, 2), np.float32).view(np.complex64)[..., 0]

    def exchanged(z: Any) -> list:
        pairs = [({"z": z}, strategy) for strategy in ("asa32", "ring16", "shm")]
        return [(jaxmpi.exchange(*pair), jaxmpi.exchange([z.real, z.imag], pair[1])) for pair in pairs]

    z = complexes(RANK)
    for got, pair in (*jax.jit(exchanged)(z), *exchanged(z)):
        assert got["z"].dtype == np.complex64
        assert np.asarray(got["z"]).view(np.float32).tobytes() == np.stack(pair, -1).tobytes()
    by_rank = [complexes(rank).astype(np.complex128) for rank in range(SIZE)]
    mean = jaxmpi.metrics.mean({"z": z, "n": complex(RANK, 1)}, RANK + 1)
    weights = np.arange(1, SIZE + 1)
    np.testing.assert_allclose(mean["z"], np.average(by_rank, 0, weights), rtol=1e-12, atol=1e-15)
    assert mean["n"] == complex(sum(n * rank for rank, n in enumerate(weights)) / sum(weights), 1)

    adam = optax.contrib.split_real_and_imaginary(optax.adam(1e-2))
    both = []
    for tx in (optax.chain(jaxmpi.exchange_gradients(), adam), jaxmpi.sharded(ADAM, "element")):
        params: Any = {"z": jnp.ones((5, 7), jnp.complex64), "b": jnp.zeros(3)}
        state, update = tx.init(params), jax.jit(tx.update)
        for _ in range(3):
            updates, state = update({"z": jnp.asarray(z), "b": jnp.full(3, RANK, jnp.float32)}, state, params)
            params = optax.apply_updates(params, updates)
        both.append(params["z"])
    assert both[1].dtype == np.complex64
    np.testing.assert_allclose(both[1], both[0], rtol=0, atol=1e-7)


@pytest.fixture
def shared_folder(tmp_path_factory) -> Path:
    """One for all ranks."""
    return Path(processes().bcast_object(str(tmp_path_factory.mktemp("run"))))


def restored(checkpoints: jaxmpi.Checkpoints, *trees: Any) -> Any:
    saved = checkpoints.restore(*trees)
    assert saved is not None
    return saved


def test_checkpoints_keep_the_state_of_every_rank(shared_folder):
    checkpoints = jaxmpi.Checkpoints(shared_folder)
    shared = {"w": jnp.arange(3.0), "double": np.full(2, 1 / 3)}
    own = {"residual": jnp.full(2, float(RANK)), "key": jaxmpi.rank_key(1)}
    assert checkpoints.restore(shared, own) is None
    for step in (5, 6, 7):
        checkpoints.save(step, jax.tree.map(lambda x, step=step: x + step, shared), own, {"epoch": step})
    saved = restored(checkpoints, shared, {"residual": jnp.zeros(2), "key": jax.random.key(9)})
    assert (saved.step, saved.extra) == (7, {"epoch": 7})
    assert isinstance(saved.shared["w"], jax.Array)
    assert (saved.shared["double"] == np.full(2, 1 / 3) + 7).all()
    assert (saved.own["residual"] == RANK).all()
    assert saved.own["key"] == own["key"]
    assert sorted(path.name for path in shared_folder.iterdir()) == ["step_00000006", "step_00000007"]
    with pytest.raises(jaxmpi.UsageError, match=r"w: got float32\[3\], expected float32\[4\]"):
        checkpoints.restore({"w": jnp.zeros(4), "double": shared["double"]}, own)
    processes().barrier()
    if RANK == 0:  # continues alone
        alone = restored(jaxmpi.Checkpoints(shared_folder, comm=SoloComm()), shared, own | {"key": jax.random.key(9)})
        assert (alone.own["residual"] == (SIZE - 1) / 2).all()
        assert alone.own["key"] == (own["key"] if SIZE == 1 else jax.random.key(9))
    processes().barrier()


def test_a_damaged_checkpoint_is_skipped_and_without_an_intact_one_all_ranks_raise(shared_folder):
    checkpoints, own = jaxmpi.Checkpoints(shared_folder), {"residual": jnp.full(2, float(RANK))}
    for step in (1, 2):
        checkpoints.save(step, {"w": jnp.full(3, float(step))}, own)

    def after_damage(damaged: int) -> Any:
        processes().barrier()
        if RANK == 0:
            file = sorted((shared_folder / f"step_{damaged:08d}").glob("*.bin"))[-1]
            *start, last = file.read_bytes()
            file.write_bytes(bytes([*start, last ^ 1]))
        processes().barrier()
        return checkpoints.restore({"w": jnp.zeros(3)}, own)

    saved = after_damage(2)
    assert saved is not None
    assert (saved.step, saved.shared["w"].tolist(), saved.own["residual"].tolist()) == (1, [1] * 3, [RANK] * 2)
    with pytest.raises(jaxmpi.UsageError, match=r"no checkpoint in .* is whole"):
        after_damage(1)


MOMENTUM = optax.sgd(lambda step: 0.5, momentum=0.5)  # its state has a scalar too; powers of two commute with rounding


def after_two_steps(tx: optax.GradientTransformation, params: Any) -> Any:
    """State for whole numbers as gradients, equal on all ranks: their mean is exact in any order."""
    state = tx.init(params)
    for scale in (1.0, 0.5):
        _, state = tx.update(jax.tree.map(lambda x, scale=scale: scale * (x + 1), params), state, params)
    return state


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("tx", "wire"), [(MOMENTUM, "32"), (optax.lars(0.5, momentum=0.5), "16")], ids=["momentum", "lars, 16"]
)
def test_a_sharded_state_is_resharded_for_other_strategies_and_numbers_of_ranks(
    tx, wire, shared_folder, standard_promotion
):
    params = {"w": jnp.arange(7.0), "b": jnp.arange(6.0).reshape(2, 3)}
    sharded = partial(jaxmpi.sharded, tx, "tensor" if wire == "16" else "element", gather_wire=wire)
    asa, ring, part = sharded("asa32"), sharded("ring32"), COMM.split(RANK // 2)
    by_asa, by_ring = after_two_steps(asa, params), after_two_steps(ring, params)
    written_by = SIZE

    def is_as_trained(tx: optax.GradientTransformation, want: Any, comm: Any = COMM) -> bool:
        asked = {"opt": tx.init(params), "rank": np.int32(-1)}
        saved = restored(jaxmpi.Checkpoints(shared_folder, comm=comm), params, asked)
        assert saved.extra == {"chunks": "of the user"}
        assert saved.own["rank"] == (RANK if comm.size == written_by else 0)
        # One worker updates whole tensors in another program: an fma rounds once less, in each of two updates.
        rtol = 2**-22 if wire == "16" and comm.size != written_by else 0.0
        return jax.tree.all(jax.tree.map(lambda x, y: np.allclose(x, y, rtol, atol=0), saved.own["opt"], want))

    extra = {"chunks": "of the user"}
    jaxmpi.Checkpoints(shared_folder).save(1, params, {"opt": by_asa, "rank": np.int32(RANK)}, extra)
    assert is_as_trained(asa, by_asa)
    assert is_as_trained(ring, by_ring)
    of_part = sharded("asa32", comm=part)
    assert is_as_trained(of_part, after_two_steps(of_part, params), part)
    if SIZE > 1 and wire == "32":
        with pytest.raises(jaxmpi.UsageError, match=r"a state with \(0, 1.*; expected \(1, .* restore it by"):
            ring.update(params, by_asa, params)
    processes().barrier()
    if RANK == 0:  # continues alone
        single, alone = sharded("asa32", comm=SoloComm()), jaxmpi.Checkpoints(shared_folder, comm=SoloComm())
        by_one = after_two_steps(single, params)
        assert is_as_trained(single, by_one, SoloComm())
        alone.save(2, params, {"opt": by_one, "rank": np.int32(0)}, extra)
    processes().barrier()
    written_by = 1
    assert is_as_trained(ring, by_ring)


@pytest.mark.parametrize("strategy", ["topk10", "lowrank2"])
def test_a_compressor_resumes_from_the_residual_of_each_rank(strategy, shared_folder):
    checkpoints = jaxmpi.Checkpoints(shared_folder)
    params = {"w": jnp.zeros((6, 4))}
    grads = {"w": jax.random.normal(jaxmpi.rank_key(1), (6, 4))}
    tx = jaxmpi.exchange_gradients(strategy)
    _, state = tx.update(grads, tx.init(params), params)
    checkpoints.save(1, params, state)
    saved = restored(checkpoints, params, tx.init(params))
    made, again = (tx.update(grads, each, params) for each in (state, saved.own))
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), made, again))
    without = jax.tree.map(lambda x, y: (x == y).all(), made, tx.update(grads, tx.init(params), params))
    assert jax.tree.all(without) == (SIZE == 1)  # which has no residual


def test_a_sharded_state_is_neither_saved_as_shared_nor_broadcast(tmp_path, standard_promotion):
    params = {"w": jnp.arange(7.0)}
    tx = jaxmpi.sharded(ADAM, "element")
    with pytest.raises(jaxmpi.UsageError, match=r"shared: got a state of jaxmpi.sharded, .* give it in own"):
        jaxmpi.Checkpoints(tmp_path).save(3, {"opt": tx.init(params)})
    with pytest.raises(jaxmpi.UsageError, match=r"broadcast: got a state of jaxmpi.sharded, which is each rank's own"):
        jaxmpi.broadcast((params, tx.init(params)))


def test_shards_of_another_optimizer_path_or_wire_are_refused(shared_folder, standard_promotion):
    """Their leaves can have names and shapes of those that are asked for."""
    checkpoints = jaxmpi.Checkpoints(shared_folder)
    params = {"w": jnp.arange(7.0), "b": jnp.ones((2, 3))}
    adam, lion = (jaxmpi.sharded(tx, "element").init(params) for tx in (ADAM, optax.lion(1e-2)))
    coarse = jaxmpi.sharded(ADAM, "element", "ring32", gather_wire="16").init(params)
    checkpoints.save(1, params, {"a": adam, "b": adam})
    for own in ({"a": adam, "b": lion}, {"b": adam, "c": adam}, {"a": coarse, "b": coarse}):
        with pytest.raises(jaxmpi.UsageError, match=rf"saved by {SIZE} ranks, with .*: take the same trees"):
            checkpoints.restore(params, own)


@pytest.mark.skipif(SIZE < 2, reason="a part of the ranks is all of them")
def test_states_of_subcommunicators_and_of_reordered_ranks_stay_with_each_rank(shared_folder, standard_promotion):
    params = {"w": jnp.full((3, 5), float(RANK)), "b": jnp.ones((5, 3))}
    for number, comm in enumerate((COMM.split(RANK), COMM.split(0, key=-RANK))):
        checkpoints = jaxmpi.Checkpoints(shared_folder / str(number))
        tx = jaxmpi.sharded(LARS, "tensor", comm=comm)
        checkpoints.save(1, {}, after_two_steps(tx, params))
        saved = restored(checkpoints, {}, tx.init(params))
        assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), saved.own, after_two_steps(tx, params)))
        others = jaxmpi.sharded(LARS, "tensor")
        with pytest.raises(
            jaxmpi.UsageError, match=r"of parts of them: ranks \[\[.*; expected \['all'\] .* comm=that part"
        ):
            checkpoints.restore({}, others.init(params))


def test_a_state_with_another_assignment_or_rounding_is_refused(standard_promotion):
    params = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones((4, 3)), "c": jnp.ones((2, 2))}
    of_lars = partial(jaxmpi.sharded, LARS, "tensor")
    tx, coarse = of_lars(), of_lars(gather_wire="16")
    pairs: list[tuple[Any, Any, str]] = [(tx, coarse, "masters"), (coarse, tx, "masters")]
    if SIZE > 1:
        pairs.append((of_lars(comm=COMM.split(0, key=-RANK)), tx, "ranks: got a state with"))
        pairs.append((tx, of_lars(cost=lambda shape: float(shape == (2, 2))), "tensors by shard: got a state with"))
    for one, other, named in pairs:
        with pytest.raises(jaxmpi.UsageError, match=named):
            one.update(params, other.init(params), params)


def test_a_checkpoint_that_is_not_finite_is_refused_on_all_ranks_unless_allowed(shared_folder):
    last = SIZE - 1
    checkpoints, shared = jaxmpi.Checkpoints(shared_folder), {"w": jnp.ones(2), "best": np.inf}
    own = {"residual": jnp.full(2, math.nan if RANK == last else 0.0)}
    for trees, named in (((shared,), "rank 0: .*best"), (({"w": jnp.ones(2)}, own), f"rank {last}: .*residual")):
        with pytest.raises(jaxmpi.TrainingError, match=f"{named}.* is not finite after step 3: .*check_finite=False"):
            checkpoints.save(3, *trees)
    assert checkpoints.restore(shared, own) is None
    jaxmpi.Checkpoints(shared_folder, check_finite=False).save(3, shared, own)
    saved = restored(checkpoints, shared, own)
    assert saved.shared["best"] == np.inf
    assert np.isnan(saved.own["residual"]).all() == (RANK == last)


def test_a_checkpoint_that_one_rank_cannot_write_is_refused_on_all(shared_folder, monkeypatch):
    last = SIZE - 1
    checkpoints = jaxmpi.Checkpoints(shared_folder)
    checkpoints.save(np.int64(1), {"w": jnp.ones(2)})

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if RANK == last:
            patch.setattr(manager, "write_leaves", full)
        with pytest.raises(jaxmpi.TrainingError, match=rf"rank {last}: the checkpoint of step 2 cannot .* No space"):
            checkpoints.save(2, {"w": jnp.zeros(2)})
    saved = restored(checkpoints, {"w": jnp.zeros(2)})
    assert saved.step == 1
    assert checkpoints.save(2, {"w": jnp.zeros(2)}).exists()


def activation(x):
    return x


def save_arguments(leaf) -> dict:
    return {"shared": {"net": {"w": jnp.ones(2), "activation": leaf}}}


# What a rank gives to `save`, the error, and what it names.
BAD_SAVES = {
    "a module's function": (save_arguments(activation), jaxmpi.UsageError, "net/activation"),
    "one path twice": ({"shared": {"a/b": jnp.ones(2), "a\\": {"b": jnp.ones(2)}}}, jaxmpi.UsageError, "path"),
    "extra": ({"shared": {"w": jnp.ones(2)}, "extra": {"loss": jnp.ones(())}}, jaxmpi.UsageError, "extra"),
    "deep extra": (
        {"shared": {"w": jnp.ones(2)}, "extra": {"x": json.loads("[" * 61 + "]" * 61)}},
        jaxmpi.UsageError,
        "extra",
    ),
    "complex NaN": ({"shared": {"w": jnp.array([complex(0, math.nan)])}}, jaxmpi.TrainingError, "w"),
}


@pytest.mark.parametrize("odd", [0, SIZE - 1], ids=["on the first", "on the last"])
@pytest.mark.parametrize(("given", "error", "named"), BAD_SAVES.values(), ids=BAD_SAVES)
def test_what_one_rank_cannot_save_is_refused_on_all_ranks(given, error, named, odd, shared_folder):
    checkpoints = jaxmpi.Checkpoints(shared_folder)
    good = {"shared": {"w": jnp.ones(2)}}
    if named == "w" and odd:  # rank 0's part of what is shared is written
        given = {**good, "own": given["shared"]}
        good = {**good, "own": {"w": jnp.zeros(1, jnp.complex64)}}
    with pytest.raises(error, match=named):
        checkpoints.save(1, **(given if odd == RANK else good))
    assert checkpoints.save(1, {"w": jnp.ones(2)}).exists()
    assert jaxmpi.metrics.sum(1) == SIZE


class Unruly:
    """A node of a tree that cannot be put together again on one rank."""


jax.tree_util.register_pytree_node(Unruly, lambda node: ((jnp.ones(2),), None), lambda _, leaves: unruly(leaves))


def unruly(leaves):
    if RANK == SIZE - 1 and isinstance(leaves[0], np.ndarray):
        raise RuntimeError("not this one")
    return Unruly()


def test_a_tree_that_one_rank_cannot_rebuild_is_refused_on_all(shared_folder):
    checkpoints = jaxmpi.Checkpoints(shared_folder)
    checkpoints.save(1, {"w": jnp.ones(2)})
    with pytest.raises((jaxmpi.UsageError, jaxmpi.TrainingError), match="not this one"):
        checkpoints.restore({"w": Unruly()})
    assert jaxmpi.metrics.sum(1) == SIZE


def test_a_step_is_a_64_bit_integer(shared_folder):
    checkpoints = jaxmpi.Checkpoints(shared_folder)
    for step in (jnp.int32(5), 1_764_300_000_123_456_789, 2**63 - 1):
        checkpoints.save(step, {"w": jnp.ones(2)})
        saved = restored(checkpoints, {"w": jnp.zeros(2)})
        assert saved.step == int(step)
    wrong: list[Any] = [1.9, -1, 2**63, None, True]
    for step in wrong:
        with pytest.raises(jaxmpi.UsageError, match="step"):
            checkpoints.save(step, {"w": jnp.zeros(2)})
    saved = restored(checkpoints, {"w": jnp.zeros(2)})
    assert float(saved.shared["w"][0]) == 1


# ---------------------------------------------------------------- docs/porting.md

PORTING = (Path(__file__).parents[2] / "docs" / "porting.md").read_text().partition("## Functions over workers")[0]
ELSEWHERE = (
    "--",
    "jaxmpi run",
    "jaxmpi.Trainer(",
    'jaxmpi.exchange(x, comm=jaxmpi.AxisComm("i", n))',
)  # other tests have these


def lines_of_jaxmpi() -> list[str]:
    """Second column of the tables of moves, as code."""
    cells = [row.split(" | ")[-1] for row in PORTING.splitlines() if row.startswith("| ")]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    parts = {".split(color, key)": "comm.split(color, key)", "jaxmpi.wait(h)": "", "optimizer.stateless_apply": ""}
    lines = [parts.get(span, re.sub("^(exchange_g)", r"jaxmpi.\1", span)) for span in spans]
    return [line for line in dict.fromkeys(lines) if line and not line.startswith(ELSEWHERE)]


def test_every_line_of_the_porting_table_runs(shared_folder):
    params, x = {"w": jnp.ones(2)}, jnp.arange(2.0 * SIZE).reshape(SIZE, 2)
    names: dict[str, Any] = {"jaxmpi": jaxmpi, "mpi": jaxmpi.collectives, "optax": optax, "comm": COMM, "x": x, "y": x}
    names |= {"a": RANK, "b": RANK, "color": 0, "key": -RANK, "ranks": [0], "params": params, "grads": params, "k": 2}
    names |= {"opt": optax.sgd(0.1), "chain": optax.sgd(0.1), "batches": [1, 2], "data": x, "effective_batch": SIZE}
    names |= {"folder": str(shared_folder), "step": 1, "shared": params, "own": params, "value": 1.5, "count": 3}
    lines = lines_of_jaxmpi()
    assert len(lines) > 35
    for line in lines:
        if line.startswith("h = "):
            started = f"def program(x):\n    {line}\n    return jaxmpi.wait(h)"
            exec(f"import jax\n{started}\njax.jit(program)(x)", names)
        else:
            exec(f"{line}: pass" if line.startswith("for ") else line, names)
