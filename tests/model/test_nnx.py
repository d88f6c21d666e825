"""The NNX adapter: a user's own module, unchanged, as a pair of pure functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmpi.model.adapters.nnx import nnx_model

# A user's module may still sow the way that Flax has begun to deprecate.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")

KEY = jax.random.key(0)
IMAGE: Any = np.random.default_rng(0).standard_normal((4, 6, 6, 2)).astype(np.float32)


class Net(nnx.Module):
    """A model as a user writes it: stock layers, stock initialisers, a list, two random streams."""

    def __init__(self, rngs):
        self.convs = nnx.List([nnx.Conv(2, 8, (3, 3), rngs=rngs), nnx.Conv(8, 8, (3, 3), rngs=rngs)])
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.drops = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.logits = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x, train):
        x = jax.nn.relu(self.norm(self.convs[0](x), use_running_average=not train))
        x = self.drops[0](self.convs[1](x), deterministic=not train).mean((1, 2))
        self.features = nnx.Intermediate(x)  # made by the call, so no state
        return self.logits(self.drops[1](x, deterministic=not train))


class Bare(nnx.Module):
    """Never tells its dropout whether it trains."""

    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.logits = nnx.Linear(2, 3, rngs=rngs)

    def __call__(self, x, train):
        return self.logits(self.drop(x.mean((1, 2))))


def adapted(net: Any = Net):
    return nnx_model(net, name="net", input_shape=(6, 6, 2), classes=3)


@pytest.fixture(scope="module")
def model():
    return adapted()


@pytest.fixture(scope="module")
def state(model):
    return model.init(KEY, IMAGE[:1])


@pytest.fixture(scope="module")
def apply(model) -> Any:
    return jax.jit(model.apply, static_argnums=4)  # compiled once, not operation by operation


def test_building_a_model_calls_nothing():
    nnx_model(lambda rngs: pytest.fail("built"), name="x", input_shape=(1, 1, 1), classes=1)


def test_init_gives_plain_arrays(state):
    params, model_state = state
    assert set(params) == {"convs", "norm", "logits"}
    assert set(model_state) == {"norm"}
    assert set(model_state["norm"]) == {"mean", "var"}
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array)
        assert leaf.dtype == jnp.float32


def test_same_numbers_as_the_module(apply, state):
    module = Net(nnx.Rngs(KEY))
    want = module(IMAGE, False)
    got = apply(*state, IMAGE, KEY, False)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_batch_statistics_move_and_dropout_follows_the_key_in_training_only(apply, state):
    params, before = state
    _, after = apply(params, before, IMAGE, KEY, True)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert not np.array_equal(after["norm"]["mean"], before["norm"]["mean"])
    _, kept = apply(params, after, IMAGE, KEY, False)
    jax.tree.map(np.testing.assert_array_equal, kept, after)
    keys = [jax.random.key(seed) for seed in (1, 1, 2)]
    one, again, other = (apply(*state, IMAGE, key, True)[0] for key in keys)
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(*(apply(*state, IMAGE, key, False)[0] for key in keys[1:]))


class Untold(nnx.Module):
    """As Flax's own guides have it: `train()` and `eval()` are all that tells."""

    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.logits = nnx.Linear(2, 3, rngs=rngs)

    def __call__(self, x):
        return self.logits(self.drop(x.mean((1, 2))))


class Deterministic(Untold):
    """Told the other way round."""

    def __call__(self, x, *, deterministic):
        return self.logits(self.drop(x.mean((1, 2)), deterministic=deterministic))


@pytest.mark.parametrize("net", [Bare, Untold, Deterministic])
def test_switches_other_than_train(net):
    other = adapted(net)
    state = other.init(KEY, IMAGE[:1])
    keys = jax.random.key(1), jax.random.key(2)
    train = [other.apply(*state, IMAGE, key, True)[0] for key in keys]
    evaluation = [other.apply(*state, IMAGE, key, False)[0] for key in keys]
    assert not np.array_equal(*train)
    np.testing.assert_array_equal(*evaluation)


def test_each_stream_has_its_own_key():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x, train):
            ones = self.scale * jnp.ones((64,))
            return self.one(ones, deterministic=False), self.two(ones, deterministic=False)

    twice = adapted(Twice)
    one, two = twice.apply(*twice.init(KEY, IMAGE[:1]), IMAGE, KEY, True)[0]
    assert not np.array_equal(one, two)
