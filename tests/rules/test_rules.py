"""The rules against one worker on the whole batch: the equivalences of Ma et al. 2016, section 3.3."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmpi.allreduce.api import exchange
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm
from jaxmpi.config.optim import Optim
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.core.errors import UsageError
from jaxmpi.optim.optimizers import is_linear, optimizer
from jaxmpi.rules import base, registry
from tolerances import USUAL_EMITTERS, U, linear_iteration

K, LOCAL, N, STEPS = 4, 2, 5, 20
ETA = 0.02
RNG = np.random.default_rng(0)
# Loss of an example: 0.5 sum_d a_d (w_d - c_d)^2, so that its gradient is a (w - c).
CURVATURE = RNG.uniform(0.5, 2.0, (STEPS, K, LOCAL, N)).astype(np.float32)
CENTER = RNG.uniform(-1, 1, (STEPS, K, LOCAL, N)).astype(np.float32)
START = RNG.uniform(-1, 1, N).astype(np.float32)

OPTIMIZERS_OF_THE_PAPER = [
    Optim(name="sgd"),
    Optim(name="momentum", momentum=0.5),
    Optim(name="momentum", momentum=0.9, weight_decay=0.01),
    Optim(name="nesterov", momentum=0.5),
]
name_of = lambda config: f"{config.name}-{config.momentum}-{config.weight_decay}"  # noqa: E731


def gradient(w, curvature, center):
    """Return the gradient of the mean loss over a batch."""
    return (curvature * (w[None] - center)).mean(0)


class Trace(NamedTuple):
    """Results that a run leaves: params of all workers, their state, and what they exchanged at each step."""

    params: np.ndarray  # [workers, N]
    state: Any
    exchanged: list[tuple]


def distributed(name: str, config: Optim, lr: float, *, average_momentum: bool = False, force: bool = False) -> Trace:
    """K workers under `vmap`."""
    comm = AxisComm("w", K)
    tx = optimizer(config, lambda step: jnp.float32(lr))
    rule_config = RuleConfig(name, average_momentum, force)

    @jax.jit
    @functools.partial(jax.vmap, axis_name="w")
    def step(params, state, curvature, center):
        seen = []

        def share(tree, op):
            seen.append((op, tree))
            return exchange(tree, op=op, comm=comm)

        means_and_sums = base.Exchange(functools.partial(share, op="mean"), functools.partial(share, op="sum"))
        rule = registry.build(rule_config, tx, means_and_sums, optimizer=config.name, linear=is_linear(config))
        params, state = rule.update({"w": gradient(params["w"], curvature, center)}, state, params)
        ops.extend(op for op, _ in seen)
        return params, state, [tree for _, tree in seen]

    ops: list[str] = []
    params = {"w": jnp.tile(START, (K, 1))}
    state = jax.vmap(tx.init)(params)
    exchanged = []
    for t in range(STEPS):
        params, state, seen = step(params, state, CURVATURE[t], CENTER[t])
        exchanged.append((ops[0], jax.tree.map(np.asarray, seen[0])))
        assert len(seen) == 1
    return Trace(np.asarray(params["w"]), state, exchanged)


def alone(config: Optim, lr: float) -> tuple[np.ndarray, optax.OptState]:
    """One worker on the whole batch, with plain Optax."""
    tx = optimizer(config, lambda step: jnp.float32(lr))

    @jax.jit
    def step(params, state, curvature, center):
        grads = {"w": gradient(params["w"], curvature.reshape(-1, N), center.reshape(-1, N))}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.asarray(START)}
    state = tx.init(params)
    for t in range(STEPS):
        params, state = step(params, state, CURVATURE[t], CENTER[t])
    return np.asarray(params["w"]), state


class Exact(NamedTuple):
    """One worker on the whole batch in float64, and how far f32 can be from it."""

    params: np.ndarray
    error: float  # of params
    momentum_error: float


def exact(config: Optim, lr: float) -> Exact:
    """K workers' v_i enter w by their mean only, and all is linear in w and v. An error e moves for each parameter as

        e_v <- mu e_v + a e_w ;  e_w <- e_w - lr e_v        (nesterov: e_w - lr (mu e_v + a e_w))

    with a its curvature at that step, known here. A step adds at most K LOCAL + K + 16 roundings (means over batch and
    workers, decay, momentum, rate, apply). Each is of numbers that are in the workers' mean no larger than `size`.
    """
    mu = 0.0 if config.name == "sgd" else 0.9 if config.momentum is None else config.momentum
    nesterov = config.name == "nesterov"
    w, v, size = START.astype(np.float64), np.zeros((K, N)), 1.0
    matrices = []
    for t in range(STEPS):
        a, c = CURVATURE[t].astype(np.float64), CENTER[t].astype(np.float64)
        g = (a * (w - c)).mean(1) + config.weight_decay * w  # [K, N]
        v = mu * v + g
        update = mu * v + g if nesterov else v
        w = w - lr * update.mean(0)
        size = max(size, np.abs(w).max(), np.abs(v).max(), np.abs(update).max(), (a * (np.abs(w) + np.abs(c))).max())
        curvature = a.mean((0, 1)) + config.weight_decay
        matrices.append([moves(mu, lr, one, nesterov) for one in curvature])
    local = (K * LOCAL + K + 16) * U * size
    errors = np.array([linear_iteration([m[d] for m in matrices], local) for d in range(N)])
    return Exact(w, errors[:, 0].max(), errors[:, 1].max())


def moves(mu: float, lr: float, curvature: float, nesterov: bool) -> np.ndarray:
    """(e_w, e_v) after a step from (e_w, e_v) before it."""
    v = np.array([curvature, mu])
    update = mu * v + np.array([curvature, 0.0]) if nesterov else v
    return np.stack([np.array([1.0, 0.0]) - lr * update, v])


@pytest.mark.parametrize("config", OPTIMIZERS_OF_THE_PAPER, ids=name_of)
def test_awagd_at_k_eta_is_subgd_at_eta_is_one_worker_at_k_eta(config):
    awagd = distributed("awagd", config, K * ETA)
    subgd = distributed("subgd", config, ETA)
    mean = distributed("gradients", config, K * ETA)
    one, _ = alone(config, K * ETA)
    expected, error, _ = exact(config, K * ETA)
    moved = np.abs(expected - START).max()
    assert error < 0.001 * moved  # the bound would notice a wrong factor
    for params in (awagd.params, subgd.params, mean.params, one[None]):
        assert (np.abs(params - expected) <= error).all()
        assert len({row.tobytes() for row in params}) == 1  # consensus, bitwise
    assert_different_ways(awagd, subgd, mean)


def assert_different_ways(awagd: Trace, subgd: Trace, mean: Trace) -> None:
    """That they end in one place must not be because they are one program."""
    assert [run.exchanged[0][0] for run in (awagd, subgd, mean)] == ["mean", "sum", "mean"]
    for t in range(STEPS):
        local_params, updates, grads = (run.exchanged[t][1]["w"] for run in (awagd, subgd, mean))
        for rows in (local_params, updates, grads):  # before they talk, workers differ
            assert len({row.tobytes() for row in rows}) == K
        assert np.abs(local_params - updates).max() > 0.01
        assert np.abs(updates - grads).max() > 0.01
        assert np.abs(local_params - grads).max() > 0.01
    # AWAGD steps K times as far as SUBGD before it takes the mean.
    first_step = awagd.exchanged[0][1]["w"] - START
    np.testing.assert_allclose(first_step, K * subgd.exchanged[0][1]["w"], atol=4 * U * (1 + np.abs(START).max()))


def test_momentum_differs_between_workers_unless_it_is_averaged_which_changes_no_params():
    config = Optim(name="momentum")
    mean, own, averaged = (
        distributed(name, config, ETA, average_momentum=average)
        for name, average in (("gradients", False), ("awagd", False), ("awagd", True))
    )
    momenta = [np.asarray(jax.tree.leaves(trace.state)[0]) for trace in (mean, own, averaged)]
    assert [len({row.tobytes() for row in momentum}) for momentum in momenta] == [1, K, 1]
    expected, error, momentum_error = exact(config, ETA)
    assert (np.abs(averaged.params - expected) <= error).all()
    assert np.abs(momenta[1].mean(0) - momenta[2][0]).max() <= 2 * momentum_error
    assert [state.dtype for state in jax.tree.leaves(averaged.state)] == [s.dtype for s in jax.tree.leaves(own.state)]


@pytest.mark.usefixtures("standard_promotion")
def test_gradients_with_adam_is_one_worker_with_adam(monkeypatch):
    """Gradients that do not depend on w and are small integers over a power of two: their means are exact.

    Both runs then feed Adam the same bits. All are positive, so that nothing cancels in the moments: after T steps m
    and v are within 3 T u and 4 T u of their own size. The difference 1 - 0.999^t cancels to 1/1000 of what it is made
    of, which makes few u into few 1000 u; an update is at most lr in size, and its square root halves that.
    """
    integers = RNG.integers(1, 9, (STEPS, K, LOCAL, N)).astype(np.float32)
    monkeypatch.setitem(globals(), "gradient", lambda w, curvature, center: curvature.mean(0))
    monkeypatch.setitem(globals(), "CURVATURE", integers)
    config = Optim(name="adam")
    many, (one, state) = distributed("gradients", config, 0.01), alone(config, 0.01)
    update_error = (3 * STEPS + 4 * STEPS / 2 + 4 * 1000 / 2 + 8) * U
    error = STEPS * (0.01 * update_error + 2 * U)
    assert (np.abs(many.params - one) <= error).all()
    assert np.abs(one - START).max() > 100 * error
    counts_and_moments = zip(jax.tree.leaves(many.state), jax.tree.leaves(state), strict=True)
    for got, wanted in counts_and_moments:
        assert len({row.tobytes() for row in np.asarray(got)}) == 1
        np.testing.assert_allclose(np.asarray(got)[0], np.asarray(wanted), rtol=2 * 4 * STEPS * U)
    assert len({row.tobytes() for row in many.exchanged[0][1]["w"]}) == K


# To a rule any optimizer is two functions: a linear one and another will do. Rules that meet every so many steps do so
# after these five; easgd_sync before the first, when worker and center are the same.
RARELY: dict[str, Any] = {"tau": 100, "local_steps": 100}
EVERY_STEP = ("gradients", "subgd", "awagd")
ALONE = [(RuleConfig(name, force=True), each) for name in EVERY_STEP for each in ("momentum", "adam")]
ALONE += [(RuleConfig(name, **RARELY), "nesterov") for name in ("easgd", "asgd", "gosgd", "easgd_sync")]
ALONE += [(RuleConfig(name, **RARELY), "momentum") for name in ("local_sgd", "diloco")]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("rule_config", "optimizer_name"), ALONE, ids=lambda each: getattr(each, "name", each))
def test_one_worker_is_the_plain_optimizer_bit_for_bit(rule_config, optimizer_name):
    config = Optim(name=optimizer_name, weight_decay=0.01)
    tx = optimizer(config, lambda step: jnp.float32(ETA))
    share = functools.partial(exchange, comm=SoloComm())
    means_and_sums = base.Exchange(functools.partial(share, op="mean"), functools.partial(share, op="sum"))
    rule = registry.build(rule_config, tx, means_and_sums, optimizer=config.name, linear=is_linear(config))

    def descend(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    params, plain_params = {"w": jnp.array(START)}, {"w": jnp.array(START)}
    state, plain_state = rule.init(params), tx.init(plain_params)
    compiled = functools.partial(jax.jit, compiler_options=USUAL_EMITTERS)
    # Outside jit an update is the jitted pieces that it is made of.
    plain, local = (
        compiled(descend),
        rule.update if rule_config.name in ("gradients", "awagd") else compiled(rule.update),
    )
    for t in range(5):
        grads = {"w": gradient(plain_params["w"], CURVATURE[t, 0], CENTER[t, 0])}
        params, state = local(grads, state, params)
        _, plain_params, plain_state = plain(grads, plain_state, plain_params)
        assert np.asarray(params["w"]).tobytes() == np.asarray(plain_params["w"]).tobytes()
    if rule_config.name in EVERY_STEP:
        same = jax.tree.map(lambda a, b: bool((a == b).all()) and a.dtype == b.dtype, state, plain_state)
        assert jax.tree.all(same)
    assert not (np.asarray(params["w"]) == START).any()


# ---------------------------------------------------------------- what is refused, what is scaled


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        (RuleConfig(local_steps=10), 4, r"rule\.local_steps: got 10.* use local_sgd or"),
        (RuleConfig("subgd", noise_scale=False), 4, r"rule\.noise_scale: got False"),
        (RuleConfig("gosgd", staleness=3), 4, r"rule\.staleness: got 3"),
        (RuleConfig("gosgd", servers=1), 3, r"rule\.servers: got 1"),
        (RuleConfig("easgd_sync", alpha=0.1, momentum=0.9), 4, r"rule\.momentum: got 0.9"),
        (RuleConfig("easgd_sync"), 4, "expected at most 1/4 = 0.25"),
        (RuleConfig("easgd"), 1, "got one rank"),
        (RuleConfig("easgd", servers=3), 3, "rule.servers: got 3 of 3 ranks; expected at most 2"),
    ],
)
def test_settings_and_ranks_that_do_not_fit_a_rule_are_refused(config, ranks, message):
    with pytest.raises(UsageError, match=message):
        registry.check_rule(config, ranks)


@pytest.mark.parametrize(
    "config",
    [
        RuleConfig(),
        RuleConfig("subgd", force=True, alpha=0.5, local_steps=50),  # as they are by default
        RuleConfig("awagd", average_momentum=True, force=True),
        RuleConfig("gosgd", p=0.5),
    ],
)
def test_settings_of_the_rule_and_defaults_are_accepted(config):
    registry.check_rule(config, 4)


@dataclasses.dataclass(frozen=True)
class Mine(RuleConfig):
    """Config of a user's rule."""

    name: str = "mine"
    quorum: int = 1
    tried: list[int] = dataclasses.field(default_factory=list)


def test_a_user_s_rule_goes_by_the_fields_that_its_class_adds_or_by_those_it_names(monkeypatch):
    row = registry.RuleSpec(
        lambda tx, x, config: registry.RULES["subgd"].build(tx, x, config), sums_updates=True, any_optimizer=False
    )
    monkeypatch.setitem(registry.RULES, "mine", row)
    registry.check_rule(Mine(quorum=2), 4)
    with pytest.raises(UsageError, match=r"rule\.tau: got 3 with rule mine"):
        registry.check_rule(Mine(tau=3), 4)
    monkeypatch.setitem(registry.RULES, "mine", dataclasses.replace(row, settings=("tau",)))
    registry.check_rule(Mine(tau=3), 4)
    with pytest.raises(UsageError, match=r"rule\.quorum: got 2 with rule mine, which does not use it"):
        registry.check_rule(Mine(quorum=2), 4)
