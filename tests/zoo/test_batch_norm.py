"""Batch normalisation: initial values, statistics of a batch, synchronised workers."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmpi.allreduce.api import exchange
from jaxmpi.comm.axis import AxisComm
from jaxmpi.model.batch_statistics import batch_mean, statistics_over
from jaxmpi.models.norm import BatchNorm
from jaxmpi.models.resnet import BASIC, BOTTLENECKS, Residual

U = 2.0**-24


def noise(*shape, seed=0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


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


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 0.0), ("bfloat16", 2.0**-8)])
def test_training_normalises_with_the_batch_and_moves_statistics_in_32_bits(dtype, rounding):
    """Around 2 a sum in bfloat16 stops growing at 512, and a square loses a variance of 0.01."""
    x, norm = jnp.asarray(2 + 0.1 * noise(8, 32, 32, 3), dtype), BatchNorm(3, eps=1e-3, momentum=0.9)
    norm.scale[...], norm.bias[...] = jnp.arange(1.0, 4), jnp.full(3, 0.5)
    y = norm(x, True)
    assert y.dtype == dtype
    wide, y = (np.asarray(array, np.float64).reshape(-1, 3) for array in (x, y))
    mean, var = wide.mean(0), wide.var(0)
    scale, s = np.arange(1, 4), np.sqrt(var + 1e-3)
    # A sum of n terms has an error of at most sqrt(n) u times their absolute sum, v = E[x^2] - m^2 three times that.
    off = 3 * math.sqrt(len(wide)) * U * (wide**2).mean(0)
    assert (np.abs(norm.mean[...] - 0.1 * mean) <= 0.1 * off + 4 * U * mean).all()
    assert (np.abs(norm.var[...] - 0.9 - 0.1 * var) <= 0.1 * off + 4 * U * (1 + var)).all()
    # y = scale (x - m) / s + bias, s^2 = v + eps, with four roundings of up to scale (|x| + m) / s.
    exact = scale * (wide - mean) / s + 0.5
    slope = off / s + np.abs(wide - mean) * off / (2 * s**3) + 4 * U * (np.abs(wide) + mean) / s
    error = scale * slope + 4 * U
    assert (np.abs(y - exact) <= error + rounding * (np.abs(exact) + error)).all()


def test_a_constant_channel_is_the_bias_and_its_gradients_are_finite():
    x = jnp.full((2, 4, 4, 3), 1 / 3)
    y, pull = jax.vjp(lambda x: BatchNorm(3, eps=1e-3, momentum=0.9)(x, True), x)
    # m has an error of a few u x, and s is at least sqrt(eps).
    np.testing.assert_allclose(y, 0, atol=3 * math.sqrt(32) * U / math.sqrt(1e-3))
    assert np.isfinite(pull(jnp.ones_like(y))[0]).all()


# ---------------------------------------------------------------- means over a batch, and over workers


def test_fillers_do_not_count_and_where_all_are_fillers_the_mean_is_theirs():
    x = noise(6, 3)
    x[4:] = x[:2]  # what the loader does
    with statistics_over(real=jnp.arange(6) < 4):
        mean = batch_mean(x)
    np.testing.assert_allclose(mean, x[:4].mean(0), atol=6 * U * np.abs(x).max())
    assert np.abs(mean - x.mean(0)).max() > 0.01
    with statistics_over(real=jnp.zeros(6, bool)):
        np.testing.assert_allclose(batch_mean(x), x.mean(0), atol=6 * U * np.abs(x).max())


def test_synchronised_means_and_their_gradients_are_those_of_one_worker_with_the_real_examples():
    """The last of four workers has none. Whole runs: tests/trainer/test_batch_statistics.py."""
    comm, x = AxisComm("workers", 4), noise(4, 2, 3)
    real = np.array([[True, True], [True, False], [True, False], [False, False]])

    def loss(x, real):
        with statistics_over(functools.partial(exchange, strategy="asa32", comm=comm), real):
            return (jnp.where(real[:, None], x - batch_mean(x)[None], 0) ** 3).sum()

    got = np.asarray(jax.jit(jax.vmap(jax.grad(loss), axis_name="workers"))(x, real))
    want = jax.grad(lambda x: ((x - x.mean(0)[None]) ** 3).sum())(x[real])
    # 3 (x - m)^2 less its mean: sums of 4 terms, in either of two orders, of at most 3 (2 max|x|)^2; fillers 2^-30.
    off = 2 * (4 + 8) * U * 3 * (2 * np.abs(x).max()) ** 2
    np.testing.assert_allclose(got[real], want, rtol=0, atol=off)
    assert np.abs(got[~real]).max() <= off
