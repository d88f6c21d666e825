"""ResNet and GoogLeNetBN beside PyTorch twins with the same params: outputs, gradients, running statistics."""

import functools

import pytest

from jaxmpi.adapters import nnx_model
from models.googlenet import googlenet_loss
from models.googlenetbn import BLOCKS, GoogLeNetBN, googlenetbn
from models.resnet import BASIC, BOTTLENECKS, STAGES, ResNet, resnet18, resnet50
from twins import BatchNorm2d, ToRows, batch_norm, check_twin, cross_entropy, torch, weights

nn = torch.nn
WIDE = ("float64",)  # at full size a million activations: see twins.py


def conv_norm(channels, out, size, stride=1, *, eps, bias):
    return nn.Sequential(nn.Conv2d(channels, out, size, stride, (size - 1) // 2, bias=bias), BatchNorm2d(out, eps, 0.1))


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


plain = functools.partial(conv_norm, eps=1e-4, bias=False)


class TwinBlock(nn.Module):
    def __init__(self, layers, shortcut):
        super().__init__()
        self.convs, self.shortcut = nn.ModuleList(layers), shortcut

    def forward(self, x):
        y = self.convs[0](x)
        for conv in self.convs[1:]:
            y = conv(y.relu())
        return (y + self.shortcut(x)).relu()


def basic(channels, width, stride):
    same = stride == 1 and channels == width
    shortcut = nn.Identity() if same else plain(channels, width, 1, stride)
    return TwinBlock([plain(channels, width, 3, stride), plain(width, width, 3)], shortcut)


def bottleneck(channels, width, stride, strides):
    same = stride == 1 and channels == 4 * width
    shortcut = nn.Identity() if same else plain(channels, 4 * width, 1, stride)
    first, second = strides(stride)
    layers = [plain(channels, width, 1, first), plain(width, width, 3, second), plain(width, 4 * width, 1)]
    return TwinBlock(layers, shortcut)


TWIN_BLOCKS = {
    "basic": (basic, 1),
    "v1": (functools.partial(bottleneck, strides=lambda stride: (stride, 1)), 4),
    "v1.5": (functools.partial(bottleneck, strides=lambda stride: (1, stride)), 4),
}


class TwinResNet(nn.Module):
    def __init__(self, kind, blocks, width, classes):
        super().__init__()
        make, expansion = TWIN_BLOCKS[kind]
        self.stem = plain(3, width, 7, 2)
        self.stages, channels = nn.Sequential(), width
        for stage, count in enumerate(blocks):
            of_stage = nn.Sequential()
            for i in range(count):
                of_stage.append(make(channels, width * 2**stage, 2 if stage > 0 and i == 0 else 1))
                channels = expansion * width * 2**stage
            self.stages.append(of_stage)
        self.logits = nn.Linear(channels, classes)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.stem(x).relu(), 3, 2, 1)
        return self.logits(self.stages(x).mean((2, 3)))


@pytest.mark.parametrize(
    ("kind", "blocks", "train"),
    [("basic", (1, 1), True), ("v1", (2, 1), True), ("v1.5", (2, 1), True), ("v1.5", (2, 1), False)],
)
def test_small_resnet(kind, blocks, train):
    block = {"basic": BASIC, **BOTTLENECKS}[kind]
    model = nnx_model(
        lambda rngs: ResNet(7, 3, block, blocks, 8, rngs), name="small", input_shape=(32, 32, 3), classes=7
    )
    twin = TwinResNet(kind, blocks, 8, 7)
    check_twin(model, twin, pairs_of(twin), train=train, batch=4)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("make", [resnet18, resnet50])
def test_full_resnet(make, train):
    kind, depth = {resnet18: ("basic", 18), resnet50: ("v1.5", 50)}[make]
    twin = TwinResNet(kind, STAGES[depth], 64, 1000)
    check_twin(make(), twin, pairs_of(twin), train=train, precisions=WIDE)


# ---------------------------------------------------------------- GoogLeNetBN


biased = functools.partial(conv_norm, eps=1e-3, bias=True)


def relus(x, *layers):
    for layer in layers:
        x = layer(x).relu()
    return x


class TwinInception(nn.Module):
    def __init__(self, channels, one, reduce3, three, reduce33, three33, pool, is_max):
        super().__init__()
        if one:
            self.one = biased(channels, one, 1)
        self.reduce3, self.three = biased(channels, reduce3, 1), biased(reduce3, three, 3)
        self.reduce33 = biased(channels, reduce33, 1)
        self.three33, self.last33 = biased(reduce33, three33, 3), biased(three33, three33, 3)
        self.window = nn.MaxPool2d(3, 1, 1) if is_max else nn.AvgPool2d(3, 1, 1)
        if pool:
            self.pool = biased(channels, pool, 1)

    def forward(self, x):
        parts = [relus(x, self.one)] if hasattr(self, "one") else []
        parts += [relus(x, self.reduce3, self.three), relus(x, self.reduce33, self.three33, self.last33)]
        x = self.window(x)
        return torch.cat([*parts, relus(x, self.pool) if hasattr(self, "pool") else x], 1)


class TwinAuxiliary(nn.Module):
    def __init__(self, channels, reduced, hidden, classes):
        super().__init__()
        self.reduce = biased(channels, reduced, 1)
        self.hidden, self.logits = nn.Linear(16 * reduced, hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        x = nn.functional.avg_pool2d(x, 5, 3) if x.shape[-1] == 14 else x  # 4x4 needs no pool
        return self.logits(self.hidden(ToRows()(relus(x, self.reduce))).relu())


class TwinGoogLeNetBN(nn.Module):
    def __init__(self, rows, shrink, classes):
        super().__init__()
        narrow, channels = 64 // shrink, 192 // shrink
        self.stem7, self.stem1 = biased(3, narrow, 7, 2), biased(narrow, narrow, 1)
        self.stem3 = biased(narrow, channels, 3)
        self.blocks, self.halve = nn.ModuleDict(), nn.ModuleDict()
        for name, row in rows.items():
            self.blocks[name] = TwinInception(channels, *row, is_max=name in ("3c", "4e", "5b"))
            channels = row[0] + row[2] + row[4] + (row[5] or channels)
            if name in ("3c", "4e"):
                self.halve[name] = biased(channels, channels, 2, 2)
            if name == "4d":
                self.aux = TwinAuxiliary(channels, 128 // shrink, 768 // shrink, classes)
        self.logits = nn.Linear(channels, classes)

    def forward(self, x):
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        x = pool(relus(x, self.stem7))
        x = pool(relus(x, self.stem1, self.stem3))
        inner = {}
        for name, block in self.blocks.items():
            x = inner[name] = block(x)
            x = relus(x, self.halve[name]) if name in self.halve else x
        main = self.logits(x.mean((2, 3)))
        return (main, self.aux(inner["4d"])) if self.training else main


def both_heads(outputs, labels):
    if not isinstance(outputs, tuple):
        return cross_entropy(outputs, labels)
    main, aux = (cross_entropy(logits, labels) for logits in outputs)
    return main + 0.3 * aux


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_small_googlenetbn(train):
    names = ("4d", "4e")  # both kinds of pool; 32 px are 4x4 here, as the auxiliary head wants
    model = nnx_model(
        lambda rngs: GoogLeNetBN(7, 3, rngs, blocks=names, shrink=16),
        name="small",
        input_shape=(32, 32, 3),
        classes=7,
    )
    twin = TwinGoogLeNetBN({name: tuple(-(-w // 16) for w in BLOCKS[name]) for name in names}, 16, 7)
    losses = {"loss": googlenet_loss, "twin_loss": both_heads}
    precisions = ("float64", "float32") if train else ("float64",)
    check_twin(model, twin, pairs_of(twin), train=train, batch=4, precisions=precisions, **losses)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_full_googlenetbn(train):
    twin = TwinGoogLeNetBN(BLOCKS, 1, 1000)
    check_twin(
        googlenetbn(), twin, pairs_of(twin), train=train, loss=googlenet_loss, twin_loss=both_heads, precisions=WIDE
    )
