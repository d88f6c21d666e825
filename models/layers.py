"""Layers that several families share; images are [batch, height, width, channels].

Some XLA operations are slow on CPU, so several layers compute the same function in another way. A grouped convolution
becomes one convolution a group, and a 1x1 convolution becomes a matrix product. Max pooling takes maxima along one axis
and then along the other, with a backward pass of its own. Local response normalisation (Krizhevsky et al. 2012) also
has a derivative by hand. NumPy draws the initial params, since `jax.random` compiles one program for each shape.
`he_normal` follows He et al. 2015, and `glorot_uniform` follows Glorot & Bengio 2010.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer

from jaxmpi.model import Model
from jaxmpi.model.contract import check_whole

Array = jax.Array
Init = Callable[..., Array]  # (key, shape, dtype) -> array
Start = Callable[[str], tuple[Init, float]]  # how params begin: place -> (initialiser of the kernel, bias)


def with_classes(make: Callable[..., Model]) -> Callable[..., Model]:
    """`make`, with models that can be rebuilt with another number of `classes`."""

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Model:
        given = inspect.signature(make).bind(*args, **options)

        def again(classes: int) -> Model:
            given.arguments["classes"] = classes
            return made(*given.args, **given.kwargs)

        return make(*args, **options)._replace(with_classes=again)

    return made


def check_sizes(name: str, classes: int, image_size: int, channels: int, smallest: int) -> None:
    """Raise `UsageError` unless sizes are whole numbers and image_size >= smallest."""
    check_whole(f"{name}: classes", classes)
    check_whole(f"{name}: image_size, px", image_size, smallest)
    check_whole(f"{name}: channels", channels)


def normal(std: float) -> Init:
    """Initialiser N(0, std^2)."""

    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
        return _drawn(key, shape, dtype, lambda rng: np.float32(std) * rng.standard_normal(shape, np.float32))

    return init


def _drawn(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, draw: Callable[[np.random.Generator], Any]) -> Array:
    """`draw(generator)` of NumPy from the key, equal for concrete and traced keys.

    jax.random compiles one program a shape, seconds for a deep network; NumPy compiles none.
    """

    def drawn(data: Any) -> np.ndarray:
        return np.asarray(draw(np.random.default_rng(np.asarray(data))), np.float32)

    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if isinstance(data, Tracer):
        out = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.pure_callback(drawn, out, data, vmap_method="sequential").astype(dtype)
    return jnp.asarray(drawn(data), dtype)


def he_normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
    """N(0, 2 / fan_in) (He et al. 2015, arXiv:1502.01852, eq. 10)."""
    return normal(math.sqrt(2 / math.prod(shape[:-1])))(key, shape, dtype)


def glorot_uniform(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
    """Glorot-uniform values (Glorot & Bengio 2010, eq. 16).

    U(-a, a), a = sqrt(6 / (fan_in + fan_out)), fans with the kernel's area.
    """
    *area, fan_in, fan_out = shape
    bound = math.sqrt(6 / (math.prod(area) * (fan_in + fan_out)))
    return _drawn(key, shape, dtype, lambda rng: rng.uniform(-bound, bound, shape))


class Conv(nnx.Module):
    """relu(conv(x, kernel) + bias), kernel f32[size, size, in // groups, out].

    The input is zero-padded by `pad`, `(size - 1) // 2` unless given. Group i of `groups` takes the i-th part of the
    input's channels to the i-th part of the output's.
    """

    def __init__(
        self,
        channels: tuple[int, int],
        size: int,
        *,
        stride: int = 1,
        pad: int | None = None,
        groups: int = 1,
        init: Init = he_normal,
        bias: float = 0.0,
        rngs: nnx.Rngs,
    ):
        inner, out = channels
        self.stride, self.pad, self.groups = stride, pad, groups
        self.kernel = nnx.Param(init(rngs.params(), (size, size, inner // groups, out), jnp.float32))
        self.bias = nnx.Param(jnp.asarray(np.full(out, bias, np.float32)))

    def __call__(self, x: Array) -> Array:
        """f32[batch, h, w, in] -> f32[batch, h', w', out].

        h' = (h + 2 pad - size) // stride + 1.
        """
        x = conv(x, self.kernel[...], self.stride, self.pad, self.groups)
        return jax.nn.relu(_add(x, self.bias[...]))


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


def he_start(place: str) -> tuple[Init, float]:
    """He-normal kernels, N(0, 0.01^2) for the class layer fc8, biases 0."""
    return (normal(0.01) if place == "fc8" else he_normal), 0.0


class Classifier(nnx.Module):
    """End of AlexNet and VGG: two dense ReLU layers with dropout, logits."""

    def __init__(self, widths: tuple[int, int, int], drop: float, start: Start, rngs: nnx.Rngs):
        features, hidden, classes = widths

        def layer(place: str, shape: tuple[int, int]) -> Dense:
            init, bias = start(place)
            return Dense(shape, init=init, bias=bias, rngs=rngs)

        self.fc6 = layer("fc6", (features, hidden))
        self.fc7 = layer("fc7", (hidden, hidden))
        self.fc8 = layer("fc8", (hidden, classes))
        self.drop = nnx.Dropout(drop, rngs=rngs)

    def __call__(self, x: Array, train: bool) -> Array:
        """f32[batch, ...] of `features` entries each -> logits f32[batch, classes]."""
        x = x.reshape(x.shape[0], -1)
        for layer in (self.fc6, self.fc7):
            x = self.drop(jax.nn.relu(layer(x)), deterministic=not train)
        return self.fc8(x)


def _add(x: Array, bias: Array) -> Array:
    return x + bias.reshape((1,) * (x.ndim - 1) + (-1,))  # ranks may be set to be strict


def conv(x: Array, kernel: Array, stride: int = 1, pad: int | None = None, groups: int = 1) -> Array:
    """Cross-correlation, zero-padded by `pad`, `(size - 1) // 2` unless given."""
    if groups > 1:  # XLA's own grouped convolution takes 4 to 13 times as long on CPU
        parts = zip(jnp.split(x, groups, -1), jnp.split(kernel, groups, -1), strict=True)
        return jnp.concatenate([conv(*part, stride, pad) for part in parts], -1)
    size = kernel.shape[0]
    pad = (size - 1) // 2 if pad is None else pad
    if size == 1 and pad == 0:
        return x[:, ::stride, ::stride] @ kernel[0, 0]  # the same numbers; faster than a convolution on CPU
    if max(x.shape[1:3]) < size:
        return _conv_of_patches(x, kernel, stride, pad)
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=layout)


def _conv_of_patches(x: Array, kernel: Array, stride: int, pad: int) -> Array:
    """Compute `conv` as one matrix product.

    XLA's convolution takes 20 times as long on CPU if the kernel is larger than the image.
    """
    size = kernel.shape[0]
    x = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows, columns = (n - size + 1 for n in x.shape[1:3])
    patches = [x[:, i : i + rows : stride, j : j + columns : stride] for i in range(size) for j in range(size)]
    return jnp.concatenate(patches, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


def at_least_32(x: Array) -> Array:
    """16-bit floats as f32, for precise sums; wider ones as they are."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def local_response_norm(x: Array, window: int = 5, k: float = 2.0, alpha: float = 1e-4) -> Array:
    """Each entry divided by the energy of its neighbour channels.

    y_c = x_c / d_c^0.75, d_c = k + alpha sum_{|e - c| <= window // 2} x_e^2. Alpha is not divided by
    the window, as in Krizhevsky et al. 2012, section 3.3; Caffe divides it.
    """
    return _lrn_forward(x, window, k, alpha)[0]


def _lrn_forward(x: Array, window: int, k: float, alpha: float) -> tuple[Array, Any]:
    x32 = at_least_32(x)  # in bfloat16 k + alpha s would lose all of a small s
    d = k + alpha * _sum_neighbours(x32 * x32, window)
    root = lax.rsqrt(d)
    scale = root * jnp.sqrt(root)  # d^-0.75 without pow, which is slow
    return (x32 * scale).astype(x.dtype), (x, d, scale)


# By hand: the derivative that JAX finds recomputes d for every neighbour, 16 times as slow on CPU.
def _lrn_backward(window: int, k: float, alpha: float, saved: Any, g: Array) -> tuple[Array]:
    x, d, scale = saved
    g, x32 = at_least_32(g), at_least_32(x)
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


def max_pool(x: Array, stride: int, window: int = 3, pad: int = 1, ceil: bool = False) -> Array:
    """Maximum over windows, padded by -inf, with sizes rounded down.

    The first of equal entries has the gradient. [batch, h, w, channels] -> h' = (h + 2 pad - window) / stride + 1.
    `ceil` rounds up: a last window may hang over the edge, if it begins inside. A row maximum of column maxima: the
    same values and gradients as one `reduce_window`, whose backward pass takes 3 (stride 1) to 13 (stride 2) times as
    long on CPU.
    """
    for axis in (2, 1):
        x = max_along(x, Windows.over(x.shape[axis], axis, window, stride, pad, ceil))
    return x


def adaptive_max_pool(x: Array, size: int) -> Array:
    """Maxima of equally spaced windows: [batch, size, size, channels] from any image.

    From n >= size entries: stride n // size and window n - (size - 1) stride, so that 13 -> 6 is 3/2, 14 -> 7 is 2/2
    and size -> size does nothing. From fewer, the nearest entries are repeated.
    """
    for axis in (2, 1):
        n = x.shape[axis]
        if n < size:
            x = jnp.take(x, np.arange(size) * n // size, axis, mode="clip")
        elif n > size:
            stride = n // size
            x = max_along(x, Windows(axis, n - (size - 1) * stride, stride, 0, size))
    return x


class Windows(NamedTuple):
    """`count` windows of `size` entries, `stride` apart; the first begins at -`pad`."""

    axis: int
    size: int
    stride: int
    pad: int
    count: int

    @classmethod
    def over(cls, n: int, axis: int, size: int, stride: int, pad: int, ceil: bool) -> "Windows":
        """All windows of an axis of n entries."""
        steps, rest = divmod(n + 2 * pad - size, stride)
        hangs = ceil and rest > 0 and (steps + 1) * stride < n + pad
        return cls(axis, size, stride, pad, steps + 1 + hangs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def max_along(x: Array, windows: Windows) -> Array:
    """Maximum over windows along one axis."""
    return functools.reduce(jnp.maximum, _taps(x, windows))


def _taps(x: Array, windows: Windows) -> list[Array]:
    """The first, second, ... entry of every window."""
    axis, size, stride, pad, count = windows
    last = (count - 1) * stride
    end = last + size - pad - x.shape[axis]  # negative if windows leave the last entries out
    padded = lax.pad(x, jnp.asarray(-jnp.inf, x.dtype), _along(x.ndim, axis, (pad, end, 0)))
    return [lax.slice_in_dim(padded, i, i + last + 1, stride, axis) for i in range(size)]


def _along(ndim: int, axis: int, config: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """A padding configuration for one axis."""
    return [config if i == axis else (0, 0, 0) for i in range(ndim)]


def _max_forward(x: Array, windows: Windows) -> tuple[Array, tuple[Array, Array]]:
    taps = _taps(x, windows)
    y = functools.reduce(jnp.maximum, taps)
    owner = jnp.full(y.shape, windows.size - 1, jnp.int8)
    for i in reversed(range(windows.size - 1)):
        owner = jnp.where(taps[i] == y, jnp.int8(i), owner)
    return y, (owner, x[:0])  # x[:0] for its shape: residuals are arrays


def _max_backward(windows: Windows, saved: tuple[Array, Array], g: Array) -> tuple[Array]:
    owner, like = saved
    axis, size, stride, pad, count = windows
    zero, last = jnp.zeros((), g.dtype), (count - 1) * stride

    def spread(i: int) -> Array:  # back to where tap i of every window came from
        config = _along(g.ndim, axis, (i - pad, like.shape[axis] - last - 1 + pad - i, stride - 1))
        return lax.pad(jnp.where(owner == i, g, zero), zero, config)

    return (functools.reduce(jnp.add, map(spread, range(size))),)


max_along.defvjp(_max_forward, _max_backward)


def average_pool(x: Array, size: int) -> Array:
    """Averages of equally spaced windows: [batch, size, size, channels] from any image.

    From n >= size entries: stride n // size and window n - (size - 1) stride, so that 14 -> 4 is
    5/3 and size -> size does nothing. From fewer, the nearest entries are repeated.
    """
    rows, columns = (jnp.asarray(_bins(n, size), x.dtype) for n in x.shape[1:3])
    return jnp.einsum("ih,jw,bhwc->bijc", rows, columns, x, precision="highest")


def _bins(n: int, size: int) -> np.ndarray:
    """Weights of n entries in averages: f64[size, n], rows sum to 1."""
    stride = n // size
    window = max(n - (size - 1) * stride, 1) if stride else 1
    starts = np.arange(size) * stride if stride else np.arange(size) * n // size
    inside = np.arange(n) - starts[:, None]
    return ((inside >= 0) & (inside < window)) / window
