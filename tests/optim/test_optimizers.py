"""Schedules against closed forms, optimizers against plain Optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.core.errors import UsageError
from jaxmpi.optim.optimizers import (
    OPTIMIZERS,
    clip_by_global_norm,
    is_linear,
    optimizer,
    scale_biases,
    schedule_free_states,
    set_step,
)
from jaxmpi.optim.schedules import Clock, schedule

CLOCK = Clock(steps_per_epoch=10, effective_batch=32, total_steps=100)
PEAK = 0.4
# A fraction is a handful of f32 operations, of which powers and cosines are good to 2 units in the last place.
RELATIVE = 16 * 2.0**-24


def rates(config: Schedule, at: list[int], workers: int = 8, clock: Clock = CLOCK) -> np.ndarray:
    lr = schedule(config, clock, PEAK, workers)
    inside = jax.jit(jax.vmap(lr))(jnp.asarray(at, jnp.int32))
    outside = np.array([lr(step) for step in at])  # as the log calls it, with Python's numbers
    np.testing.assert_allclose(inside, outside, rtol=RELATIVE, atol=1e-9)
    return np.asarray(inside)


DECAYS = [
    (Schedule(), lambda t: 1.0),
    (
        Schedule(decay="step", boundaries=("3ep", "60st", "2560ex"), factor=0.1),
        lambda t: 0.1 ** sum(t >= b for b in (30, 60, 80)),
    ),
    (Schedule(decay="poly", power=2.0), lambda t: max(1 - t / 100, 0) ** 2),
    (Schedule(decay="poly", span="5ep"), lambda t: max(1 - t / 50, 0) ** 0.5),
    (Schedule(decay="cosine"), lambda t: (1 + np.cos(np.pi * min(t / 100, 1))) / 2),
    (Schedule(decay="cosine", span="50%"), lambda t: (1 + np.cos(np.pi * min(t / 50, 1))) / 2),
    # Ma et al. 2016, section 4: eta0 (1 - epoch * minibatches / max_it)^0.5, max_it = span in steps.
    (Schedule(decay="poly_epoch"), lambda t: max(1 - (t // 10) * 10 / 100, 0) ** 0.5),
    (Schedule(decay="poly_epoch", span="240ep"), lambda t: (1 - (t // 10) * 10 / 2400) ** 0.5),
]


@pytest.mark.parametrize(("config", "fraction"), DECAYS)
def test_decays(config, fraction):
    at = [0, 1, 9, 10, 29, 30, 31, 50, 60, 79, 80, 99, 100, 120]
    # Near the end of a cosine 1 + cos cancels: what is left is the error of the cosine's argument and value.
    np.testing.assert_allclose(rates(config, at), [PEAK * fraction(t) for t in at], rtol=RELATIVE, atol=PEAK * 2.0**-22)


LINEAR = [
    (Schedule(warmup="20st"), lambda t: min(1 / 20 + (1 - 1 / 20) * t / 20, 1)),
    (Schedule(warmup="2ep", warmup_from=0.1), lambda t: min(0.1 + 0.9 * t / 20, 1)),
    (Schedule(warmup="10%", warmup_from=1.0), lambda t: 1.0),
]


@pytest.mark.parametrize(("config", "fraction"), LINEAR)
def test_linear_warmup(config, fraction):
    at = [0, 1, 5, 19, 20, 21, 99]
    np.testing.assert_allclose(rates(config, at), [PEAK * fraction(t) for t in at], rtol=RELATIVE)


@pytest.mark.parametrize("workers", [1, 2, 8, 32])
def test_geometric_warmup_multiplies_by_the_fifth_root_of_k_after_each_of_five_epochs(workers):
    at = [10 * epoch + batch for epoch in range(8) for batch in (0, 4, 9)]
    got = rates(Schedule(warmup="5ep", warmup_shape="geometric"), at, workers).reshape(8, 3)
    assert (got == got[:, :1]).all()
    eta0 = PEAK / workers  # the rate that one worker would run; k eta0 after five epochs
    expected = [eta0 * workers ** (min(epoch, 5) / 5) for epoch in range(8)]
    np.testing.assert_allclose(got[:, 0], expected, rtol=RELATIVE * max(1, np.log(workers)))
    assert (got[5:] == got[-1]).all()


def test_warmup_and_decay_multiply():
    config = Schedule(warmup="20st", warmup_from=0.5, decay="step", boundaries=("5st",), factor=0.5)
    np.testing.assert_allclose(rates(config, [0, 10, 20]), [0.2, 0.4 * 0.75 * 0.5, 0.2], rtol=RELATIVE)


@pytest.mark.parametrize("decay", ["constant", "step", "poly", "poly_epoch", "cosine"])
def test_a_run_of_one_step_divides_by_nothing(decay):
    lr = schedule(Schedule(decay=decay, span="0st", warmup="1st", boundaries=("1st",)), Clock(1, 1, 1), PEAK, 1)
    assert np.isfinite(lr(0))
    assert jnp.asarray(lr(jnp.int32(0))).dtype == jnp.float32


# ---------------------------------------------------------------- optimizers

PARAMS: Any = {
    "conv": {"kernel": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "bias": np.ones(4, np.float32)},
    "scale": np.float32(2.0),
}


def gradient(step: int, scale: float = 1.0):
    return jax.tree.map(lambda p: scale * np.float32(np.cos(step)) * (p + np.float32(0.5)), PARAMS)


def run(tx: optax.GradientTransformation, steps: int = 5, scale: float = 1.0) -> Any:
    update = jax.jit(tx.update)
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    for step in range(steps):
        updates, state = update(gradient(step, scale), state, params)
        params = optax.apply_updates(params, updates)
    return params


def same_bits(a: Any, b: Any) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), a, b))


def falling(step) -> jax.Array:
    return 0.1 / (1 + jnp.asarray(step, jnp.float32))


def configured(**fields) -> optax.GradientTransformation:
    return optimizer(Optim(lr=1.0, **fields), falling)


def plain(direction: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(direction, optax.scale_by_learning_rate(falling))


def decayed(*after: optax.GradientTransformation, mask=None) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(0.01, mask), *after)


def kernels(params):
    return {"conv": {"kernel": True, "bias": False}, "scale": False}


SAME_AS_OPTAX = [
    ({"name": "sgd"}, plain(optax.identity())),
    ({"name": "momentum", "momentum": 0.8}, plain(optax.trace(0.8))),
    ({"name": "nesterov"}, plain(optax.trace(0.9, nesterov=True))),
    ({"name": "adam"}, plain(optax.scale_by_adam())),
    ({"name": "adam", "b1": 0.8, "b2": 0.9, "eps": 1e-3}, plain(optax.scale_by_adam(0.8, 0.9, 1e-3))),
    ({"name": "nadamw", "weight_decay": 0.01}, optax.nadamw(falling, weight_decay=0.01)),
    ({"name": "radam"}, optax.radam(falling)),
    ({"name": "adabelief"}, plain(optax.scale_by_belief())),
    ({"name": "adamax"}, optax.adamax(falling)),
    ({"name": "lion", "b2": 0.9, "weight_decay": 0.01}, optax.lion(falling, b2=0.9, weight_decay=0.01)),
    ({"name": "lamb", "weight_decay": 0.01}, optax.lamb(falling, weight_decay=0.01)),
    ({"name": "lars", "momentum": 0.5, "weight_decay": 0.01}, optax.lars(falling, 0.01, momentum=0.5)),
    ({"name": "adafactor", "weight_decay": 0.01}, optax.adafactor(falling, weight_decay_rate=0.01)),
    (
        {"name": "muon", "momentum": 0.5, "b1": 0.8, "weight_decay": 0.01},
        optax.contrib.muon(falling, weight_decay=0.01, adam_weight_decay=0.01, beta=0.5, adam_b1=0.8),
    ),
    (
        {"name": "schedule_free_sgd", "weight_decay": 0.01},
        optax.contrib.schedule_free(decayed(optax.sgd(falling)), falling),
    ),
    (
        {"name": "schedule_free_adamw", "b1": 0.95, "b2": 0.99, "eps": 1e-6, "weight_decay": 0.01},
        optax.contrib.schedule_free_adamw(falling, None, 0.95, 0.99, 1e-6, 0.01),  # pyright: ignore[reportArgumentType]
    ),
    ({"name": "muon", "bias_lr_factor": 2.0}, optax.chain(optax.contrib.muon(falling), scale_biases(2.0))),
    (
        {"name": "adamw", "weight_decay": 0.01, "decay_mask": kernels},
        optax.adamw(falling, weight_decay=0.01, mask=kernels),
    ),
    ({"name": "lamb", "weight_decay": 0.01, "decay_bias": False}, optax.lamb(falling, weight_decay=0.01, mask=kernels)),
    ({"name": "mine", "transform": optax.sgd(0.1)}, optax.sgd(0.1)),
    (
        {"name": "mine", "transform": optax.adamw, "clip_norm": 0.5},
        optax.chain(clip_by_global_norm(0.5), optax.adamw(falling)),
    ),
    ({"name": "rmsprop"}, plain(optax.scale_by_rms())),
    ({"name": "adagrad"}, plain(optax.scale_by_rss())),
    ({"name": "momentum", "weight_decay": 0.01}, plain(decayed(optax.trace(0.9)))),
    ({"name": "sgd", "weight_decay": 0.01, "decay_bias": False}, plain(decayed(mask=kernels))),
    ({"name": "sgd", "clip_norm": 0.5}, optax.chain(clip_by_global_norm(0.5), plain(optax.identity()))),
]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("fields", "expected"),
    SAME_AS_OPTAX,
    ids=[" ".join([fields["name"], *list(fields)[1:]]) for fields, _ in SAME_AS_OPTAX],
)
def test_optimizers_are_optax(fields, expected):
    assert same_bits(run(configured(**fields)), run(expected))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_clipping_is_optax_s_within_its_roundings(dtype):
    def both(largest: float, grads: dict) -> list[dict]:
        ways = clip_by_global_norm(largest), optax.clip_by_global_norm(largest)
        return [jax.tree.map(np.asarray, transform.update(grads, transform.init(grads))[0]) for transform in ways]

    rng = np.random.default_rng(0)
    grads = {"w": rng.standard_normal((30, 7), np.float32).astype(dtype), "b": np.zeros(3, dtype)}
    got, wanted = both(0.5, grads)
    assert got["w"].dtype == dtype
    off = np.abs(got["w"].astype(np.float64) - wanted["w"].astype(np.float64))
    # Two operations each, in two orders, on normal numbers; a rounding is half of eps.
    assert (off <= 4 * float(jnp.finfo(dtype).eps) / 2 * np.abs(wanted["w"].astype(np.float64))).all()
    assert (got["b"] == 0).all()
    for limit in (100.0, np.inf):
        assert (both(limit, grads)[0]["w"] == grads["w"]).all()
    for bad in (np.nan, np.inf):
        got, wanted = both(0.5, {"w": np.array([1.0, bad], dtype)})
        np.testing.assert_array_equal(got["w"].astype(np.float64), wanted["w"].astype(np.float64))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_the_table_says_to_be_linear_is(name):
    """Two workers' mean update beside that of their mean gradient, twenty times: some begin as another."""
    config, rng = Optim(name=name), np.random.default_rng(0)
    tx = optimizer(config, falling)

    def noise() -> Any:
        return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), PARAMS)

    params, states, difference = jax.tree.map(jnp.asarray, PARAMS), [tx.init(PARAMS)] * 3, 0.0
    update = jax.jit(tx.update)
    for _ in range(20):
        gradients = [noise(), noise()]
        gradients.append(jax.tree.map(lambda a, b: (a + b) / 2, *gradients))
        a, b, one = results = [update(g, s, params) for g, s in zip(gradients, states, strict=True)]
        states = [state for _, state in results]
        off = jax.tree.map(lambda x, y, z: abs((x + y) / 2 - z).max() / abs(z).max(), a[0], b[0], one[0])
        difference = max(difference, *map(float, jax.tree.leaves(off)))
        params = optax.apply_updates(params, one[0])
    assert difference < 1e-3 or not is_linear(config)
    assert not is_linear(Optim("mine", transform=optax.sgd))
    assert not is_linear(Optim("sgd", clip_norm=1.0))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_setting_of_an_optimizer_moves_its_params(name):
    """Settings that the table says it takes, and those that all take; `decay_bias` and `ema` have their own tests."""
    everywhere = {"weight_decay": 0.5, "bias_lr_factor": 3.0}
    values = {"b1": 0.3, "b2": 0.3, "eps": 1e6, "momentum": 0.5, "rate_in_velocity": True}
    settings = everywhere | {setting: values[setting] for setting in OPTIMIZERS[name].takes}
    was = run(configured(name=name), 20)
    for setting, value in settings.items():
        assert not same_bits(was, run(configured(name=name, **{setting: value}), 20)), setting


REFUSED = {
    "unknown decay": (Schedule(decay="poli"), "unknown schedule.decay 'poli'; did you mean 'poly'"),
    "unknown warm-up": (Schedule(warmup_shape="exp"), "unknown schedule.warmup_shape 'exp'"),
    "steps without boundaries": (Schedule(decay="step"), "got no boundaries"),
    "a name of the table": (Optim(transform=optax.sgd), "got one with the name 'momentum', which is jaxmpi's own"),
    "no optimizer": (Optim("mine", transform=3), "optim.transform of 'mine': got a builtins.int; expected an Optax"),
    "a function that gives none": (Optim("mine", transform=lambda lr: lr), "'mine': got a .*; expected an Optax"),
    "decay beside it": (Optim("mine", transform=optax.sgd, weight_decay=0.1), "optim.weight_decay: got optim.tr"),
    "moments of what has none": (Optim("sgd", b1=0.5, eps=1.0), "optim.b1: got 0.5; optimizer 'sgd' has none: leave"),
    "no fraction of the average": (Optim("schedule_free_sgd", b1=0.0), r"optim.b1: got 0 with 'schedule_free_sgd'"),
    "a momentum that Adam has not": (Optim("adam", momentum=0.9), "optim.momentum: got 0.9"),
    "a velocity beside it": (Optim("mine", transform=optax.sgd, rate_in_velocity=True), "rate_in_velocity: got"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_that_a_schedule_or_optimizer_does_not_have_are_refused(config, message):
    with pytest.raises(UsageError, match=message):
        schedule(config, CLOCK, PEAK, 1) if isinstance(config, Schedule) else optimizer(config, falling)


def test_set_step_gives_the_rates_of_that_step():
    tx = configured(name="schedule_free_sgd", b1=0.5)
    state = set_step(tx.init(PARAMS), 7)
    steps = [int(leaf) for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32]
    assert sorted(steps) == [7, 8]  # Optax counts those of the average from 1
    [free] = schedule_free_states(tx.update(gradient(0), state, PARAMS)[1])
    assert free.max_lr == falling(8)


@pytest.mark.parametrize("name", ["momentum", "nesterov"])
def test_the_rate_inside_the_velocity(name):
    """V <- mu v - eta g ; w <- w + v (Nesterov: w <- w + mu v - eta g), which differs once the rate changes."""
    mu, rates = 0.5, (1.0, 0.25, 0.0)
    tx = optimizer(Optim(name=name, momentum=mu, rate_in_velocity=True), lambda step: jnp.asarray(rates)[step])
    params = jnp.zeros(2)
    state, v = tx.init(params), 0.0
    for rate in rates:
        updates, state = tx.update(jnp.ones(2), state, params)
        v = mu * v - rate
        assert np.asarray(updates).tolist() == [mu * v - rate if name == "nesterov" else v] * 2  # exact: powers of 2
    constant = [
        run(optimizer(Optim(name=name, momentum=mu, rate_in_velocity=inside), optax.constant_schedule(0.5)))
        for inside in (True, False)
    ]
    # 0.5 is a power of two: it commutes with every rounding.
    assert same_bits(*constant)


def test_biases_run_a_multiple_of_the_rate():
    once, twice = run(configured(name="sgd"), 1), run(configured(name="sgd", bias_lr_factor=2.0), 1)
    assert (once["conv"]["kernel"] == twice["conv"]["kernel"]).all()
    for part in (lambda t: t["conv"]["bias"], lambda t: t["scale"]):
        np.testing.assert_allclose(part(twice) - part(PARAMS), 2 * (part(once) - part(PARAMS)), rtol=4 * 2.0**-22)


@pytest.mark.parametrize(
    ("workers", "start", "peak"), [(1, 0.025, 0.025), (4, 0.1, 0.1), (8, 0.1, 0.2), (64, 0.1, 1.6)]
)
def test_a_warm_up_may_have_its_own_initial_rate(workers, start, peak):
    """IBM's: from 0.1 to 0.1 b n / 256 with b = 64, which is less than 0.1 for few workers."""
    config = Schedule("step", boundaries=("30ep", "60ep"), warmup="5ep", warmup_lr=0.1)
    rate = schedule(config, Clock(10, 64 * workers, 900), 0.1 * 64 / 256 * workers, workers)
    lr = lambda step: np.asarray(rate(step)).item()  # noqa: E731
    assert [lr(step) for step in (0, 50, 299, 300, 600)] == pytest.approx(
        [start, peak, peak, peak / 10, peak / 100], rel=1e-6
    )
    assert lr(25) == pytest.approx((start + peak) / 2, rel=1e-6)


def test_an_optax_schedule_is_taken_as_it_is_times_the_factor_of_the_workers():
    theirs = optax.warmup_cosine_decay_schedule(0.0, 0.3, 10, 100)
    lr = schedule(Schedule(rate=theirs), CLOCK, 8 * PEAK, 8, factor=8.0)
    ours, plain_ones = [np.asarray([rate(step) for step in (0, 5, 10, 99)]) for rate in (lr, theirs)]
    np.testing.assert_array_equal(ours, 8 * plain_ones)
    with pytest.raises(UsageError, match=r"got schedule\.rate and schedule\.decay, warmup; give one of them"):
        Schedule("cosine", warmup="1ep", rate=theirs)
