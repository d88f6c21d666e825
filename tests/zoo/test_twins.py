"""The zoo beside PyTorch twins: padding, pooling, grouping, normalisation, heads and running statistics."""

from collections.abc import Iterable

import pytest

from jaxmpi.model.adapters.nnx import nnx_model
from jaxmpi.models import MODELS
from jaxmpi.models.alexnet import STARTS, AlexNet
from jaxmpi.models.googlenet import BLOCKS, TINY_BLOCKS, GoogLeNet, googlenet_loss
from jaxmpi.models.googlenet import STARTS as GOOGLENET_STARTS
from jaxmpi.models.googlenetbn import GoogLeNetBN
from jaxmpi.models.resnet import BASIC, BOTTLENECKS, ResNet
from jaxmpi.models.vgg import DEPTHS, Vgg
from twins import BatchNorm2d, batch_norm, check_twin, no_dropout, torch, torch_zoo, weights

nn = torch.nn
WIDE = ("float64",)  # at full size a million activations: see twins.py


def pairs_in_order(twin: nn.Module, paths: list[str]) -> list[tuple[str, str]]:
    """The twin's layers with weights, in order, are the model's at `paths`."""
    layers = [name for name, layer in twin.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    return [pair for path, name in zip(paths, layers, strict=True) for pair in weights(path, name)]


DENSE = ["classifier/fc6", "classifier/fc7", "classifier/fc8"]

# ---------------------------------------------------------------- AlexNet

ALEXNET = [*(f"conv{i}" for i in range(1, 6)), *DENSE]


def test_alexnet():
    model = nnx_model(
        lambda rngs: AlexNet(10, 3, STARTS["he"], rngs, shrink=16),
        name="narrow AlexNet",
        input_shape=(227, 227, 3),
        classes=10,
    )
    twin = torch_zoo.alexnet(10, 16)
    check_twin(model, twin, pairs_in_order(twin, ALEXNET))


# ---------------------------------------------------------------- VGG


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
    twin = torch_zoo.vgg(depths, 10, 32)
    check_twin(model, twin, pairs_in_order(twin, vgg_paths(depths)), batch=1, precisions=WIDE)


# ---------------------------------------------------------------- GoogLeNet

INCEPTION = ("one", "reduce3", "three", "reduce5", "five", "pool")
HEADS = [f"{aux}/{layer}" for aux in ("aux1", "aux2") for layer in ("reduce", "hidden", "logits")]


def googlenet_paths(blocks: Iterable[str]) -> list[str]:
    inner = [f"blocks/{name}/{layer}" for name in blocks for layer in INCEPTION]
    return ["stem7", "stem1", "stem3", *inner, *HEADS, "logits"]


AT_224 = (224, None, BLOCKS, "float64")
AT_64 = (64, nn.Identity(), TINY_BLOCKS, "float32")  # 4x4 where the heads begin
AT_32 = (32, torch_zoo.Repeat(4), TINY_BLOCKS, "float64")  # 2x2 there


@pytest.mark.parametrize(("size", "pool", "blocks", "precision"), [AT_224, AT_64, AT_32])
def test_googlenet_and_its_auxiliary_heads_in_training(size, pool, blocks, precision):
    model = nnx_model(
        lambda rngs: no_dropout(GoogLeNet(10, 3, GOOGLENET_STARTS["he"], rngs, blocks=blocks, shrink=8)),
        name="narrow GoogLeNet",
        input_shape=(size, size, 3),
        classes=10,
    )
    twin = torch_zoo.GoogLeNet(10, 8, pool, blocks)
    for module in twin.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    options = {"loss": googlenet_loss, "twin_loss": torch_zoo.with_heads, "precisions": (precision,)}
    check_twin(model, twin, pairs_in_order(twin, googlenet_paths(blocks)), train=True, **options)


# ---------------------------------------------------------------- with batch normalisation


def pairs_of(twin):
    """Model and twin name their layers alike, but for the numbers in a `Sequential` of convolution and norm."""
    pairs = []
    for name, layer in twin.named_modules():
        path = name.replace(".", "/")
        if isinstance(layer, nn.Linear):
            pairs += weights(path, name)
        elif isinstance(layer, nn.Sequential) and isinstance(layer[0], nn.Conv2d):
            pairs += weights(path, f"{name}.0")[: 1 if layer[0].bias is None else 2]
            pairs += batch_norm(f"{path}/norm", f"{name}.1")
    return pairs


@pytest.mark.parametrize(
    ("kind", "blocks", "train"),
    [("basic", (1, 1), True), ("v1", (2, 1), True), ("v1.5", (2, 1), True), ("v1.5", (2, 1), False)],
)
def test_small_resnet(kind, blocks, train):
    block = {"basic": BASIC, **BOTTLENECKS}[kind]
    model = nnx_model(
        lambda rngs: ResNet(7, 3, block, blocks, 8, rngs), name="small", input_shape=(32, 32, 3), classes=7
    )
    twin = torch_zoo.ResNet(kind, blocks, 7, 8, BatchNorm2d)
    check_twin(model, twin, pairs_of(twin), train=train, batch=4)


@pytest.mark.parametrize("name", ["resnet101_tiny", "resnet152_tiny"])
def test_tiny_resnet(name):
    """With more blocks in some stages than in others, as at full size."""
    twin = torch_zoo.TWINS[name](norm=BatchNorm2d)
    check_twin(MODELS[name](), twin, pairs_of(twin), train=True, batch=4, precisions=WIDE)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_small_googlenetbn(train):
    names = ("4d", "4e")  # both kinds of pool; 32 px are 4x4 here, as the auxiliary head wants
    model = nnx_model(
        lambda rngs: GoogLeNetBN(7, 3, rngs, blocks=names, shrink=16), name="small", input_shape=(32, 32, 3), classes=7
    )
    twin = torch_zoo.GoogLeNetBN(7, 16, names, BatchNorm2d)
    losses = {"loss": googlenet_loss, "twin_loss": torch_zoo.with_heads}
    precisions = ("float64", "float32") if train else ("float64",)
    check_twin(model, twin, pairs_of(twin), train=train, batch=4, precisions=precisions, **losses)
