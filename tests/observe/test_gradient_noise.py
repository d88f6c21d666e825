"""The noise scale: against gradients drawn from a known distribution, and in a run whose gradients are its examples."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmpi.allreduce.api import exchange
from jaxmpi.comm.axis import AxisComm
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.data import Sampler
from jaxmpi.observe.gradient_noise import Means, Noise
from jaxmpi.rules import base, registry
from launching import train_here
from runs import record
from tolerances import U

K, B, D = 4, 8, 50  # workers, examples of each, params
SIGMA, SIZE = 3.0, 2.0  # of an example's gradient: N(G, SIGMA^2), |G| = SIZE


def means(grads: np.ndarray) -> Means:
    """Return the means of f64[steps, K, D]."""
    return Means(np.square(grads).sum(-1).mean(), np.square(grads.mean(1)).sum(-1).mean())


def test_a_known_distribution():
    """Gradients of workers are N(G, s^2) in each of D entries, s^2 = SIGMA^2 / B.

    variance: s^2 chi^2_{D (K-1)} / (K-1) a step, so its standard error over T steps is D s^2 sqrt(2 / (D (K-1) T)).
    square: |g|^2 has variance 4 |G|^2 s^2 / K + 2 D (s^2 / K)^2; V / K, independent of it, the variance above / K^2.
    Their ratio is off by the sum of their relative errors. Five standard errors of each.
    """
    steps, s2 = 2000, SIGMA**2 / B
    goal = np.full(D, SIZE / math.sqrt(D))
    grads = np.random.default_rng(0).normal(goal, math.sqrt(s2), (steps, K, D))
    got = Noise(K, B).fields(means(grads))
    of_variance = D * s2 * math.sqrt(2 / (D * (K - 1) * steps))
    of_square = math.sqrt((4 * SIZE**2 * s2 / K + 2 * D * (s2 / K) ** 2) / steps + (of_variance / K) ** 2)
    assert of_variance < 0.02 * D * s2  # the tolerance sees a wrong factor
    assert of_square < 0.05 * SIZE**2
    assert got["worker_variance"] == pytest.approx(D * s2, abs=5 * of_variance)
    assert got["gradient_square"] == pytest.approx(SIZE**2, abs=5 * of_square)
    scale = D * SIGMA**2 / SIZE**2
    error = 5 * (of_variance / (D * s2) + of_square / SIZE**2)
    assert got["noise_scale"] == pytest.approx(scale, rel=error / (1 - error))


def test_the_scale_is_a_ratio_of_moving_means():
    meter = Noise(2, 4)
    meter.fields(Means(3.0, 2.0))  # V = 2, |G|^2 = 1, b V = 8
    got = meter.fields(Means(5.0, 3.0))  # V = 4, |G|^2 = 1, b V = 16
    assert Noise(2, 4).fields(Means(2.0, 1.0))["noise_scale"] == math.inf  # the noise hides the gradient
    assert got["noise_scale"] == pytest.approx((0.9 * 8 + 16) / (0.9 * 1 + 1))


# ---------------------------------------------------------------- in the rule


def exchange_of(comm: AxisComm, gradients: optax.GradientTransformation | None = None) -> base.Exchange:
    mean, total = (functools.partial(exchange, op=op, comm=comm) for op in ("mean", "sum"))
    return base.Exchange(mean, total, gradients=gradients)


def test_the_square_is_that_of_the_mean_and_the_update_is_the_same():
    comm = AxisComm("w", K)
    noisy, plain = (
        registry.build(RuleConfig(noise_scale=noise), optax.sgd(0.1), exchange_of(comm), optimizer="sgd", linear=True)
        for noise in (True, False)
    )
    assert noisy.update_with_squares
    assert plain.update_with_squares is None
    rng = np.random.default_rng(0)
    grads = {"a": rng.standard_normal((K, 3, 4), np.float32), "b": rng.standard_normal((K, 7)).astype(np.float16)}
    params = jax.tree.map(jnp.ones_like, grads)
    state = noisy.init(params)
    params_noisy, _, whole = jax.jit(jax.vmap(noisy.update_with_squares, axis_name="w"))(grads, state, params)
    params_plain, _ = jax.jit(jax.vmap(plain.update, axis_name="w"))(grads, state, params)
    jax.tree.map(np.testing.assert_array_equal, params_noisy, params_plain)
    flat = np.concatenate([np.asarray(leaf, np.float64).reshape(K, -1) for leaf in grads.values()], 1)
    # The float16 leaf's mean is rounded to float16: 2^-11 of each entry, twice that of its square.
    np.testing.assert_allclose(whole, [np.square(flat.mean(0)).sum()] * K, rtol=2**-10 + 20 * U)


# ---------------------------------------------------------------- in a run

EXAMPLES, BATCH = 72, 16  # 5 steps an epoch, the last with 8 examples
LINEAR = f"""
import numpy as np
import jax.numpy as jnp
from jaxmpi.model.adapters.functions import plain_model
from jaxmpi.config.data import Data
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.config.optim import Optim
from jaxmpi.data import ArraySource

X = np.random.default_rng(0).normal(1, 1, ({EXAMPLES}, 6)).astype(np.float32)
source = ArraySource(X, np.zeros({EXAMPLES}, np.int32), classes=1)
model = plain_model(lambda key: jnp.zeros(6), lambda w, x: x @ w[:, None], name="linear", input_shape=(6,), classes=1)
experiment = Experiment(
    model=model, loss=lambda outputs, labels: outputs[:, 0], data=Data("array", train=source, validation=source),
    optim=Optim("sgd", lr=0.01), exchange=ExchangeConfig("asa32"),
    effective_batch={BATCH}, train_for="10st", log_every=5, eval_every="0st", checkpoint_every="0st",
)
"""


def test_the_record_has_what_the_examples_say(tmp_path):
    """The loss is w x, so an example's gradient is the example; short steps do not count."""
    (tmp_path / "linear.py").write_text(LINEAR)
    ended = train_here(str(tmp_path / "linear.py"), "--devices", "4", "--run-dir", str(tmp_path / "run"))
    assert ended.code == 0, ended.out
    lines = record(tmp_path / "run", "train")
    x = np.random.default_rng(0).normal(1, 1, (EXAMPLES, 6)).astype(np.float32).astype(np.float64)
    meter = Noise(4, BATCH // 4)
    for row, steps in zip(lines, ([0], [1, 2, 3], [5, 6, 7, 8]), strict=True):  # the fifth of an epoch is short
        shares = [[Sampler(EXAMPLES, BATCH, rank, 4).indices(k).indices for rank in range(4)] for k in steps]
        expected = meter.fields(means(np.array([[x[share].mean(0) for share in of_step] for of_step in shares])))
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4)
