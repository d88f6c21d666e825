"""Batch normalisation, and convolutions with it, of [batch, height, width, channels]."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxmpi.model import batch_mean
from jaxmpi.models.layers import Array, Init, at_least_32, conv, he_normal


class BatchNorm(nnx.Module):
    """Batch normalisation (Ioffe & Szegedy 2015, arXiv:1502.03167, alg. 1).

    y = scale (x - m) / sqrt(v + eps) + bias, channel by channel.
    In training m = E[x] and v = E[x^2] - m^2 over examples, height and width of the local batch. If gradients are
    accumulated, m and v are of each micro-batch. They are in f32 even if x is a 16-bit float. Evaluation uses running
    ones, which every training step moves: mean <- momentum mean + (1 - momentum) m, var alike. v divides by n, the
    running variance too; PyTorch's running variance divides by n - 1. If |m| is k standard deviations, v has a relative
    error of about k^2 2^-24.

    Batches. m and v are `jaxmpi.model.batch_mean`s: of one worker's examples, or of all workers' if the run
    synchronises batch statistics. In an epoch's short last step the trainer marks the examples that only fill the batch
    up. These are left out; a worker with nothing but fillers takes theirs. Outside of the trainer, the layer counts all
    examples.

    Params: scale, bias f32[channels]. State: mean, var f32[channels].
    Communicates: as `batch_mean`, 2 channels + 1 floats.

    Args:
        channels: of x.
        eps: added to the variance, > 0.
        momentum: share that the running statistics keep at each step, in [0, 1).
        scale: initial value of all entries of scale.
    """

    def __init__(self, channels: int, *, eps: float, momentum: float = 0.9, scale: float = 1.0):
        def full(value: float) -> Array:
            return jnp.asarray(np.full(channels, value, np.float32))

        self.eps, self.momentum = eps, momentum
        self.scale, self.bias = nnx.Param(full(scale)), nnx.Param(full(0.0))
        self.mean, self.var = nnx.BatchStat(full(0.0)), nnx.BatchStat(full(1.0))

    def __call__(self, x: Array, train: bool) -> Array:
        """[batch, h, w, channels] of any float type -> the same."""
        wide = at_least_32(x)
        if train:
            mean, square = batch_mean((wide.mean((1, 2)), (wide * wide).mean((1, 2))))
            var = jnp.maximum(square - mean * mean, 0)  # rounding may leave it below
            self._move(mean, var)
        else:
            mean, var = at_least_32(self.mean[...]), at_least_32(self.var[...])
        slope = lax.rsqrt(var + self.eps) * self.scale[...].astype(var.dtype)
        shift = self.bias[...].astype(var.dtype) - mean * slope
        return (wide * _row(slope) + _row(shift)).astype(x.dtype)  # twice as fast on CPU as (x - m) slope + bias

    def _move(self, mean: Array, var: Array) -> None:
        for running, new in ((self.mean, mean), (self.var, var)):
            old = at_least_32(running[...])
            # not running[...] = : Flax then writes the whole program so far into a message, layer by layer
            running.set_value((self.momentum * old + (1 - self.momentum) * new).astype(running.dtype))


def _row(x: Array) -> Array:
    return x.reshape(1, 1, 1, -1)  # ranks may be set to be strict


class ConvNorm(nnx.Module):
    """norm(conv(x, kernel) [+ bias]), zero-padded by `(size - 1) // 2`.

    kernel: f32[size, size, in, out].
    """

    def __init__(
        self,
        channels: tuple[int, int],
        size: int,
        *,
        eps: float,
        stride: int = 1,
        bias: bool = False,
        scale: float = 1.0,
        init: Init = he_normal,
        rngs: nnx.Rngs,
    ):
        self.stride = stride
        self.kernel = nnx.Param(init(rngs.params(), (size, size, *channels), jnp.float32))
        self.bias = nnx.Param(jnp.asarray(np.zeros(channels[1], np.float32))) if bias else None
        self.norm = BatchNorm(channels[1], eps=eps, scale=scale)

    def __call__(self, x: Array, train: bool) -> Array:
        """f32[batch, h, w, in] -> f32[batch, h', w', out].

        h' = (h - 1) // stride + 1 if `size` is odd, (h - 2) // stride + 1 if it is even; w' alike.
        """
        x = conv(x, self.kernel[...], self.stride)
        return self.norm(x if self.bias is None else x + _row(self.bias[...]), train)
