"""The zoo in torch.nn, layer for layer: what tests hold the models against, and the peers of scripts/bench_gpu.py.

Images are [batch, channels, height, width]. In training the networks with auxiliary heads give a tuple of logits, the
main ones first. `norm` makes a batch norm layer from channels, eps and momentum. Importing this file imports torch.
"""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn

from jaxmpi.models import googlenet as googlenet_tables
from jaxmpi.models import googlenetbn as googlenetbn_tables
from jaxmpi.models.resnet import STAGES, TINY_STAGES
from jaxmpi.models.vgg import DEPTHS

Tensor = torch.Tensor
Norm = Callable[[int, float, float], nn.Module]
Layer = Callable[..., nn.Sequential]  # channels, out, size, stride -> convolution and norm
LRN = functools.partial(nn.LocalResponseNorm, 5, alpha=5e-4, beta=0.75, k=2.0)  # torch divides alpha by the size


class ToRows(nn.Module):
    """[batch, channels, h, w] -> [batch, h w channels], the order in which the models flatten."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).flatten(1)


class Repeat(nn.Module):
    """[batch, channels, n, n] -> [batch, channels, size, size], n < size: the nearest entries, as the pools of the
    models do if an image is too small.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.arange(self.size, device=x.device) * x.shape[-1] // self.size
        return x[:, :, nearest][..., nearest]


def conv(channels: int, out: int, size: int, stride: int = 1, pad: int = 0, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, size, stride, pad, groups=groups), nn.ReLU())


def classifier(features: int, hidden: int, classes: int) -> list[nn.Module]:
    first = [ToRows(), nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(0.5)]
    return [*first, nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, classes)]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Softmax cross-entropy of each example."""
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def with_heads(outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """The same; of several logits main + 0.3 (sum of the auxiliary ones)."""
    main, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
    return cross_entropy(main, labels) + 0.3 * sum(cross_entropy(logits, labels) for logits in auxiliary)


# ---------------------------------------------------------------- AlexNet and VGG


def alexnet(classes: int = 1000, shrink: int = 1, last: nn.Module | None = None) -> nn.Sequential:
    """`last` makes the 6x6 entries of the classifier: a pool from 13x13, unless given."""
    a, b, c = 96 // shrink, 256 // shrink, 384 // shrink
    return nn.Sequential(
        *(conv(3, a, 11, stride=4), nn.MaxPool2d(3, 2), LRN()),
        *(conv(a, b, 5, pad=2, groups=2), nn.MaxPool2d(3, 2), LRN()),
        *(conv(b, c, 3, pad=1), conv(c, c, 3, pad=1, groups=2), conv(c, b, 3, pad=1, groups=2)),
        last or nn.MaxPool2d(3, 2),
        *classifier(6 * 6 * b, 4096 // shrink, classes),
    )


def vgg(depths: tuple[int, ...], classes: int = 1000, shrink: int = 1, last: nn.Module | None = None) -> nn.Sequential:
    """`last` makes the 7x7 entries of the classifier: a pool from 14x14, unless given."""
    layers, channels = [], 3
    for depth, width in zip(depths, (64, 128, 256, 512, 512), strict=True):
        for _ in range(depth):
            layers.append(conv(channels, width // shrink, 3, pad=1))
            channels = width // shrink
        layers.append(nn.MaxPool2d(2))
    layers[-1] = last or layers[-1]
    return nn.Sequential(*layers, *classifier(7 * 7 * channels, 4096 // shrink, classes))


# ---------------------------------------------------------------- GoogLeNet


class Inception(nn.Module):
    def __init__(self, channels: int, w: googlenet_tables.Widths):
        super().__init__()
        self.one = conv(channels, w.one, 1)
        self.three = nn.Sequential(conv(channels, w.reduce3, 1), conv(w.reduce3, w.three, 3, pad=1))
        self.five = nn.Sequential(conv(channels, w.reduce5, 1), conv(w.reduce5, w.five, 5, pad=2))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(channels, w.pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class GoogLeNet(nn.Module):
    """`pool` makes the 4x4 entries of an auxiliary head: an average pool from 14x14, unless given."""

    def __init__(
        self,
        classes: int = 1000,
        shrink: int = 1,
        pool: nn.Module | None = None,
        blocks: Iterable[str] = googlenet_tables.BLOCKS,
    ):
        super().__init__()
        pool = pool or nn.AvgPool2d(5, 3)
        a, b, reduced, hidden = (w // shrink for w in (64, 192, 128, 1024))
        self.stem = nn.Sequential(
            *(conv(3, a, 7, stride=2, pad=3), nn.MaxPool2d(3, 2, 1), LRN()),
            *(conv(a, a, 1), conv(a, b, 3, pad=1), nn.MaxPool2d(3, 2, 1), LRN()),
        )
        self.blocks, self.heads, inner = nn.ModuleDict(), nn.ModuleDict(), b
        for name in blocks:
            widths = googlenet_tables.Widths(*(max(1, w // shrink) for w in googlenet_tables.BLOCKS[name]))
            self.blocks[name], inner = Inception(inner, widths), widths.out
            if name in ("4a", "4d"):
                dense = [nn.Linear(16 * reduced, hidden), nn.ReLU(), nn.Dropout(0.7), nn.Linear(hidden, classes)]
                self.heads[name] = nn.Sequential(pool, conv(inner, reduced, 1), ToRows(), *dense)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.logits = nn.Sequential(nn.AdaptiveAvgPool2d(1), ToRows(), nn.Dropout(0.4), nn.Linear(inner, classes))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        x, heads = self.stem(x), []
        for name, block in self.blocks.items():
            x = block(x)
            if self.training and name in self.heads:
                heads.append(self.heads[name](x))
            x = self.pool(x) if name in ("3b", "4e") else x
        return (self.logits(x), *heads) if self.training else self.logits(x)


# ---------------------------------------------------------------- ResNet


def conv_norm(
    channels: int, out: int, size: int, stride: int = 1, *, eps: float, bias: bool, norm: Norm
) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, size, stride, (size - 1) // 2, bias=bias), norm(out, eps, 0.1))


class Block(nn.Module):
    def __init__(self, layers: list[nn.Sequential], shortcut: nn.Module):
        super().__init__()
        self.convs, self.shortcut = nn.ModuleList(layers), shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.convs[0](x)
        for layer in list(self.convs)[1:]:
            y = layer(y.relu())
        return (y + self.shortcut(x)).relu()


def basic(layer: Layer, channels: int, width: int, stride: int) -> Block:
    same = stride == 1 and channels == width
    shortcut = nn.Identity() if same else layer(channels, width, 1, stride)
    return Block([layer(channels, width, 3, stride), layer(width, width, 3)], shortcut)


def bottleneck(layer: Layer, channels: int, width: int, stride: int, strides: Callable) -> Block:
    same = stride == 1 and channels == 4 * width
    shortcut = nn.Identity() if same else layer(channels, 4 * width, 1, stride)
    first, second = strides(stride)
    layers = [layer(channels, width, 1, first), layer(width, width, 3, second), layer(width, 4 * width, 1)]
    return Block(layers, shortcut)


RESNET_BLOCKS = {  # how a block is made, channels out / width
    "basic": (basic, 1),
    "v1": (functools.partial(bottleneck, strides=lambda stride: (stride, 1)), 4),
    "v1.5": (functools.partial(bottleneck, strides=lambda stride: (1, stride)), 4),
}


class ResNet(nn.Module):
    def __init__(
        self, kind: str, stages: tuple[int, ...], classes: int = 1000, width: int = 64, norm: Norm = nn.BatchNorm2d
    ):
        super().__init__()
        layer = functools.partial(conv_norm, eps=1e-4, bias=False, norm=norm)
        make, expansion = RESNET_BLOCKS[kind]
        self.stem = layer(3, width, 7, 2)
        self.stages, channels = nn.Sequential(), width
        for stage, count in enumerate(stages):
            of_stage = nn.Sequential()
            for i in range(count):
                of_stage.append(make(layer, channels, width * 2**stage, 2 if stage > 0 and i == 0 else 1))
                channels = expansion * width * 2**stage
            self.stages.append(of_stage)
        self.logits = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.stem(x).relu(), 3, 2, 1)
        return self.logits(self.stages(x).mean((2, 3)))


# ---------------------------------------------------------------- GoogLeNetBN


def relus(x: Tensor, *layers: nn.Module) -> Tensor:
    for layer in layers:
        x = layer(x).relu()
    return x


class InceptionBN(nn.Module):
    def __init__(self, layer: Layer, channels: int, w: googlenetbn_tables.Widths, is_max: bool):
        super().__init__()
        if w.one:
            self.one = layer(channels, w.one, 1)
        self.reduce3, self.three = layer(channels, w.reduce3, 1), layer(w.reduce3, w.three, 3)
        self.reduce33 = layer(channels, w.reduce33, 1)
        self.three33, self.last33 = layer(w.reduce33, w.three33, 3), layer(w.three33, w.three33, 3)
        self.window = nn.MaxPool2d(3, 1, 1) if is_max else nn.AvgPool2d(3, 1, 1)
        if w.pool:
            self.pool = layer(channels, w.pool, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [relus(x, self.one)] if hasattr(self, "one") else []
        parts += [relus(x, self.reduce3, self.three), relus(x, self.reduce33, self.three33, self.last33)]
        x = self.window(x)
        return torch.cat([*parts, relus(x, self.pool) if hasattr(self, "pool") else x], 1)


class AuxiliaryBN(nn.Module):
    def __init__(self, layer: Layer, channels: int, reduced: int, hidden: int, classes: int):
        super().__init__()
        self.reduce = layer(channels, reduced, 1)
        self.hidden, self.logits = nn.Linear(16 * reduced, hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.avg_pool2d(x, 5, 3) if x.shape[-1] == 14 else x  # 4x4 needs no pool
        return self.logits(self.hidden(ToRows()(relus(x, self.reduce))).relu())


class GoogLeNetBN(nn.Module):
    def __init__(
        self,
        classes: int = 1000,
        shrink: int = 1,
        blocks: Iterable[str] = googlenetbn_tables.BLOCKS,
        norm: Norm = nn.BatchNorm2d,
    ):
        super().__init__()
        layer = functools.partial(conv_norm, eps=1e-3, bias=True, norm=norm)
        narrow, channels = 64 // shrink, 192 // shrink
        self.stem7, self.stem1 = layer(3, narrow, 7, 2), layer(narrow, narrow, 1)
        self.stem3 = layer(narrow, channels, 3)
        self.blocks, self.halve = nn.ModuleDict(), nn.ModuleDict()
        for name in blocks:
            widths = googlenetbn_tables.Widths(*(-(-w // shrink) for w in googlenetbn_tables.BLOCKS[name]))
            self.blocks[name] = InceptionBN(layer, channels, widths, is_max=name in ("3c", "4e", "5b"))
            channels = widths.one + widths.three + widths.three33 + (widths.pool or channels)
            if name in ("3c", "4e"):
                self.halve[name] = layer(channels, channels, 2, 2)
            if name == "4d":
                self.aux = AuxiliaryBN(layer, channels, 128 // shrink, 768 // shrink, classes)
        self.logits = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        x = pool(relus(x, self.stem7))
        x = pool(relus(x, self.stem1, self.stem3))
        inner = {}
        for name, block in self.blocks.items():
            x = inner[name] = block(x)
            x = relus(x, self.halve[name]) if name in self.halve else x
        main = self.logits(x.mean((2, 3)))
        return (main, self.aux(inner["4d"])) if self.training else main


# ---------------------------------------------------------------- by the names of models.MODELS


TWINS: dict[str, Callable[..., nn.Module]] = {
    "alexnet": alexnet,
    "alexnet_tiny": lambda: alexnet(10, 16, Repeat(6)),
    "vgg16": functools.partial(vgg, DEPTHS["vgg16"]),
    "vgg16_tiny": lambda: vgg(DEPTHS["vgg16"], 10, 16, Repeat(7)),
    "vgg19": functools.partial(vgg, DEPTHS["vgg19"]),
    "vgg19_tiny": lambda: vgg(DEPTHS["vgg19"], 10, 16, Repeat(7)),
    "googlenet": GoogLeNet,
    "googlenet_tiny": lambda: GoogLeNet(10, 16, Repeat(4), googlenet_tables.TINY_BLOCKS),
    "googlenetbn": GoogLeNetBN,
    "googlenetbn_tiny": lambda: GoogLeNetBN(10, 16, googlenetbn_tables.TINY_BLOCKS),
    "resnet18": functools.partial(ResNet, "basic", STAGES[18]),
    "resnet18_tiny": functools.partial(ResNet, "basic", TINY_STAGES, 10, 8),
    "resnet50": functools.partial(ResNet, "v1.5", STAGES[50]),
    "resnet50_tiny": functools.partial(ResNet, "v1.5", TINY_STAGES, 10, 8),
    "resnet101": functools.partial(ResNet, "v1.5", STAGES[101]),
    "resnet101_tiny": functools.partial(ResNet, "v1.5", (1, 1, 2, 1), 10, 8),
    "resnet152": functools.partial(ResNet, "v1.5", STAGES[152]),
    "resnet152_tiny": functools.partial(ResNet, "v1.5", (1, 2, 3, 1), 10, 8),
}
