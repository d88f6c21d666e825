"""The zoo beside PyTorch twins: padding, pooling, grouping, normalisation and heads, not only the counts."""

from collections.abc import Iterable

import pytest

from jaxmpi.model.adapters.nnx import nnx_model
from jaxmpi.models.alexnet import STARTS, AlexNet
from jaxmpi.models.googlenet import BLOCKS, TINY_BLOCKS, GoogLeNet, googlenet_loss
from jaxmpi.models.googlenet import STARTS as GOOGLENET_STARTS
from jaxmpi.models.vgg import DEPTHS, Vgg
from twins import check_twin, no_dropout, torch, torch_zoo, weights

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
