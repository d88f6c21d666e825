"""Flax, Equinox and plain functions as models; what does not fit is named before training."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from PIL import Image

from jaxmpi.checkpoint import manifests
from jaxmpi.comm.topology import gather_workers
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.data.feed import open_feed
from jaxmpi.model.adapters.equinox import equinox_model
from jaxmpi.model.adapters.functions import plain_model
from jaxmpi.model.adapters.linen import linen_model
from jaxmpi.model.adapters.nnx import nnx_model
from jaxmpi.model.batch_statistics import statistics_over
from jaxmpi.model.check import check_model
from jaxmpi.model.contract import Model
from jaxmpi.models.cnn import digits_cnn_tiny
from jaxmpi.models.norm import ConvNorm
from jaxmpi.trainer.main import train as train_here

KEY = jax.random.key(0)
IMAGE: Any = np.random.default_rng(0).standard_normal((4, 8, 8, 1)).astype(np.float32)


# ---------------------------------------------------------------- Linen


class LinenNet(nn.Module):
    """Batch norm, dropout, a counter, a sown intermediate, a boxed param."""

    @nn.compact
    def __call__(self, x, train):
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
        x = nn.BatchNorm(use_running_average=not train)(x.reshape(x.shape[0], -1))
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value += 1
        self.sow("intermediates", "features", x)
        return nn.Dense(10, kernel_init=boxed)(nn.Dropout(0.5, deterministic=not train)(x))


class LinenTraining(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return LinenNet()(x, training)


class LinenDeterministic(nn.Module):
    @nn.compact
    def __call__(self, x, *, deterministic):
        return LinenNet()(x, not deterministic)


def linen(module: nn.Module) -> Model:
    return linen_model(module, name="net", input_shape=(8, 8, 1), classes=10)


def assert_trains_and_evaluates(model: Model) -> None:
    """Dropout follows the key and state moves, in training only."""
    params, before = model.init(KEY, IMAGE[:1])
    apply: Any = jax.jit(model.apply, static_argnums=4)
    keys = jax.random.key(1), jax.random.key(1), jax.random.key(2)
    one, same, other = (apply(params, before, IMAGE, key, True)[0] for key in keys)
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    after = apply(params, before, IMAGE, KEY, True)[1]
    assert not all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    outputs = [apply(params, after, IMAGE, key, False) for key in keys[1:]]
    np.testing.assert_array_equal(outputs[0][0], outputs[1][0])
    assert not np.array_equal(one, outputs[0][0])
    jax.tree.map(np.testing.assert_array_equal, outputs[0][1], after)


# ---------------------------------------------------------------- NNX


class NnxNet(nnx.Module):
    """A model as a user writes it: stock layers, stock initialisers, a list, two random streams."""

    def __init__(self, rngs):
        self.convs = nnx.List([nnx.Conv(1, 8, (3, 3), rngs=rngs), nnx.Conv(8, 8, (3, 3), rngs=rngs)])
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.drops = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.logits = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x, train):
        x = jax.nn.relu(self.norm(self.convs[0](x), use_running_average=not train))
        x = self.drops[0](self.convs[1](x), deterministic=not train).mean((1, 2))
        self.features = nnx.Intermediate(x)  # made by the call, so no state
        return self.logits(self.drops[1](x, deterministic=not train))


class NnxSwitchless(nnx.Module):
    """As Flax's own guides have it: `train()` and `eval()` are all that tells."""

    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.logits = nnx.Linear(1, 10, rngs=rngs)

    def __call__(self, x):
        return self.logits(self.drop(x.mean((1, 2))))


class NnxDeterministic(NnxSwitchless):
    def __call__(self, x, *, deterministic):
        return self.logits(self.drop(x.mean((1, 2)), deterministic=deterministic))


class NnxTwice(NnxSwitchless):
    """Two layers draw: each has a stream of its own."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.other = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        ones = jnp.ones(64)
        return self.drop(ones, deterministic=False), self.other(ones, deterministic=False)


def nnx_net(net: Any) -> Model:
    return nnx_model(net, name="net", input_shape=(8, 8, 1), classes=10)


def test_nnx_params_and_state_are_plain_arrays_and_give_the_modules_numbers():
    model = nnx_net(NnxNet)
    params, model_state = model.init(KEY, IMAGE[:1])
    assert set(params) == {"convs", "norm", "logits"}
    assert {name: set(values) for name, values in model_state.items()} == {"norm": {"mean", "var"}}
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((params, model_state)))
    got = jax.jit(model.apply, static_argnums=4)(params, model_state, IMAGE, KEY, False)[0]  # pyright: ignore[reportCallIssue]
    np.testing.assert_allclose(got, NnxNet(nnx.Rngs(KEY))(IMAGE, False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("net", [NnxSwitchless, NnxDeterministic])
def test_nnx_modules_have_other_names_for_the_training_switch(net):
    model = nnx_net(net)
    state = model.init(KEY, IMAGE[:1])
    keys = jax.random.key(1), jax.random.key(2)
    assert not np.array_equal(*(model.apply(*state, IMAGE, key, True)[0] for key in keys))
    np.testing.assert_array_equal(*(model.apply(*state, IMAGE, key, False)[0] for key in keys))


def test_each_nnx_stream_has_its_own_key():
    model = nnx_net(NnxTwice)
    one, other = model.apply(*model.init(KEY, IMAGE[:1]), IMAGE, KEY, True)[0]
    assert not np.array_equal(one, other)


# ---------------------------------------------------------------- Equinox


class EquinoxNet(eqx.Module):
    """Batch norm, dropout, a function, an array that is not trained."""

    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    logits: eqx.nn.Linear
    activate: Callable
    order: jax.Array

    def __init__(self, key, mode: Any = "batch"):
        self.norm = eqx.nn.BatchNorm(1, "batch", mode=mode)
        self.drop = eqx.nn.Dropout(0.5)
        self.logits = eqx.nn.Linear(64, 10, key=key)
        self.activate = jnp.tanh
        self.order = jnp.arange(64)[::-1]

    def __call__(self, x, state, *, key):
        x, state = self.norm(x, state)
        return self.logits(self.drop(self.activate(x).reshape(-1)[self.order], key=key)), state


def equinox(make: Any, **kwargs: Any) -> Model:
    return equinox_model(make, name="net", input_shape=(8, 8, 1), classes=10, **kwargs)


def test_equinox_examples_have_separate_keys():
    class Drop(eqx.Module):
        scale: jax.Array
        drop: eqx.nn.Dropout = eqx.nn.Dropout(0.5)

        def __call__(self, x, key):
            return self.drop(self.scale * jnp.ones(64), key=key)

    model = equinox(Drop(jnp.ones(())))
    masks = model.apply(*model.init(KEY, IMAGE[:1]), IMAGE, KEY, True)[0]
    assert len(np.unique(masks, axis=0)) == len(IMAGE)


# ---------------------------------------------------------------- plain functions


def logits(params, image):
    return jnp.tanh(image.reshape(image.shape[0], -1)) @ params


def keyed(params, image, key):
    return jax.random.normal(key, ()) * logits(params, image)


def switched(params, image, *, deterministic):
    return logits(params, image) * (0.0 if deterministic else 1.0)


def counting(params, state, image):
    return logits(params, image), {"calls": state["calls"] + 1}


def full(params, model_state, image, key, train):
    return (keyed if train else logits)(params, image, *([key] if train else [])), model_state


W: Any = np.random.default_rng(1).standard_normal((64, 10))  # f64: what NumPy makes becomes f32
PAIRS = {
    "key": (lambda key: W, logits),
    "other names and defaults": (
        lambda seed, factor=1: factor * W,
        lambda weights, x, power=1: logits(weights, x) ** power,
    ),
    "key by name": (lambda key: W, keyed),
    "switch by name": (lambda key: W, switched),
    "state": (lambda key: (W, {"calls": 0}), counting),
    "the contract itself": (lambda key, image: (W, {}), full),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_plain_pairs(pair, as_users_have_it):
    init, apply = PAIRS[pair]
    model = plain_model(init, apply, name="net", input_shape=(8, 8, 1), classes=10)
    check_model(model)
    params, model_state = model.init(KEY, IMAGE[:1])
    assert params.dtype == jnp.float32
    trained, moved = model.apply(params, model_state, IMAGE, KEY, True)
    evaluated, state_after = model.apply(params, model_state, IMAGE, KEY, False)
    factor = jax.random.normal(KEY, ())
    in_training, in_evaluation = {"key by name": (factor, factor), "switch by name": (1, 0)}.get(pair, (1, 1))
    in_training = factor if pair == "the contract itself" else in_training
    np.testing.assert_allclose(trained, in_training * logits(params, IMAGE), rtol=1e-6)
    np.testing.assert_allclose(evaluated, in_evaluation * logits(params, IMAGE), rtol=1e-6)
    assert state_after == model_state
    if pair == "state":
        assert (int(model_state["calls"]), int(moved["calls"])) == (0, 1)


# ---------------------------------------------------------------- bad input


def plain(classes: int = 10) -> Model:
    rest: Any = {"name": "net", "input_shape": (8, 8, 1), "classes": classes}
    return plain_model(lambda key: jnp.zeros((64, classes)), logits, **rest)


KINDS = {"nnx": nnx_net(NnxNet), "linen": linen(LinenNet()), "equinox": equinox(EquinoxNet), "plain": plain()}


MODES = {  # ways in which a library's modules are told that they train
    "linen, training": linen(LinenTraining()),
    "linen, deterministic": linen(LinenDeterministic()),
    "equinox, ema": equinox(lambda key: EquinoxNet(key, "ema")),
}


@pytest.mark.parametrize("name", [*KINDS, *MODES])
def test_a_good_model_passes_in_16_bits_too_and_knows_whether_it_trains(name, as_users_have_it):
    model = (KINDS | MODES)[name]
    if name in KINDS:
        check_model(model)
        check_model(model, compute_dtype="bfloat16")
    if name != "plain":
        assert_trains_and_evaluates(model)


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shape", [(4, 8, 8, 3), (8, 8, 1)])
def test_image_of_another_size_or_channel_count(model, shape, as_users_have_it):
    params, model_state = model.init(KEY, IMAGE[:1])
    for call in (lambda x: model.apply(params, model_state, x, KEY, True), lambda x: model.init(KEY, x)):
        with pytest.raises(UsageError, match=r"net: got images of .*; expected \(8, 8, 1\)"):
            call(jnp.zeros(shape))


def test_data_of_other_classes_than_the_models_are_named(tmp_path, as_users_have_it, no_launcher):
    data = Data("digits", channels=1)
    experiment = Experiment(plain(7), data=data, train_for="1st", run_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match="digits has 10 classes, model net has 7"):
        train_here(experiment, "net")


def test_a_model_of_the_zoo_follows_the_classes_of_the_training_data(tmp_path, as_users_have_it, no_launcher, capsys):
    for split, name, i in itertools.product(("train", "validation"), ("cat", "cow", "dog"), range(4)):
        folder = tmp_path / split / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 20 * i, np.uint8)).save(folder / f"{i}.png")
    data = Data("imagefolder", dir=str(tmp_path), channels=1)
    rest: Any = {"local_batch": 4, "train_for": "2st", "run_dir": str(tmp_path / "run")}
    assert train_here(Experiment(digits_cnn_tiny(), data=data, **rest), "cnn")["eval_count"] == 12
    assert "imagefolder has 3 classes: digits_cnn_tiny is made with as many, not with the experiment's 10\n" in (
        capsys.readouterr().out
    )
    saved = manifests.read_manifest(tmp_path / "run" / "checkpoints" / "step_00000002")
    shapes = {leaf["path"]: leaf["shape"] for leaf in saved["files"]["common.bin"]}
    assert [shape for path, shape in shapes.items() if "params" in path and "logits" in path] == [[3], [16, 3]]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_label_outside_the_classes_of_the_model_is_named(split, as_users_have_it, no_launcher):
    good, odd = ([(np.zeros((8, 8, 1), np.uint8), label)] * 4 for label in (9, 12))
    splits: Any = {"train": good, "validation": good, split: odd}
    experiment = Experiment(plain(), data=Data("array", channels=1, **splits))
    feed = open_feed(experiment, split, 4, gather_workers(1))
    with pytest.raises(UsageError, match=rf"data\.{split}\[\d\]: got label 12; expected 0 <= label < 10"):
        next(feed.batches())
    of_its_own = dataclasses.replace(experiment, loss=lambda outputs, labels: outputs[:, 0] - labels)
    with contextlib.closing(open_feed(of_its_own, split, 4, gather_workers(1), pool=feed.pool).batches()) as batches:
        assert next(batches)["label"].tolist() == [12] * 4
    feed.pool.stop()


def with_init(variables: Any) -> Model:
    return Model("net", lambda key, image: variables, lambda *args: (None, {}), (8, 8, 1), 10)


def with_apply(result: Callable[[Any, Any], Any]) -> Model:
    variables = {"w": jnp.zeros((64, 10))}, {"n": jnp.zeros(3)}
    return Model("net", lambda *args: variables, lambda p, s, x, *_: result(logits(p["w"], x), s), (8, 8, 1), 10)


BROKEN = {
    "a module": (LinenNet(), "got an instance of LinenNet as the experiment's model"),
    "no params": (with_init(({}, {})), "net: init: expected params, got none"),
    "text": (with_init(({"w": "zeros"}, {})), "params/w: got an instance of str"),
    "f64": (with_init(({"w": W}, {})), "params/w: got float64"),
    "random key": (with_init((jnp.ones(1), {"key": KEY})), "model_state/key: got key"),
    "outputs alone": (with_apply(lambda out, state: out), "net: apply: "),
    "new state": (with_apply(lambda out, state: (out, state | {"m": out})), "model_state/m: got float32"),
    "lost state": (with_apply(lambda out, state: (out, {})), "model_state/n: got nothing"),
    "other state": (with_apply(lambda out, state: (out, {"n": jnp.zeros(4)})), "model_state/n: got float32[4]"),
    "other classes": (with_apply(lambda out, state: (out[:, :7], state)), "got float32[2, 7] in training"),
    "a tuple": (with_apply(lambda out, state: ((out, out), state)), "got a tuple of 2"),
    "another size": (
        with_apply(lambda out, state: (out.reshape(-1, 49), state)),
        "net: apply in training: got float32[2, 8, 8, 1], as the model's input_shape says; expected",
    ),
    "whole logits": (with_apply(lambda out, state: (out.astype(jnp.int32), state)), "got int32[2, 10]"),
    "a mean loss": (plain(), "got float32[], expected float32[2], one loss an example", lambda out, labels: out.mean()),
    "a loss a class": (plain(), "got float32[2, 10], expected float32[2]", lambda out, labels: out),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_model_or_loss_that_breaks_the_contract(case):
    model, message, *loss = BROKEN[case]
    with pytest.raises(UsageError, match=re.escape(message)):
        check_model(model, *loss)


def test_a_tuple_in_training_needs_a_loss_that_takes_it():
    def apply(params, state, image, key, train):
        return (logits(params, image),) * 2 if train else logits(params, image), state

    model = Model("net", lambda *args: (jnp.zeros((64, 10)), {}), apply, (8, 8, 1), 10)
    loss = optax.softmax_cross_entropy_with_integer_labels
    check_model(model, lambda outputs, labels: loss(outputs[0] if isinstance(outputs, tuple) else outputs, labels))


# ---------------------------------------------------------------- unusual models


class Masked(nnx.Module):
    """An array that is no variable."""

    def __init__(self, mask, rngs: nnx.Rngs):
        self.mask, self.dense = mask(64), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.dense(x.reshape(len(x), -1) * self.mask[None])


def test_a_jax_array_that_is_not_a_variable_is_named():
    model = nnx_model(lambda rngs: Masked(jnp.ones, rngs), name="masked", input_shape=(8, 8, 1), classes=10)
    for begin in (lambda: check_model(model), lambda: model.init(KEY, IMAGE[:1])):  # on shapes, and for real
        with pytest.raises(UsageError, match="masked: mask: a JAX array that is no variable; make it nnx"):
            begin()


class Remat(nnx.Module):
    """A jit of the model's own, around batch statistics."""

    def __init__(self, rngs):
        self.norm, self.dense = ConvNorm((1, 4), 3, eps=1e-5, rngs=rngs), nnx.Linear(4, 10, rngs=rngs)

    @partial(nnx.remat, static_argnums=2)
    def inner(self, x, train):
        return self.norm(x, train)

    def __call__(self, x, train):
        return self.dense(self.inner(x, train).mean((1, 2)))


def test_jits_in_a_model_know_of_synchronised_statistics():
    """Two examples a worker, as in the trial on shapes, whose traces must not be used again."""
    model, means = nnx_model(Remat, name="net", input_shape=(8, 8, 1), classes=10), []
    params, model_state = model.init(KEY, IMAGE[:1])
    check_model(model)

    def apply(image):
        with statistics_over(lambda tree: (means.append(tree), tree)[1]):
            return model.apply(params, model_state, image, KEY, True)

    jax.eval_shape(apply, IMAGE[:2])
    assert means
