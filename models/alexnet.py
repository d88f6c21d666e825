"""AlexNet (Krizhevsky et al. 2012, "ImageNet classification with deep convolutional neural networks")."""

from typing import Any, NamedTuple

from flax import nnx

from jaxmpi.core.errors import lookup
from jaxmpi.model import Model, nnx_model
from jaxmpi.models.layers import (
    Array,
    Classifier,
    Conv,
    Init,
    Start,
    adaptive_max_pool,
    check_sizes,
    he_start,
    local_response_norm,
    max_pool,
    normal,
    with_classes,
)


class Shape(NamedTuple):
    """Shape of one convolution: output channels, kernel size, stride, padding, groups."""

    out: int
    size: int
    stride: int
    pad: int
    groups: int


CONVOLUTIONS = {
    "conv1": Shape(96, 11, stride=4, pad=0, groups=1),
    "conv2": Shape(256, 5, stride=1, pad=2, groups=2),
    "conv3": Shape(384, 3, stride=1, pad=1, groups=1),
    "conv4": Shape(384, 3, stride=1, pad=1, groups=2),
    "conv5": Shape(256, 3, stride=1, pad=1, groups=2),
}
HIDDEN = 4096
DROP = 0.5
SMALLEST = 35  # px: below it the second pool has no window

# Standard deviations and biases of Theano-MPI's AlexNet; the paper has 0.01 and 1 for 0.005 and 0.1.
PUBLISHED = {
    "conv1": (0.01, 0.0), "conv2": (0.01, 0.1), "conv3": (0.01, 0.0), "conv4": (0.01, 0.1), "conv5": (0.01, 0.0),
    "fc6": (0.005, 0.1), "fc7": (0.005, 0.1), "fc8": (0.01, 0.0),
}  # fmt: skip


def published_start(place: str) -> tuple[Init, float]:
    """N(0, std^2) and a constant bias, by place."""
    std, bias = PUBLISHED[place]
    return normal(std), bias


STARTS: dict[str, Start] = {"published": published_start, "he": he_start}


class AlexNet(nnx.Module):
    """Five convolutions and three dense layers; inner channels divided by `shrink`."""

    def __init__(self, classes: int, channels: int, start: Start, rngs: nnx.Rngs, *, shrink: int = 1):
        def layer(place: str, channels: int) -> Conv:
            out, size, stride, pad, groups = CONVOLUTIONS[place]
            init, bias = start(place)
            shape = (channels, out // shrink)
            return Conv(shape, size, stride=stride, pad=pad, groups=groups, init=init, bias=bias, rngs=rngs)

        a, b, c, d, e = (shape.out // shrink for shape in CONVOLUTIONS.values())
        self.conv1 = layer("conv1", channels)
        self.conv2 = layer("conv2", a)
        self.conv3 = layer("conv3", b)
        self.conv4 = layer("conv4", c)
        self.conv5 = layer("conv5", d)
        self.classifier = Classifier((36 * e, HIDDEN // shrink, classes), DROP, start, rngs)

    def __call__(self, x: Array, train: bool) -> Array:
        """f32[batch, 227, 227, 3] -> logits f32[batch, classes]."""
        x = local_response_norm(max_pool(self.conv1(x), 2, pad=0))  # 55 -> 27
        x = local_response_norm(max_pool(self.conv2(x), 2, pad=0))  # 27 -> 13
        x = self.conv5(self.conv4(self.conv3(x)))
        return self.classifier(adaptive_max_pool(x, 6), train)  # 13 -> 6


def alexnet(classes: int = 1000, image_size: int = 227, channels: int = 3, init: str = "published") -> Model:
    """AlexNet: 60,965,224 params at the defaults; two groups in conv2, conv4, conv5.

    At other sizes than 227 px the last pool adapts, so that all but the class layer keep their shape.

    Args:
        classes: number of logits.
        image_size: px, height and width, >= 35.
        channels: of the image.
        init: "published": normal with Theano-MPI's standard deviations and biases; "he": He-normal, biases 0,
            which trains faster on small data.

    Reference: Krizhevsky et al. 2012. As Theano-MPI (and Caffe), it pools before both local response
    normalisations; the paper normalises first. Dropout 0.5 after both hidden dense layers.
    """
    return _model("alexnet", classes, image_size, channels, init)


def alexnet_tiny(classes: int = 10, image_size: int = 64, channels: int = 3, init: str = "he") -> Model:
    """AlexNet with a sixteenth of the channels: milliseconds a step."""
    return _model("alexnet_tiny", classes, image_size, channels, init, shrink=16)


@with_classes
def _model(name: str, classes: int, image_size: int, channels: int, init: str, **sizes: Any) -> Model:
    start = lookup(STARTS, init, "init")
    check_sizes(name, classes, image_size, channels, SMALLEST)
    return nnx_model(
        lambda rngs: AlexNet(classes, channels, start, rngs, **sizes),
        name=name,
        input_shape=(image_size, image_size, channels),
        classes=classes,
    )
