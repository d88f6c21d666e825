"""VGG-16 and VGG-19 (Simonyan & Zisserman 2015, table 1, columns D, E)."""

from typing import Any

from flax import nnx

from jaxmpi.core.errors import lookup
from jaxmpi.model import Model, nnx_model
from jaxmpi.models.layers import (
    Array,
    Classifier,
    Conv,
    Start,
    adaptive_max_pool,
    check_sizes,
    glorot_uniform,
    he_start,
    max_pool,
    with_classes,
)

WIDTHS = (64, 128, 256, 512, 512)  # output channels of the convolutions of each stage
DEPTHS = {"vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}  # convolutions of each stage
HIDDEN = 4096
DROP = 0.5
SMALLEST = 16  # px: four pools halve before the last one
STARTS: dict[str, Start] = {"published": lambda place: (glorot_uniform, 0.0), "he": he_start}


class Vgg(nnx.Module):
    """Pooled stages of 3x3 convolutions, three dense layers; channels divided by `shrink`."""

    def __init__(
        self,
        depths: tuple[int, ...],
        classes: int,
        channels: int,
        start: Start,
        rngs: nnx.Rngs,
        *,
        shrink: int = 1,
    ):
        self.depths = depths
        self.convs = nnx.Dict()
        for stage, (depth, width) in enumerate(zip(depths, WIDTHS, strict=True), 1):
            for i in range(1, depth + 1):
                name = f"conv{stage}_{i}"
                init, bias = start(name)
                self.convs[name] = Conv((channels, width // shrink), 3, init=init, bias=bias, rngs=rngs)
                channels = width // shrink
        self.classifier = Classifier((49 * channels, HIDDEN // shrink, classes), DROP, start, rngs)

    def __call__(self, x: Array, train: bool) -> Array:
        """f32[batch, 224, 224, 3] -> logits f32[batch, classes]."""
        for stage, depth in enumerate(self.depths, 1):
            for i in range(1, depth + 1):
                x = self.convs[f"conv{stage}_{i}"](x)
            x = max_pool(x, 2, 2, 0) if stage < len(self.depths) else adaptive_max_pool(x, 7)
        return self.classifier(x, train)


def vgg16(classes: int = 1000, image_size: int = 224, channels: int = 3, init: str = "published") -> Model:
    """VGG-16: 138,357,544 params at the defaults, as in Theano-MPI's "VGGNet" (depth 16).

    At other sizes than 224 px the last pool adapts, so that all but the class layer keep their shape.

    Args:
        classes: number of logits.
        image_size: px, height and width, >= 16.
        channels: of the image.
        init: "published": Glorot-uniform, biases 0, with which the paper (section 3.1) trains without its
            pre-training of a shallower network, and Theano-MPI too; "he": He-normal, biases 0, with which
            deep ones begin to learn sooner.

    Reference: arXiv:1409.1556. Dropout 0.5 after both hidden dense layers.
    """
    return _model("vgg16", "vgg16", classes, image_size, channels, init)


def vgg19(classes: int = 1000, image_size: int = 224, channels: int = 3, init: str = "published") -> Model:
    """VGG-19: 143,667,240 params at the defaults; else as `vgg16`."""
    return _model("vgg19", "vgg19", classes, image_size, channels, init)


def vgg16_tiny(classes: int = 10, image_size: int = 32, channels: int = 3, init: str = "he") -> Model:
    """VGG-16 with a sixteenth of the channels: milliseconds a step."""
    return _model("vgg16_tiny", "vgg16", classes, image_size, channels, init, shrink=16)


def vgg19_tiny(classes: int = 10, image_size: int = 32, channels: int = 3, init: str = "he") -> Model:
    """VGG-19 with a sixteenth of the channels: milliseconds a step."""
    return _model("vgg19_tiny", "vgg19", classes, image_size, channels, init, shrink=16)


@with_classes
def _model(name: str, depths: str, classes: int, image_size: int, channels: int, init: str, **sizes: Any) -> Model:
    start = lookup(STARTS, init, "init")
    check_sizes(name, classes, image_size, channels, SMALLEST)
    return nnx_model(
        lambda rngs: Vgg(DEPTHS[depths], classes, channels, start, rngs, **sizes),
        name=name,
        input_shape=(image_size, image_size, channels),
        classes=classes,
    )
