"""Ranks that drive several devices each, with updates sharded over all devices of all ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmpi
from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.api import Choice, Op
from jaxmpi.allreduce.local_devices import over_local_devices
from jaxmpi.allreduce.zero import make_zero
from jaxmpi.comm.topology import AXIS
from jaxmpi.config.optim import Optim
from jaxmpi.core.sharding import assign_tensors
from jaxmpi.optim.optimizers import optimizer
from jaxmpi.rules.averaged import averaged
from jaxmpi.rules.base import Exchange, Rule
from jaxmpi.rules.gradients import gradients
from tolerances import USUAL_EMITTERS, U

COMM = jaxmpi.world()
SIZE, RANK = COMM.size, int(COMM.rank)
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(SIZE == 1, reason="devices of one process exchange in one program"),
    pytest.mark.skipif(jax.local_device_count() < 3, reason="there are fewer devices"),
]
SHAPES = {"kernel": (17, 5), "bias": (5,), "scale": (), "big": (3, 40, 2), "empty": (0, 4), "out": (5, 17)}
STEPS, RATE = 3, 0.01


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Optax counts on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.local_devices()[:devices]), (AXIS,))


def placed(trees: list[Any], mesh: Mesh) -> Any:
    """One tree for each device."""
    where = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.tree.map(lambda *x: jax.device_put(np.stack(x), where), *trees)


def tree(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def rule_of(config: Optim, strategy: str, mesh: Mesh, bucket_bytes: int | None, *, is_sharded: bool) -> Rule:
    """Rule `gradients` with an average of params; clipping is the optimizer's, or the halves'."""

    def over(function: Callable, donate_argnums: tuple[int, ...] = ()) -> Callable:
        def of_one(*args: Any) -> Any:
            return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))

        spec = PartitionSpec(AXIS)
        spread = jax.shard_map(of_one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(spread, donate_argnums=donate_argnums, compiler_options=USUAL_EMITTERS)

    def mean_or_sum(op: Op) -> Callable[[Any], Any]:
        return over_local_devices(Choice(parse(strategy).name, op, COMM, bucket_bytes), mesh)

    exchange = Exchange(mean_or_sum("mean"), mean_or_sum("sum"), over)
    if is_sharded:
        sharding = assign_tensors(tree(0), SIZE * mesh.size) if config.name == "lars" else None
        zero = make_zero(strategy, "mean", COMM, bucket_bytes, sharding, config.clip_norm, mesh=mesh)
        exchange = exchange._replace(zero=zero)
        config = replace(config, clip_norm=0.0)
    tx = optimizer(config, lambda step: jnp.float32(RATE))
    return averaged(gradients(tx, exchange), 0.9, over, "gradients")


def stepped(rule: Rule, mesh: Mesh) -> tuple[Any, Any, Any]:
    """Params, their average and the rule's state after some steps, with gradients of its own on every device."""
    params = placed([tree(0)] * mesh.size, mesh)
    if rule.sharding:
        chunks = [rule.sharding.zero.shard_indices[RANK * mesh.size + place] for place in range(mesh.size)]
        state = placed([jax.jit(rule.sharding.init)(tree(0), np.int32(chunk)) for chunk in chunks], mesh)
    else:
        state = placed([jax.jit(rule.init)(tree(0))] * mesh.size, mesh)
    workers = SIZE * mesh.size
    for step in range(1, 1 + STEPS):
        own = [tree(step * workers + RANK * mesh.size + place) for place in range(mesh.size)]
        params, state = rule.update(placed(own, mesh), state, params)
    assert rule.eval_params
    return params, rule.eval_params(params, state), state


@pytest.mark.parametrize(
    ("devices", "strategy", "bucket_bytes", "config"),
    [
        (3, "ring32", 4, Optim("adamw", weight_decay=0.1, decay_bias=False, bias_lr_factor=2.0)),
        pytest.param(2, "shm", None, Optim("lars"), marks=pytest.mark.slow),
    ],
    ids=["3 devices, ring, adamw", "2 devices, shm, lars"],
)
def test_sharded_updates_leave_the_bits_of_whole_ones_with_a_share_of_the_state(
    devices, strategy, bucket_bytes, config
):
    mesh, rule = mesh_of(devices), partial(rule_of, config, strategy, mesh_of(devices))
    whole, average, all_of_it = stepped(rule(bucket_bytes, is_sharded=False), mesh)
    params, gathered, state = stepped(rule(512, is_sharded=True), mesh)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(whole))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(gathered), jax.device_get(average))
    assert all((np.asarray(params[name]) != tree(0)[name]).any() for name in SHAPES if name != "empty")

    def of_device(tree: Any) -> int:
        floats = [x for x in jax.tree.leaves(tree) if x.dtype == jnp.float32]
        return sum(x.addressable_shards[0].data.nbytes for x in floats)

    size_bytes = sum(x.nbytes for x in tree(0).values())
    kept = of_device(all_of_it) // size_bytes
    padding = len(SHAPES) if config.name != "lars" else assign_tensors(tree(0), SIZE * devices).width
    assert of_device(state) <= kept * (size_bytes / (SIZE * devices) + 4 * padding)


def test_clipping_is_by_the_norm_of_the_whole_gradient():
    mesh, config = mesh_of(2), Optim("momentum", clip_norm=0.5)
    whole, _, _ = stepped(rule_of(config, "asa32", mesh, None, is_sharded=False), mesh)
    params, _, _ = stepped(rule_of(config, "asa32", mesh, None, is_sharded=True), mesh)
    # A norm is a sum of n squares and a root. A velocity adds up to three gradients of at most 0.5, so does a param.
    n = sum(x.size for x in tree(0).values())
    off = sum(range(1, STEPS + 1)) * RATE * 0.5 * (n + 4) * U
    for name in SHAPES:
        rounding = STEPS * U * np.abs(np.asarray(whole[name])).max(initial=0)
        assert np.abs(np.asarray(params[name] - whole[name])).max(initial=0) <= off + rounding
    params = jax.device_get(params)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x[0], x[1]), params)
