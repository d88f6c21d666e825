"""Local SGD and DiLoCo, mostly on small multiples of powers of two, of which f32 rounds nothing."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi.allreduce.api import exchange
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.optim.optimizers import optimizer
from jaxmpi.rules import base, registry
from jaxmpi.trainer.build import overlap_obstacle
from tolerances import leaf_bound

K, N = 4, 5
ETA, OUTER = 0.25, 0.5  # powers of two; momentum 0.5
RNG = np.random.default_rng(0)
START = RNG.integers(-8, 9, N) / 8
GRADS = RNG.integers(-8, 9, (6, K, N)) / 4  # that do not depend on w
CURVATURE, CENTER = 1 / RNG.integers(1, 3, (3, K, N)), RNG.integers(-4, 5, (3, K, N)) / 4


def constant(w: Any, t: int) -> Any:
    return jnp.asarray(GRADS[t], jnp.float32)


def spring(w: Any, t: int) -> Any:
    """Return the gradient of 0.5 a (w - c)^2."""
    return jnp.asarray(CURVATURE[t], jnp.float32) * (w - jnp.asarray(CENTER[t], jnp.float32))


def built(config: RuleConfig, optim: Optim, comm: AxisComm, strategy: str = "asa32") -> base.Rule:
    """The rule as the trainer builds it."""
    mean, total = (functools.partial(exchange, strategy=strategy, op=op, comm=comm) for op in ("mean", "sum"))
    tx = optimizer(optim, lambda step: jnp.float32(optim.lr))
    return registry.build(config, tx, base.Exchange(mean, total), optimizer=optim.name, linear=True)


def trained(config: RuleConfig, optim: Optim, gradient: Any, steps: int) -> np.ndarray:
    """Params of all workers after every step, f32[steps, K, N]; workers under `vmap`."""
    rule = built(config, optim, AxisComm("w", K))
    step = jax.jit(jax.vmap(rule.update, axis_name="w"))
    params = {"w": jnp.tile(jnp.asarray(START, jnp.float32), (K, 1))}
    state, seen = jax.vmap(rule.init)(params), []
    for t in range(steps):
        params, state = step({"w": gradient(params["w"], t)}, state, params)
        seen.append(np.asarray(params["w"]))
    return np.stack(seen)


def by_hand(period: int, outer_lr: float, mu: float, inner_mu: float) -> np.ndarray:
    """Algorithm 1 of Douillard et al. 2023 in float64, inner SGD with momentum: f64[steps, K, N]."""
    agreed, v, w, u, seen = START, np.zeros(N), np.tile(START, (K, 1)), np.zeros((K, N)), []
    for t, g in enumerate(GRADS, 1):
        u = inner_mu * u + g
        w = w - ETA * u
        if t % period == 0:
            d = (agreed - w).mean(0)
            v = mu * v + d
            agreed = agreed - outer_lr * (mu * v + d if mu else d)
            w = np.tile(agreed, (K, 1))
        seen.append(w)
    return np.stack(seen)


MOMENTUM = Optim("momentum", lr=ETA, momentum=0.5)


@pytest.mark.parametrize("period", [1, 2, 3, 6, 7])
def test_the_algorithm_step_by_step(period):
    local = trained(RuleConfig("local_sgd", local_steps=period), MOMENTUM, constant, 6)
    np.testing.assert_array_equal(local, by_hand(period, 1.0, 0.0, 0.5))
    config = RuleConfig("diloco", local_steps=period, outer_lr=OUTER, outer_momentum=0.5)
    outer = trained(config, MOMENTUM, constant, 6)
    np.testing.assert_array_equal(outer, by_hand(period, OUTER, 0.5, 0.5))
    is_one = [len({row.tobytes() for row in at}) == 1 for at in outer]
    assert is_one == [t % period == 0 for t in range(1, 7)]  # apart in between


def test_local_sgd_with_one_step_is_awagd_and_the_mean_of_gradients():
    runs = [
        trained(RuleConfig(name, local_steps=1), MOMENTUM, spring, 3) for name in ("local_sgd", "awagd", "gradients")
    ]
    assert np.abs(runs[0][-1] - START).max() > 0.1
    for other in runs[1:]:
        np.testing.assert_array_equal(runs[0], other)


def test_diloco_with_one_step_of_sgd_is_nesterov_on_the_mean_of_gradients():
    diloco = RuleConfig("diloco", local_steps=1, outer_lr=OUTER, outer_momentum=0.5)
    nesterov = Optim("nesterov", lr=ETA * OUTER, momentum=0.5)
    one = trained(diloco, Optim("sgd", lr=ETA), spring, 3)
    np.testing.assert_array_equal(one, trained(RuleConfig("gradients"), nesterov, spring, 3))


# ---------------------------------------------------------------- meeting


def met(strategy: str, rows: np.ndarray, agreed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Evaluated before a meeting, params after it, evaluated after it; workers at `rows` step at rate 0."""
    rule = built(RuleConfig("local_sgd", local_steps=1), Optim("sgd", lr=1e-30), AxisComm("w", len(rows)), strategy)

    @jax.jit
    @functools.partial(jax.vmap, axis_name="w", in_axes=(0, None))
    def meet(w, agreed):
        state = rule.init(agreed)
        assert rule.eval_params
        before = rule.eval_params(w, state)
        params, state = rule.update(jnp.zeros_like(w), state, w)
        return before, params, rule.eval_params(params, state)

    before, params, after = meet(rows, agreed)
    return np.asarray(before), np.asarray(params), np.asarray(after)


@pytest.mark.parametrize("strategy", ["asa:32", "tree:bf16", "asa:8"])
def test_a_meeting_keeps_the_mean(strategy):
    agreed = RNG.standard_normal(1000).astype(np.float32)
    moved = 0.01 * RNG.standard_normal((K, 1000)).astype(np.float32)
    rows = agreed - moved
    moved = agreed - rows  # as f32 has it, exactly: they are near each other
    before, params, after = met(strategy, rows, agreed)
    mean = rows.astype(np.float64).mean(0)
    error = leaf_bound(strategy, moved, "float32", "mean") + 2.0**-24 * np.abs(mean) * 1.1  # of the mean; of w' - mean
    assert (np.abs(params - mean) <= error).all()
    assert len({row.tobytes() for row in params}) == 1
    np.testing.assert_array_equal(params, before)  # evaluation before it is that of the params after it
    np.testing.assert_array_equal(params, after)


def test_a_coarse_wire_keeps_more_of_differences_than_of_weights():
    agreed = 100 + RNG.standard_normal(1000).astype(np.float32)
    rows = agreed - 0.01 * RNG.standard_normal((K, 1000)).astype(np.float32)
    mean = rows.astype(np.float64).mean(0)
    local = np.abs(met("asa:8", rows, agreed)[1] - mean).max()
    weights = jax.jit(jax.vmap(lambda w: exchange(w, "asa:8", comm=AxisComm("w", K)), axis_name="w"))(rows)
    assert local < 0.001 < 0.1 < np.abs(np.asarray(weights) - mean).max()


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "easgd_sync"])
def test_the_distance_of_workers_is_that_of_the_last_meeting(name):
    """From their mean, or the center, before they move; easgd_sync meets at steps 1, 4, ..., before it steps."""
    period, start = 3, np.tile(START, (K, 1))
    config = RuleConfig(name, local_steps=period, tau=period, alpha=0.25)
    rule = built(config, MOMENTUM, AxisComm("w", K))
    assert rule.distance
    step, params = jax.jit(jax.vmap(rule.update, axis_name="w")), {"w": jnp.asarray(start, jnp.float32)}
    state, expected, apart = jax.vmap(rule.init)(params), np.zeros(K), np.zeros((K, N))
    velocity = np.zeros((K, N))
    for t in range(5):
        if name == "easgd_sync" and t == period:  # the center has not moved since the first meeting
            expected = np.linalg.norm(apart, axis=1)
        velocity = 0.5 * velocity + GRADS[t]
        apart = apart - ETA * velocity
        if name != "easgd_sync" and t + 1 == period:
            expected = np.linalg.norm(apart - apart.mean(0), axis=1)
        params, state = step({"w": constant(None, t)}, state, params)
        # N squares, their sum, a root, a mean of K: each rounds once, relatively.
        np.testing.assert_allclose(np.asarray(rule.distance(state)), expected, rtol=(N + K + 4) * 2.0**-24)
    assert expected.min() > 0.1


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_what_a_rule_says_of_itself(name):
    rule = built(RuleConfig(name), Optim("adam"), AxisComm("w", K))  # any optimizer, unforced
    assert (rule.state_is_replicated, rule.params_are_replicated) == (False, False)
    experiment = Experiment(rule=RuleConfig(name), exchange=ExchangeConfig("asa32", overlap="on"))
    workers = Workers(SoloComm(), SoloProcesses(), (0,), None)
    plan: Any = SimpleNamespace(experiment=experiment, workers=workers)
    assert "exchanges every so many steps only" in overlap_obstacle(plan)
