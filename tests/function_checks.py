"""Results of `jaxmpi.function` and its variables must be what one worker gives: checks for any kind of workers.

Each check runs as it is over devices of one process, and on every rank of an SPMD job. It also runs as it is, once,
in a script that leads workers. Expected values come from NumPy or from the bare function on all the data.
"""

import itertools
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi import functions as jm
from jaxmpi.comm.job import processes
from jaxmpi.functions.lifecycle import current_group
from jaxmpi.functions.reports import WorkerFailed
from jaxmpi.functions.rows import shard_bounds

U = 2.0**-24  # unit roundoff of f32


def f32(values) -> np.ndarray:
    return np.asarray(values, np.float32)


def workers() -> int:
    return current_group().size


def data(n: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((n, 3)) * 4
    return values.astype(jnp.dtype(dtype))


def fails(call, message: str) -> None:
    with pytest.raises(jaxmpi.UsageError, match=re.escape(message)):
        call()


def wrap(words: str = "gather", f=lambda x: x, inputs: Any = jm.scatter) -> Any:
    """A function over workers; by default it gives its rows back."""
    return jm.function(f, inputs, words)


# ---------------------------------------------------------------- reductions

OPS = ("mean", "sum", "prod", "min", "max")
NUMPY = {"mean": np.mean, "sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max}


def uneven() -> int:
    return 5 * workers() + 1


def reductions(x: np.ndarray, ops: tuple[str, ...]) -> Iterator[tuple[int, str, Any]]:
    """Results over the first axis, in several numbers of slices."""
    f = jm.function(lambda x: tuple(getattr(jnp, op)(x, 0) for op in ops), jm.scatter, [getattr(jm, op) for op in ops])
    for slices in (1, 2, 3, len(x) + 7):
        for op, got in zip(ops, f(x, slices=slices), strict=True):
            assert got.dtype == x.dtype
            yield slices, op, got


def check_floats():
    """Error <= (n + 2 slices + 4 workers) u op(|x|): a term is rounded once a sum that it is in, and by its weights."""
    n = uneven()
    x = data(n)
    for slices, op, got in reductions(x, OPS):
        wide = x.astype(np.float64)
        bound = (n + 2 * slices + 4 * workers()) * U * NUMPY["prod" if op == "prod" else op](abs(wide), axis=0)
        error = abs(np.asarray(got, np.float64) - NUMPY[op](wide, axis=0))
        assert (error <= (0 if op in ("min", "max") else bound)).all(), (op, slices, error, bound)


def check_integers():
    """In every bit, sums that wrap included."""
    n = uneven()
    x = np.random.default_rng(1).integers(-(2**31), 2**31 - 1, (n, 3), dtype=np.int32)
    for _, op, got in reductions(x, OPS[1:]):
        expected = NUMPY[op](x, axis=0, **({"dtype": np.int32} if op in ("sum", "prod") else {}))
        assert np.asarray(got).tobytes() == expected.tobytes()


def figures(x, scale=1.0, *, shift=0.0):
    """A tree of outputs that reduce in different ways."""
    y = scale * x + shift
    return {"loss": y.mean(), "rows": y, "most": (y.max(), {"each": y.max(0), "least": y.min()})}


def mirrored(x):
    """The same by a program that calls back into Python, so that workers get the function itself."""
    return figures(jax.pure_callback(lambda v: -v, jax.ShapeDtypeStruct(x.shape, x.dtype), x))


TREE = {"loss": jm.mean, "rows": "gather", "most": (jm.max, {"each": "max", "least": "min"})}


def check_trees_of_reductions():
    """Each place of an output in its own way; in slices; some of them only; kept in variables."""
    x = data(uneven())
    for function, y in ((figures, x), (mirrored, -x)):
        f = jm.function(function, jm.scatter, TREE)
        for slices in (1, 3):
            got = f(x, slices=slices)
            assert abs(float(got["loss"]) - y.mean()) <= 64 * U * abs(y).max()
            assert (np.asarray(got["rows"]) == y).all()
            assert (float(got["most"][0]), float(got["most"][1]["least"])) == (y.max(), y.min())
            assert (np.asarray(got["most"][1]["each"]) == y.max(0)).all()
        some = f(x, output_subset=["most"])
        assert list(some) == ["most"]
        assert float(some["most"][0]) == y.max()
        assert set(f(x, output_subset=["rows", "loss"])) == {"rows", "loss"}
    top = jm.variable(np.zeros(3, np.float32))
    kept = jm.function(
        figures, jm.scatter, {"loss": "mean", "rows": "local", "most": (jm.max, {"each": jm.max(top), "least": "min"})}
    )
    got = kept(x)
    assert got["most"][1]["each"] is None
    assert (top.get(workers() - 1) == x.max(0)).all()
    assert (got["rows"].gather() == x).all()
    pieces = jm.function(lambda x: x.sum(), jm.scatter, jm.local(jm.sum))(x, slices=3)
    assert abs(float(pieces.reduce("sum")) - x.sum()) <= 3 * len(x) * U * abs(x).sum()


def check_subsets():
    """Others are not computed, and variables that take them keep what they hold; updates happen in any case."""
    x = data(uneven())
    kept, count = jm.variable(np.float32(7)), jm.variable(np.int32(0))
    f = jm.function(
        lambda x: (x.sum(), x.max(), x.min(), x.shape[0]), jm.scatter, ("sum", jm.max(kept), "min"), (count, "add")
    )
    assert [float(v) for v in f(x, output_subset=[2])] == [x.min()]
    assert (float(kept.value), int(count.reduce("sum"))) == (7, len(x))
    least, total = f(x, output_subset=(2, 0))
    assert float(least) == x.min()
    assert float(total) == float(f(x)[0])
    assert (float(kept.value), int(count.reduce("sum"))) == (x.max(), 3 * len(x))
    assert f(x, output_subset=()) == ()
    big = jm.function(
        lambda x: (x.sum(), jnp.broadcast_to(x.sum(), (len(x), 1 << 16, 1 << 12))), jm.scatter, ("sum", "gather")
    )
    assert float(big(x, output_subset=[0])[0]) == float(total)  # the other has 1 GB a row
    fails(lambda: f(x, output_subset=[3]), "output_subset: got")


def check_arguments_by_name():
    """By the names of the function's parameters, in any order; those that inputs leave out keep their defaults."""
    x = data(uneven())
    expected = np.asarray(2 * x + 1)
    by_dict = jm.function(figures, {"shift": jm.broadcast, "x": jm.scatter, "scale": jm.broadcast}, TREE)
    by_place = jm.function(figures, (jm.scatter, jm.broadcast), TREE)
    for got in (by_dict(shift=1.0, scale=2.0, x=x), by_dict(x, 2.0, shift=1.0), by_dict(x, 2.0, 1.0, slices=2)):
        assert (np.asarray(got["rows"]) == expected).all()
    for got in (by_place(x, scale=2.0), by_place(scale=2.0, x=x, output_subset=["rows"])):
        assert (np.asarray(got["rows"]) == 2 * x).all()
    assert (np.asarray(jm.function(mirrored, {"x": jm.scatter}, TREE)(x=x)["rows"]) == -x).all()
    any_names = jm.function(lambda **parts: sum(p.max() for p in parts.values()), jm.scatter, "max")
    assert float(any_names(a=x, b=x)) == 2 * x.max()
    shift = jm.variable(np.float32(1))
    held = jm.function(figures, {"x": jm.scatter, "shift": shift}, TREE)
    assert (np.asarray(held(x=x)["rows"]) == x + 1).all()
    fails(lambda: by_place(x, 2.0, shift=1.0), "'shift'")
    fails(lambda: jm.function(lambda batch: batch, {"batch": jm.scatter}), "inputs: got 'batch'")


def check_batches():
    n = uneven() + 9
    x = data(n)
    f = jm.function(lambda x: x, jm.scatter, jm.gather)
    order = np.random.default_rng(3).permutation(n)
    mask = np.flatnonzero(x[:, 0] > -100)
    positive = x[:, 0] > 0
    ranges = (n - 2, slice(2, None), slice(n, 1, -1), slice(0, n, 2))
    for batch in (*ranges, order, order.tolist()[: workers()], -1 - order, mask, positive, positive.tolist()):
        chosen = slice(batch) if isinstance(batch, int) else batch
        for slices in (1, 3):
            assert (np.asarray(f(x, batch=batch, slices=slices)) == x[chosen]).all(), batch
            assert (np.asarray(f(jnp.asarray(x), batch=batch, slices=slices)) == x[chosen]).all(), batch


# ---------------------------------------------------------------- what is kept


def check_broadcast_is_seen_when_it_changes():
    f = jm.function(lambda x, p: p["a"].sum() + p["b"] + 0 * x.sum(), (jm.scatter, jm.broadcast), jm.max)
    x, p = data(workers()), {"a": np.ones(4, np.float32), "b": jnp.float32(1)}
    assert float(f(x, p)) == 5
    p["a"][1] = 3  # in place
    assert float(f(x, p)) == 7
    p["b"] = jnp.float32(-1)
    assert float(f(x, p)) == 5
    assert float(f(x, {"a": np.zeros(2, np.float32), "b": np.float32(0)})) == 0
    assert float(f(x, {"a": p["a"].astype(np.float64), "b": 2.0})) == 8


def check_updates():
    """From the original values, accumulated over pieces, applied once, each worker for itself."""
    n, k = 7 * workers(), workers()
    x = np.arange(n, dtype=np.int32)
    seen, total, largest, last = (jm.variable(np.int32(v)) for v in (100, 5, -1, 0))

    def f(x, seen, largest):
        return x.size, seen + x.size * 0 + x.size, x.sum(), jnp.maximum(largest, x.max()), x

    single = jm.variable(np.int32(1))  # a pair by itself, and a variable by itself
    jm.function(lambda x: x.sum(), jm.scatter, (), (single, jm.add))(x, slices=2)
    assert int(single.reduce("sum")) == x.sum() + k
    jm.function(lambda old: 2 * old, single, (), single)()
    assert int(single.reduce("sum")) == 2 * (x.sum() + k)

    wrong = jm.function(lambda x: jnp.stack([x.sum()] * 3), jm.scatter, (), (single, jm.add))
    fails(lambda: wrong(x, slices=2), "add: got int32[3] for a variable of int32[]")
    assert int(single.reduce("sum")) == 2 * (x.sum() + k)

    updates = ((seen, jm.max), (total, jm.add), (largest, jm.max), (last, jm.gather))
    run = jm.function(f, (jm.scatter, seen, largest), (jm.sum,), updates)
    edges = shard_bounds(n, k)
    for slices in (1, 3):
        seen.broadcast(np.int32(100))
        total.broadcast(np.int32(5))
        (count,) = run(x, slices=slices)
        assert int(count) == n
        pieces = shard_bounds(n, k * slices)
        for rank in {0, k - 1}:
            mine = x[edges[rank] : edges[rank + 1]]
            longest = max(b - a for a, b in itertools.pairwise(pieces))
            assert seen.get(rank) == 100 + (7 if slices == 1 else longest)
            assert total.get(rank) == 5 + mine.sum()
            assert largest.get(rank) == mine.max()
            assert (last.get(rank) == mine).all()


def check_resident():
    """Rows that live on the workers: sliced, chosen by worker, weighted by their numbers."""
    k, n = workers(), 4 * workers() + 1
    x = np.arange(n, dtype=np.float32)
    rows = jm.variable(f32([0]))
    rows.scatter(x)
    f = jm.function(lambda x: (x.mean(), x), jm.scatter(rows), (jm.mean, jm.gather))
    for slices in (1, 2, 50):
        mean, all_rows = f(slices=slices)
        assert abs(float(mean) - x.mean()) <= (n + 50 + 4 * k) * U * n
        assert (np.asarray(all_rows) == x).all()
    edges = shard_bounds(n, k)
    shares = [x[a:b] for a, b in itertools.pairwise(edges)]
    for chosen in (slice(1, None), 2, [0, -1], np.array([3, 0])):
        picked = np.concatenate([share[slice(chosen) if isinstance(chosen, int) else chosen] for share in shares])
        assert (np.asarray(f(batch_local=chosen, slices=2)[1]) == picked).all()
    each = [[r % 4, 0][: 1 + r % 2] for r in range(k)]
    picked = np.concatenate([share[c] for share, c in zip(shares, each, strict=True)])
    mean, got = f(batch_local=each)
    assert (np.asarray(got) == picked).all()
    assert abs(float(mean) - picked.mean()) <= (n + 4 * k) * U * n
    both = jm.function(lambda x, y: (x - y).max(), (jm.scatter(rows), jm.scatter), jm.max)
    assert float(both(x, slices=2)) == 0


# ---------------------------------------------------------------- variables and shared arrays


def check_variable():
    k = workers()
    v = jm.variable({"a": f32([1, 2]), "b": np.int32(3)})
    for rank in range(k):
        v.set(rank, {"a": f32([rank, 2]), "b": np.int32(rank)})
    assert v.get(np.int64(k - 1))["b"] == k - 1
    fails(lambda: v.get(k), f"get: rank: got {k}; expected a worker in [0, {k})")
    mean_a = v.reduce(jm.max)["a"]
    assert (np.asarray(mean_a) == [k - 1, 2]).all()
    assert int(v.reduce("sum")["b"]) == k * (k - 1) // 2
    assert int(v.reduce(jm.prod)["b"]) == 0
    fails(lambda: v.all_reduce("mean"), "int32[], which mean cannot take")
    v.all_reduce(jm.sum)
    assert [int(v.get(r)["b"]) for r in range(k)] == [k * (k - 1) // 2] * k
    assert (v.get(0)["a"] == [k * (k - 1) / 2, 2 * k]).all()
    v.set(k - 1, {"a": f32([7, 7, 7]), "b": np.int32(9)})
    v.broadcast(root=k - 1)
    assert (v.get(0)["a"] == 7).all()
    assert v.value["a"].shape == (3,)


def check_strategies():
    """Whole numbers below 2^8 are exact on all wires but `8`, which rounds a share and then a sum."""
    k = workers()
    x = np.random.default_rng(k).integers(-9, 9, (k, 3001)).astype(np.float32)  # a length that no k divides
    total = x.sum(0)
    for strategy in ("shm", "ring16", "asa8"):
        v = jm.variable(x[0])
        for rank in range(1, k):
            v.set(rank, x[rank])
        v.all_reduce("sum", strategy=strategy)
        # Every worker's part is rounded, then the sum.
        bound = 1.01 / 253 * (abs(x).max() * k + abs(total).max()) if strategy == "asa8" else 0
        assert (abs(v.get(k - 1) - total) <= bound).all(), strategy
        assert v.get(0).tobytes() == v.get(k - 1).tobytes()


def check_unequal_lengths():
    k = workers()
    v = jm.variable(np.zeros((0, 2), np.float32))
    n = 3 * k + 1
    x = data(n)[:, :2]
    v.scatter(x)
    assert v.lengths() == [b - a for a, b in itertools.pairwise(shard_bounds(n, k))]
    assert v.gather().tobytes() == x.tobytes()
    order = np.random.default_rng(5).permutation(n)[: 2 * k]
    v.scatter(x, batch=order)
    assert (v.gather() == x[order]).all()
    v.set(0, x[:2])
    v.set(k - 1, np.zeros((0, 2), np.float32))
    assert v.lengths() == [*([2] * (k > 1)), *[2] * (k - 2), 0]
    rest = np.concatenate([v.get(r) for r in range(k)])
    assert (v.gather() == rest).all()
    v.all_gather()
    assert all((v.get(r) == rest).all() for r in range(k))
    if k > 1:
        v.set(0, x[:1])
        fails(lambda: v.all_reduce("sum"), "differs between workers")
        v.set(0, np.zeros((3, 5), np.float32))
        fails(v.gather, "expected the same")


def check_shared():
    n = uneven()
    x = data(n)
    memory = jm.shared(x)
    f = jm.function(lambda x: x, jm.scatter, jm.gather)
    order = np.random.default_rng(7).permutation(n)
    assert (np.asarray(f(memory)) == x).all()
    assert (np.asarray(f(memory, batch=order, slices=2)) == x[order]).all()
    assert (np.asarray(f(memory, batch=slice(None, 1, -1))) == x[:1:-1]).all()
    memory.resize(4 * n)
    assert (memory[:n] == x).all()
    synchronise()
    memory[n:] = np.float32(2)
    synchronise()
    assert (np.asarray(f(memory))[n:] == 2).all()
    synchronise()
    v = jm.variable(f32([0]))
    v.scatter(memory, batch=order)
    assert (v.gather() == x[order]).all()
    both = jm.function(lambda a, b: (a - b).max(), (jm.scatter, jm.scatter), jm.max)
    memory.resize(n)
    assert float(both(memory, x)) == 0
    memory.free()
    fails(lambda: f(memory), "has been freed")


def synchronise() -> None:
    """If ranks share memory, what one writes others must not read too early."""
    if not current_group().is_serial:
        processes().barrier()


# ---------------------------------------------------------------- optimizers


def normalised(params, stats, x, y, key):
    """A loss with batch statistics, dropout and figures, as a user may write it."""
    m, v = x.mean(0, keepdims=True), x.var(0, keepdims=True)
    drop = jax.random.bernoulli(key[0], 0.8, x.shape)
    out = jnp.where(drop, (x - m) / jnp.sqrt(v + 1e-3), 0) @ params["w"]
    new = {"mean": 0.9 * stats["mean"] + 0.1 * m, "seen": jnp.int32(len(x)), "last": y[-1:]}
    return jnp.mean((out - y) ** 2), (new, {"most": abs(out - y).max(), "out": out})


def check_model_state():
    """Batch statistics, dropout and figures: as one process that computes the shares one after another."""
    k = workers()
    n = 5 * k + 1
    x, y, w = data(n), data(n, seed=1)[:, 0], f32([1, -1, 2])
    zeros = {"mean": np.zeros((1, 3), np.float32), "seen": np.int32(0), "last": np.zeros(1, np.float32)}
    tx, spans = optax.sgd(0.1, momentum=0.9), [*itertools.pairwise(shard_bounds(n, k))]
    step = jm.optimizer(
        normalised,
        {"w": w},
        tx,
        (jm.scatter,) * 3,
        model_state=zeros,
        model_state_outputs={"mean": "mean", "seen": "sum", "last": "local"},
        aux={"most": "max", "out": "gather"},
    )
    one, mean = jax.jit(jax.value_and_grad(normalised, has_aux=True)), zeros["mean"]
    params: Any = {"w": w}
    state = tx.init(params)
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed), n)
        value, got = step(x, y, key=keys)
        found = [one(params, zeros | {"mean": mean}, x[a:b], y[a:b], keys[a:b]) for a, b in spans]
        weights = [(b - a) / n for a, b in spans]
        losses, news, figures_, grads = zip(*((v, s, f, g["w"]) for (v, (s, f)), g in found), strict=True)
        expected = np.concatenate([f["out"] for f in figures_])
        assert abs(float(value) - np.dot(weights, losses)) <= 1e-5 * float(value)
        assert (abs(np.asarray(got["out"]) - expected) <= 1e-5 * abs(expected).max()).all()
        assert abs(float(got["most"]) - max(float(f["most"]) for f in figures_)) <= 1e-5 * float(got["most"])
        mean = np.sum([w * np.asarray(s["mean"]) for w, s in zip(weights, news, strict=True)], axis=0)
        updates, state = tx.update({"w": sum(w * g for w, g in zip(weights, grads, strict=True))}, state, params)
        params = optax.apply_updates(params, updates)
    ours = [jax.tree.leaves(step.params.get(rank)) for rank in (0, k - 1)]
    assert [leaf.tobytes() for leaf in ours[0]] == [leaf.tobytes() for leaf in ours[1]]
    for rank in {0, k - 1}:
        assert (abs(step.params.get(rank)["w"] - np.asarray(params["w"])) <= 1e-5 * abs(params["w"]).max()).all()
        assert (abs(step.model_state["mean"].get(rank) - mean) <= 1e-5 * abs(mean).max()).all()
        assert int(step.model_state["seen"].get(rank)) == n
        assert step.model_state["last"].get(rank) == y[spans[rank][1] - 1]


def naps(x):
    """The last worker is slow."""

    def nap(v):
        time.sleep(0.3 if v[-1] > 1 else 0.0)
        return v

    return jax.pure_callback(nap, jax.ShapeDtypeStruct(x.shape, x.dtype), x).max()


def check_profile():
    """Parts add up to the calls' time; waiting for a slow worker is a part of its own."""
    x = np.zeros(4 * workers(), np.float32)
    x[-1] = 2
    f = jm.function(naps, jm.scatter, jm.max)
    f(x)
    with jm.profile() as profile:
        begin = time.perf_counter()
        assert float(f(x)) == float(f(x)) == 2
        seconds = time.perf_counter() - begin
        fails(lambda: jm.profile().__enter__(), "profile: another one is under way")
    [row] = profile.rows
    parts = [row[f"{part}_s"] for part in ("function", "shuffle", "straggler", "reduce", "compile", "other")]
    assert min(parts) >= 0
    assert abs(sum(parts) - row["total_s"]) < 1e-9
    assert 0.6 <= row["total_s"] <= seconds
    if workers() > 1 and len(current_group().workers) == 1 and current_group().worker.rank == 0:
        assert row["straggler_s"] >= 0.5 > row["function_s"]
    assert (row["sent_bytes"] > 0) == (current_group().is_serial and workers() > 1)
    f(x)
    assert profile.rows[0]["calls"] == 2  # no longer under way


def check_keys():
    """Typed keys draw on every worker as they draw in one process."""
    k, key = workers(), [jax.random.key(7), jax.random.key(7, impl="rbg")]
    keys = [jax.random.split(each, 3 * k) for each in key]

    def draw(keys: Any) -> jax.Array:
        return jnp.stack([jax.random.normal(each, (3,)) for each in keys], 1)

    def same(got: Any, expected: Any) -> bool:
        return all(bool((a == b).all()) for a, b in zip(got, expected, strict=True))

    one = jm.function(lambda key: draw(key)[None], jm.broadcast, jm.gather)
    assert (np.asarray(one(key)) == np.asarray(draw(key))).all()
    assert len(one(key)) == k
    back = jm.function(lambda keys: keys, jm.scatter, jm.gather)
    assert same(back(keys, batch=slice(None, None, -1), slices=2), [each[::-1] for each in keys])
    held = jm.variable({"key": key, "n": np.int32(0)})

    def advance(held, x):
        new, used = zip(*map(jax.random.split, held["key"]), strict=True)
        return draw(used)[None], {"key": [*new], "n": held["n"] + 1}

    step = jm.function(advance, (held, jm.scatter), (jm.gather,), held)
    for _ in range(2):
        key, used = zip(*map(jax.random.split, key), strict=True)
        (got,) = step(data(k))
        assert (np.asarray(got) == np.asarray(draw(used))).all()
    assert same(held.value["key"], key)
    first = [each[0] for each in keys]
    held.set(k - 1, {"key": first, "n": np.int32(5)})
    held.broadcast(root=k - 1)
    assert same(held.get(0)["key"], first)
    rows = jm.variable(keys)
    rows.scatter(keys)
    assert [each.shape for each in rows.value] == [(3,)] * 2
    assert same(jm.function(lambda keys: keys, jm.scatter(rows), jm.gather)(), keys)
    fails(lambda: wrap("sum")(keys[0]), "output 0: got random keys, which sum cannot take")


# ---------------------------------------------------------------- what is refused


def check_refusals():
    k, x = workers(), data(3 * workers())
    two_args = jm.function(lambda x, y: (x.mean(), y.mean()), (jm.scatter, jm.scatter), (jm.mean, jm.mean))
    one, v = wrap("mean", lambda x: x.sum()), jm.variable(np.float32(0))
    refused: list[tuple[Any, str]] = [
        (lambda: two_args(x, x[1:]), "scattered inputs have different lengths: argument 1"),
        (lambda: two_args(x[: k - 1], x[: k - 1]), f"got {k - 1} examples for {k} workers"),
        (lambda: one(np.arange(3 * k)), "int32[], which mean cannot take exactly: use sum"),
        (lambda: one(None), "argument 0: got None"),
        (lambda: jax.jit(one)(x), "got a traced value"),
        (lambda: one(x, batch=[0, 3 * k]), f"got index {3 * k}; there are {3 * k} examples"),
        (lambda: one(x, batch=x[1:, 0] > 0), f"got a mask of shape [{3 * k - 1}]"),
        (lambda: one(x, batch_local=1), "no input is scatter(variable)"),
        (lambda: wrap("local")(x, slices=2), "nothing says how pieces combine"),
        (
            lambda: wrap("sum")(x, slices=2) if k == 1 else wrap("sum")(data(3 * k + 1)),
            "slices" if k == 1 else "differs",
        ),
        (lambda: wrap(f=lambda x: x.sum())(x), "gather needs a first axis"),
        (lambda: jm.function(lambda x: (x, x), updates=((v, jm.add), (v, jm.max))), "is to take two results"),
    ]
    for call, message in refused:
        fails(call, message)
    assert abs(float(one(x)) - float(x.sum()) / k) <= 64 * U * abs(x).sum()  # the next call works


def check_exchange_inside():
    """Over the function's workers if every rank runs the script; elsewhere refused while tracing, never another."""
    k = workers()
    x = np.ones((3 * k, 2), np.float32)
    by_hand = jm.function(lambda x: jaxmpi.exchange(x.sum(), "ring", op="sum"), jm.scatter, jm.mean)
    tx = optax.chain(jaxmpi.exchange_gradients(op="sum"), optax.scale(1.0))
    by_optax = jm.function(lambda x: tx.update(x.sum(), tx.init(x.sum()))[0], jm.scatter, jm.mean)
    jitted = jax.jit(lambda x: jaxmpi.exchange(x, op="sum"))
    if processes().size == 1:
        assert float(jitted(np.float32(6))) == 6  # over the script alone: JAX has its trace
    by_jit = jm.function(lambda x: jitted(x.sum()), jm.scatter, jm.mean)
    for f in (by_hand, by_optax, by_jit):
        if k == 1 or current_group().is_the_world:
            assert float(f(x)) == 6 * k
        else:
            fails(lambda f=f: f(x), "exchange inside a function is over its workers only where every rank runs")
    assert float(jm.function(lambda x: x.sum(), jm.scatter, jm.sum)(x)) == 6 * k  # the next call works


def may_fail(x):
    def look(value):
        if value < 0:
            raise ValueError("a negative example")
        return value

    return jax.pure_callback(look, jax.ShapeDtypeStruct((), jnp.float32), x.min())


def check_exception():
    """In the last worker only: all learn of it, with its traceback; the next call works."""
    x = np.arange(2 * workers(), dtype=np.float32)
    f = jm.function(may_fail, jm.scatter, jm.max)
    assert float(f(x)) == len(x) - 2
    bad = x.copy()
    bad[-1] = -1
    for _ in range(2):
        with pytest.raises(Exception, match="a negative example") as caught:
            f(bad)
        if workers() > 1:
            text = str(caught.value)
            assert isinstance(caught.value, WorkerFailed)
            assert f"worker {workers() - 1} of {workers()} failed" in text, text
            assert "function_checks.py" in text, text
    assert float(f(x)) == len(x) - 2
    with pytest.raises(Exception, match="a negative example"):  # in all, at their first call with such shapes
        f(np.full(4 * workers(), -1, np.float32))
    assert float(f(x)) == len(x) - 2


def check_what_a_function_leaves_goes_with_it():
    """Broadcast inputs and programs, on every worker, at the next call."""
    double = jm.function(lambda x: 2 * x.sum(), jm.scatter, jm.sum)
    x, number = data(workers()), double.number + 1
    double(x)

    def left() -> list[int]:
        return [f for w in current_group().workers for f, *_ in [*w.broadcasts, *w.programs] if f == number] + [
            f for f in current_group().functions if f == number
        ]

    big = jm.function(lambda x, w: (x.sum() + w).sum(), (jm.scatter, jm.broadcast), jm.sum)
    big(x, np.ones(1 << 22, np.float32))
    assert big.number == number
    assert len(left()) >= 2
    del big
    double(x)
    assert left() == []


CORE = [  # quick ones that leave no kind of message out
    *(check_batches, check_broadcast_is_seen_when_it_changes, check_resident, check_variable, check_unequal_lengths),
    *(check_shared, check_exception, check_exchange_inside, check_trees_of_reductions),
    *(check_profile, check_keys),
]
CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
