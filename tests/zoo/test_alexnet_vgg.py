"""AlexNet and VGG: start, dropout, and the layers under them."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmpi.models.alexnet import PUBLISHED, alexnet_tiny
from jaxmpi.models.layers import Classifier, Windows, local_response_norm, max_pool
from jaxmpi.models.vgg import vgg16_tiny

KEY = jax.random.key(0)


# ---------------------------------------------------------------- how params begin


def spread(n: int) -> float:
    """Five standard errors of the standard deviation of n normal numbers, relative."""
    return 5 / math.sqrt(2 * n)


def test_alexnet_starts_as_published():
    layers, _ = alexnet_tiny(init="published").init(KEY, jnp.zeros((1, 64, 64, 3)))
    layers.update(layers.pop("classifier"))
    assert layers.keys() == PUBLISHED.keys()
    assert PUBLISHED["conv2"] == PUBLISHED["conv4"] == (0.01, 0.1)
    assert PUBLISHED["fc6"] == PUBLISHED["fc7"] == (0.005, 0.1)
    for name, (std, bias) in PUBLISHED.items():
        kernel = layers[name]["kernel"]
        assert float(kernel.std()) == pytest.approx(std, rel=spread(kernel.size))
        np.testing.assert_array_equal(layers[name]["bias"], np.float32(bias))


def test_vgg_starts_as_published():
    params, _ = vgg16_tiny(init="published").init(KEY, jnp.zeros((1, 32, 32, 3)))
    for layer in (params["convs"]["conv5_3"], params["classifier"]["fc6"]):
        *area, fan_in, fan_out = layer["kernel"].shape
        bound = math.sqrt(6 / (math.prod(area) * (fan_in + fan_out)))
        assert 0.99 * bound < float(jnp.abs(layer["kernel"]).max()) <= bound
        assert float(layer["kernel"].std()) == pytest.approx(bound / math.sqrt(3), rel=spread(layer["kernel"].size))
        assert not layer["bias"].any()


# ---------------------------------------------------------------- dropout


def test_dropout_keeps_half_twice_and_doubles_it():
    batch, width = 256, 64
    module = Classifier((1, width, width), 0.5, lambda place: (nnx.initializers.zeros_init(), 0.0), nnx.Rngs(0))
    module.fc6.bias[...] = jnp.ones(width)
    module.fc7.kernel[...] = module.fc8.kernel[...] = jnp.eye(width)
    image = jnp.ones((batch, 1, 1, 1))
    np.testing.assert_array_equal(module(image, False), 1)
    y = np.asarray(module(image, True))
    assert set(np.unique(y)) == {0, 4}  # two masks, each doubles what it keeps
    # A quarter is kept if the masks are independent, with a standard error of sqrt(3 / 16 / n).
    assert (y > 0).mean() == pytest.approx(0.25, abs=5 * math.sqrt(3 / 16 / y.size))


# ---------------------------------------------------------------- layers


@functools.partial(jax.jit, static_argnums=0)
def pulled(f, args, g):
    y, pull = jax.vjp(f, *args)
    return y, pull(g)


def windows_of(n: int, size: int, stride: int, pad: int, ceil: bool) -> list[range]:
    """The entries of every window by the rule of torch: rounded up, a window that begins past the last is dropped."""
    steps = (n + 2 * pad - size) / stride
    count = (math.ceil(steps) if ceil else math.floor(steps)) + 1
    starts = [i * stride - pad for i in range(count)]
    return [range(max(start, 0), min(start + size, n)) for start in starts if start < n]


def check_pool(pool, n, windows):
    """Values and gradients of a pool of n x n different entries, by looking at every window."""
    rng = np.random.default_rng(n)
    x = rng.permutation(2 * n * n).reshape(1, n, n, 2).astype(np.float32)
    shape = (1, len(windows), len(windows), 2)
    g = rng.integers(1, 9, shape).astype(np.float32)  # sums of small integers are exact
    want, want_gradient = np.empty(shape, np.float32), np.zeros_like(x)
    for i, j, c in np.ndindex(shape[1:]):
        row, column = max(itertools.product(windows[i], windows[j]), key=lambda place: x[0, *place, c])
        want[0, i, j, c] = x[0, row, column, c]
        want_gradient[0, row, column, c] += g[0, i, j, c]
    got, (got_gradient,) = pulled(pool, (x,), g)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_gradient, want_gradient)


POOLS = [(2, 2, 0), (3, 2, 0), (3, 2, 1), (2, 3, 1), (5, 4, 2)]  # size, stride, pad


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(("size", "stride", "pad"), POOLS)
def test_max_pool_takes_every_window(size, stride, pad, ceil):
    for n in range(size, 30):
        want = windows_of(n, size, stride, pad, ceil)
        assert Windows.over(n, 1, size, stride, pad, ceil).count == len(want)
    for n in (7, 8):
        check_pool(lambda x: max_pool(x, stride, size, pad, ceil), n, windows_of(n, size, stride, pad, ceil))


@pytest.mark.parametrize("channels", [3, 8])
def test_local_response_norm_value_and_gradient(channels):
    rng, alpha = np.random.default_rng(0), 0.1
    x, g = rng.standard_normal((2, 2, 2, 2, channels), np.float32)

    def plain(x):
        energy = [(x[..., max(c - 2, 0) : c + 3] ** 2).sum(-1) for c in range(channels)]
        return x / (2 + alpha * jnp.stack(energy, -1)) ** 0.75

    want, (want_gradient,) = pulled(plain, (3 * x,), g)
    got, (got_gradient,) = pulled(lambda x: local_response_norm(x, 5, 2.0, alpha), (3 * x,), g)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(got_gradient, want_gradient, rtol=1e-4, atol=1e-5)
