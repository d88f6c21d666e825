"""GoogLeNet of Szegedy et al. 2015, "Going deeper with convolutions", table 1.

An inception block concatenates 1x1, 3x3 and 5x5 convolutions and a pool. Convolutions of size 1x1 reduce the channels
before the larger kernels, which limits the cost. Two auxiliary classifiers add 0.3 of their loss each in training. The
`published` initialisation has Theano-MPI's standard deviations; `he` trains faster on small data. Theano-MPI's third
local response normalisation, after 4e, is left out because the paper has none there.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmpi.core.errors import lookup
from jaxmpi.model import Model, nnx_model
from jaxmpi.models.layers import (
    Array,
    Conv,
    Dense,
    Init,
    at_least_32,
    average_pool,
    check_sizes,
    he_normal,
    local_response_norm,
    max_pool,
    normal,
    with_classes,
)


class Widths(NamedTuple):
    """Output channels of an inception block; `reduce3` and `reduce5` feed wider kernels."""

    one: int
    reduce3: int
    three: int
    reduce5: int
    five: int
    pool: int

    @property
    def out(self) -> int:
        """Channels of the four branches together."""
        return self.one + self.three + self.five + self.pool


BLOCKS = {
    "3a": Widths(64, 96, 128, 16, 32, 32),
    "3b": Widths(128, 128, 192, 32, 96, 64),
    "4a": Widths(192, 96, 208, 16, 48, 64),
    "4b": Widths(160, 112, 224, 24, 64, 64),
    "4c": Widths(128, 128, 256, 24, 64, 64),
    "4d": Widths(112, 144, 288, 32, 64, 64),
    "4e": Widths(256, 160, 320, 32, 128, 128),
    "5a": Widths(256, 160, 320, 32, 128, 128),
    "5b": Widths(384, 192, 384, 48, 128, 128),
}
TINY_BLOCKS = ("3b", "4a", "4d", "5b")  # both auxiliary heads and one pool between blocks
AUX_WEIGHT = 0.3  # weight of each auxiliary loss, in training


class Start(NamedTuple):
    """Initial params: kernels by kind of layer, and the convolutions' bias."""

    kernel: Callable[[str], Init]
    bias: float


# Standard deviations of Theano-MPI's GoogLeNet, by place.
STD = {
    "stem7": 0.1, "stem1": 0.1, "stem3": 0.03,
    "one": 0.03, "reduce3": 0.09, "three": 0.03, "reduce5": 0.2, "five": 0.03, "pool": 0.1,
    "aux": 0.1, "hidden": 0.01, "logits": 0.01,
}  # fmt: skip
STARTS = {
    "published": Start(lambda place: normal(STD[place]), 0.2),
    "he": Start(lambda place: normal(0.01) if place == "logits" else he_normal, 0.0),
    "he_all": Start(lambda place: he_normal, 0.0),
}


class Inception(nnx.Module):
    """1x1, 3x3 and 5x5 convolutions and a pool, their channels concatenated."""

    def __init__(self, channels: int, widths: Widths, start: Start, rngs: nnx.Rngs):
        def layer(place: str, channels: int, size: int) -> Conv:
            shape = (channels, getattr(widths, place))
            return Conv(shape, size, init=start.kernel(place), bias=start.bias, rngs=rngs)

        self.one = layer("one", channels, 1)
        self.reduce3 = layer("reduce3", channels, 1)
        self.three = layer("three", widths.reduce3, 3)
        self.reduce5 = layer("reduce5", channels, 1)
        self.five = layer("five", widths.reduce5, 5)
        self.pool = layer("pool", channels, 1)

    def __call__(self, x: Array) -> Array:
        """f32[batch, h, w, in] -> f32[batch, h, w, `Widths.out`]."""
        branches = (
            self.one(x),
            self.three(self.reduce3(x)),
            self.five(self.reduce5(x)),
            self.pool(max_pool(x, 1)),
        )
        return jnp.concatenate(branches, axis=-1)


class Auxiliary(nnx.Module):
    """Inner classifier: average pool to 4x4, 1x1 convolution, two dense layers."""

    def __init__(self, channels: int, widths: tuple[int, int], classes: int, start: Start, rngs: nnx.Rngs):
        reduced, hidden = widths
        init = start.kernel
        self.reduce = Conv((channels, reduced), 1, init=init("aux"), bias=start.bias, rngs=rngs)
        self.hidden = Dense((16 * reduced, hidden), init=init("hidden"), rngs=rngs)
        self.drop = nnx.Dropout(0.7, rngs=rngs)
        self.logits = Dense((hidden, classes), init=init("logits"), rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """f32[batch, h, w, in] -> logits f32[batch, classes]."""
        x = self.reduce(average_pool(x, 4))
        x = jax.nn.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.logits(self.drop(x, deterministic=False))  # only training runs this head


class GoogLeNet(nnx.Module):
    """Stem, inception blocks, three heads (4a, 4d, last); widths divided by `shrink`."""

    def __init__(
        self,
        classes: int,
        channels: int,
        start: Start,
        rngs: nnx.Rngs,
        *,
        blocks: Iterable[str] = BLOCKS,
        shrink: int = 1,
    ):
        def stem(shape: tuple[int, int], size: int, stride: int = 1) -> Conv:
            init = start.kernel(f"stem{size}")
            return Conv(shape, size, stride=stride, init=init, bias=start.bias, rngs=rngs)

        narrow, wide = 64 // shrink, 192 // shrink
        self.stem7 = stem((channels, narrow), 7, stride=2)
        self.stem1 = stem((narrow, narrow), 1)
        self.stem3 = stem((narrow, wide), 3)
        self.blocks, heads, inner = nnx.Dict(), {}, wide
        for name in blocks:
            widths = Widths(*(max(1, w // shrink) for w in BLOCKS[name]))
            self.blocks[name] = Inception(inner, widths, start, rngs)
            inner = heads[name] = widths.out
        aux = (128 // shrink, 1024 // shrink)
        self.aux1 = Auxiliary(heads["4a"], aux, classes, start, rngs)
        self.aux2 = Auxiliary(heads["4d"], aux, classes, start, rngs)
        self.drop = nnx.Dropout(0.4, rngs=rngs)
        self.logits = Dense((inner, classes), init=start.kernel("logits"), rngs=rngs)

    def __call__(self, x: Array, train: bool) -> Array | tuple[Array, Array, Array]:
        """Image -> logits f32[batch, classes]; in training (main, after 4a, after 4d)."""
        x = local_response_norm(max_pool(self.stem7(x), 2))
        x = local_response_norm(max_pool(self.stem3(self.stem1(x)), 2))
        inner = {}
        for name, block in self.blocks.items():
            x = inner[name] = block(x)
            if name in ("3b", "4e"):
                x = max_pool(x, 2)
        x = self.drop(x.mean((1, 2)), deterministic=not train)
        if not train:
            return self.logits(x)
        return self.logits(x), self.aux1(inner["4a"]), self.aux2(inner["4d"])


def googlenet(classes: int = 1000, image_size: int = 224, channels: int = 3, init: str = "published") -> Model:
    """GoogLeNet: 13,378,280 params at the defaults, the auxiliary heads' 6,379,728 among them.

    In training `apply` returns the logits (main, after 4a, after 4d), in evaluation the main ones.
    At other sizes than 224 px the average pools adapt, so that all but the class layers keep their
    shape.

    Args:
        classes: number of logits.
        image_size: px, height and width, >= 16.
        channels: of the image.
        init: "published": normal with Theano-MPI's standard deviations, convolution biases 0.2;
            "he": He-normal, logits N(0, 0.01^2), biases 0, which trains faster on small data; "he_all": the
            logits' kernels, too, which leaves chance sooner at low rates and is less stable at high ones.

    Reference: Szegedy et al. 2015, arXiv:1409.4842. As Theano-MPI, it pools before both local
    response normalisations; without Theano-MPI's third one, after 4e, which is not in the paper.
    """
    return _model("googlenet", classes, image_size, channels, init)


def googlenet_tiny(classes: int = 10, image_size: int = 32, channels: int = 3, init: str = "he") -> Model:
    """GoogLeNet with a sixteenth of the channels and four of the blocks."""
    return _model("googlenet_tiny", classes, image_size, channels, init, shrink=16, blocks=TINY_BLOCKS)


@with_classes
def _model(name: str, classes: int, image_size: int, channels: int, init: str, **sizes: Any) -> Model:
    start = lookup(STARTS, init, "init")
    check_sizes(name, classes, image_size, channels, 16)
    return nnx_model(
        lambda rngs: GoogLeNet(classes, channels, start, rngs, **sizes),
        name=name,
        input_shape=(image_size, image_size, channels),
        classes=classes,
    )


def googlenet_loss(outputs: Array | tuple[Array, ...], labels: Array) -> Array:
    """Softmax cross-entropy of each example: f32[batch] from labels i32[batch].

    In training, outputs are three logits: main + 0.3 aux1 + 0.3 aux2.
    """
    if not isinstance(outputs, tuple):
        return _cross_entropy(outputs, labels)
    main, *auxiliary = (_cross_entropy(logits, labels) for logits in outputs)
    return main + AUX_WEIGHT * sum(auxiliary)


def _cross_entropy(logits: Array, labels: Array) -> Array:
    log_p = jax.nn.log_softmax(at_least_32(logits))
    return -jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
