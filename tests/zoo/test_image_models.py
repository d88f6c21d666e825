"""The zoo: exact counts and shapes, the layers against plain references, and that the tiny ones learn."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxmpi.models.__main__ as report
from jaxmpi.core.errors import UsageError
from jaxmpi.models import MODELS
from jaxmpi.models import layers as layers_module
from jaxmpi.models.googlenet import (
    AUX_WEIGHT,
    STARTS,
    GoogLeNet,
    googlenet,
    googlenet_loss,
    googlenet_tiny,
)
from jaxmpi.models.googlenetbn import GoogLeNetBN
from jaxmpi.models.layers import average_pool, conv, he_normal, local_response_norm, max_pool, normal

KEY = jax.random.key(0)
TINY = [name for name in MODELS if name.endswith("_tiny")]


def noise(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@functools.partial(jax.jit, static_argnums=0)
def pulled(f, x, g):
    y, pull = jax.vjp(f, x)
    return y, pull(g)[0]


def test_googlenet_published_and_he_start():
    published = _stds("published")
    assert published["kernel stem7"] == pytest.approx(0.1, rel=0.05)
    assert published["kernel reduce5"] == pytest.approx(0.2, rel=0.05)
    assert published["bias stem7"] == pytest.approx(0.2)
    he = _stds("he")
    assert he["kernel reduce5"] == pytest.approx(math.sqrt(2 / 192), rel=0.05)
    assert (published["kernel logits"], he["kernel logits"]) == pytest.approx((0.01, 0.01), rel=0.05)
    assert _stds("he_all")["kernel logits"] == pytest.approx(math.sqrt(2 / 1024), rel=0.05)
    assert he["bias stem7"] == 0


def _stds(start):
    module = GoogLeNet(10, 3, STARTS[start], nnx.Rngs(0))
    layers = {"stem7": module.stem7, "reduce5": module.blocks["3a"].reduce5}
    layers["logits"] = module.logits
    out = {f"kernel {name}": float(layer.kernel[...].std()) for name, layer in layers.items()}
    return out | {f"bias {name}": float(layer.bias[...].mean()) for name, layer in layers.items()}


def test_unknown_start_and_size_are_refused():
    with pytest.raises(UsageError, match="did you mean 'published'"):
        googlenet(init="publishd")
    with pytest.raises(UsageError, match="image_size, px: got 8; expected a whole number >= 16"):
        googlenet(image_size=8)


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


def test_dropout_follows_the_key_in_training_only():
    model = googlenet_tiny()
    image = noise((2, *model.input_shape))
    params, state = model.init(KEY, image[:1])
    apply = jax.jit(lambda key, train: model.apply(params, state, image, key, train)[0], static_argnums=1)
    one, again, other = (apply(jax.random.key(seed), True) for seed in (1, 1, 2))
    for head in range(3):
        np.testing.assert_array_equal(one[head], again[head])
        assert not np.array_equal(one[head], other[head])
    np.testing.assert_array_equal(apply(jax.random.key(1), False), apply(jax.random.key(2), False))


def rates_of(model: nnx.Module) -> dict[str, float]:
    """Dropout rates by path."""
    layers = ((path, layer) for path, layer in nnx.iter_graph(model) if isinstance(layer, nnx.Dropout))
    return {"/".join(map(str, path)): float(layer.rate) for path, layer in layers}


def test_googlenet_drops_as_published():
    """Szegedy et al. 2015: 40 % before the logits (table 1), 70 % in the auxiliary heads (section 5)."""
    module = nnx.eval_shape(lambda: GoogLeNet(10, 3, STARTS["published"], nnx.Rngs(0)))
    assert rates_of(module) == {"drop": 0.4, "aux1/drop": 0.7, "aux2/drop": 0.7}


def test_googlenetbn_drops_nothing():
    """Ioffe & Szegedy 2015, section 4.2.1; nor does models/googlenetbn.lua."""
    assert rates_of(nnx.eval_shape(lambda: GoogLeNetBN(10, 3, nnx.Rngs(0)))) == {}


def test_init_is_a_function_of_the_key():
    model = MODELS["digits_cnn"]()
    image = jnp.zeros((1, 8, 8, 1))
    eager, traced = model.init(KEY, image)[0], jax.jit(model.init)(KEY, image)[0]
    jax.tree.map(np.testing.assert_array_equal, eager, traced)
    other = model.init(jax.random.key(1), image)[0]
    assert not np.array_equal(eager["conv1"]["kernel"], other["conv1"]["kernel"])
    assert not np.array_equal(eager["conv1"]["kernel"].ravel()[:9], eager["conv2"]["kernel"].ravel()[:9])


def test_initialisers_draw_the_same_under_vmap():
    keys = jax.random.split(KEY, 3)
    mapped = jax.vmap(lambda key: normal(0.5)(key, (4, 2)))(keys)
    np.testing.assert_array_equal(mapped, jnp.stack([normal(0.5)(key, (4, 2)) for key in keys]))
    assert float(he_normal(KEY, (3, 3, 50, 60)).std()) == pytest.approx(math.sqrt(2 / 450), rel=0.02)


@pytest.mark.e2e
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(1, 1), (7, 8)])
def test_max_pool_is_reduce_window(size, stride):
    # Few different values, so that ties decide where the gradient goes.
    x = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (2, *size, 3)).astype(np.float32))

    def plain(x):
        pads = ((0, 0), (1, 1), (1, 1), (0, 0))
        strides = (1, stride, stride, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), strides, pads)

    want, pull_want = jax.vjp(plain, x)
    got, pull_got = jax.vjp(lambda x: max_pool(x, stride), x)
    g = noise(want.shape)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(pull_got(g)[0], pull_want(g)[0], rtol=1e-5, atol=1e-6)


def test_average_pool_at_14_is_5_by_3_and_at_4_nothing():
    x = noise((2, 14, 14, 3))
    want = lax.reduce_window(x, 0.0, lax.add, (1, 5, 5, 1), (1, 3, 3, 1), "VALID") / 25
    np.testing.assert_allclose(average_pool(x, 4), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(average_pool(x[:, :4, :4], 4), x[:, :4, :4])


@pytest.mark.parametrize("size", range(1, 20, 3))
def test_average_pool_weights(size):
    bins = layers_module._bins(size, 4)
    assert bins.shape == (4, size)
    np.testing.assert_allclose(bins.sum(1), 1)
    assert (bins.sum(0) > 0).all()  # no entry is left out


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


@pytest.mark.parametrize(("image", "size", "stride"), [(3, 5, 1), (5, 1, 1), (9, 3, 2)])
def test_conv_is_the_convolution(image, size, stride):
    x, kernel, pad = noise((2, image, image, 3)), noise((size, size, 3, 4), 1), (size - 1) // 2
    want = lax.conv_general_dilated(
        x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(conv(x, kernel, stride), want, rtol=1e-4, atol=1e-5)


def test_bfloat16_stays_bfloat16():
    model = googlenet_tiny()
    params, state, image = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), report.shapes(model))

    def loss(params, state, image):
        outputs, _ = model.apply(params, state, image, KEY, True)
        return googlenet_loss(outputs, jnp.zeros(1, int)).sum(), outputs

    grads, outputs = jax.eval_shape(jax.grad(loss, has_aux=True), params, state, image)
    assert {leaf.dtype for leaf in jax.tree.leaves((grads, outputs))} == {jnp.dtype(jnp.bfloat16)}


def test_table_row():
    name, depth, params, size, flop, gradient_bytes = report.row(googlenet())
    assert (name, depth, params, size) == ("googlenet", "22", "13,378,280", "224x224x3")
    assert 2.9 < float(flop) < 3.3  # 1.5 G multiply-adds in the paper
    assert gradient_bytes == f"{4 * 13_378_280:,}"
