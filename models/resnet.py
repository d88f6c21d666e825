"""Residual networks of He et al. 2016, "Deep residual learning", table 1."""

import functools
from typing import NamedTuple

import jax
from flax import nnx

from jaxmpi.core.errors import lookup
from jaxmpi.model import Model, nnx_model
from jaxmpi.models.layers import Array, Dense, check_sizes, max_pool, normal, with_classes
from jaxmpi.models.norm import ConvNorm

conv_norm = functools.partial(ConvNorm, eps=1e-4)  # momentum 0.9: as Theano-MPI's ResNet-50


class Block(NamedTuple):
    """The convolutions that a shortcut bypasses."""

    sizes: tuple[int, ...]  # px of each kernel
    strided: int  # which of them has the block's stride
    expansion: int  # channels out / width


BASIC = Block((3, 3), 0, 1)
BOTTLENECKS = {"v1": Block((1, 3, 1), 0, 4), "v1.5": Block((1, 3, 1), 1, 4)}
STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}  # blocks, by depth
TINY_STAGES = (1, 1, 1, 1)
WIDTH = 64  # channels of the stem and the first stage; doubled by each later one


class Residual(nnx.Module):
    """relu(shortcut(x) + norm(conv(... relu(norm(conv(x))))), section 3.2 of the paper.

    The shortcut is x itself, or a 1x1 convolution with norm if channels or size change (its option B). The last
    scale begins at 0, so that a block begins as its shortcut (Goyal et al. 2017, arXiv:1706.02677, section 5.1).
    """

    def __init__(self, channels: int, width: int, block: Block, stride: int, rngs: nnx.Rngs):
        last, self.out = len(block.sizes) - 1, width * block.expansion
        ins = [channels, *[width] * last]
        outs = [*[width] * last, self.out]
        self.convs = nnx.List(
            conv_norm(
                (ins[i], outs[i]), size, stride=stride if i == block.strided else 1, scale=float(i != last), rngs=rngs
            )
            for i, size in enumerate(block.sizes)
        )
        is_same = stride == 1 and channels == self.out
        self.shortcut = None if is_same else conv_norm((channels, self.out), 1, stride=stride, rngs=rngs)

    def __call__(self, x: Array, train: bool) -> Array:
        """f32[batch, h, w, in] -> f32[batch, ceil(h/stride), ceil(w/stride), width*expansion]."""
        y = x
        for i, conv in enumerate(self.convs):
            y = conv(jax.nn.relu(y) if i else y, train)
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x, train)))


class ResNet(nnx.Module):
    """Stem, four stages of blocks, mean over the image, logits."""

    def __init__(self, classes: int, channels: int, block: Block, stages: tuple[int, ...], width: int, rngs: nnx.Rngs):
        self.stem = conv_norm((channels, width), 7, stride=2, rngs=rngs)
        self.stages, inner = nnx.List(), width
        for stage, blocks in enumerate(stages):
            self.stages.append(nnx.List())
            for i in range(blocks):
                stride = 2 if stage and i == 0 else 1
                self.stages[-1].append(Residual(inner, width << stage, block, stride, rngs))
                inner = self.stages[-1][-1].out
        self.logits = Dense((inner, classes), init=normal(0.01), rngs=rngs)

    def __call__(self, x: Array, train: bool) -> Array:
        """Image -> logits f32[batch, classes]."""
        x = max_pool(jax.nn.relu(self.stem(x, train)), 2)
        for stage in self.stages:
            for block in stage:
                x = block(x, train)
        return self.logits(x.mean((1, 2)))


def resnet18(classes: int = 1000, image_size: int = 224, channels: int = 3) -> Model:
    """ResNet-18: 11,689,512 params, 9,600 batch statistics at the defaults. More: `resnet50`."""
    return _model("resnet18", (image_size, channels), classes, BASIC, STAGES[18])


def resnet50(classes: int = 1000, image_size: int = 224, channels: int = 3, version: str = "v1.5") -> Model:
    """ResNet-50: 25,557,032 params, 53,120 batch statistics at the defaults.

    He-normal convolutions without bias, logits N(0, 0.01^2), the last scale of each block 0 at the start; batch
    norm with eps 1e-4, momentum 0.9. At any image size the last pool is the mean over the remaining image.

    Args:
        classes: number of logits.
        image_size: px, height and width, >= 32.
        channels: of the image.
        version: "v1.5" has a block's stride in its 3x3 convolution, as the Torch model that IBM trained and PyTorch's;
            "v1" in the first 1x1, as the paper and Theano-MPI. v1.5 reads all pixels, for 7 % more operations; the
            counts are the same.

    Reference: He et al. 2016, arXiv:1512.03385. Theano-MPI's first convolution has a bias, which the norm behind it
    cancels (25,557,096 params with it); its first pool is not padded.
    """
    return _model("resnet50", (image_size, channels), classes, bottleneck(version), STAGES[50])


def resnet101(classes: int = 1000, image_size: int = 224, channels: int = 3, version: str = "v1.5") -> Model:
    """ResNet-101: 44,549,160 params, 105,344 batch statistics at the defaults. Arguments: `resnet50`."""
    return _model("resnet101", (image_size, channels), classes, bottleneck(version), STAGES[101])


def resnet152(classes: int = 1000, image_size: int = 224, channels: int = 3, version: str = "v1.5") -> Model:
    """ResNet-152: 60,192,808 params, 151,424 batch statistics at the defaults. Arguments: `resnet50`."""
    return _model("resnet152", (image_size, channels), classes, bottleneck(version), STAGES[152])


def resnet18_tiny(classes: int = 10, image_size: int = 64, channels: int = 3) -> Model:
    """ResNet-18 with an eighth of the channels and one block a stage."""
    return _model("resnet18_tiny", (image_size, channels), classes, BASIC, TINY_STAGES, WIDTH // 8)


def resnet50_tiny(classes: int = 10, image_size: int = 64, channels: int = 3, version: str = "v1.5") -> Model:
    """`resnet50` with an eighth of the channels and one block a stage."""
    return _model("resnet50_tiny", (image_size, channels), classes, bottleneck(version), TINY_STAGES, WIDTH // 8)


def resnet101_tiny(classes: int = 10, image_size: int = 64, channels: int = 3, version: str = "v1.5") -> Model:
    """ResNet-101 with an eighth of the channels and five blocks. Version: `resnet50`."""
    return _model("resnet101_tiny", (image_size, channels), classes, bottleneck(version), (1, 1, 2, 1), WIDTH // 8)


def resnet152_tiny(classes: int = 10, image_size: int = 64, channels: int = 3, version: str = "v1.5") -> Model:
    """ResNet-152 with an eighth of the channels and seven blocks. Version: `resnet50`."""
    return _model("resnet152_tiny", (image_size, channels), classes, bottleneck(version), (1, 2, 3, 1), WIDTH // 8)


def bottleneck(version: str) -> Block:
    """The block of the deeper networks, by version."""
    return lookup(BOTTLENECKS, version, "version")


@with_classes
def _model(
    name: str, image: tuple[int, int], classes: int, block: Block, stages: tuple[int, ...], width: int = WIDTH
) -> Model:
    size, channels = image
    check_sizes(name, classes, size, channels, 32)
    return nnx_model(
        lambda rngs: ResNet(classes, channels, block, stages, width, rngs),
        name=name,
        input_shape=(size, size, channels),
        classes=classes,
    )
