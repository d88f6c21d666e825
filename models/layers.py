"""Layers that more than one family shares. Images are [batch, height, width, channels]."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer

Array = jax.Array
Init = Callable[..., Array]  # (key, shape, dtype) -> array


def normal(std: float) -> Init:
    """Initialiser N(0, std^2), drawn by NumPy from the key.

    jax.random compiles one program a shape, seconds for a deep network; NumPy compiles none.
    The numbers are the same whether the key is concrete or traced.
    """

    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
        def draw(data: Any) -> np.ndarray:
            generator = np.random.default_rng(np.asarray(data))
            return np.float32(std) * generator.standard_normal(shape, np.float32)

        data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
        if isinstance(data, Tracer):
            out = jax.ShapeDtypeStruct(shape, jnp.float32)
            return jax.pure_callback(draw, out, data, vmap_method="sequential").astype(dtype)
        return jnp.asarray(draw(data), dtype)

    return init


def he_normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
    """N(0, 2 / fan_in), fan_in = all but the last axis (He et al. 2015, arXiv:1502.01852, eq. 10)."""
    return normal(math.sqrt(2 / math.prod(shape[:-1])))(key, shape, dtype)


class Conv(nnx.Module):
    """relu(conv(x, kernel) + bias), zero-padded by `(size - 1) // 2`; kernel f32[size, size, in, out]."""

    def __init__(
        self,
        channels: tuple[int, int],
        size: int,
        *,
        stride: int = 1,
        init: Init = he_normal,
        bias: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.stride = stride
        self.kernel = nnx.Param(init(rngs.params(), (size, size, *channels), jnp.float32))
        self.bias = nnx.Param(jnp.asarray(np.full(channels[1], bias, np.float32)))

    def __call__(self, x: Array) -> Array:
        """f32[batch, h, w, in] -> f32[batch, h // stride, w // stride, out]."""
        return jax.nn.relu(_add(conv(x, self.kernel[...], self.stride), self.bias[...]))


class Dense(nnx.Module):
    """x kernel + bias; kernel f32[in, out]."""

    def __init__(
        self,
        features: tuple[int, int],
        *,
        init: Init = he_normal,
        bias: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.kernel = nnx.Param(init(rngs.params(), features, jnp.float32))
        self.bias = nnx.Param(jnp.asarray(np.full(features[1], bias, np.float32)))

    def __call__(self, x: Array) -> Array:
        """f32[batch, in] -> f32[batch, out]."""
        return _add(x @ self.kernel[...], self.bias[...])


def _add(x: Array, bias: Array) -> Array:
    return x + bias.reshape((1,) * (x.ndim - 1) + (-1,))  # ranks may be set to be strict


def conv(x: Array, kernel: Array, stride: int = 1) -> Array:
    """Cross-correlation, zero-padded by `(size - 1) // 2` on each side."""
    size = kernel.shape[0]
    if size == 1 and stride == 1:
        return x @ kernel[0, 0]  # the same numbers; faster than a convolution on CPU
    if max(x.shape[1:3]) < size:
        return _conv_of_patches(x, kernel, stride)
    pad = (size - 1) // 2
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=layout)


def _conv_of_patches(x: Array, kernel: Array, stride: int) -> Array:
    """The same as one matrix product.

    XLA's convolution takes 20 times as long on CPU where the kernel is larger than the image.
    """
    size = kernel.shape[0]
    pad = (size - 1) // 2
    x = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows, columns = (n - size + 1 for n in x.shape[1:3])
    patches = [x[:, i : i + rows : stride, j : j + columns : stride] for i in range(size) for j in range(size)]
    return jnp.concatenate(patches, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def local_response_norm(x: Array, window: int = 5, k: float = 2.0, alpha: float = 1e-4) -> Array:
    """Each entry divided by the energy of its neighbour channels.

    y_c = x_c / d_c^0.75, d_c = k + alpha sum_{|e - c| <= window // 2} x_e^2. Alpha is not divided by
    the window, as in Krizhevsky et al. 2012, section 3.3; Caffe divides it.
    """
    return _lrn_forward(x, window, k, alpha)[0]


def _lrn_forward(x: Array, window: int, k: float, alpha: float) -> tuple[Array, Any]:
    x32 = x.astype(jnp.float32)  # in bfloat16 k + alpha s would lose all of a small s
    d = k + alpha * _sum_neighbours(x32 * x32, window)
    root = lax.rsqrt(d)
    scale = root * jnp.sqrt(root)  # d^-0.75 without pow, which is slow
    return (x32 * scale).astype(x.dtype), (x, d, scale)


# By hand: the derivative that JAX finds recomputes d for every neighbour, 16 times as slow on CPU.
def _lrn_backward(window: int, k: float, alpha: float, saved: Any, g: Array) -> tuple[Array]:
    x, d, scale = saved
    g, x32 = g.astype(jnp.float32), x.astype(jnp.float32)
    inner = lax.optimization_barrier(g * x32 * scale / d)  # computed once, not once a neighbour
    gx = g * scale - 1.5 * alpha * x32 * _sum_neighbours(inner, window)
    return (gx.astype(x.dtype),)


local_response_norm.defvjp(_lrn_forward, _lrn_backward)


def _sum_neighbours(x: Array, window: int) -> Array:
    """The sum of `window` channels around each, zero-padded."""
    half, channels = window // 2, x.shape[-1]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)])
    taps = [lax.slice_in_dim(padded, i, i + channels, axis=-1) for i in range(window)]
    return functools.reduce(jnp.add, taps)


def max_pool(x: Array, stride: int) -> Array:
    """Maximum over 3x3, padded by 1, sizes rounded down; of equal entries the first has the gradient.

    A row maximum of column maxima: the same values and gradients as one `reduce_window`, whose
    backward pass takes 3 (stride 1) to 13 (stride 2) times as long on CPU.
    """
    return max_of_three(max_of_three(x, 2, stride), 1, stride)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def max_of_three(x: Array, axis: int, stride: int) -> Array:
    """Maximum over windows of 3 along one axis, padded by 1."""
    return functools.reduce(jnp.maximum, _taps(x, axis, stride))


def _taps(x: Array, axis: int, stride: int) -> list[Array]:
    """The first, second and third entry of every window."""
    lowest = jnp.asarray(-jnp.inf, x.dtype)
    padded = lax.pad(x, lowest, _along(x.ndim, axis, (1, 1, 0)))
    last = (x.shape[axis] - 1) // stride * stride
    return [lax.slice_in_dim(padded, i, i + last + 1, stride, axis) for i in range(3)]


def _along(ndim: int, axis: int, config: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """A padding configuration for one axis."""
    return [config if i == axis else (0, 0, 0) for i in range(ndim)]


def _max_forward(x: Array, axis: int, stride: int) -> tuple[Array, tuple[Array, Array]]:
    first, second, third = _taps(x, axis, stride)
    y = jnp.maximum(jnp.maximum(first, second), third)
    owner = jnp.where(first == y, jnp.int8(0), jnp.where(second == y, jnp.int8(1), jnp.int8(2)))
    return y, (owner, x[:0])  # x[:0] for its shape: residuals are arrays


def _max_backward(axis: int, stride: int, saved: tuple[Array, Array], g: Array) -> tuple[Array]:
    owner, like = saved
    zero, size = jnp.zeros((), g.dtype), like.shape[axis]
    last = (size - 1) // stride * stride

    def spread(i: int) -> Array:  # back to where tap i of every window came from
        config = _along(g.ndim, axis, (i - 1, size - last - i, stride - 1))
        return lax.pad(jnp.where(owner == i, g, zero), zero, config)

    return (spread(0) + spread(1) + spread(2),)


max_of_three.defvjp(_max_forward, _max_backward)


def average_pool(x: Array, size: int) -> Array:
    """Averages of equally spaced windows: [batch, size, size, channels] from any height and width.

    From n >= size entries: stride n // size and window n - (size - 1) stride, so that 14 -> 4 is
    5/3 and size -> size does nothing. From fewer, the nearest entries are repeated.
    """
    rows, columns = (jnp.asarray(_bins(n, size), x.dtype) for n in x.shape[1:3])
    return jnp.einsum("ih,jw,bhwc->bijc", rows, columns, x, precision="highest")


def _bins(n: int, size: int) -> np.ndarray:
    """Which of n entries each of `size` windows averages: f64[size, n], rows sum to 1."""
    stride = n // size
    window = max(n - (size - 1) * stride, 1) if stride else 1
    starts = np.arange(size) * stride if stride else np.arange(size) * n // size
    inside = np.arange(n) - starts[:, None]
    return ((inside >= 0) & (inside < window)) / window
