"""The optimizer between the halves of the exchange: the bits of workers that update all, with a share of the state."""

import copy
import functools
import math
import pickle
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jaxmpi
from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.algorithms.table import with_halves
from jaxmpi.allreduce.api import exchange
from jaxmpi.allreduce.sharded import ShardedState
from jaxmpi.allreduce.zero import Zero, make_zero
from jaxmpi.checkpoint.export import model_of
from jaxmpi.checkpoint.manager import Retention, files_of, save
from jaxmpi.checkpoint.restore import Slicing, restore
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.config.optim import Optim
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.core.sharding import ElementSharding, TensorSharding, assign_tensors
from jaxmpi.core.sharding_trial import check_sharding
from jaxmpi.core.train_state import create
from jaxmpi.models.__main__ import tree
from jaxmpi.optim.optimizers import OPTIMIZERS, muon_cost, optimizer, scale_by_rate_factor, scale_rate, sharding_for
from jaxmpi.rules import base
from jaxmpi.rules.averaged import averaged
from jaxmpi.rules.gradients import gradients
from references import sum_over_workers
from tolerances import USUAL_EMITTERS, WIRE, U, bound

RNG = np.random.default_rng(0)
PARAMS = {
    "kernel": RNG.standard_normal((7, 5)).astype(np.float32),  # no multiple of any number of workers
    "bias": RNG.standard_normal(5).astype(np.float32),
    "scale": np.float32(1.5) * np.ones((), np.float32),
    "big": RNG.standard_normal((3, 40, 2)).astype(np.float32),
    "empty": np.zeros((0, 4), np.float32),
}
PAIRS = {
    name: RNG.standard_normal(shape).astype(np.float32)
    for name, shape in {"a": (7, 5), "b": (5, 7), "bias": (5,), "c": (6, 6), "d": (4, 9), "other_bias": (6,)}.items()
}
WIDE = PARAMS | {"bias": RNG.standard_normal(13).astype(np.float32)}  # slices of two entries on 8 workers
FEW = {name: PARAMS[name] for name in ("kernel", "bias", "big")}
STEPS, BUCKET_BYTES = 40, 4 << 20
# Decay of some tensors and a rate of its own for others: both go by the number of axes.
ADAMW = Optim("adamw", weight_decay=0.1, decay_bias=False, bias_lr_factor=2.0)


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Optax counts on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def tiled(tree: Any, workers: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * workers), tree)


def is_same(left: Any, right: Any) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def program(function: Any, **_: Any) -> Any:
    return jax.jit(jax.vmap(function, axis_name="w"))


def on_devices(function: Any, **_: Any) -> Any:
    """`program` on two devices, where a branch is one: under vmap all of them run, and are fused."""

    def of_one(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))

    spec = jax.sharding.PartitionSpec("w")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("w",))
    spread = jax.shard_map(of_one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(spread, compiler_options=USUAL_EMITTERS)


class SplitZero:
    """Halves that are programs of their own, as the trainer has them: XLA fuses nothing across."""

    def __init__(self, zero: Zero, program: Any) -> None:
        self.zero = zero
        self.scatter = program(zero.scatter)
        self.gathers = {wire: program(functools.partial(zero.gather, wire=wire)) for wire in ("32", "16", "8")}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.zero, name)

    def gather(self, shards: Any, like: Any, wire: str = "32") -> Any:
        return self.gathers[wire](shards, like)

    def gather_params(self, shards: Any, params: Any) -> Any:
        return self.gather(shards, params)

    def shard_index(self) -> jax.Array:
        return jnp.asarray(self.zero.shard_indices)


def rule_of(
    tx: Any,
    strategy: str,
    comm: AxisComm,
    *,
    is_sharded: bool,
    clip_norm: float = 0.0,
    sharding: TensorSharding | None = None,
    wire: str = "32",
    program: Any = program,
) -> base.Rule:
    """Rule `gradients` over all workers of one process."""
    mean = program(functools.partial(exchange, strategy=strategy, comm=comm, bucket_bytes=4))
    zero: Any = SplitZero(
        make_zero(strategy, "mean", comm, BUCKET_BYTES, sharding, clip_norm, gather_wire=wire), program
    )
    return gradients(tx, base.Exchange(mean, mean, program, zero=zero if is_sharded else None))


def begun(rule: base.Rule, workers: int, weights: Any = PARAMS, program: Any = program) -> tuple[Any, Any]:
    """Params and the rule's state 0 of all workers."""
    params = tiled(weights, workers)
    if rule.sharding:
        return params, program(rule.sharding.init)(params, jnp.asarray(rule.sharding.zero.shard_indices))
    return params, program(rule.init)(params)


def trained(rule: base.Rule, begin: tuple[Any, Any], span: range = range(STEPS), program: Any = program) -> Any:
    """Params [workers, ...] and the rule's state after some steps."""
    params, state = begin
    workers, rng = len(jax.tree.leaves(params)[0]), np.random.default_rng(1)
    curvature = jax.tree.map(lambda x: rng.uniform(0.5, 2, x.shape).astype(np.float32), params)
    gradient = program(lambda p, c, t: jax.tree.map(lambda w, a: a * (w - 0.3 * jnp.sin(a * t)), p, c))
    for t in span:
        grads = gradient(params, curvature, jnp.full(workers, t, jnp.float32))
        params, state = rule.update(grads, state, params)
    return params, state


def averages_of(rule: base.Rule, params: Any, state: Any) -> Any:
    assert rule.eval_params
    return rule.eval_params(params, state)


# ---------------------------------------------------------------- two halves


@pytest.mark.parametrize(("workers", "hosts"), [(3, None), (4, (0, 1, 1, 0))])
def test_two_halves_are_the_whole_and_each_worker_has_its_chunk(workers, hosts):
    comm = AxisComm("w", workers, hosts)
    x = RNG.standard_normal((workers, workers * 6)).astype(np.float32)
    able = with_halves(comm.hosts)
    assert {"asa", "ring", "hier-asa", "hier-ring"} <= set(able)
    for name in [name for name in able if name != "ar"]:
        for wire in sorted({"32", "16" if hosts is None else "32"} & set(parse(name).spec.wires)):
            row = parse(f"{name}:{wire}")
            halves = row.spec.halves
            assert halves
            both = jax.jit(jax.vmap(lambda v, h=halves, r=row: h.scatter(v, comm, r.wire), axis_name="w"))(x)
            again = jax.jit(jax.vmap(lambda v, h=halves, r=row: h.gather(v, comm, r.wire), axis_name="w"))(both)
            whole = jax.jit(jax.vmap(lambda v, r=row: r.spec.sum(v, comm, r.wire), axis_name="w"))(x)
            assert is_same(again, whole), row.name
            if wire == "32":
                assert is_same(both, whole[0].reshape(workers, -1)[np.array(halves.chunks(comm))]), row.name


def test_the_halves_of_the_library_s_own_allreduce_are_its_reduce_scatter_and_its_allgather():
    workers = 4
    comm, (_, spec, wire) = AxisComm("w", workers), parse("ar")
    x = RNG.standard_normal((workers, workers * 6)).astype(np.float32)
    assert spec.halves
    scatter, gather = (lambda v, half=half: half(v[0], comm, wire)[None] for half in spec.halves[:2])
    mesh, rows = jax.sharding.Mesh(np.array(jax.devices()[:workers]), ("w",)), jax.sharding.PartitionSpec("w")
    spread = functools.partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    both = jax.jit(spread(lambda v: gather(scatter(v)))).lower(x).compile()
    moves = set(re.findall(r"(all-\w+|reduce-scatter)(?:-start)?\(", both.as_text() or ""))
    assert moves == {"reduce-scatter", "all-gather"}
    for whole in np.asarray(both(x)):
        assert (np.abs(whole - sum_over_workers(x)) <= bound("ar", x)).all()
    chunks = np.asarray(jax.jit(spread(scatter))(x))
    assert is_same(chunks.reshape(-1), np.asarray(both(x))[0])


# ---------------------------------------------------------------- the same params


@pytest.mark.parametrize(
    ("workers", "hosts", "strategy", "weights"),
    [
        (4, (0, 1, 0, 1), "hier-ring32", PARAMS),
        (3, None, "shm", PARAMS),
        # Under vmap XLA divides shards of a single entry otherwise: the next test.
        (8, None, "ring32", WIDE),
    ],
)
def test_params_are_those_of_workers_that_update_all_bit_for_bit(workers, hosts, strategy, weights):
    comm, tx = AxisComm("w", workers, hosts), optimizer(ADAMW, lambda step: jnp.float32(0.01))
    rules = [rule_of(tx, strategy, comm, is_sharded=flag) for flag in (False, True)]
    rules = [averaged(rule, 0.9, program, "gradients") for rule in rules]
    (whole, all_of_it), (params, state) = (trained(rule, begun(rule, workers, weights)) for rule in rules)
    assert is_same(params, whole)
    average, gathered = (averages_of(rule, params, of) for rule, of in zip(rules, (all_of_it, state), strict=True))
    assert is_same(gathered, average)
    assert not is_same(average, params)
    assert not is_same(params, tiled(weights, workers))
    # Each worker's state: a shard of every leaf that is one of params', rounded up to whole entries.
    floats = lambda tree: sum(x[0].nbytes for x in jax.tree.leaves(tree) if x.dtype == jnp.float32)  # noqa: E731
    moments = floats(all_of_it) // sum(leaf.nbytes for leaf in weights.values())
    assert floats(state) <= floats(all_of_it) / workers + 4 * moments * len(weights)


QUICK = ("adam", "lion")
BY_ELEMENT = [name for name, row in OPTIMIZERS.items() if row.by == "element"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in BY_ELEMENT])
def test_shards_by_element_are_updated_as_by_workers_that_update_all_bit_for_bit(name):
    comm, config = AxisComm("w", 3), Optim(name, weight_decay=0.01, decay_bias=False, bias_lr_factor=2.0)
    tx = optimizer(config, lambda step: 0.01 / (1 + step))
    rules = [rule_of(tx, "asa32", comm, is_sharded=flag) for flag in (False, True)]
    (whole, all_of_it), (params, state) = (trained(rule, begun(rule, 3, FEW), range(20)) for rule in rules)
    assert is_same(params, whole)
    assert not is_same(params, tiled(FEW, 3))
    # A worker's state is its shard of the whole one, but for padding.
    like, of_one = jax.eval_shape(tx.init, FEW), lambda tree: [x[0] for x in jax.tree.leaves(jax.device_get(tree))]
    first = jax.tree.leaves(
        ElementSharding(3).shard(jax.tree.unflatten(jax.tree.structure(like), of_one(all_of_it)), 0)
    )
    assert is_same([np.ravel(x) for x in of_one(state)], [np.ravel(x) for x in first])


SLOW = ("lamb", "adafactor", "muon")  # compiles for five seconds each
BY_TENSOR = [name for name, row in OPTIMIZERS.items() if row.by == "tensor"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in BY_TENSOR])
def test_whole_tensors_are_updated_as_by_workers_that_update_all_bit_for_bit(name):
    # XLA divides by a number that one tensor alone is divided by in another way, so each worker has two of a kind.
    comm, dealt = AxisComm("w", 2), assign_tensors(PAIRS, 2)._replace(owners=(0, 0, 1, 1, 1, 1))
    tx = optimizer(Optim(name, weight_decay=0.01, decay_bias=False, bias_lr_factor=2.0), lambda step: jnp.float32(0.01))
    rules = [rule_of(tx, "asa32", comm, is_sharded=flag, sharding=dealt, program=on_devices) for flag in (False, True)]
    begin = (begun(rule, 2, PAIRS, on_devices) for rule in rules)
    both = [trained(*each, range(20), on_devices) for each in zip(rules, begin, strict=True)]
    (whole, all_of_it), (params, state) = jax.device_get(both)
    assert is_same(params, whole)
    assert not is_same(params, tiled(PAIRS, 2))
    # Each worker has the state of its own leaves, and only that.
    held = [dealt.with_state_of(tx).to_checkpoint(jax.tree.map(lambda x, w=w: x[w], state), w) for w in range(2)]
    every = [dict(named_leaves(each)) for each in held]
    assert is_same(every[0] | every[1], dict(named_leaves(jax.tree.map(lambda x: x[0], all_of_it))))
    assert not any("bias" in leaf for leaf in every[0])


def test_changes_in_fewer_bits_leave_replicas_equal_and_within_a_rounding_of_masters():
    comm = AxisComm("w", 2)
    for name, wire, dealt in (("adam", "16", None), ("lars", "8", assign_tensors(FEW, 2))):
        tx = optimizer(Optim(name), lambda step: jnp.float32(0.01))
        rule = rule_of(tx, "asa32", comm, is_sharded=True, wire=wire, sharding=dealt)
        then = trained(rule, begun(rule, 2, FEW), range(20))
        before = jax.tree.map(np.array, then[0])
        params, state = trained(rule, then, range(20, 21))
        assert is_same(*(jax.tree.map(lambda x, w=w: x[w], params) for w in range(2)))
        assert rule.sharding
        masters = rule.sharding.zero.gather(state["masters"], params)
        relative, of_largest = WIRE[wire]
        changes = {leaf: np.abs(masters[leaf] - before[leaf]) for leaf in FEW}
        off = 0.0
        for leaf, change in changes.items():
            apart = np.abs(np.asarray(masters[leaf] - params[leaf], np.float64))
            bound = (relative + U) * change + of_largest * change.max() + U * np.abs(params[leaf])
            assert (apart <= bound).all()
            off = max(off, apart.max())
        assert off > 0
        assert np.abs(masters["big"] - FEW["big"]).max() > 10 * off


@pytest.mark.parametrize(("strategy", "by"), [("asa:8", "tensor"), ("hier-ring:16", "element")])
def test_tensors_of_a_bucket_do_not_share_a_scale(strategy, by):
    """The error of each leaf is that of the leaf alone, in the sum and when gathered; a NaN stays in its leaf."""
    comm = AxisComm("w", 4, (0, 0, 1, 1))
    scales = {"a": 1e-3, "b": 1.0, "c": np.nan, "d": 1e-12, "e": 1e6}
    sizes = {"a": 64, "b": 700, "c": 40, "d": 9, "e": 300}
    rows = {name: (scales[name] * RNG.standard_normal((4, n))).astype(np.float32) for name, n in sizes.items()}
    like = jax.tree.map(lambda x: x[0], rows)
    wire = strategy.partition(":")[2]
    dealt = assign_tensors(like, 4) if by == "tensor" else None
    halves = make_zero(strategy, "sum", comm, BUCKET_BYTES, dealt, gather_wire=wire)
    total = program(lambda grads: halves.gather(halves.scatter(grads)[0], grads, wire))(rows)
    for name, each in rows.items():
        got = np.asarray(total[name][3], np.float64)
        if np.isnan(scales[name]):
            assert np.isnan(got).all()
            continue
        error = bound(strategy, each, hosts=2) + bound(f"asa:{wire}", each)  # of the sum, and of what is gathered
        assert (np.abs(got - each.astype(np.float64).sum(0)) <= error).all(), name


@pytest.mark.parametrize(
    ("wire", "entry", "apart", "same"),
    [
        ("32", 0, False, True),  # another worker's slice: overwritten
        ("32", -1, False, False),  # its own: on all workers
        ("16", 0, True, True),  # a change is added to it
        ("16", -1, True, False),  # and what brings it back to the masters goes to all
    ],
)
def test_a_flipped_bit_of_params_is_found_by_a_comparison_after_the_next_step_only_if_changes_travel(
    wire, entry, apart, same
):
    rule, before, state = after_steps_of_two(wire)
    flipped, grads = dict(before), tiled(FEW, 2)
    flipped["kernel"] = flipped["kernel"].copy()
    flipped["kernel"][1].view(np.uint32).reshape(-1)[entry] ^= 1 << 22
    copied = lambda tree: jax.tree.map(jnp.array, tree)  # noqa: E731
    (want, _), (got, _) = (rule.update(copied(grads), copied(state), copied(each)) for each in (before, flipped))
    assert not is_same(before, flipped)
    assert apart != is_same(*(jax.tree.map(lambda x, w=w: x[w], got) for w in range(2)))
    assert same == is_same(got["kernel"][0], want["kernel"][0])


@functools.cache
def after_steps_of_two(wire: str) -> tuple[base.Rule, Any, Any]:
    """A rule of two workers, and their params and state after some steps."""
    tx = optimizer(Optim("momentum"), lambda step: jnp.float32(0.01))
    rule = rule_of(tx, "asa32", AxisComm("w", 2), is_sharded=True, wire=wire)
    return rule, *jax.device_get(trained(rule, begun(rule, 2, FEW), range(2)))


def test_a_rate_that_a_callback_lowers_reaches_tensors_that_are_updated_whole():
    dealt, tx = assign_tensors(FEW, 2), optax.chain(optax.lars(1e-2), scale_by_rate_factor())
    dealt = dealt.with_state_of(tx)
    for index in range(2):
        shard, state = dealt.shard(FEW, index), dealt.init(tx, FEW, index)
        whole, half = (dealt.step(tx.update, index, shard, s, shard)[0] for s in (state, scale_rate(state, 0.5)))
        assert is_same(half, jax.tree.map(lambda x: x / 2, whole))
        assert np.abs(whole.flat).max() > 0


def test_leaves_are_dealt_by_cost():
    """No worker has more than the costliest leaf above an equal share, nor than 4/3 of it: as dealt by cost alone."""
    rng = np.random.default_rng(0)
    params = {str(i): np.zeros(rng.integers(1, 400, rng.integers(1, 4)), np.float32) for i in range(40)}
    for workers in (2, 3, 8):
        dealt = assign_tensors(params, workers, muon_cost)
        costs = [muon_cost(shape) for shape in dealt.shapes]
        loads = np.bincount(dealt.owners, costs, minlength=workers)
        assert loads.max() <= max(max(costs), sum(costs) / workers * 4 / 3)


def test_clipping_by_the_global_norm_is_that_of_the_whole_gradient():
    comm = AxisComm("w", 3)
    one = optimizer(Optim("sgd", clip_norm=0.5), lambda step: jnp.float32(0.01))
    bare = optimizer(Optim("sgd"), lambda step: jnp.float32(0.01))
    whole, _ = trained(rule := rule_of(one, "asa32", comm, is_sharded=False), begun(rule, 3))
    params, _ = trained(rule := rule_of(bare, "asa32", comm, is_sharded=True, clip_norm=0.5), begun(rule, 3))
    unclipped, _ = trained(rule := rule_of(bare, "asa32", comm, is_sharded=True), begun(rule, 3))
    # A norm is a sum of 281 squares and a root; a step is at most lr * 0.5, so each is off by that times (281 + 4) u.
    off = STEPS * 0.01 * 0.5 * (281 + 4) * U
    for name in ("kernel", "bias", "scale", "big"):
        rounding = STEPS * U * np.abs(whole[name]).max()
        assert np.abs(params[name] - whole[name]).max() <= off + rounding
    assert np.abs(unclipped["big"] - whole["big"]).max() > 100 * off


@pytest.mark.parametrize("wire", ["32", "16"])
def test_one_worker_runs_the_optimizer_itself_also_if_its_step_donates_params(wire):
    tx, params = jaxmpi.sharded(optax.sgd(0.5), "element", comm=SoloComm(), gather_wire=wire), {"w": jnp.arange(6.0)}
    state: Any = tx.init(params)
    assert isinstance(state, ShardedState)
    assert copy.deepcopy(state).whole == pickle.loads(pickle.dumps(state)).whole

    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    after, state = jax.jit(step, donate_argnums=(0, 1))(params, state)
    assert is_same(after, {"w": np.arange(6.0, dtype=np.float32) / 2})
    assert is_same(state.shard.masters if wire == "16" else after, after)  # its own, in 32 bits


# ---------------------------------------------------------------- bytes


class Counting(AxisComm):
    """Workers on hosts, so that all goes by `permute` but small gathers; counts what every one of them sends."""

    def __init__(self, hosts: tuple[int, ...]) -> None:
        super().__init__("w", len(hosts), hosts)
        self.sent, self.times = np.zeros(len(hosts)), 1

    def permute(self, x: Any, pairs: Any) -> Any:
        for source, destination in pairs:
            self.sent[source] += self.times * (source != destination) * sum(leaf.nbytes for leaf in jax.tree.leaves(x))
        return super().permute(x, pairs)

    def allgather(self, x: Any) -> Any:
        self.sent += self.times * (self.size - 1) * sum(leaf.nbytes for leaf in jax.tree.leaves(x))
        return super().allgather(x)

    def loop(self, turns: int, turn: Any, carry: Any) -> Any:
        if turns:
            self.times, before = self.times * turns, self.times
            jax.eval_shape(turn, 0, carry)  # once; if the loop itself is traced nothing is counted
            self.times = 0
            carry, self.times = super().loop(turns, turn, carry), before
        return carry


@pytest.mark.parametrize(
    ("strategy", "wire", "hosts"), [("asa32", "32", range(8)), ("hier-ring32", "32", (0, 1, 2, 3) * 2)]
)
def test_googlenet_s_slices_are_as_many_bytes_on_the_wire_as_its_sums_and_clipping_a_float_to_each(
    strategy, wire, hosts
):
    few = sorted(tree("googlenet").items(), key=lambda item: -math.prod(item[1]))[:40]  # all take long to trace
    like = {name: jax.ShapeDtypeStruct((8, *shape), jnp.float32) for name, shape in few}
    whole, cut = (Counting(tuple(hosts)) for _ in range(2))
    clipped = make_zero(strategy, "mean", cut, BUCKET_BYTES, clip_norm=1.0, gather_wire=wire)

    def traced(move: Any) -> None:
        jax.eval_shape(jax.vmap(move, axis_name="w"), like)

    traced(lambda x: exchange(x, strategy, comm=whole))
    traced(lambda x: clipped.gather(clipped.scatter(x)[0], x, wire))
    assert (whole.sent > 2 * 7 / 8 * sum(math.prod(leaf.shape[1:]) for leaf in like.values())).all()
    assert (cut.sent <= 1.000_001 * whole.sent).all()


# ---------------------------------------------------------------- by element, by tensor, or refused

LAYER = {"bias": np.zeros(4, np.float32), "kernel": np.zeros((3, 5), np.float32), "scale": np.zeros(4, np.float32)}
LAYERS = {"first": LAYER, "second": LAYER}
ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


def on_updates(update: Any) -> optax.GradientTransformation:
    """SGD, and a function of all updates."""
    return optax.chain(optax.sgd(1e-3), optax.stateless(lambda updates, _: update(updates)))


def by_name(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, tree)


Made: Any = optax.GradientTransformation  # of functions that know their trees


def with_history() -> optax.GradientTransformation:
    """Ten numbers that are no moments of a tensor."""
    return Made(lambda p: jnp.arange(10.0), lambda u, state, p=None: (u, jnp.roll(state, 1)))


def growing() -> optax.GradientTransformation:
    return Made(lambda p: jnp.zeros(()), lambda u, state, p=None: (u, jnp.zeros(3)))


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.by])
def test_the_trial_agrees_with_the_table(name):
    tx, by = optimizer(Optim(name), lambda step: jnp.float32(0.01)), OPTIMIZERS[name].by
    check_sharding(tx, FEW, by, 2)
    assert sharding_for(Optim(name), lambda step: 0.01, FEW, 2).name == {"element": "entries", "tensor": "leaves"}[by]


@pytest.mark.parametrize(
    ("tx", "allowed"),
    [
        # One norm of all tensors: every so many steps, of some tensors, in a loop, by a reference.
        (optax.MultiSteps(CLIPPED, 30).gradient_transformation(), ""),
        (optax.chain(optax.clip_by_global_norm(100.0), optax.sgd(1e-3)), ""),
        (optax.partition({"bias": ADAM, "kernel": optax.contrib.prodigy(), "scale": ADAM}, by_name), ""),
        (optax.apply_if_finite(ADAM, 3), ""),  # a worker whose shard is finite would go on alone
        (optax.add_noise(0.1, 0.5, jax.random.key(0)), ""),
        (on_updates(lambda u: jax.tree.map(lambda x: x / len(jax.tree.leaves(u)), u)), "element"),
        (on_updates(lambda u: u | {"first": jax.tree.map(lambda x: x - u["second"]["bias"].mean(), u["first"])}), ""),
        (optax.chain(ADAM, growing()), ""),
        (optax.chain(optax.monitor({"norm": optax.tree.norm}), ADAM), ""),
        (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(1e-3)), "tensor"),
        (on_updates(lambda u: jax.tree.map(lambda x: x * x.shape[0], u)), "tensor"),
        (optax.chain(ADAM, with_history()), "tensor"),
        (optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-3, 0.0, 100)), "element tensor"),
        (on_updates(lambda u: jax.tree.map(lambda x: jax.pure_callback(np.asarray, x, x), u)), "element tensor"),
        # A name that a shard of other tensors lacks.
        (on_updates(lambda u: u | {"first": jax.tree.map(lambda x: x / 2, u["first"])}), "element tensor"),
    ],
)
def test_a_wrong_word_for_an_optimizer_of_one_s_own_is_refused(tx, allowed):
    for by in ("element", "tensor"):
        if by in allowed:
            check_sharding(tx, LAYERS, by, 2)
        else:
            with pytest.raises(UsageError, match=f"by: got '{by}'.*'element' if .*'tensor' if"):
                check_sharding(tx, LAYERS, by, 2)


def test_a_state_that_goes_by_the_shapes_of_the_model_s_tensors_is_not_sharded_by_element():
    factored = optax.scale_by_factored_rms()
    check_sharding(factored, {"kernel": np.zeros((12, 25), np.float32)}, "element", 2)
    with pytest.raises(UsageError, match="goes by the shapes"):
        check_sharding(factored, {"kernel": np.zeros((128, 256), np.float32)}, "element", 2)


CHAIN = optax.chain(jaxmpi.exchange_gradients("asa32"), ADAM)
BOTH_WORDS = "'element' if .*'tensor' if"


def begin(tx: Any, word: str = "element", params: Any = FEW) -> Any:
    return jaxmpi.sharded(tx, word, comm=SoloComm()).init(params)


def shard_custom(tx: Any, **options: Any) -> Any:
    return sharding_for(Optim("mine", transform=tx, **options), lambda step: 0.01, FEW, 2)


def make(strategy: str, hosts: tuple[int, ...] = (0,) * 4, **options: Any) -> Zero:
    return make_zero(strategy, "mean", AxisComm("w", len(hosts), hosts), None, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: begin(ADAM, ""), f"by: got ''.*{BOTH_WORDS}"),
        (lambda: begin(ADAM, "asa32"), f"by: got 'asa32'.*{BOTH_WORDS}"),
        (lambda: shard_custom(ADAM), f"optim.shard_by of 'mine'.*{BOTH_WORDS}"),
        (lambda: shard_custom(CHAIN, shard_by="element"), "optimizer 'mine' with sharded updates.*optimizer alone"),
        (lambda: begin(CHAIN), r"jaxmpi.sharded\(tx\).*optimizer alone"),
        (lambda: begin(optax.contrib.schedule_free_adamw(1e-3)), "schedule-free"),
        (lambda: begin(ADAM, params={"w": jnp.zeros(3, jnp.bfloat16)}), "w is bfloat16; expected float32"),
        (lambda: jaxmpi.sharded(ADAM, "element").update({"w": jnp.zeros(3)}, ()), "got no params"),
        (lambda: make("tree:32"), "got strategy 'tree:32'.*asa, ring"),
        (lambda: make("topk1"), "got strategy 'topk1'.*asa, ring"),
        (lambda: make("shm", (0, 0, 1, 1)), "got strategy 'shm' .* for ranks on these hosts: ar, asa, ring"),
        (lambda: make("shm", gather_wire="16"), "got gather_wire 16 with strategy 'shm'.*or take ar, asa, ring"),
        (lambda: make("ring32", gather_wire=8), "unknown wire 8; did you mean '8'"),
        (lambda: make("ring32", clip_norm=-1.0), "clip_norm"),  # it would turn the gradients round
    ],
)
def test_what_cannot_be_sharded_is_refused_with_what_can(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_padding_is_not_sent():
    """Its masters may have moved: all workers take up the moments of a param of one entry, whose gradient is 0 there.

    A block of an 8-bit wire takes its scale from its largest entry.
    """
    params = {"gain": jnp.float32(2), "bias": jnp.arange(5.0), "even": jnp.ones(4)}
    masters = jax.tree.map(lambda x: x + 1, ElementSharding(2).shard(params, 1))
    changes = ElementSharding(2).changes(params, masters, 1)
    assert jax.tree.map(lambda x: x.tolist(), changes) == {"gain": 0.0, "bias": [1.0, 1.0, 0.0], "even": [1.0, 1.0]}
    masters = jax.tree.map(lambda x: x + 1, ElementSharding(2).shard(params, 0))
    assert float(ElementSharding(2).changes(params, masters, 0)["gain"]) == 1.0


# ---------------------------------------------------------------- checkpoints

LAMB = optax.lamb(1e-2)
FORMS = ["whole", "entries 1", "entries 8", "leaves 3", "masters, entries 3", "masters, leaves 8"]
BY_HOST = (4, 0, 5, 1, 6, 2, 7, 3)  # shards of eight workers, as a hierarchy of two hosts gives them


def held_by(form: str, whole: Any) -> tuple[dict[int, Any], Slicing, dict[str, Any]]:
    """States of workers that hold LAMB's whole state in some form.

    The whole state has an average of params, and masters or none.
    """
    words = form.replace("masters, ", "").split()
    has_masters, workers = form.startswith("masters"), int(words[-1]) if words[1:] else 2
    if not has_masters:
        whole = whole | {"of_rule": whole["of_rule"]["of_tx"]}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), whole)
    if form == "whole":
        return made_of([whole] * workers), Slicing(dict(named_leaves(shapes))), {}
    cut = assign_tensors(PARAMS, workers) if words[0] == "leaves" else ElementSharding(workers)
    cut = cut.with_state_of(LAMB)
    chunks = BY_HOST if form == "entries 8" else tuple(range(workers))[::-1]
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(whole)}

    def like(chunk: int) -> Any:
        own = lambda tree: jax.eval_shape(cut.shard, tree, chunk)  # noqa: E731
        of_tx = jax.eval_shape(functools.partial(cut.init, LAMB), PARAMS, chunk)
        of_rule = {"of_tx": of_tx, "masters": own(PARAMS)} if has_masters else of_tx
        return whole | {"average": own(PARAMS), "of_rule": of_rule}

    return (
        made_of([cut.from_checkpoint(like(chunk), chunk, leaves.__getitem__) for chunk in chunks]),
        Slicing(dict(named_leaves(shapes)), chunks, cut.from_checkpoint),
        {"chunks": list(chunks), "cut": cut.name, "saved": cut.to_checkpoint},
    )


def made_of(states: list[Any]) -> dict[int, Any]:
    return {
        worker: create(PARAMS, {}, jax.tree.map(np.asarray, each), seed=1, worker=worker)
        for worker, each in enumerate(states)
    }


@pytest.mark.parametrize("before", FORMS)
def test_whole_leaves_and_masters_are_taken_up_in_any_other_form(tmp_path, before):
    noise = lambda x: RNG.standard_normal(np.shape(x)).astype(np.float32) if x.dtype == jnp.float32 else x + 7  # noqa: E731
    noisy = functools.partial(jax.tree.map, noise)
    masters = noisy(PARAMS)
    whole = {"of_rule": {"of_tx": noisy(LAMB.init(PARAMS)), "masters": masters}, "average": noisy(PARAMS)}
    whole = jax.tree.map(np.asarray, whole | {"averaged": np.int32(3)})
    kept, _, extra = held_by(before, whole)
    if extra:
        saved = extra.pop("saved")
        kept = {w: each._replace(rule_state=saved(each.rule_state, extra["chunks"][w])) for w, each in kept.items()}
    facts = {"step": 0, "workers": len(kept), "extra": extra, "keep": Retention(1)}
    where = save(tmp_path, files_of(kept, not extra), SoloProcesses(), **facts)
    exported = model_of(where)
    assert is_same([exported[f"params/{name}"] for name in PARAMS], [whole["average"][name] for name in PARAMS])
    had = before.startswith("masters")
    for after in FORMS:
        has = after.startswith("masters")
        # Masters that are dropped become the params; those that begin are the params.
        truth = whole if had else whole | {"of_rule": whole["of_rule"] | {"masters": PARAMS}}
        wanted, slicing, _ = held_by(after, truth)
        like = {worker: jax.tree.map(np.zeros_like, state) for worker, state in wanted.items()}
        found = restore(
            tmp_path, like, SoloProcesses(), workers=len(wanted), replicated=after == "whole", slicing=slicing
        )
        assert found, (before, after)
        for worker, state in found.states.items():
            assert is_same(state.rule_state, wanted[worker].rule_state), (before, after)
            assert is_same(state.params, masters if had and not has else PARAMS), (before, after)
