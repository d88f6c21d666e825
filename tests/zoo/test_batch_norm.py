"""Batch normalisation, ResNet and GoogLeNetBN: exact counts, statistics of a batch, synchronised workers, learning."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmpi.models.__main__ as report
from jaxmpi.allreduce.api import exchange
from jaxmpi.comm.axis import AxisComm
from jaxmpi.model.adapters.nnx import nnx_model
from jaxmpi.model.batch_statistics import batch_mean, statistics_over
from jaxmpi.models.googlenetbn import googlenetbn
from jaxmpi.models.layers import Dense
from jaxmpi.models.norm import BatchNorm, ConvNorm
from jaxmpi.models.resnet import (
    BASIC,
    BOTTLENECKS,
    Residual,
    resnet18,
    resnet50,
    resnet152,
)

KEY = jax.random.key(0)
U = 2.0**-24


def count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def noise(*shape, seed=0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# ---------------------------------------------------------------- counts and shapes


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("make", "depth", "params", "statistics"),
    [
        (resnet18, 18, 11_689_512, 9_600),
        (resnet50, 50, 25_557_032, 53_120),
        (resnet152, 152, 60_192_808, 151_424),
        # Stem 3, ten blocks of 1x1, 3x3, 3x3, two halving convolutions, logits: 3 + 30 + 2 + 1.
        (googlenetbn, 36, 19_147_888, 23_360),
    ],
)
def test_depth_and_counts(make, depth, params, statistics):
    model = make()
    abstract, state, _ = report.shapes(model)
    assert (count(abstract), count(state)) == (params, statistics)
    if depth < 100:  # whose programs are lowered in a second
        assert tuple(report.row(model)[1:4]) == (str(depth), f"{params:,}", "224x224x3")
    assert {leaf.dtype for leaf in jax.tree.leaves((abstract, state))} == {jnp.dtype("float32")}


# ---------------------------------------------------------------- initial values


@pytest.mark.parametrize("block", [BASIC, *BOTTLENECKS.values()], ids=["basic", *BOTTLENECKS])
def test_a_block_begins_as_its_shortcut(block):
    same = Residual(4 * block.expansion, 4, block, 1, nnx.Rngs(0))
    x = noise(2, 6, 6, 4 * block.expansion)
    np.testing.assert_array_equal(same(x, True), np.maximum(x, 0))
    wider = Residual(4, 4, block, 2, nnx.Rngs(0))
    assert wider.shortcut is not None
    np.testing.assert_array_equal(wider(x[..., :4], True), jax.nn.relu(wider.shortcut(x[..., :4], True)))


# ---------------------------------------------------------------- the layer


def layer(channels=3, eps=1e-3):
    norm = BatchNorm(channels, eps=eps, momentum=0.9)
    norm.scale[...], norm.bias[...] = jnp.arange(1.0, channels + 1), jnp.full(channels, 0.5)
    return norm


class Exact:
    """The result `layer` must give for f32[..., channels] in training, in f64, and how far 32 bits may be from it.

    A sum of n terms has an error of at most sqrt(n) u times their absolute sum (tests/twins.py). So m is within
    d_m = sqrt(n) u E|x|. The variance v = E[x^2] - m^2 is within d_v = 3 sqrt(n) u E[x^2]. The result is
    y = scale (x - m) / s + bias with s^2 = v + eps. It is within scale (d_m / s + |x - m| d_v / (2 s^3)) and four
    roundings of up to scale (|x| + |m|) / s.
    """

    def __init__(self, x, eps=1e-3):
        x = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
        scale, spread = np.arange(1, x.shape[-1] + 1), math.sqrt(len(x)) * U
        self.mean, self.var = x.mean(0), x.var(0)
        s = np.sqrt(self.var + eps)
        self.y = scale * (x - self.mean) / s + 0.5
        self.mean_error, self.var_error = spread * np.abs(x).mean(0), 3 * spread * (x**2).mean(0)
        slope = self.mean_error / s + np.abs(x - self.mean) * self.var_error / (2 * s**3)
        self.y_error = scale * (slope + 4 * U * (np.abs(x) + np.abs(self.mean)) / s) + 4 * U

    def check(self, y, norm, rounding=0.0):
        """`rounding`: of y to its own dtype."""
        y = np.asarray(y, np.float64).reshape(self.y.shape)
        assert (np.abs(y - self.y) <= self.y_error + rounding * (np.abs(self.y) + self.y_error)).all()
        assert (np.abs(norm.mean[...] - 0.1 * self.mean) <= 0.1 * self.mean_error + 4 * U * np.abs(self.mean)).all()
        assert (np.abs(norm.var[...] - 0.9 - 0.1 * self.var) <= 0.1 * self.var_error + 4 * U * (1 + self.var)).all()


def test_training_normalises_with_the_batch_and_moves_the_running_statistics():
    x, norm = 3 * noise(4, 5, 6, 3) + 2, layer()
    Exact(x).check(norm(x, True), norm)


def test_statistics_of_bfloat16_are_taken_in_32_bits():
    # Around 2 a sum in bfloat16 stops growing at 512, and a square loses a variance of 0.01.
    x, norm = jnp.asarray(2 + 0.1 * noise(8, 32, 32, 3), jnp.bfloat16), layer()
    y = norm(x, True)
    assert y.dtype == jnp.bfloat16
    Exact(x).check(y, norm, rounding=2.0**-8)


def test_a_constant_channel_is_the_bias_and_its_gradients_are_finite():
    x = jnp.full((2, 4, 4, 3), 1 / 3)
    y, pull = jax.vjp(lambda x: layer()(x, True), x)
    # m has an error of a few u x, and s is at least sqrt(eps).
    np.testing.assert_allclose(y, 0.5, atol=3 * math.sqrt(32) * U / math.sqrt(1e-3))
    assert np.isfinite(pull(jnp.ones_like(y))[0]).all()


# ---------------------------------------------------------------- means over a batch, and over workers


def test_batch_mean_is_the_mean_over_examples():
    tree = {"a": noise(5, 3), "b": noise(5, 2, 2)}
    mean = batch_mean(tree)
    for name, leaf in tree.items():
        np.testing.assert_allclose(mean[name], leaf.mean(0), atol=5 * U * np.abs(leaf).max())


def test_fillers_do_not_count_and_where_all_are_fillers_the_mean_is_theirs():
    x = noise(6, 3)
    x[4:] = x[:2]  # what the loader does
    with statistics_over(real=jnp.arange(6) < 4):
        mean = batch_mean(x)
    np.testing.assert_allclose(mean, x[:4].mean(0), atol=6 * U * np.abs(x).max())
    assert np.abs(mean - x.mean(0)).max() > 0.01
    with statistics_over(real=jnp.zeros(6, bool)):
        np.testing.assert_allclose(batch_mean(x), x.mean(0), atol=6 * U * np.abs(x).max())


class Small(nnx.Module):
    """Two layers of statistics, the second of what the first made of all examples."""

    def __init__(self, rngs):
        self.first = ConvNorm((3, 4), 3, eps=1e-3, stride=2, rngs=rngs)
        self.second = ConvNorm((4, 6), 3, eps=1e-3, rngs=rngs)
        self.logits = Dense((6, 5), rngs=rngs)

    def __call__(self, x, train):
        x = jax.nn.relu(self.first(x, train))
        return self.logits(jnp.square(self.second(x, train)).mean((1, 2)))


SMALL = nnx_model(Small, name="small", input_shape=(12, 12, 3), classes=5)
BATCH = 8
LONGEST_SUM = BATCH * 12 * 12  # over the places where the first kernel is used


def start():
    """Params, none of them 0, state, images and labels."""
    image = noise(BATCH, 12, 12, 3) + np.linspace(-1, 1, BATCH, dtype=np.float32).reshape(-1, 1, 1, 1)
    params, state = SMALL.init(KEY, jnp.asarray(image[:1]))
    params = jax.tree.map(lambda p: p + 0.3 if p.ndim == 1 else p, jax.device_get(params))
    return params, jax.device_get(state), image, np.arange(BATCH, dtype=np.int32) % 5


@functools.cache
def one_worker(precision, real):
    """Gradients of the mean loss, logits and new state of one worker that has the real examples only."""

    def loss(params, state, image, labels):
        logits, after = SMALL.apply(params, state, image, KEY, True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (logits, after)

    params, state, image, labels = start()
    with jax.enable_x64(precision == "float64"), jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: jnp.asarray(x, precision), (params, state, image[:real]))
        grads, (logits, after) = jax.jit(jax.grad(loss, has_aux=True))(*wide, labels[:real])
        return jax.device_get((grads, logits, after))


def workers_of(workers, real, synchronised=True):
    """The same by several workers, worker i with every workers-th example from the i-th on; fillers repeat one."""
    comm = AxisComm("workers", workers)
    mean = functools.partial(exchange, strategy="asa32", comm=comm) if synchronised else None

    def of_one(params, state, image, labels, weight):
        def loss(params):
            with statistics_over(mean, weight > 0):
                logits, after = SMALL.apply(params, state, image, KEY, True)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return (losses * weight).sum(), (logits, after)

        grads, (logits, after) = jax.grad(loss, has_aux=True)(params)
        return exchange(grads, comm=comm), logits, after

    params, state, image, labels = start()
    image[real:], labels[real:] = image[0], labels[0]
    weight = np.where(np.arange(BATCH) < real, np.float32(workers / real), np.float32(0))
    shares = [np.stack([x[i::workers] for i in range(workers)]) for x in (image, labels, weight)]
    step = jax.jit(jax.vmap(of_one, in_axes=(None, None, 0, 0, 0), axis_name="workers"))
    with jax.default_matmul_precision("highest"):
        grads, logits, after = jax.device_get(step(params, state, *shares))
    for leaf in jax.tree.leaves((grads, after) if synchronised else grads):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))  # the same bits on all workers
    logits = np.stack([logits[i % workers, i // workers] for i in range(real)])  # in the order of the examples
    return jax.tree.map(lambda x: x[0], grads), logits, jax.tree.map(lambda x: x[0], after)


def farthest(got, real):
    """The largest errors of gradients, logits and state, by leaf, in units of what rounding explains.

    The bound is that of tests/twins.py: sqrt(n) times the error that one worker has in 32 bits.
    """

    def ratio(got, exact, rounded):
        error = max(np.linalg.norm(rounded - exact), U * np.linalg.norm(exact))
        return np.linalg.norm(got - exact) / (math.sqrt(LONGEST_SUM) * error)

    exact, rounded = one_worker("float64", real), one_worker("float32", real)
    return [max(jax.tree.leaves(jax.tree.map(ratio, *part))) for part in zip(got, exact, rounded, strict=True)]


@pytest.mark.e2e
@pytest.mark.parametrize(("workers", "real"), [(1, 5), (4, 8), (4, 3)])
def test_synchronised_workers_are_one_worker_with_the_real_examples(workers, real):
    # Of 3 real examples the last of 4 workers has none.
    assert max(farthest(workers_of(workers, real), real)) <= 1
