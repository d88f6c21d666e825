"""Language models: exact counts, plain references, no look at what comes next, and that the tiny ones learn."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi.models.__main__ as report
from jaxmpi.core.errors import UsageError
from jaxmpi.models import MODELS
from jaxmpi.models.encoder_decoder import encoder_decoder
from jaxmpi.models.gpt import attention
from jaxmpi.models.lstm import lstm

KEY = jax.random.key(0)
TINY = ("lstm_tiny", "gpt_tiny", "lm300m_tiny")
# By hand, from the shapes: words W, width d, cells c, window T, layers L.
LSTM = lambda W, d, c, L: W * d + L * (2 * d * 4 * c + 4 * c + c * d) + d * W + W  # noqa: E731
GPT = lambda W, T, d, L: W * d + T * d + L * (12 * d * d + 13 * d) + 2 * d + d * W + W  # noqa: E731
COUNTS = {"lstm": LSTM(256, 256, 512, 2), "lm300m": LSTM(72_000, 1024, 8192, 2), "gpt": GPT(256, 128, 384, 6)}


def tokens(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.int32)


@pytest.mark.parametrize("name", COUNTS)
def test_params(name):
    params, state, _ = report.shapes(MODELS[name]())
    got = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert (got, state) == (COUNTS[name], {})


@pytest.mark.parametrize("name", TINY)
def test_a_place_sees_itself_and_what_is_before_it(name):
    model = MODELS[name]()
    params, state = model.init(KEY, jnp.zeros((1, *model.input_shape), jnp.int32))
    apply = jax.jit(lambda x: model.apply(params, state, x, KEY, True)[0])
    one = tokens((1, *model.input_shape))
    other, at = one.copy(), 7
    other[0, at] ^= 1
    changed = np.asarray(jnp.abs(apply(one) - apply(other)).max(-1)[0]) > 0
    assert changed.tolist() == [False] * at + [True] * (len(changed) - at)


def test_the_lstm_is_the_equations():
    model = lstm(window=5, width=3, cells=4, layers=1)
    params, state = model.init(KEY, jnp.zeros((1, 5), jnp.int32))
    x = tokens((2, 5))
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    layer, s = p["layers"][0], lambda z: 1 / (1 + np.exp(-z))
    c, r, want = np.zeros((2, 4)), np.zeros((2, 3)), []
    for t in range(5):
        z = p["embedding"][x[:, t]] @ layer["input"] + r @ layer["state"] + layer["bias"]
        i, f, g, o = np.split(z, 4, axis=-1)
        c = s(f) * c + s(i) * np.tanh(g)
        r = s(o) * np.tanh(c) @ layer["project"]
        want.append(r @ p["words"]["kernel"] + p["words"]["bias"])
    got = jax.jit(lambda x: model.apply(params, state, x, KEY, False)[0])(x)
    # Five steps of sums of at most 4 terms of size 1, in f32, through tanh and s, whose slopes are at most 1.
    np.testing.assert_allclose(got, np.stack(want, 1), atol=1e-5)
    assert layer["bias"].tolist() == [0] * 4 + [1] * 4 + [0] * 8  # cells keep what they hold


def test_attention_is_the_equation():
    q, k, v = rows = np.random.default_rng(0).standard_normal((3, 2, 6, 4))
    want = np.zeros((2, 6, 4))
    for b, t, head in np.ndindex(2, 6, 2):
        d = slice(2 * head, 2 * head + 2)
        score = np.exp(k[b, : t + 1, d] @ q[b, t, d] / math.sqrt(2))
        want[b, t, d] = score / score.sum() @ v[b, : t + 1, d]
    got = attention(jnp.concatenate([jnp.asarray(part, jnp.float32) for part in rows], -1), 2)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_decoder_sees_the_words_before_and_no_padding_of_the_source():
    init, apply = encoder_decoder(12, 6, width=16, heads=2, layers=2)
    params = init(jax.random.key(0))
    source, before = jnp.array([[3, 4, 5, 0, 0, 0]]), jnp.array([[1, 7, 8, 9, 2, 3]])
    logits = np.asarray(apply(params, source, before))
    later = np.asarray(apply(params, source, before.at[0, 3].set(2)))
    np.testing.assert_allclose(logits[:, :3], later[:, :3], atol=1e-6)
    assert (np.abs(logits - later).max(-1)[:, 3:] > 1e-4).all()
    padding = {**params, "words": params["words"].at[0].add(1.0)}  # of which only padding is made
    np.testing.assert_allclose(apply(padding, source, before), logits, atol=1e-6)
    assert np.abs(np.asarray(apply(params, source.at[0, 1].set(9), before)) - logits).max() > 1e-3
    assert np.isfinite(np.asarray(apply(params, 0 * source, before))).all()
    with pytest.raises(UsageError, match="encoder_decoder: got width 10 and 4 heads; expected a width that divides"):
        encoder_decoder(12, 6, width=10)


@pytest.mark.parametrize("name", ["lstm_tiny", "gpt_tiny"])
def test_tiny_model_learns(name, standard_promotion):
    model, tx = MODELS[name](), optax.adam(0.01, b2=0.99)
    window = model.input_shape[0]
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 3, np.uint8).astype(np.int32)
    rows = np.stack([text[i : i + window + 1] for i in range(45)])
    params, model_state = model.init(KEY, jnp.zeros((1, window), jnp.int32))

    def loss(params):
        logits, _ = model.apply(params, model_state, jnp.asarray(rows[:, :-1]), KEY, True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})
    state, losses = jax.jit(tx.init)(params), []
    for _ in range(40):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[0] > 5
    assert losses[-1] < 0.5 * losses[0]
