"""The zoo: exact counts and shapes, and that the tiny image models learn."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi.models.__main__ as report
from jaxmpi.models import MODELS
from jaxmpi.models.googlenet import AUX_WEIGHT, googlenet_loss, googlenet_tiny

KEY = jax.random.key(0)
# Depth, params, statistics, px.
COUNTS = {
    "alexnet": (8, 60_965_224, 0, 227),
    "vgg16": (16, 138_357_544, 0, 224),
    "vgg19": (19, 143_667_240, 0, 224),
    "resnet18": (18, 11_689_512, 9_600, 224),
    "resnet50": (50, 25_557_032, 53_120, 224),
    "resnet152": (152, 60_192_808, 151_424, 224),
    # Stem 3, ten blocks of 1x1, 3x3, 3x3, two halving convolutions, logits: 3 + 30 + 2 + 1.
    "googlenetbn": (36, 19_147_888, 23_360, 224),
}


def count(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.e2e
@pytest.mark.parametrize("name", COUNTS)
def test_depth_and_counts(name):
    depth, params, statistics, size = COUNTS[name]
    model = MODELS[name]()
    abstract, state, _ = report.shapes(model)
    assert (count(abstract), count(state)) == (params, statistics)
    assert {leaf.dtype for leaf in jax.tree.leaves((abstract, state))} == {jnp.dtype("float32")}
    if depth < 100:  # whose programs are lowered in a second
        assert tuple(report.row(model)[1:4]) == (str(depth), f"{params:,}", f"{size}x{size}x3")


def test_googlenet_loss_weighs_the_auxiliary_heads():
    logits, labels = list(np.random.default_rng(0).standard_normal((3, 4, 10), np.float32)), jnp.arange(4)
    main, aux1, aux2 = (optax.softmax_cross_entropy_with_integer_labels(each, labels) for each in logits)
    np.testing.assert_allclose(googlenet_loss(tuple(logits), labels), main + AUX_WEIGHT * (aux1 + aux2), rtol=1e-6)
    np.testing.assert_allclose(googlenet_loss(logits[0], labels), main, rtol=1e-6)


# test_twins.py has gradients of the first two, test_language_models.py the others.
ELSEWHERE = ("alexnet", "vgg", "lstm", "gpt", "lm300m")
DEEP = ("resnet101_tiny", "resnet152_tiny", "resnet50_tiny", "googlenetbn_tiny")  # more of the same blocks


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in DEEP else ())
        for name in MODELS
        if name.endswith("_tiny") and not name.startswith(ELSEWHERE)
    ],
)
def test_tiny_model_learns(name):
    model = MODELS[name]()
    image = jnp.asarray(np.random.default_rng(0).standard_normal((16, *model.input_shape), np.float32))
    labels = jnp.arange(16) % model.classes
    params, state = model.init(KEY, image[:1])

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # in half the time
    def gradients(params, key):
        loss = lambda params: googlenet_loss(model.apply(params, state, image, key, True)[0], labels).mean()  # noqa: E731
        return jax.value_and_grad(loss)(params)

    params = jax.tree.map(np.array, params)  # NumPy: nothing to compile
    velocity, losses = jax.tree.map(np.zeros_like, params), []
    for i in range(80 if name.startswith("googlenet") else 40):
        value, grads = gradients(params, jax.random.fold_in(KEY, i))
        velocity = jax.tree.map(
            lambda v, g: np.float32(0.9) * v - np.float32(0.05) * g, velocity, jax.device_get(grads)
        )
        params = jax.tree.map(np.add, params, velocity)
        losses.append(float(value))
    assert np.mean(losses[-5:]) < 0.6 * losses[0]


def test_bfloat16_stays_bfloat16():
    model = googlenet_tiny()
    params, state, image = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), report.shapes(model))

    def loss(params, state, image):
        outputs, _ = model.apply(params, state, image, KEY, True)
        return googlenet_loss(outputs, jnp.zeros(1, int)).sum(), outputs

    grads, outputs = jax.eval_shape(jax.grad(loss, has_aux=True), params, state, image)
    assert {leaf.dtype for leaf in jax.tree.leaves((grads, outputs))} == {jnp.dtype(jnp.bfloat16)}
