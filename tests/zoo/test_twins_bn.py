"""ResNet and GoogLeNetBN beside PyTorch twins with the same params: outputs, gradients, running statistics."""

import pytest

from jaxmpi.model.adapters.nnx import nnx_model
from jaxmpi.models import MODELS
from jaxmpi.models.googlenet import googlenet_loss
from jaxmpi.models.googlenetbn import GoogLeNetBN
from jaxmpi.models.resnet import BASIC, BOTTLENECKS, ResNet
from twins import BatchNorm2d, batch_norm, check_twin, torch, torch_zoo, weights

nn = torch.nn
WIDE = ("float64",)  # at full size a million activations: see twins.py


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


# ---------------------------------------------------------------- ResNet


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


# ---------------------------------------------------------------- GoogLeNetBN


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_small_googlenetbn(train):
    names = ("4d", "4e")  # both kinds of pool; 32 px are 4x4 here, as the auxiliary head wants
    model = nnx_model(
        lambda rngs: GoogLeNetBN(7, 3, rngs, blocks=names, shrink=16),
        name="small",
        input_shape=(32, 32, 3),
        classes=7,
    )
    twin = torch_zoo.GoogLeNetBN(7, 16, names, BatchNorm2d)
    losses = {"loss": googlenet_loss, "twin_loss": torch_zoo.with_heads}
    precisions = ("float64", "float32") if train else ("float64",)
    check_twin(model, twin, pairs_of(twin), train=train, batch=4, precisions=precisions, **losses)
