"""A model beside a PyTorch twin of it with the same params: outputs, loss, gradients and model state.

The twin is written with torch.nn and runs in 64 bits; that is the exact answer. Let e be the error, by tensor, of the
same twin in 32 bits. It measures what rounding costs in this network: u = 2^-24 an operation, amplified by the layers
after it. The model adds the same terms in other orders. In the worst order, one after another, a sum of n terms has an
error of about sqrt(n) u. See Higham and Mary 2019, "A new approach to probabilistic rounding error analysis". In the
best order the error is about u. So by tensor, in the 2-norm, with n terms in the longest sum of the network, the model
is within

    sqrt(n) (u' / u) max(e, u |exact|)

of the exact answer, u' = 2^-24 in 32 bits and 2^-53 in 64 bits. The run in 64 bits proves the structure: a wrong pad,
group or constant is a million times as large. The run in 32 bits proves that nothing is lost on the way. A layer that
wants at least 32 bits must therefore promote (`jaxmpi.models.layers.at_least_32`), not cast to f32. In 32 bits an
activation that is rounded across 0, or across its neighbour in a pool, switches a gradient. With m activations about
m u of them do, so `precisions` says "float64" only if m is a million.

    model = nnx_model(lambda rngs: no_dropout(Net(rngs)), name="net", input_shape=(32, 32, 3), classes=10)
    twin = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch_zoo.ToRows(), torch.nn.Linear(7200, 10))
    check_twin(model, twin, [*weights("conv", "0"), *weights("logits", "2")])
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxmpi.model.contract import Model

pytest.importorskip("torch", reason="PyTorch twins need torch", exc_type=ImportError)
import torch  # pyright: ignore[reportMissingImports] # CI may do without it

import torch_zoo

Pairs = Iterable[tuple[str, str]]  # (path in params or model state, "/" between keys; name in the twin's state_dict)
Tensors = dict[str, np.ndarray]  # by name, f64, in the layout of torch
KEY = jax.random.key(0)
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}


class BatchNorm2d(torch.nn.BatchNorm2d):
    """torch's, but the running variance takes the batch's variance / n, as JAX libraries do; torch takes / (n - 1)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        momentum, running_mean, running_var = self.momentum, self.running_mean, self.running_var
        assert momentum is not None
        assert running_mean is not None
        assert running_var is not None
        with torch.no_grad():  # here: torch's own forward keeps running_var for its backward pass
            var, mean = torch.var_mean(input, (0, 2, 3), correction=0)
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(var, momentum)
        return torch.nn.functional.batch_norm(input, None, None, self.weight, self.bias, True, eps=self.eps)


def weights(path: str, name: str) -> list[tuple[str, str]]:
    """The pairs of a convolution or dense layer with bias."""
    return [(f"{path}/kernel", f"{name}.weight"), (f"{path}/bias", f"{name}.bias")]


def batch_norm(path: str, name: str) -> list[tuple[str, str]]:
    """The pairs of a batch norm layer: params scale and bias, state mean and var."""
    ours, theirs = ("scale", "bias", "mean", "var"), ("weight", "bias", "running_mean", "running_var")
    return [(f"{path}/{a}", f"{name}.{b}") for a, b in zip(ours, theirs, strict=True)]


def no_dropout(module: nnx.Module) -> Any:
    """The module with all its dropout rates 0: what is left is deterministic in training as well."""
    for _, layer in nnx.iter_graph(module):
        if isinstance(layer, nnx.Dropout):
            layer.rate = 0.0
    return module


class Case(NamedTuple):
    """The data that model and twin get: trees of f64 arrays in the layout of JAX."""

    params: Any
    state: Any
    image: np.ndarray  # f64[batch, height, width, channels]
    labels: np.ndarray  # i32[batch]


def check_twin(
    model: Model,
    twin: torch.nn.Module,
    pairs: Pairs,
    *,
    train: bool = False,
    batch: int = 2,
    loss: Callable[[Any, jax.Array], jax.Array] = optax.softmax_cross_entropy_with_integer_labels,
    twin_loss: Callable[[Any, torch.Tensor], torch.Tensor] = torch_zoo.cross_entropy,
    precisions: Sequence[str] = ("float64", "float32"),
) -> None:
    """Assert that model and twin agree: outputs, loss, gradients by params and image, model state after.

    Args:
        model: without dropout where `train`.
        twin: gives logits, or a tuple of them, for f64[batch, channels, height, width]; it is not changed.
        pairs: every leaf of the model and every tensor of the twin, once.
        train: as in `Model.apply`; `twin.training` follows.
        batch: examples.
        loss: (outputs, labels) -> loss of each example, of the model.
        twin_loss: the same of the twin.
        precisions: in which the model runs.
    """
    pairs, case = list(pairs), draw(model, batch)
    exact, rounded = (_theirs(twin, pairs, case, twin_loss, train, dtype) for dtype in (torch.float64, torch.float32))
    spread = math.sqrt(_longest_sum(case))
    for precision in precisions:
        got = _ours(model, pairs, case, loss, train, precision)
        assert got.keys() == exact.keys()
        for name, want in exact.items():
            assert got[name].shape == want.shape, name
            error = max(_norm(rounded[name] - want), UNIT["float32"] * _norm(want))
            bound = spread * error * UNIT[precision] / UNIT["float32"]
            assert _norm(got[name] - want) <= bound, (name, precision, _norm(got[name] - want) / bound)


def draw(model: Model, batch: int, seed: int = 0) -> Case:
    """An image, labels, and values for all params and model state at which every one of them matters."""
    rng = np.random.default_rng(seed)
    key = jax.eval_shape(lambda: jax.random.key(0))
    shape = jax.ShapeDtypeStruct((1, *model.input_shape), jnp.float32)

    def value(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if (kind := path[-1].key) == "kernel":
            std = math.sqrt(2 / math.prod(leaf.shape[:-1]))
            return _f32(std * rng.standard_normal(leaf.shape, np.float32))
        low, high = {"bias": (-0.1, 0.3), "mean": (-0.3, 0.3), "scale": (0.5, 1.5), "var": (0.5, 1.5)}[kind]
        return _f32(rng.uniform(low, high, leaf.shape))

    params, state = jax.tree.map_with_path(value, jax.eval_shape(model.init, key, shape))
    image = _f32(rng.standard_normal((batch, *model.input_shape)))
    return Case(params, state, image, rng.integers(0, model.classes, batch, np.int32))


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float64)  # a value that 32 bits hold: all runs start from the same


def _ours(model: Model, pairs: Any, case: Case, loss: Any, train: bool, precision: str) -> Tensors:
    """Return what the model gives."""

    def mean_loss(params: Any, image: Any, state: Any) -> tuple[Any, Any]:
        outputs, after = model.apply(params, state, image, KEY, train)
        return loss(outputs, case.labels).mean(), (outputs, after)

    with jax.enable_x64(precision == "float64"), jax.default_matmul_precision("highest"):
        params, state, image = jax.tree.map(lambda x: jnp.asarray(x, precision), (case.params, case.state, case.image))
        run = jax.jit(jax.value_and_grad(mean_loss, (0, 1), has_aux=True))
        (value, (outputs, after)), (grads, image_grad) = jax.device_get(run(params, image, state))
    for leaf in jax.tree.leaves((outputs, after, grads, image_grad)):
        assert leaf.dtype == precision
    found = {"loss": np.asarray(value), "gradient of image": image_to_torch(image_grad)}
    found |= _named_outputs(outputs) | {f"gradient of {name}": x for name, x in named(grads, pairs).items()}
    return found | {f"new {name}": x for name, x in named(after, pairs).items()}


def _theirs(twin: torch.nn.Module, pairs: Any, case: Case, loss: Any, train: bool, dtype: torch.dtype) -> Tensors:
    """Return what the twin gives in `dtype`."""
    twin = copy.deepcopy(twin).to(dtype).train(train)
    load(twin, named((case.params, case.state), pairs))
    image = torch.from_numpy(image_to_torch(case.image)).to(dtype).requires_grad_()
    outputs = twin(image)
    value = loss(outputs, torch.from_numpy(case.labels).long()).mean()
    value.backward()
    assert all(x is None or x.any() for x in (p.grad for p in twin.parameters())), "a gradient of 0 proves nothing"
    leaves = {"loss": value, "gradient of image": image.grad} | _named_outputs(outputs)
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in twin.named_parameters()}
    leaves |= {f"gradient of {name}": grad for name, grad in grads.items()}
    leaves |= {f"new {name}": b for name, b in twin.named_buffers() if not name.endswith("num_batches_tracked")}
    return {name: x.detach().double().numpy() for name, x in leaves.items()}


def _named_outputs(outputs: Any) -> dict[str, Any]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return {f"output {i}": x for i, x in enumerate(outputs)}


def named(tree: Any, pairs: Pairs) -> Tensors:
    """The leaves of a tree by the names of the twin; the tree may be one of several that `pairs` cover."""
    names = dict(pairs)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keys = [[key.key for key in path if isinstance(key, jax.tree_util.DictKey)] for path, _ in leaves]
    paths = ["/".join(map(str, path)) for path in keys]
    return {names[path]: weights_to_torch(x) for path, (_, x) in zip(paths, leaves, strict=True)}


def load(twin: torch.nn.Module, tensors: Tensors) -> None:
    """Copy into params and buffers; each must be there once, in the same shape."""
    wanted = {name: x for name, x in twin.state_dict().items() if not name.endswith("num_batches_tracked")}
    assert tensors.keys() == wanted.keys()
    for name, x in tensors.items():
        assert x.shape == wanted[name].shape, f"{name}: got {x.shape}; expected {tuple(wanted[name].shape)}"
        wanted[name].copy_(torch.from_numpy(x))


AXES = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}  # [h, w, in, out] -> [out, in, h, w]; [in, out] -> [out, in]


def weights_to_torch(x: Any) -> np.ndarray:
    """A kernel or a vector, in f64 and the layout of torch."""
    return np.asarray(x, np.float64).transpose(AXES[x.ndim])


def image_to_torch(x: Any) -> np.ndarray:
    """[batch, height, width, channels] -> f64[batch, channels, height, width]."""
    return np.asarray(x, np.float64).transpose(0, 3, 1, 2)


def _longest_sum(case: Case) -> int:
    """Terms of the longest sum: over what feeds an output, or over the places where a kernel is used."""
    fan_in = max(math.prod(x.shape[:-1]) for x in jax.tree.leaves(case.params))
    return max(fan_in, math.prod(case.image.shape[:3]))


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.ravel()))
