"""The zoo beside PyTorch twins: padding, pooling, grouping, normalisation and heads, not only the counts."""

import functools
from collections.abc import Iterable

import pytest

from jaxmpi.model import nnx_model
from models.alexnet import STARTS, AlexNet, alexnet
from models.googlenet import BLOCKS, TINY_BLOCKS, GoogLeNet, Widths, googlenet, googlenet_loss
from models.googlenet import STARTS as GOOGLENET_STARTS
from models.vgg import DEPTHS, Vgg, vgg16, vgg19
from twins import ToRows, check_twin, cross_entropy, no_dropout, torch, weights

nn = torch.nn
Tensor = torch.Tensor
LRN = functools.partial(nn.LocalResponseNorm, 5, alpha=5e-4, beta=0.75, k=2.0)  # torch divides alpha by the size
WIDE = ("float64",)  # at full size a million activations: see twins.py


def conv(channels: int, out: int, size: int, stride: int = 1, pad: int = 0, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, size, stride, pad, groups=groups), nn.ReLU())


def classifier(features: int, hidden: int, classes: int) -> list[nn.Module]:
    first = [ToRows(), nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(0.5)]
    return [*first, nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, classes)]


def pairs_in_order(twin: nn.Module, paths: list[str]) -> list[tuple[str, str]]:
    """The twin's layers with weights, in order, are the model's at `paths`."""
    layers = [name for name, layer in twin.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    return [pair for path, name in zip(paths, layers, strict=True) for pair in weights(path, name)]


DENSE = ["classifier/fc6", "classifier/fc7", "classifier/fc8"]

# ---------------------------------------------------------------- AlexNet


def alexnet_twin(shrink: int, classes: int) -> nn.Sequential:
    a, b, c = 96 // shrink, 256 // shrink, 384 // shrink
    return nn.Sequential(
        *(conv(3, a, 11, stride=4), nn.MaxPool2d(3, 2), LRN()),
        *(conv(a, b, 5, pad=2, groups=2), nn.MaxPool2d(3, 2), LRN()),
        *(conv(b, c, 3, pad=1), conv(c, c, 3, pad=1, groups=2), conv(c, b, 3, pad=1, groups=2), nn.MaxPool2d(3, 2)),
        *classifier(6 * 6 * b, 4096 // shrink, classes),
    )


ALEXNET = [*(f"conv{i}" for i in range(1, 6)), *DENSE]


def test_alexnet():
    model = nnx_model(
        lambda rngs: AlexNet(10, 3, STARTS["he"], rngs, shrink=16),
        name="narrow AlexNet",
        input_shape=(227, 227, 3),
        classes=10,
    )
    twin = alexnet_twin(16, 10)
    check_twin(model, twin, pairs_in_order(twin, ALEXNET))


@pytest.mark.slow
def test_alexnet_at_full_size():
    twin = alexnet_twin(1, 1000)
    check_twin(alexnet(), twin, pairs_in_order(twin, ALEXNET), batch=1, precisions=WIDE)


# ---------------------------------------------------------------- VGG


def vgg_twin(depths: tuple[int, ...], shrink: int, classes: int) -> nn.Sequential:
    layers, channels = [], 3
    for depth, width in zip(depths, (64, 128, 256, 512, 512), strict=True):
        for _ in range(depth):
            layers.append(conv(channels, width // shrink, 3, pad=1))
            channels = width // shrink
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *classifier(7 * 7 * channels, 4096 // shrink, classes))


def vgg_paths(depths: tuple[int, ...]) -> list[str]:
    return [f"convs/conv{stage}_{i}" for stage, n in enumerate(depths, 1) for i in range(1, n + 1)] + DENSE


@pytest.mark.parametrize("name", DEPTHS)
def test_vgg(name):
    depths = DEPTHS[name]
    model = nnx_model(
        lambda rngs: Vgg(depths, 10, 3, STARTS["he"], rngs, shrink=32),
        name="narrow VGG",
        input_shape=(224, 224, 3),
        classes=10,
    )
    twin = vgg_twin(depths, 32, 10)
    check_twin(model, twin, pairs_in_order(twin, vgg_paths(depths)), batch=1, precisions=WIDE)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make"), [("vgg16", vgg16), ("vgg19", vgg19)])
def test_vgg_at_full_size(name, make):
    twin = vgg_twin(DEPTHS[name], 1, 1000)
    check_twin(make(), twin, pairs_in_order(twin, vgg_paths(DEPTHS[name])), batch=1, precisions=WIDE)


# ---------------------------------------------------------------- GoogLeNet


class InceptionTwin(nn.Module):
    def __init__(self, channels: int, w: Widths):
        super().__init__()
        self.one = conv(channels, w.one, 1)
        self.three = nn.Sequential(conv(channels, w.reduce3, 1), conv(w.reduce3, w.three, 3, pad=1))
        self.five = nn.Sequential(conv(channels, w.reduce5, 1), conv(w.reduce5, w.five, 5, pad=2))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(channels, w.pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class GoogLeNetTwin(nn.Module):
    """`pool` makes the 4x4 entries of an auxiliary head."""

    def __init__(self, classes: int, shrink: int, pool: nn.Module, blocks: Iterable[str] = BLOCKS):
        super().__init__()
        a, b, reduced, hidden = (w // shrink for w in (64, 192, 128, 1024))
        self.stem = nn.Sequential(
            *(conv(3, a, 7, stride=2, pad=3), nn.MaxPool2d(3, 2, 1), LRN()),
            *(conv(a, a, 1), conv(a, b, 3, pad=1), nn.MaxPool2d(3, 2, 1), LRN()),
        )
        self.blocks, self.heads, inner = nn.ModuleDict(), nn.ModuleDict(), b
        for name in blocks:
            widths = Widths(*(w // shrink for w in BLOCKS[name]))
            self.blocks[name], inner = InceptionTwin(inner, widths), widths.out
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


INCEPTION = ("one", "reduce3", "three", "reduce5", "five", "pool")
HEADS = [f"{aux}/{layer}" for aux in ("aux1", "aux2") for layer in ("reduce", "hidden", "logits")]


def googlenet_paths(blocks: Iterable[str]) -> list[str]:
    inner = [f"blocks/{name}/{layer}" for name in blocks for layer in INCEPTION]
    return ["stem7", "stem1", "stem3", *inner, *HEADS, "logits"]


def googlenet_twin_loss(outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    main, *auxiliary = (cross_entropy(logits, labels) for logits in outputs)
    return main + 0.3 * sum(auxiliary)


AT_224 = (224, nn.AvgPool2d(5, 3), BLOCKS, "float64")
AT_64 = (64, nn.Identity(), TINY_BLOCKS, "float32")  # 4x4 where the heads begin


@pytest.mark.parametrize(("size", "pool", "blocks", "precision"), [AT_224, AT_64])
def test_googlenet_and_its_auxiliary_heads_in_training(size, pool, blocks, precision):
    model = nnx_model(
        lambda rngs: no_dropout(GoogLeNet(10, 3, GOOGLENET_STARTS["he"], rngs, blocks=blocks, shrink=8)),
        name="narrow GoogLeNet",
        input_shape=(size, size, 3),
        classes=10,
    )
    twin = GoogLeNetTwin(10, 8, pool, blocks)
    for module in twin.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    options = {"loss": googlenet_loss, "twin_loss": googlenet_twin_loss, "precisions": (precision,)}
    check_twin(model, twin, pairs_in_order(twin, googlenet_paths(blocks)), train=True, **options)


@pytest.mark.slow
def test_googlenet_at_full_size():
    twin = GoogLeNetTwin(1000, 1, nn.Identity())
    check_twin(googlenet(), twin, pairs_in_order(twin, googlenet_paths(BLOCKS)), batch=1, precisions=WIDE)
