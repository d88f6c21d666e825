"""IBM's "GoogleNetBN": GoogLeNet with batch normalisation (Ioffe & Szegedy 2015, figure 5).

The network replaces the 5x5 convolutions of GoogLeNet by two 3x3 convolutions. Batch normalisation follows every
convolution, and there is no dropout. The widths are those of models/googlenetbn.lua in soumith/imagenet-multiGPU.torch.
Initialisation differs from that file: He-normal kernels replace Torch's own. Mean pooling adds shifted images, which
takes half the time of `reduce_window` on CPU. IBM's payload of 93 MB matches no parameter count that we found.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxmpi.model import Model, nnx_model
from jaxmpi.models.layers import Array, Dense, average_pool, check_sizes, max_pool, normal, with_classes
from jaxmpi.models.norm import ConvNorm

conv_norm = functools.partial(ConvNorm, eps=1e-3, bias=True)  # momentum 0.9


class Widths(NamedTuple):
    """Output channels of an inception block.

    `one` 0 leaves its branch out, `pool` 0 its convolution.
    """

    one: int
    reduce3: int
    three: int
    reduce33: int
    three33: int  # channels of both 3x3 in a row
    pool: int

    def shrunk(self, shrink: int) -> "Widths":
        """Every width divided by `shrink`, but none to 0."""
        return Widths(*(-(-w // shrink) for w in self))

    def out(self, channels: int) -> int:
        """Channels of the block's output, if its input has `channels`."""
        return self.one + self.three + self.three33 + (self.pool or channels)


BLOCKS = {
    "3a": Widths(64, 64, 64, 64, 96, 32),
    "3b": Widths(64, 64, 96, 64, 96, 64),
    "3c": Widths(0, 128, 160, 64, 96, 0),
    "4a": Widths(224, 64, 96, 96, 128, 128),
    "4b": Widths(192, 96, 128, 96, 128, 128),
    "4c": Widths(160, 128, 160, 128, 160, 96),
    "4d": Widths(96, 128, 192, 160, 192, 96),
    "4e": Widths(0, 128, 192, 192, 256, 0),
    "5a": Widths(352, 192, 320, 160, 224, 128),
    "5b": Widths(352, 192, 320, 192, 224, 128),
}
TINY_BLOCKS = ("3c", "4d", "4e", "5b")  # both kinds of pool, both halvings, the auxiliary head
MAX_POOLED = ("3c", "4e", "5b")  # the others take means
HALVED = ("3c", "4e")  # a 2x2 convolution of stride 2 follows
AUX_AFTER = "4d"


def mean_pool(x: Array) -> Array:
    """Sum over 3x3 at every place, zero-padded by 1, divided by 9."""
    for axis in (1, 2):  # sums of sums: half the time of a `reduce_window` on CPU
        n = x.shape[axis]
        padded = jnp.pad(x, [(1, 1) if i == axis else (0, 0) for i in range(x.ndim)])
        before, here, after = (lax.slice_in_dim(padded, i, i + n, axis=axis) for i in range(3))
        x = before + here + after
    return x / 9


def through(x: Array, train: bool, *layers: ConvNorm | None) -> Array:
    """Layers one after another, a relu after each; None is no layer."""
    for layer in layers:
        x = x if layer is None else jax.nn.relu(layer(x, train))
    return x


class Inception(nnx.Module):
    """1x1, 3x3, double 3x3 convolutions and a pool, their channels concatenated."""

    def __init__(self, channels: int, widths: Widths, is_max: bool, rngs: nnx.Rngs):
        layer = functools.partial(conv_norm, rngs=rngs)
        self.is_max = is_max
        self.one = layer((channels, widths.one), 1) if widths.one else None
        self.reduce3 = layer((channels, widths.reduce3), 1)
        self.three = layer((widths.reduce3, widths.three), 3)
        self.reduce33 = layer((channels, widths.reduce33), 1)
        self.three33 = layer((widths.reduce33, widths.three33), 3)
        self.last33 = layer((widths.three33, widths.three33), 3)
        self.pool = layer((channels, widths.pool), 1) if widths.pool else None

    def __call__(self, x: Array, train: bool) -> Array:
        """f32[batch, h, w, in] -> f32[batch, h, w, out]."""
        pooled = max_pool(x, 1) if self.is_max else mean_pool(x)
        branches = [
            through(x, train, self.reduce3, self.three),
            through(x, train, self.reduce33, self.three33, self.last33),
            through(pooled, train, self.pool),
        ]
        if self.one is not None:
            branches.insert(0, through(x, train, self.one))
        return jnp.concatenate(branches, axis=-1)


class Auxiliary(nnx.Module):
    """Inner classifier: average pool to 4x4, 1x1 convolution, two dense layers."""

    def __init__(self, channels: int, widths: tuple[int, int], classes: int, rngs: nnx.Rngs):
        reduced, hidden = widths
        self.reduce = conv_norm((channels, reduced), 1, rngs=rngs)
        self.hidden = Dense((16 * reduced, hidden), rngs=rngs)
        self.logits = Dense((hidden, classes), init=normal(0.01), rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """f32[batch, h, w, in] -> logits f32[batch, classes]; runs in training only."""
        x = through(average_pool(x, 4), True, self.reduce)
        return self.logits(jax.nn.relu(self.hidden(x.reshape(x.shape[0], -1))))


class GoogLeNetBN(nnx.Module):
    """Stem, inception blocks, two heads (4d, last); widths divided by `shrink`."""

    def __init__(self, classes: int, channels: int, rngs: nnx.Rngs, *, blocks: Iterable[str] = BLOCKS, shrink: int = 1):
        layer = functools.partial(conv_norm, rngs=rngs)
        narrow, inner = 64 // shrink, 192 // shrink
        self.stem7 = layer((channels, narrow), 7, stride=2)
        self.stem1 = layer((narrow, narrow), 1)
        self.stem3 = layer((narrow, inner), 3)
        self.blocks, self.halve = nnx.Dict(), nnx.Dict()
        for name in blocks:
            widths = BLOCKS[name].shrunk(shrink)
            self.blocks[name] = Inception(inner, widths, name in MAX_POOLED, rngs)
            inner = widths.out(inner)
            if name in HALVED:
                self.halve[name] = layer((inner, inner), 2, stride=2)
            if name == AUX_AFTER:
                self.aux = Auxiliary(inner, (128 // shrink, 768 // shrink), classes, rngs)
        self.logits = Dense((inner, classes), init=normal(0.01), rngs=rngs)

    def __call__(self, x: Array, train: bool) -> Array | tuple[Array, Array]:
        """Image -> main logits f32[batch, classes]; in training (main, after 4d)."""
        x = _halve(through(x, train, self.stem7))
        x = inner = _halve(through(x, train, self.stem1, self.stem3))
        for name, block in self.blocks.items():
            x = through(block(x, train), train, self.halve.get(name))
            if name == AUX_AFTER:
                inner = x
        logits = self.logits(x.mean((1, 2)))
        return (logits, self.aux(inner)) if train else logits


def _halve(x: Array) -> Array:
    return max_pool(x, 2, pad=0, ceil=True)


def googlenetbn(classes: int = 1000, image_size: int = 224, channels: int = 3) -> Model:
    """GoogLeNetBN: 19,147,888 params, the auxiliary head's 2,416,744 among them; 23,360 batch statistics.

    In training `apply` returns the logits (main, after 4d), for which `jaxmpi.models.googlenet.googlenet_loss` is the
    loss; in evaluation the main ones. At other sizes than 224 px the average pools adapt, so that all but the class
    layers keep their shape.

    Depth 36: three convolutions in the stem and three in each of ten blocks (1x1, 3x3, 3x3). Two more convolutions
    halve the image, and the logits are one layer. IBM's payload of 93 MB matches no count of this network that we
    found: 76.6 MB with the head, 66.9 without.

    Args:
        classes: number of logits.
        image_size: px, height and width, >= 32.
        channels: of the image.

    Reference: Ioffe & Szegedy 2015, arXiv:1502.03167, as models/googlenetbn.lua of soumith/imagenet-multiGPU.torch:
    biased convolutions, batch norm with eps 1e-3, momentum 0.9, no dropout. Differs from that file: inside the blocks
    it has a relu between convolution and norm too; initialisation is Torch's own there, here kernels are He-normal,
    biases 0, logits N(0, 0.01^2). The auxiliary loss weighs 0.3, as in GoogLeNet.
    """
    return _model("googlenetbn", classes, image_size, channels)


def googlenetbn_tiny(classes: int = 10, image_size: int = 64, channels: int = 3) -> Model:
    """GoogLeNetBN with a sixteenth of the channels and four of the blocks."""
    return _model("googlenetbn_tiny", classes, image_size, channels, shrink=16, blocks=TINY_BLOCKS)


@with_classes
def _model(name: str, classes: int, image_size: int, channels: int, **sizes: Any) -> Model:
    check_sizes(name, classes, image_size, channels, 32)
    return nnx_model(
        lambda rngs: GoogLeNetBN(classes, channels, rngs, **sizes),
        name=name,
        input_shape=(image_size, image_size, channels),
        classes=classes,
    )
