"""Trees in, trees out: dtypes, shapes, buckets, refusals."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxmpi.allreduce.api import exchange, exchange_gradients
from jaxmpi.allreduce.buckets import assign_buckets
from jaxmpi.comm.agreement import Fingerprint
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm
from jaxmpi.core.errors import UsageError
from references import mean_in_leaf_dtype
from tolerances import bound, leaf_bound

WORKERS = 3


class Layer(NamedTuple):
    kernel: Any
    bias: Any


def noise(seed: int, shape: tuple[int, ...], dtype=jnp.float32, workers: int = WORKERS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((workers, *shape)).astype(dtype)


def nested() -> dict:
    """Workers' trees as one, with a leading axis of workers."""
    return {
        "layer": Layer(noise(0, (3, 5)), noise(1, (5,), jnp.bfloat16)),
        "list": [noise(2, (), jnp.float16), None, noise(3, (0, 2)), (noise(4, (7, 1, 2), jnp.float16),)],
        "empty": {},
        "scalar": noise(5, ()),
    }


def over_workers(function, workers: int = WORKERS, **kwargs):
    """`exchange` of trees with a leading axis of workers."""
    comm = AxisComm("w", workers)
    return jax.jit(jax.vmap(functools.partial(function, comm=comm, **kwargs), axis_name="w", axis_size=workers))


def assert_mean_of_workers(got, tree, strategy: str, op: str = "mean") -> None:
    for leaf, rows in zip(jax.tree.leaves(got), jax.tree.leaves(tree), strict=True):
        exact = mean_in_leaf_dtype(rows) * (len(rows) if op == "sum" else 1)
        flat = rows.reshape(len(rows), -1).astype(np.float32)
        error = leaf_bound(strategy, flat, str(leaf.dtype), op).reshape(exact.shape)  # as if the leaf were alone
        assert (leaf.dtype, leaf.shape) == (rows.dtype, rows.shape)
        assert (np.abs(np.asarray(leaf, np.float64) - exact) <= error).all()


@pytest.mark.parametrize(("strategy", "op", "bucket_bytes"), [("ar", "mean", None), ("tree:8", "sum", 4)])
def test_any_tree_keeps_structure_shapes_and_dtypes(strategy, op, bucket_bytes):
    tree = nested()
    got = over_workers(exchange, strategy=strategy, op=op, bucket_bytes=bucket_bytes)(tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert_mean_of_workers(got, tree, strategy, op)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
leaves = st.tuples(shapes, st.sampled_from(["float32", "bfloat16", "float16"]))


trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner), max_leaves=5
)


@settings(max_examples=3)
@given(
    st.lists(trees, min_size=20, max_size=20),
    st.sampled_from(["asa32", "asa16", "ring16", "asa8"]),
    st.sampled_from([None, 4, 64]),
)
def test_random_trees(specs, strategy, bucket_bytes):
    """Twenty in one program: compiling is what takes time."""
    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    many = [jax.tree.map(lambda leaf: noise(7, leaf[0], leaf[1]), spec, is_leaf=is_leaf) for spec in specs]

    def each(trees, comm):
        return [exchange(tree, strategy, comm=comm, bucket_bytes=bucket_bytes) for tree in trees]

    for tree, got in zip(many, over_workers(each)(many), strict=True):
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        assert_mean_of_workers(got, tree, strategy)


# ---------------------------------------------------------------- buckets


@pytest.mark.parametrize("strategy", ["asa32", "tree", "pipering", "root"])
def test_some_strategies_give_the_same_bits_whatever_the_buckets(strategy):
    """They add the workers in one order for every element, wherever in a bucket the element lies. A ring starts each
    chunk at another worker, so there it matters; and other wires scale by the bucket.
    """
    tree = {str(n): noise(n, (n,), workers=4) for n in (1, 5, 33, 64)}
    buckets = (None, 4, 100)
    assert [len(assign_buckets([1, 33, 5, 64], b)) for b in buckets] == [1, 4, 3]
    results = [over_workers(exchange, 4, strategy=strategy, bucket_bytes=b)(tree) for b in buckets]
    bits = [[np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result)] for result in results]
    assert bits[0] == bits[1] == bits[2]


BLOCKS = ["asa", "ring", "tree", "root", "color3", "hier-ring", "hier-color2"]


@pytest.mark.parametrize("strategy", [*(f"{name}:8" for name in BLOCKS), "asa:16"])
def test_leaves_of_a_bucket_do_not_share_a_scale(strategy):
    """The error of each leaf is that of the leaf alone; a NaN stays in its leaf."""
    hosts = (0, 0, 1, 1, 2, 2)
    workers = len(hosts)
    sizes = {"a": 3, "b": 64, "c": 700, "d": 257, "e": 1, "f": 30_000, "g": 5}
    scales = {"a": 1e-3, "b": 1e-12, "c": 1e6, "d": np.nan, "e": 1e-9, "f": 1.0, "g": 1e-6}
    tree = {name: scales[name] * noise(i, (n,), workers=workers) for i, (name, n) in enumerate(sizes.items())}
    run = functools.partial(
        exchange, strategy=strategy, op="sum", bucket_bytes=None, comm=AxisComm("w", workers, hosts)
    )
    got = jax.jit(jax.vmap(run, axis_name="w", axis_size=workers))(tree)
    for name, rows in tree.items():
        if np.isfinite(scales[name]):
            error = np.abs(np.asarray(got[name][0], np.float64) - rows.astype(np.float64).sum(0))
            assert (error <= bound(strategy, rows, len(set(hosts)))).all(), name
        else:
            assert np.isnan(got[name]).all()


# ---------------------------------------------------------------- inside and outside jit, one worker


@pytest.mark.parametrize("strategy", ["asa16", "ring:8", "ar", "none"])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_one_worker_keeps_its_bits(strategy, op):
    tree = jax.tree.map(lambda x: x[0], nested()) | {"complex": np.array([1 + 2j, -0.0 - 1j], np.complex64)}
    inside = jax.jit(lambda t: exchange(t, strategy, op))(tree)
    for got in (exchange(tree, strategy, op), inside):
        same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), got, tree)
        assert jax.tree.all(same)


class Twins(SoloComm):
    """Two workers that both hold nothing but ones; counts what they do."""

    size = 2
    order = (0, 1)

    def __init__(self) -> None:
        self.signed: list[Fingerprint] = []
        self.traced = 0

    def assert_same(self, mine):
        self.signed.append(mine)

    def alltoall(self, x):
        self.traced += 1
        return jax.tree.map(lambda leaf: jnp.stack([leaf[0], leaf[0]]), x)

    def allgather(self, x):
        return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), x)


def test_outside_jit_nothing_is_traced_again_and_trees_are_compared_at_every_call():
    comm = Twins()
    tree = {"a": {"b": jnp.ones((2, 3))}, "c": jnp.ones(4, jnp.bfloat16), "empty": np.zeros((0, 3), np.float32)}
    for _ in range(3):
        total = exchange(tree, "asa", "sum", comm, 64)
    assert jax.tree.map(lambda x: x.tolist(), total) == {"a": {"b": [[2] * 3] * 2}, "c": [2] * 4, "empty": []}
    assert comm.traced == 1  # one bucket
    assert [signed.value for signed in comm.signed[1:]] == [comm.signed[0].value] * 2
    signed = comm.signed[0].value
    assert signed["leaf"] == {"a/b": "float32[2, 3]", "c": "bfloat16[4]", "empty": "float32[0, 3]"}
    assert tuple(signed[k] for k in ("strategy", "op", "bucket_bytes")) == ("asa:32", "sum", 64)
    assert exchange({"empty": tree["empty"], "none": None}, comm=comm)["empty"].shape == (0, 3)
    assert comm.traced == 1  # empty leaves need no collective


# ---------------------------------------------------------------- refusals


REFUSED = [
    ({"a": {"b": np.ones(2, np.int32)}}, {}, "leaf 'a/b' is int32; expected floats"),
    (np.ones(2, bool), {}, r"leaf '\(the tree itself\)' is bool"),
    ({"key": jax.random.key(0)}, {}, "leaf 'key' is key<fry>; expected"),
    (jnp.ones(2), {"strategy": "hier-asa8"}, "unknown strategy 'hier-asa8'; did you mean 'hier-asa:8'"),
    (jnp.ones(2), {"strategy": "tree16"}, "unknown strategy 'tree16'; did you mean 'tree:16'"),
    (jnp.ones(2), {"strategy": "asa23"}, r"unknown strategy 'asa23'; did you mean 'asa32'\? there are: ar, asa, asa16"),
    (jnp.ones(2), {"strategy": "asa:9"}, "unknown wire '9'; .*there are: 16, 32, 8, bf16"),
    (jnp.ones(2), {"op": "max"}, "unknown op 'max'; .*there are: mean, sum"),
]


@pytest.mark.parametrize(("tree", "options", "message"), REFUSED)
def test_leaves_that_a_sum_would_falsify_and_unknown_words_are_refused(tree, options, message):
    with pytest.raises(UsageError, match=message):
        exchange(tree, **options)


LOST = [
    (2**40, "mean"),
    (2**29, "sum"),  # of 4 workers
    (1e300, "mean"),
    (np.array([1.0, -1e300]), "mean"),
    (np.array([1e300 + 0j]), "mean"),
    (np.ma.masked_array([1.0], [True], np.float32), "mean"),
    (np.zeros(1, jax.dtypes.float0), "mean"),
]


@pytest.mark.parametrize(("number", "op"), LOST)
def test_numbers_that_would_wrap_or_become_infinite_are_refused(number, op):
    comm = AxisComm("w", 4)
    both = lambda x, n: exchange({"x": x, "tokens": n}, op=op, comm=comm)  # noqa: E731
    with pytest.raises(UsageError, match="leaf 'tokens"):
        jax.vmap(lambda x: both(x, number), axis_name="w")(jnp.ones(4))
    fits = jax.jit(jax.vmap(lambda x: both(x, 2**29 - 1), axis_name="w"))(jnp.ones(4))["tokens"]
    assert fits.tolist() == ([2**31 - 4] * 4 if op == "sum" else [float(np.float32(2**29 - 1))] * 4)


def test_the_mean_of_complex_gradients_is_the_gradient_of_the_mean_loss():
    """In JAX's convention, dL/dx - i dL/dy."""
    comm, x = AxisComm("w", WORKERS), (noise(1, (4,)) + 1j * noise(2, (4,))).astype(np.complex64)
    z = jnp.asarray([1 + 2j, -1j, 3, 0.5], jnp.complex64)
    loss = lambda z, x: jnp.sum(jnp.abs(z - x) ** 2 + (z * x).real)  # noqa: E731
    mean = jax.jit(jax.vmap(lambda x: exchange(jax.grad(loss)(z, x), comm=comm), axis_name="w"))(x)
    whole = jax.jit(jax.grad(lambda z: sum(loss(z, each) for each in x) / np.float32(WORKERS)))(z)
    np.testing.assert_allclose(mean, np.tile(whole, (WORKERS, 1)), rtol=1e-5, atol=1e-5)
    one, cotangents = (lambda x: exchange(x, comm=comm)), x[::-1]
    back = jax.jit(lambda x, c: jax.vjp(jax.vmap(one, axis_name="w"), x)[1](c)[0])
    np.testing.assert_allclose(back(x, cotangents), np.tile(x.mean(0), (WORKERS, 1)), rtol=1e-5, atol=1e-5)


def test_a_compressor_is_not_differentiated():
    tx, x = exchange_gradients("topk5", comm=AxisComm("w", WORKERS)), jnp.ones((WORKERS, 3))
    update: Any = tx.update
    with pytest.raises(UsageError, match=r"by a compressor .* cannot be differentiated; take jax.grad first"):
        jax.vmap(jax.grad(lambda x: update(x, tx.init(x))[0].sum()), axis_name="w")(x)


@pytest.mark.parametrize("strategy", ["ar", "asa32", "tree:8", "shm"])
def test_another_axis_may_be_mapped_inside_and_outside_that_of_the_workers(strategy):
    x, each = noise(9, (4, 7)), functools.partial(exchange, strategy=strategy, comm=AxisComm("w", WORKERS))
    alone = over_workers(exchange, strategy=strategy)
    expected = np.stack([alone(x[:, i]) for i in range(4)], 1)
    for maps in [({"axis_name": "w"}, {}), ({"in_axes": 1, "out_axes": 1}, {"axis_name": "w"})]:
        outer, inner = (functools.partial(jax.vmap, **kwargs) for kwargs in maps)
        assert np.array_equal(jax.jit(outer(inner(each)))(x), expected)


@pytest.mark.parametrize(("strategy", "workers"), [("ar", 2), ("ring32", 8), ("shm", 2)])
def test_an_axis_of_another_size_is_refused(strategy, workers):
    """Half of the workers would be left out, or the sum divided by too few."""
    each = functools.partial(exchange, strategy=strategy, comm=AxisComm("w", workers))
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("w",))
    for run in (jax.vmap(each, axis_name="w"), jax.shard_map(each, mesh=mesh, in_specs=P("w"), out_specs=P("w"))):
        with pytest.raises(UsageError, match=f"got {workers} workers along axis 'w', which has 4; give that size"):
            run(jnp.ones((4, 3)))
