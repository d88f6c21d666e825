"""Losses to gradients to metrics: exact counts, micro-batches, short batches, N workers against one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmpi.config.data import Data
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.errors import UsageError
from jaxmpi.core.train_state import create
from jaxmpi.data import Augment
from jaxmpi.model.contract import Model
from jaxmpi.rules import base, registry
from jaxmpi.tasks import classes
from jaxmpi.tasks.registry import TASKS
from jaxmpi.tasks.supervised import Supervised, normalise
from jaxmpi.trainer import step
from tolerances import U

KEY = jax.random.key_data(jax.random.key(0))
NAN = float("nan")

RANKINGS = [
    # logits, label -> classes ahead
    ([0.1, 0.9, 0.5], 1, 0),
    ([0.1, 0.9, 0.5], 0, 2),
    ([0.5, 0.5, 0.5], 0, 0),
    ([0.5, 0.5, 0.5], 2, 2),
    ([NAN, 0.5, 0.1], 0, 3),  # no hit whatever k, as long as there are 5 classes
    ([NAN, NAN, NAN], 0, 3),
    ([np.inf, 0.5, -np.inf], 0, 0),
    ([-np.inf, -np.inf, 0.0], 1, 2),
]


@pytest.mark.parametrize(("logits", "label", "ahead"), RANKINGS)
def test_ranking(logits, label, ahead):
    assert classes.ranking(jnp.array([logits]), jnp.array([label])).tolist() == [ahead]


def forward(apply, loss=classes.cross_entropy, **kwargs) -> step.Forward:
    model = Model("test", lambda key, image: ({}, {}), apply, kwargs.pop("shape", (3,)), 2, **kwargs.pop("facts", {}))
    dtypes = [kwargs[name] for name in ("compute_dtype",) if name in kwargs]
    made = Supervised(model, loss, kwargs.pop("data", Data()), *dtypes)
    return step.Forward(TASKS["classification"].build(made), **kwargs)


def evaluated(made: step.Forward, params, batch) -> dict[str, float]:
    """Sums over a batch."""
    return {name: float(sums) for name, (sums, _) in step.eval_step(made, params, {}, batch)[0].items()}


# ---------------------------------------------------------------- gradients of exact arithmetic


def linear(params, model_state, image, key, train):
    return image * params["w"][None], {"calls": model_state["calls"] + 1}


def integer_loss(outputs, labels):
    """Its gradient is sum_j weight_j label_j image_j: integers, so that f32 adds them exactly in any order."""
    return outputs.sum(-1) * labels.astype(jnp.float32)


def integer_batch(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    image = rng.integers(-8, 9, (size, 3)).astype(np.float32)
    return {
        "image": image,
        "label": rng.integers(0, 9, size).astype(np.int32),
        "weight": np.full(size, 0.25, np.float32),
    }


def integer_gradients(batch, micro_batch: int = 0):
    run = jax.jit(step.local_gradients(forward(linear, integer_loss), micro_batch))
    return run({"w": jnp.ones(3)}, {"calls": jnp.int32(0)}, batch, KEY, jnp.int32(0))


@pytest.mark.parametrize("micro_batch", [1, 3, 12])
def test_micro_batches_add_up_to_the_whole_batch_exactly(micro_batch):
    batch = integer_batch(12)
    grads, _, metrics = integer_gradients(batch)
    expected = (batch["weight"] * batch["label"]) @ batch["image"].astype(np.float64)
    assert grads["w"].tolist() == expected.tolist()
    piecewise, state, more = integer_gradients(batch, micro_batch)
    assert piecewise["w"].tolist() == grads["w"].tolist()
    assert jax.tree.map(float, more[:2]) == metrics[:2]
    assert float(metrics.count) == 12
    assert int(state["calls"]) == 12 // micro_batch  # it did run piece by piece


def test_micro_batches_are_in_memory_one_after_another():
    """Also where they are unrolled: XLA's scheduler would mix them."""

    def wide(params, model_state, image, key, train):
        return jnp.sin(jnp.sin(image @ params["v"]) @ params["w"]), model_state

    params, batch = {"v": jnp.ones((3, 256)), "w": jnp.ones((256, 256))}, integer_batch(2048)
    temporary = []
    for micro_batch in (0, 512):
        run = jax.jit(step.local_gradients(forward(wide, integer_loss), micro_batch))
        memory = run.lower(params, {}, batch, KEY, jnp.int32(0)).compile().memory_analysis()
        assert memory
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[1] < 0.5 * temporary[0]


def test_micro_batches_draw_different_random_numbers():
    def noisy(params, model_state, image, key, train):
        return image * params["w"][None] * jax.random.uniform(key), model_state

    def grads(micro_batch, t):
        batch = jax.tree.map(lambda x: np.repeat(x[:1], 4, 0), integer_batch(4))
        run = step.local_gradients(forward(noisy, integer_loss), micro_batch)
        return run({"w": jnp.ones(3)}, {}, batch, KEY, jnp.int32(t))[0]["w"].tolist()

    assert grads(0, 0) == grads(0, 0)
    assert grads(0, 0) != grads(0, 1)
    assert grads(0, 0) != grads(2, 0)


def test_what_only_fills_a_batch_changes_nothing_not_even_where_it_is_nan():
    batch = integer_batch(4)
    padded = {
        "image": np.concatenate([batch["image"], np.full((2, 3), np.nan, np.float32)]),
        "label": np.concatenate([batch["label"], np.ones(2, np.int32)]),
        "weight": np.concatenate([batch["weight"], np.zeros(2, np.float32)]),
    }
    grads, _, metrics = integer_gradients(batch)
    _, _, with_fillers = integer_gradients(padded)
    assert jax.tree.map(float, with_fillers[:2]) == jax.tree.map(float, metrics[:2])
    finite = {**padded, "image": np.nan_to_num(padded["image"], nan=3.0)}
    assert integer_gradients(finite)[0]["w"].tolist() == grads["w"].tolist()


# ---------------------------------------------------------------- dtypes, normalisation, evaluation


def test_bf16_is_what_computes_and_f32_what_is_kept():
    seen = []

    def apply(params, model_state, image, key, train):
        seen.append((params["w"].dtype, image.dtype))
        return image @ params["w"], {"mean": image.mean(0), "count": model_state["count"] + 1}

    run = step.local_gradients(forward(apply, compute_dtype=jnp.bfloat16))
    batch = {
        "image": np.ones((4, 3), np.float32),
        "label": np.zeros(4, np.int32),
        "weight": np.full(4, 0.25, np.float32),
    }
    params, state = {"w": jnp.ones((3, 2))}, {"mean": jnp.zeros(3), "count": jnp.int32(0)}
    grads, state, metrics = run(params, state, batch, KEY, jnp.int32(0))
    assert set(seen) == {(jnp.dtype("bfloat16"), jnp.dtype("bfloat16"))}
    assert {leaf.dtype for leaf in jax.tree.leaves((grads, metrics[:2], state["mean"]))} == {jnp.dtype("float32")}
    assert state["count"].dtype == jnp.int32


def test_normalise_per_channel():
    data = Data(mean=(0.5, 0.25, 0.0), std=(0.5, 1.0, 2.0))
    image = np.array([[[[255, 0, 51]]]], np.uint8)
    np.testing.assert_allclose(normalise(jnp.asarray(image), data), [[[[1.0, -0.25, 0.1]]]], rtol=4 * U)


def test_images_that_the_loader_took_a_mean_image_from_are_ready_and_others_are_refused():
    data, image = Data(channels=1, std=(0.376,), mean_image="mean.npy"), np.full((1, 2, 2, 1), 51, np.uint8)
    subtracted = Augment(data, False, 0, np.full((2, 2, 1), 25.5, np.float32))(image[0], 0, 0, "photo0.jpg")
    ready = normalise(jnp.asarray(subtracted), data)
    np.testing.assert_allclose(ready, np.full((2, 2, 1), 0.1 / 0.376), rtol=4 * U)
    with pytest.raises(UsageError, match=r"data\.mean_image is subtracted by loaders; got images of uint8"):
        normalise(jnp.asarray(image), data)


def test_evaluation_counts_real_examples_only():
    logits = np.array([[9, 0, 0, 0, 0, 0], [9, 8, 7, 6, 5, 4], [0, 9, 0, 0, 0, 0], [0, 0, 0, 0, 0, np.nan]], np.float32)
    batch = {"image": logits, "label": np.array([0, 4, 0, 0], np.int32), "weight": np.array([1, 1, 1, 0], np.float32)}
    sums = evaluated(forward(lambda p, s, image, key, train: (image, s), shape=(6,)), {}, batch)
    assert (sums["top1"], sums["top5"], sums["count"]) == (1, 3, 3)
    exact = -(
        np.log(np.exp(logits[:3].astype(np.float64)) / np.exp(logits[:3].astype(np.float64)).sum(1, keepdims=True))
    )
    np.testing.assert_allclose(sums["loss"], exact[[0, 1, 2], [0, 4, 0]].sum(), rtol=32 * U)


# ---------------------------------------------------------------- tokens


def next_token(params, model_state, tokens, key, train):
    assert tokens.dtype == jnp.int32
    return jnp.take(params["logits"], tokens, axis=0), model_state


def of_tokens(**kwargs) -> step.Forward:
    return forward(next_token, shape=(4,), facts={"input_dtype": jnp.int32, "label_shape": (4,)}, **kwargs)


def test_a_sequences_loss_and_hits_are_means_over_its_tokens():
    rng = np.random.default_rng(1)
    table = rng.standard_normal((6, 6)).astype(np.float32)
    tokens, labels = rng.integers(0, 6, (2, 3, 4)).astype(np.int32)
    batch = {"image": tokens, "label": labels, "weight": np.array([1, 1, 0], np.float32)}
    sums = evaluated(of_tokens(), {"logits": table}, batch)
    wide = table.astype(np.float64)[tokens]
    exact = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(sums["loss"], exact[:2].mean(1).sum(), rtol=64 * U)
    assert sums["top1"] == (wide.argmax(-1) == labels)[:2].mean(1).sum()  # quarters are exact
    assert sums["count"] == 2
    run = jax.jit(step.local_gradients(of_tokens(), 1), static_argnums=())
    grads, _, training = run({"logits": table}, {}, batch, KEY, jnp.int32(0))
    np.testing.assert_allclose(float(training.loss), sums["loss"], rtol=64 * U)
    chances = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True) - np.eye(6)[labels]
    expected = sum(np.eye(6)[tokens[i]].T @ chances[i] / 4 for i in range(2))
    np.testing.assert_allclose(grads["logits"], expected, atol=64 * U)


# ---------------------------------------------------------------- memory


def tanh_layers(widths: list[int]) -> tuple:
    """(gradients of a model of dense layers, its params, a batch)."""
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(0, a**-0.5, (a, b)), jnp.float32) for a, b in itertools.pairwise(widths)]

    def apply(params, model_state, image, key, train):
        for weights in params:
            image = jnp.tanh(image @ weights)
        return image, model_state

    gradients = step.local_gradients(forward(apply, shape=(widths[0],)))
    image = rng.normal(size=(4, widths[0])).astype(np.float32)
    return gradients, params, {"image": image, "label": jnp.zeros(4, jnp.int32), "weight": jnp.ones(4)}


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the bytes that a program takes beyond its arguments and results."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how XLA copies on CPUs")
def test_params_are_updated_in_place_with_the_same_bits():
    """No leaf is copied before a step, for which all gradients are there at once instead: as much memory, but for a
    leaf."""
    gradients, params, batch = tanh_layers([64, 512, 512, 512, 2])
    jitted = {}
    for name, form in {"early": gradients, "waiting": step.after_all_gradients(gradients)}.items():

        def update(params, form=form):
            grads, _, metrics = form(params, {}, batch, KEY, jnp.array(0))
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), metrics

        jitted[name] = jax.jit(update, donate_argnums=0).lower(params).compile()
    copies = {name: compiled.as_text().count(" copy(%params") for name, compiled in jitted.items()}
    assert copies["waiting"] == 0 < copies["early"]
    assert temporary_bytes(jitted["waiting"]) - temporary_bytes(jitted["early"]) < 4 * 512 * 512
    early, waiting = (compiled(jax.tree.map(jnp.copy, params)) for compiled in jitted.values())
    assert [leaf.tobytes() for leaf in jax.tree.leaves(early)] == [leaf.tobytes() for leaf in jax.tree.leaves(waiting)]


def test_waiting_gradients_that_are_not_finite_stay_so():
    gradients, params, batch = tanh_layers([4, 3, 2])
    bad = [params[0].at[0, 0].set(jnp.nan), params[1]]
    grads, _, metrics = step.after_all_gradients(gradients)(bad, {}, batch, KEY, jnp.array(0))
    assert not np.asarray(metrics.finite).any()
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("bad", ["loss", "a gradient", "nothing"])
def test_a_step_that_is_not_finite_is_skipped_and_changes_nothing(bad):
    """The vote calls a gradient beyond 1.8e19 infinite, whose update would be finite."""
    params = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    finite = jnp.array([True, bad != "a gradient"])
    metrics = step.Metrics(jnp.asarray(jnp.inf if bad == "loss" else 1.0), jnp.ones(()), finite, squares=jnp.ones(()))
    grads = jax.tree.map(lambda p: p * np.float32(1e19), params)
    rule = registry.build(
        RuleConfig(), optax.sgd(0.1, 0.9), base.Exchange(lambda g: g, lambda g: g), optimizer="sgd", linear=True
    )
    before = create(params, {"mean": np.zeros(2, np.float32)}, rule.init(params), seed=0, worker=0)
    made = step.poison_nonfinite(lambda *_: (grads, {"mean": jnp.ones(2)}, metrics))
    one = functools.partial(step.train_step, gradients=made, rule=rule, guard=step.revert_if_nonfinite)
    after, told = jax.jit(one)(before, {})
    assert told.applied == (bad == "nothing")
    assert after.step == before.step + 1
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), before, after)
    assert all(jax.tree.leaves(same._replace(step=True))) == (bad != "nothing")
