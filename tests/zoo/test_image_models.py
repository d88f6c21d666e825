"""The zoo: exact counts and shapes, the layers against plain references, and that the tiny ones learn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi.models.__main__ as report
from jaxmpi.models import MODELS
from jaxmpi.models.googlenet import (
    AUX_WEIGHT,
    googlenet_loss,
    googlenet_tiny,
)
from jaxmpi.models.layers import local_response_norm

KEY = jax.random.key(0)
TINY = [name for name in MODELS if name.endswith("_tiny")]


def noise(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@functools.partial(jax.jit, static_argnums=0)
def pulled(f, x, g):
    y, pull = jax.vjp(f, x)
    return y, pull(g)[0]


def test_googlenet_loss_weighs_the_auxiliary_heads():
    logits, labels = [noise((4, 10), seed) for seed in range(3)], jnp.arange(4)
    main, aux1, aux2 = (optax.softmax_cross_entropy_with_integer_labels(each, labels) for each in logits)
    loss = googlenet_loss(tuple(logits), labels)
    assert loss.shape == (4,)
    np.testing.assert_allclose(loss, main + AUX_WEIGHT * (aux1 + aux2), rtol=1e-6)
    np.testing.assert_allclose(googlenet_loss(logits[0], labels), main, rtol=1e-6)


class Tiny:
    """One batch for a tiny model, and its compiled gradients: compiling is what takes the time."""

    def __init__(self, name):
        self.model = MODELS[name]()
        self.image = noise((16, *self.model.input_shape))
        labels = jnp.arange(16) % self.model.classes
        self.params, self.state = self.model.init(KEY, self.image[:1])

        def loss(params, key, heads):
            outputs, _ = self.model.apply(params, self.state, self.image, key, True)
            if isinstance(outputs, tuple):
                main = googlenet_loss(outputs[0], labels)
                return (main + heads * (googlenet_loss(outputs, labels) - main)).mean()
            return googlenet_loss(outputs, labels).mean()

        options = {"xla_backend_optimization_level": 0}  # compiles in half the time
        self.gradients = jax.jit(jax.value_and_grad(loss), compiler_options=options)


tiny_run = functools.cache(Tiny)


@pytest.mark.e2e
def test_auxiliary_heads_reach_the_inner_blocks():
    tiny = tiny_run("googlenet_tiny")
    _, both = tiny.gradients(tiny.params, KEY, 1.0)
    _, main = tiny.gradients(tiny.params, KEY, 0.0)
    for head in ("aux1", "aux2"):
        assert all(float(jnp.abs(leaf).max()) == 0 for leaf in jax.tree.leaves(main[head]))
        assert float(jnp.abs(both[head]["logits"]["kernel"]).max()) > 0
    assert float(jnp.abs(both["stem7"]["kernel"] - main["stem7"]["kernel"]).max()) > 0


# test_twins.py has gradients of the first two, test_language_models.py the others.
ELSEWHERE = ("alexnet", "vgg", "lstm", "gpt", "lm300m")


DEEP = ("resnet101_tiny", "resnet152_tiny")  # more of the same blocks
DEEP += ("resnet50_tiny", "googlenetbn_tiny")


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in DEEP else ())
        for name in TINY
        if not name.startswith(ELSEWHERE)
    ],
)
def test_tiny_model_learns(name):
    tiny = tiny_run(name)
    params = jax.tree.map(np.array, tiny.params)  # NumPy: nothing to compile
    velocity, losses = jax.tree.map(np.zeros_like, params), []
    for i in range(80):
        value, grads = tiny.gradients(params, jax.random.fold_in(KEY, i), 1.0)
        velocity = jax.tree.map(
            lambda v, g: np.float32(0.9) * v - np.float32(0.05) * g, velocity, jax.device_get(grads)
        )
        params = jax.tree.map(np.add, params, velocity)
        losses.append(float(value))
    assert np.mean(losses[-5:]) < 0.6 * losses[0]


@pytest.mark.parametrize("channels", [3, 8])
def test_local_response_norm_value_and_gradient(channels):
    x, alpha = 3 * noise((2, 2, 2, channels)), 0.1

    def plain(x):
        energy = [(x[..., max(c - 2, 0) : c + 3] ** 2).sum(-1) for c in range(channels)]
        return x / (2 + alpha * jnp.stack(energy, -1)) ** 0.75

    g = noise(x.shape, 1)
    want, want_gradient = pulled(plain, x, g)
    got, got_gradient = pulled(lambda x: local_response_norm(x, 5, 2.0, alpha), x, g)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(got_gradient, want_gradient, rtol=1e-4, atol=1e-5)


def test_bfloat16_stays_bfloat16():
    model = googlenet_tiny()
    params, state, image = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), report.shapes(model))

    def loss(params, state, image):
        outputs, _ = model.apply(params, state, image, KEY, True)
        return googlenet_loss(outputs, jnp.zeros(1, int)).sum(), outputs

    grads, outputs = jax.eval_shape(jax.grad(loss, has_aux=True), params, state, image)
    assert {leaf.dtype for leaf in jax.tree.leaves((grads, outputs))} == {jnp.dtype(jnp.bfloat16)}
