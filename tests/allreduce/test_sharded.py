"""The optimizer between the halves of the exchange: the bits of workers that update all, with a share of the state."""

import copy
import dataclasses
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
from jaxmpi.allreduce.shards import Shards, shards_of, vectors_of
from jaxmpi.allreduce.slice_vectors import RowsInColumns
from jaxmpi.allreduce.wires import WIRES
from jaxmpi.checkpoint.export import model_of
from jaxmpi.checkpoint.manager import Retention, files_of, save
from jaxmpi.checkpoint.restore import Slicing, restore
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.config.optim import Optim
from jaxmpi.core.deals import Deal, Leaves, deal
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.core.separable import Traced, cut_for, goes_by_shape
from jaxmpi.core.slices import Entries, slices_of
from jaxmpi.core.train_state import create
from jaxmpi.models.__main__ import tree
from jaxmpi.optim.optimizers import OPTIMIZERS, cut_of, is_linear, muon_cost, optimizer
from jaxmpi.rules import base
from jaxmpi.rules.averaged import averaged
from jaxmpi.rules.gradients import gradients
from references import sum_over_workers
from test_strategies import Counting
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
STEPS, BUCKET_BYTES = 100, 4 << 20
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


class SplitShards:
    """Halves that are programs of their own, as the trainer has them: XLA fuses nothing across."""

    def __init__(self, shards: Shards, program: Any) -> None:
        self.chunks, self.size, self.cut, self.shared_params = shards.chunks, shards.size, shards.cut, None
        self.early = False
        self.gives_square, self.keeps_masters, self.gather_wire = (
            shards.gives_square,
            shards.keeps_masters,
            shards.gather_wire,
        )
        self.scatter = program(shards.scatter)
        self.gathers = {wire: program(functools.partial(shards.gather, wire=wire)) for wire in ("32", "16", "8")}

    def gather(self, slices: Any, like: Any, wire: str = "32") -> Any:
        return self.gathers[wire](slices, like)

    def renewed(self, slices: Any, params: Any) -> Any:
        return self.gather(slices, params)

    def chunk(self) -> jax.Array:
        return jnp.asarray(self.chunks)


def rule_of(
    tx: Any,
    strategy: str,
    comm: AxisComm,
    *,
    is_sharded: bool,
    clip_norm: float = 0.0,
    dealt: Deal | None = None,
    wire: str = "32",
    program: Any = program,
) -> base.Rule:
    """Rule `gradients` over all workers of one process."""
    mean = program(functools.partial(exchange, strategy=strategy, comm=comm, bucket_bytes=4))
    halves = shards_of(strategy, "mean", comm, BUCKET_BYTES, clip_norm, deal=dealt, gather_wire=wire)
    shards = SplitShards(halves, program) if is_sharded else None
    return gradients(tx, base.Exchange(mean, mean, program, shards=shards))


def begun(rule: base.Rule, workers: int, weights: Any = PARAMS, program: Any = program) -> tuple[Any, Any]:
    """Params and the rule's state 0 of all workers."""
    params = tiled(weights, workers)
    if rule.sharding:
        return params, program(rule.sharding.init)(params, jnp.asarray(rule.sharding.chunks))
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


@pytest.mark.parametrize(
    ("workers", "hosts"),
    [(3, None), (4, (0, 1, 1, 0))],
)
def test_two_halves_are_the_whole_and_each_worker_has_its_chunk(workers, hosts):
    comm = AxisComm("w", workers, hosts)
    x = RNG.standard_normal((workers, workers * 6)).astype(np.float32)
    able = with_halves(comm.hosts)
    assert {"asa", "ring", "hier-asa", "hier-ring"} <= set(able)
    for name in [name for name in able if name != "ar"]:
        for wire in sorted({"32", "16"} & set(parse(name).spec.wires)):
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


@pytest.mark.parametrize("strategy", ["tree:32", "topk1"])
def test_a_strategy_without_halves_is_refused_with_those_that_have(strategy):
    with pytest.raises(UsageError, match=f"got strategy '{strategy}'.*asa, ring"):
        shards_of(strategy, "mean", SoloComm(), None)


# ---------------------------------------------------------------- the same params


@pytest.mark.parametrize(
    ("workers", "hosts", "strategy", "config", "weights"),
    [
        (3, None, "asa32", ADAMW, PARAMS),
        (4, (0, 1, 0, 1), "hier-ring32", ADAMW, PARAMS),
        (3, None, "shm", ADAMW, PARAMS),
        # Under vmap XLA divides slices of a single entry otherwise: the next test.
        (8, None, "ring32", ADAMW, WIDE),
    ],
)
def test_params_are_those_of_workers_that_update_all_bit_for_bit(workers, hosts, strategy, config, weights):
    comm, tx = AxisComm("w", workers, hosts), optimizer(config, lambda step: jnp.float32(0.01))
    rules = [rule_of(tx, strategy, comm, is_sharded=flag) for flag in (False, True)]
    rules = [averaged(rule, 0.9, program, "gradients") for rule in rules]
    (whole, all_of_it), (params, state) = (trained(rule, begun(rule, workers, weights)) for rule in rules)
    assert is_same(params, whole)
    average, gathered = (averages_of(rule, params, of) for rule, of in zip(rules, (all_of_it, state), strict=True))
    assert is_same(gathered, average)
    assert not is_same(average, params)
    assert not is_same(params, tiled(weights, workers))
    # Each worker's share of the state: a slice of every leaf that is one of params', rounded up to whole entries.
    floats = lambda tree: sum(x[0].nbytes for x in jax.tree.leaves(tree) if x.dtype == jnp.float32)  # noqa: E731
    moments = floats(all_of_it) // sum(leaf.nbytes for leaf in weights.values())
    assert floats(state) <= floats(all_of_it) / workers + 4 * moments * len(weights)


def test_slices_of_a_single_entry_are_updated_in_a_program_of_a_worker_bit_for_bit():
    """A bias of 5 entries on 8 workers, beside larger tensors; the program is one worker's, as between ranks."""
    tx, workers, rng = optimizer(ADAMW, lambda step: jnp.float32(0.01)), 8, np.random.default_rng(1)

    @jax.jit
    def stepped(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    whole = (PARAMS, tx.init(PARAMS))
    own = [(part, tx.init(part)) for part in (slices_of(PARAMS, chunk, workers) for chunk in range(workers))]
    for _ in range(20):
        grads = jax.tree.map(lambda x: np.asarray(rng.standard_normal(x.shape), np.float32), PARAMS)
        whole = stepped(grads, whole[1], whole[0])
        own = [stepped(slices_of(grads, chunk, workers), state, part) for chunk, (part, state) in enumerate(own)]
    for chunk, (part, _) in enumerate(own):
        assert is_same(part, slices_of(whole[0], chunk, workers)), chunk


ENTRYWISE = [name for name, row in OPTIMIZERS.items() if row.cut == "entries"]


@pytest.mark.parametrize("name", ENTRYWISE)
def test_slices_are_updated_by_every_optimizer_of_entries_as_by_workers_that_update_all_bit_for_bit(name):
    comm, config = AxisComm("w", 3), Optim(name, weight_decay=0.01, decay_bias=False, bias_lr_factor=2.0)
    tx = optimizer(config, lambda step: 0.01 / (1 + step))
    rules = [rule_of(tx, "asa32", comm, is_sharded=flag) for flag in (False, True)]
    (whole, all_of_it), (params, state) = (trained(rule, begun(rule, 3, FEW), range(20)) for rule in rules)
    assert is_same(params, whole)
    assert not is_same(params, tiled(FEW, 3))
    # A worker's state is its slice of the whole one, but for what rounds its slice up.
    like, of_one = jax.eval_shape(tx.init, FEW), lambda tree: [x[0] for x in jax.tree.leaves(jax.device_get(tree))]
    first = jax.tree.leaves(slices_of(jax.tree.unflatten(jax.tree.structure(like), of_one(all_of_it)), 0, 3))
    assert is_same([np.ravel(x) for x in of_one(state)], [np.ravel(x) for x in first])


SLOW = ("lamb", "adafactor", "muon")  # compiles for five seconds each
LEAFWISE = [name for name, row in OPTIMIZERS.items() if row.cut == "leaves"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in LEAFWISE])
def test_whole_leaves_are_updated_as_by_workers_that_update_all_bit_for_bit(name):
    # XLA divides by a number that one tensor alone is divided by in another way, so each worker has two of a kind.
    comm, dealt = AxisComm("w", 2), deal(PAIRS, 2)._replace(owners=(0, 0, 1, 1, 1, 1))
    tx = optimizer(Optim(name, weight_decay=0.01, decay_bias=False, bias_lr_factor=2.0), lambda step: jnp.float32(0.01))
    rules = [rule_of(tx, "asa32", comm, is_sharded=flag, dealt=dealt, program=on_devices) for flag in (False, True)]
    begin = (begun(rule, 2, PAIRS, on_devices) for rule in rules)
    both = [trained(*each, range(50), on_devices) for each in zip(rules, begin, strict=True)]
    (whole, all_of_it), (params, state) = jax.device_get(both)
    assert is_same(params, whole)
    assert not is_same(params, tiled(PAIRS, 2))
    # Each worker has the state of its own leaves, and only that.
    held = [Leaves(dealt).for_state_of(tx).saved(jax.tree.map(lambda x, w=w: x[w], state), w) for w in range(2)]
    every = [dict(named_leaves(each)) for each in held]
    assert is_same(every[0] | every[1], dict(named_leaves(jax.tree.map(lambda x: x[0], all_of_it))))
    assert not any("bias" in leaf for leaf in every[0])


# Divisions and roots on the way from a gradient to an update, of which XLA may make products. Muon's five steps each
# multiply an error by 3.4445 at most, the slope of their polynomial.
ROUNDED = {"lars": 4, "lamb": 8, "adafactor": 16, "muon": 2 * 3.4445**5}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in LEAFWISE])
def test_whole_leaves_that_are_dealt_by_cost_are_updated_within_the_roundings_of_an_update(name):
    """A worker may have one tensor of a kind alone, which the test before avoids."""
    comm, dealt = AxisComm("w", 2), deal(FEW, 2)
    tx = optimizer(Optim(name, weight_decay=0.01), lambda step: jnp.float32(0.01))
    rules = [rule_of(tx, "asa32", comm, is_sharded=flag, dealt=dealt, program=on_devices) for flag in (False, True)]
    begin = (begun(rule, 2, FEW, on_devices) for rule in rules)
    whole, params = (trained(*each, range(1), on_devices)[0] for each in zip(rules, begin, strict=True))
    for leaf, start in FEW.items():
        update = np.abs(np.asarray(whole[leaf])[0] - start).max()
        bound = 2 * U * np.abs(whole[leaf]) + ROUNDED[name] * U * update
        assert (np.abs(np.asarray(params[leaf]) - np.asarray(whole[leaf])) <= bound).all(), leaf
        assert update > 100 * U


def test_changes_in_fewer_bits_leave_replicas_equal_and_within_a_rounding_of_masters():
    comm = AxisComm("w", 2)
    for name, wire, dealt in (("adam", "16", None), ("lars", "8", deal(FEW, 2))):
        tx = optimizer(Optim(name), lambda step: jnp.float32(0.01))
        rule = rule_of(tx, "asa32", comm, is_sharded=True, wire=wire, dealt=dealt)
        then = trained(rule, begun(rule, 2, FEW), range(20))
        before = jax.tree.map(np.array, then[0])
        params, state = trained(rule, then, range(20, 21))
        assert is_same(*(jax.tree.map(lambda x, w=w: x[w], params) for w in range(2)))
        assert rule.sharding
        masters = rule.sharding.shards.gather(state["masters"], params)
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


@pytest.mark.parametrize("cut", ["element", "tensor"])
@pytest.mark.parametrize("strategy", ["asa:8", "hier-ring:16"])
def test_tensors_of_a_bucket_do_not_share_a_scale(strategy, cut):
    """The error of each leaf is that of the leaf alone, in the sum and when gathered; a NaN stays in its leaf."""
    comm = AxisComm("w", 4, (0, 0, 1, 1))
    scales = {"a": 1e-3, "b": 1.0, "c": np.nan, "d": 1e-12, "e": 1e6}
    sizes = {"a": 64, "b": 700, "c": 40, "d": 9, "e": 300}
    rows = {name: (scales[name] * RNG.standard_normal((4, n))).astype(np.float32) for name, n in sizes.items()}
    like = jax.tree.map(lambda x: x[0], rows)
    wire = strategy.partition(":")[2]
    dealt = deal(like, 4) if cut == "tensor" else None
    halves = shards_of(strategy, "sum", comm, BUCKET_BYTES, deal=dealt, gather_wire=wire)
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
    comm, tx = AxisComm("w", 2), optimizer(Optim("momentum"), lambda step: jnp.float32(0.01))
    rule, grads = rule_of(tx, "asa32", comm, is_sharded=True, wire=wire), tiled(FEW, 2)
    before, state = trained(rule, begun(rule, 2, FEW), range(2))
    before, flipped = jax.device_get(before), jax.device_get(before)
    flipped["kernel"] = flipped["kernel"].copy()
    flipped["kernel"][1].view(np.uint32).reshape(-1)[entry] ^= 1 << 22
    copied = lambda tree: jax.tree.map(jnp.array, tree)  # noqa: E731
    (want, _), (got, _) = (rule.update(copied(grads), copied(state), copied(each)) for each in (before, flipped))
    assert not is_same(before, flipped)
    assert apart != is_same(*(jax.tree.map(lambda x, w=w: x[w], got) for w in range(2)))
    assert same == is_same(got["kernel"][0], want["kernel"][0])


def test_leaves_are_dealt_by_cost():
    """No worker has more than the costliest leaf above an equal share, nor than 4/3 of it: as dealt by cost alone."""
    rng = np.random.default_rng(0)
    params = {str(i): np.zeros(rng.integers(1, 400, rng.integers(1, 4)), np.float32) for i in range(40)}
    for workers in (2, 3, 8):
        dealt = deal(params, workers, muon_cost)
        costs = [muon_cost(shape) for shape in dealt.shapes]
        loads = np.bincount(dealt.owners, costs, minlength=workers)
        assert loads.max() <= max(max(costs), sum(costs) / workers * 4 / 3)


def test_small_buckets_do_not_make_a_collective_of_every_number_of_whole_tensors():
    dealt = deal({"a": np.zeros((900, 30), np.float32), "b": np.zeros(4000, np.float32)}, 2)
    vectors = vectors_of(None, 2, 4, dealt)
    assert isinstance(vectors, RowsInColumns)
    assert len(vectors.spans) <= 1024
    assert vectors.spans[0][0] == 0
    assert vectors.spans[-1][1] == dealt.width


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


def test_one_worker_runs_the_optimizer_itself():
    tx = jaxmpi.sharded(optax.adam(1e-2), comm=SoloComm())
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    assert isinstance(state, ShardedState)
    assert is_same(state.own, optax.adam(1e-2).init(params))
    got, _ = tx.update(params, tx.init(params), params)
    want, _ = optax.adam(1e-2).update(params, optax.adam(1e-2).init(params), params)
    assert is_same(got, want)


def test_one_worker_whose_step_donates_params_keeps_its_own_in_32_bits():
    tx, params = jaxmpi.sharded(optax.sgd(0.5), comm=SoloComm(), gather_wire="16"), {"w": jnp.arange(6.0)}
    state: Any = tx.init(params)
    assert copy.deepcopy(state).whole == pickle.loads(pickle.dumps(state)).whole

    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    after, state = jax.jit(step, donate_argnums=(0, 1))(params, state)
    assert is_same(after, {"w": np.arange(6.0, dtype=np.float32) / 2})
    assert is_same(state.own.masters, after)


# ---------------------------------------------------------------- bytes


class Sending(Counting):
    """`Counting`, of small gathers as well."""

    sent: np.ndarray

    def allgather(self, x: Any) -> Any:
        self.sent = self.sent + self.times * (self.size - 1) * sum(leaf.nbytes for leaf in jax.tree.leaves(x))
        return super().allgather(x)


@pytest.mark.parametrize(
    ("strategy", "wire", "hosts"),
    [
        ("asa32", "32", range(8)),
        ("hier-ring32", "32", (0, 1, 2, 3) * 2),
    ],
)
def test_googlenet_s_slices_are_as_many_bytes_on_the_wire_as_its_sums_and_clipping_a_float_to_each(
    strategy, wire, hosts
):
    like = {name: jax.ShapeDtypeStruct((8, *shape), jnp.float32) for name, shape in tree("googlenet").items()}
    whole, cut = (Sending(tuple(hosts)) for _ in range(2))
    clipped = shards_of(strategy, "mean", cut, BUCKET_BYTES, clip_norm=1.0, gather_wire=wire)

    def traced(move: Any) -> None:
        jax.eval_shape(jax.vmap(move, axis_name="w"), like)

    traced(lambda x: exchange(x, strategy, comm=whole))
    traced(lambda x: clipped.gather(clipped.scatter(x)[0], x, wire))
    assert (whole.sent > 2 * 7 / 8 * sum(math.prod(leaf.shape[1:]) for leaf in like.values())).all()
    assert (cut.sent <= 1.000_001 * whole.sent).all()


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.cut])
def test_the_table_knows_how_optimizers_can_be_cut(name):
    tx, cut = optimizer(Optim(name), lambda step: jnp.float32(0.01)), OPTIMIZERS[name].cut
    weights = PARAMS if cut == "entries" else FEW
    assert cut_of(Optim(name), tx, weights, 2) == cut == cut_for(tx, weights, 2)


def every(k: int) -> Any:
    """Return a test for every k-th step."""
    return lambda step: step % k == 0


def names_of(tree: Any) -> Any:
    """The name of each tensor in its layer."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, tree)


def is_kernel(tree: Any) -> Any:
    """True for kernels."""
    return jax.tree.map(lambda name: name == "kernel", names_of(tree))


def step_of_one_s_own(update: Any) -> Any:
    """SGD, and a function of all updates."""
    return optax.chain(optax.sgd(1e-3), optax.stateless(lambda updates, _: update(updates)))


def looped_mean(updates: Any) -> Any:
    """Updates, with a number of all of them from the second round of a loop on."""

    def body(i: Any, carry: Any) -> Any:
        tree, seen = carry
        return jax.tree.map(lambda u: u + seen, tree), jax.lax.cond(i > 0, optax.tree.norm, lambda _: seen, tree)

    return jax.lax.fori_loop(0, 3, body, (updates, jnp.float32(0)))[0]


def times_state(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    """Updates times numbers in the state."""
    return jax.tree.map(lambda x, factor: x * factor, updates, state), state


def by_rows_from_the_start() -> Any:
    """A rate of each tensor by its number of rows, in the state."""
    rate = lambda leaf: jnp.float32(leaf.shape[0] ** -0.5)  # noqa: E731
    return optax.GradientTransformation(lambda params: jax.tree.map(rate, params), times_state)


def by_number_from_the_start() -> Any:
    """A rate by the number of tensors, in the state."""
    rate = lambda params: jnp.float32(1 / len(jax.tree.leaves(params)))  # noqa: E731
    return optax.GradientTransformation(lambda params: jax.tree.map(lambda _: rate(params), params), times_state)


def halves_of_many_rows(updates: Any) -> Any:
    """More rows than any tensor has, but slices of two workers may have."""
    return jax.tree.map(lambda u: u / 2 if u.shape[0] > 100 else u, updates)


def by_rate(big: Any, small: Any) -> Any:
    """Two rates in the state, one for large tensors."""
    step = lambda u, _: jax.tree.map(lambda u: u * -(big if u.shape[0] > 50 else small), u)  # noqa: E731
    return optax.stateless(step)


def by_the_widest(updates: Any) -> Any:
    """A factor of each tensor by its width and the widest."""
    widest = max(u.shape[-1] for u in jax.tree.leaves(updates))
    return jax.tree.map(lambda u: u * (u.shape[-1] / widest), updates)


def turns_by_size(updates: Any) -> Any:
    """More turns of a loop for large tensors."""
    turns = lambda u: jax.lax.fori_loop(0, 3 if u.size > 200 else 1, lambda _, x: x * 0.9, u)  # noqa: E731
    return jax.tree.map(turns, updates)


def by_table(step: Any) -> Any:
    """A rate out of a table."""
    return jnp.array([1e-3, 1e-4, 1e-5])[jnp.sum(step >= jnp.array([100, 200]))]


def late(step: Any, **_: Any) -> Any:
    """From step 100 on."""
    return step >= 100


LAYER = {"bias": np.zeros(4, np.float32), "kernel": np.zeros((3, 5), np.float32), "scale": np.zeros(4, np.float32)}
LAYERS = {"first": LAYER, "second": LAYER}
ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


@pytest.mark.parametrize(
    "tx",
    [
        CLIPPED,
        optax.apply_if_finite(optax.adam(1e-3), 3),  # a worker whose leaves are finite would go on alone
        # They move params seldom, or begin to mix late.
        optax.MultiSteps(CLIPPED, 30).gradient_transformation(),
        optax.conditionally_mask(CLIPPED, every(4)),
        optax.chain(optax.conditionally_transform(optax.clip_by_global_norm(1.0), late), ADAM),
        # They go by how far params have moved, some of them or if a NaN has been replaced.
        optax.contrib.prodigy(),
        optax.partition({"bias": ADAM, "kernel": optax.contrib.prodigy(), "scale": ADAM}, names_of),
        # Every third tensor.
        optax.chain(optax.masked(optax.clip_by_global_norm(1.0), is_kernel), ADAM),
        optax.chain(optax.lars(1e-2), by_number_from_the_start()),
        optax.chain(optax.lars(1e-2), step_of_one_s_own(by_the_widest)),
        optax.add_noise(0.1, 0.5, jax.random.key(0)),
        # The mean over all tensors, behind a loop and a branch.
        step_of_one_s_own(looped_mean),
    ],
)
def test_what_mixes_tensors_is_found_in_its_equations(tx):
    with pytest.raises(UsageError, match=r"sharded: the (update of|state's) .* depends on other tensors"):
        cut_of(Optim("mine", transform=tx), tx, LAYERS, 2)


@pytest.mark.parametrize(
    ("tx", "cut"),
    [
        (optax.MultiSteps(optax.lamb(1e-3), 30).gradient_transformation(), "leaves"),
        (optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-3, 0.0, 100)), "entries"),
        (optax.radam(1e-3), "entries"),
        (optax.adam(by_table), "entries"),
        (optax.chain(ADAM, by_rows_from_the_start()), "leaves"),
        (optax.chain(ADAM, step_of_one_s_own(turns_by_size)), "leaves"),
        (
            optax.chain(ADAM, step_of_one_s_own(lambda u: jax.tree.map(lambda x: x * np.ones(x.shape, x.dtype), u))),
            "entries",
        ),
        (optax.inject_hyperparams(by_rate)(big=1e-4, small=1e-2), "leaves"),
        (optax.chain(ADAM, step_of_one_s_own(halves_of_many_rows)), "leaves"),
        (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(1e-3)), "leaves"),
        (optax.chain(optax.centralize(), optax.sgd(1e-3)), "leaves"),
    ],
)
def test_an_optimizer_of_one_s_own_is_cut_by_what_its_equations_mix(tx, cut):
    assert cut_of(Optim("mine", transform=tx), tx, FEW, 2) == cut


def test_an_optimizer_whose_state_gets_leaves_later_is_refused():
    tx = optax.chain(optax.monitor({"norm": optax.tree.norm}), ADAM)
    with pytest.raises(UsageError, match=r"an update of this optimizer gives other leaves, .*leave it unsharded"):
        cut_for(tx, FEW, 2)


def clipped_through_a_reference(updates: Any) -> Any:
    """By the global norm, summed where origins do not look."""
    total = jax.new_ref(jnp.float32(0))
    for u in jax.tree.leaves(updates):
        total[...] += jnp.sum(u * u)
    return jax.tree.map(lambda u: u / jnp.sqrt(total[...]), updates)


def called_back(updates: Any) -> Any:
    """Numbers of Python's."""
    return jax.tree.map(lambda u: jax.pure_callback(lambda x: x, u, u), updates)


@pytest.mark.parametrize("step", [clipped_through_a_reference, called_back])
def test_what_comes_from_elsewhere_than_equations_is_refused(step):
    tx = optax.chain(ADAM, step_of_one_s_own(step))
    with pytest.raises(UsageError, match=r"sharded: the update of .* is made by this optimizer of more than"):
        cut_for(tx, FEW, 2)


def test_a_state_of_other_shapes_after_an_update_is_refused():
    """The second update is another program than the first."""
    update = lambda updates, state, params=None: (updates, jnp.zeros(3))  # noqa: E731
    grown = optax.GradientTransformation(lambda params: jnp.zeros(()), update)
    with pytest.raises(UsageError, match=r"gives other leaves, shapes or dtypes than params have"):
        cut_for(optax.chain(ADAM, grown), FEW, 2)


def test_a_rate_for_each_column_is_not_cut_through_rows():
    """A slice is one entry wide, and would become as many columns as there are rates."""
    tx = optax.chain(optax.scale_by_adam(), optax.scale(-jnp.full(10, 1e-3)))
    assert cut_for(tx, {"head": np.zeros((128, 10), np.float32)}, 2) == "leaves"
    assert cut_for(tx, {"bias": np.zeros(10, np.float32)}, 2) == "leaves"  # of a slice of it there is no product at all


def test_slices_are_compared_for_the_workers_that_there_are():
    """Seven workers have 72 of 500 entries each; none of 2, 3, 4, 8 and 500 have a multiple of eight."""
    halved = step_of_one_s_own(lambda u: jax.tree.map(lambda x: x / 2 if x.shape[0] % 8 == 0 else x, u))
    tx, params = optax.chain(ADAM, halved), {"kernel": np.zeros((10, 50), np.float32)}
    assert [cut_for(tx, params, workers) for workers in (2, 7)] == ["entries", "leaves"]


def test_an_optimizer_that_fails_without_tensors_is_refused_where_a_worker_has_none():
    """Four tensors leave four of eight workers without one."""
    first = lambda u: jax.tree.map(lambda x: x / x.max(), u) if jax.tree.leaves(u)[0].size else u  # noqa: E731
    tx = step_of_one_s_own(first)
    assert cut_for(tx, {**LAYER, "more": LAYER["bias"]}, 2) == "leaves"
    with pytest.raises(UsageError, match=r"fails for a worker without tensors \(IndexError.*take fewer workers"):
        cut_for(tx, {**LAYER, "more": LAYER["bias"]}, 8)


def test_whole_tensors_need_an_optimizer_with_a_hash():
    """The layout of its state is kept by that hash; slices need no layout."""

    @dataclasses.dataclass
    class Halve:
        mean: bool = False

        def __call__(self, updates: Any, state: Any, params: Any = None) -> Any:
            return jax.tree.map(lambda u: u / 2 + (u.mean() if self.mean else 0), updates), state

    halved, centred = (optax.GradientTransformation(lambda params: (), Halve(mean)) for mean in (False, True))
    assert cut_for(halved, FEW, 2) == "entries"
    with pytest.raises(
        UsageError, match=r"got an optimizer, .* without a hash \(unhashable type: 'Halve'\); expected an"
    ):
        cut_for(centred, FEW, 2)


def test_the_tensors_of_each_worker_are_compared_as_its_cost_deals_them():
    """Two workers have two tensors each, or one and three."""

    def by_pairs(updates: Any) -> Any:
        factor = 0.5 if len(jax.tree.leaves(updates)) == 2 else 1.0
        return jax.tree.map(lambda u: u / u.max() * factor, updates)

    tx, params = step_of_one_s_own(by_pairs), [np.zeros(n, np.float32) for n in (10, 9, 8, 7)]
    assert cut_for(tx, params, 2, cost=lambda shape: 100.0 if tuple(shape) == (10,) else 1.0) == "leaves"
    with pytest.raises(UsageError, match=r"sharded: the update of \d depends on other tensors"):
        cut_for(tx, params, 2)


def test_whole_tensors_need_a_state_that_keeps_its_dtypes():
    """A branch of the program updates each worker's tensors, and all give arrays of the same dtypes."""
    cast = lambda updates, state, params=None: (updates, jnp.float32(state))  # noqa: E731
    first = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.bfloat16), cast)
    assert cut_for(optax.chain(ADAM, first), FEW, 2) == "entries"
    with pytest.raises(UsageError, match=r"gives other leaves, shapes or dtypes than params have, or than its init"):
        cut_for(optax.chain(optax.lars(1e-2), first), FEW, 2)


def test_what_is_printed_in_a_loop_is_no_reason_to_refuse():
    def printed(u: Any) -> Any:
        jax.debug.print("{}", u)
        return u * 0.9

    looped = lambda updates: jax.tree.map(lambda u: jax.lax.fori_loop(0, 3, lambda _, x: printed(x), u), updates)  # noqa: E731
    assert cut_for(optax.chain(ADAM, step_of_one_s_own(looped)), FEW, 2) == "entries"


def test_small_tensors_of_an_optimizer_may_be_cut_otherwise_than_large_ones():
    factored = optax.scale_by_factored_rms()
    assert cut_for(factored, {"kernel": np.zeros((12, 25), np.float32)}, 2) == "entries"
    assert cut_for(factored, {"kernel": np.zeros((128, 256), np.float32)}, 2) == "leaves"


def by_size(most: int) -> Any:
    """Adam, and decay of tensors of more entries alone."""
    return optax.chain(
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1, mask=lambda tree: jax.tree.map(lambda leaf: leaf.size > most, tree)),
        optax.scale(-1e-3),
    )


def step_by_size(other: Any) -> Any:
    """Adam, and a step of one's own."""
    update = lambda updates, params: jax.tree.map(other, updates, params)  # noqa: E731
    return optax.chain(optax.adam(1e-3), optax.stateless(update))


def by_rows() -> Any:
    """A rate of each tensor by its number of rows."""
    return optax.stateless(lambda updates, _: jax.tree.map(lambda leaf: leaf * (-1e-3 / leaf.shape[0]), updates))


def with_history() -> Any:
    """Adam beside ten numbers that are no moments of a tensor."""
    update = lambda updates, state, params=None: (updates, jnp.roll(state, 1))  # noqa: E731
    return optax.chain(optax.GradientTransformation(lambda params: jnp.arange(10.0), update), optax.adam(1e-3))


LARGE = {"kernel": np.zeros((128, 128), np.float32), "bias": np.zeros(16, np.float32)}


@pytest.mark.parametrize(
    ("tx", "goes"),
    [
        (by_size(200), True),
        (by_size(8000), True),
        (by_size(0), False),
        (by_rows(), True),
        # JAX has numbers in equations that move data, too.
        (step_by_size(lambda u, p: jnp.where(p.size > 8000, u + 0.1 * p, u)), True),
        (step_by_size(lambda u, p: jnp.clip(u, -(0.01 if p.size > 8000 else 9.0), 9.0)), True),
        (step_by_size(lambda u, p: u ** (3 if p.size > 8000 else 2)), True),
        (step_by_size(lambda u, p: jnp.clip(jnp.where(p > 0, u, 0.5 * u), -0.1, 0.1)), False),
        (with_history(), True),
    ],
)
def test_whether_an_optimizer_goes_by_sizes_is_seen_whatever_the_size(tx, goes):
    assert goes_by_shape(Traced.of(tx, LARGE), tx, LARGE, 2) == goes


def test_an_optimizer_that_goes_by_sizes_gets_whole_leaves():
    assert cut_for(by_size(8000), LARGE, 2) == "leaves"


def pruned(updates: Any, _: Any) -> Any:
    """With a constant array of each tensor's own shape."""
    odd = jax.tree.map(lambda leaf: np.arange(leaf.size).reshape(leaf.shape) % 2, LARGE)
    return jax.tree.map(jnp.multiply, updates, odd)


def centred(updates: Any, _: Any) -> Any:
    """A layer by its name, which a worker that updates other tensors has not."""
    return updates | {"kernel": updates["kernel"] - updates["kernel"].mean(axis=0, keepdims=True)}


def asserted(updates: Any, _: Any) -> Any:
    assert updates["kernel"].shape == (128, 128)
    return updates


@pytest.mark.parametrize("step", [pruned, centred, asserted])
def test_an_optimizer_that_takes_the_model_s_tensors_alone_cannot_be_cut(step):
    tx = optax.chain(optax.sgd(1e-3), optax.stateless(step))
    with pytest.raises(UsageError, match=r"sharded: this optimizer fails when it is traced for shares of the params"):
        cut_for(tx, LARGE, 2)
    assert is_linear(Optim("mine", transform=tx), tx, LARGE) == (step is centred)


def test_a_chain_that_exchanges_is_not_sharded_by_the_trainer():
    chain = optax.chain(jaxmpi.exchange_gradients("asa32"), optax.adam(1e-3))
    with pytest.raises(UsageError, match=r"optimizer 'mine' with sharded updates: got .* in it; .*optimizer alone"):
        cut_of(Optim("mine", transform=chain), chain, FEW, 2)


def test_a_chain_that_exchanges_is_not_sharded():
    tx = jaxmpi.sharded(optax.chain(jaxmpi.exchange_gradients("asa32"), optax.adam(1e-3)), comm=SoloComm())
    with pytest.raises(
        UsageError, match=r"jaxmpi.sharded\(tx\): got .* in tx; expected no messages: .*optimizer alone"
    ):
        tx.init(FEW)


def test_what_shared_memory_cannot_do_is_refused_with_what_can():
    hosts = AxisComm("w", 4, (0, 0, 1, 1))
    with pytest.raises(UsageError, match=r"got strategy 'shm' .* not for ranks on these hosts; expected ar, asa, ring"):
        shards_of("shm", "mean", hosts, None)
    with pytest.raises(UsageError, match=r"got gather_wire 16 with strategy 'shm'.*or take ar, asa, ring"):
        shards_of("shm", "mean", AxisComm("w", 4), None, gather_wire="16")
    assert set(with_halves((0, 0))) - set(with_halves((0, 0), "16")) == {"shm"}


def test_a_norm_below_0_is_refused():
    """It would turn the gradients round."""
    with pytest.raises(UsageError, match=r"clip_norm: got -1\.0; expected a largest norm >= 0"):
        shards_of("ring32", "mean", AxisComm("w", 4), None, clip_norm=-1.0)


def test_what_fills_a_slice_up_is_not_sent():
    """Its masters may have moved: all workers take up the moments of a param of one entry, whose gradient is 0 there.

    A block of an 8-bit wire takes its scale from its largest entry.
    """
    params = {"gain": jnp.float32(2), "bias": jnp.arange(5.0), "even": jnp.ones(4)}
    masters = jax.tree.map(lambda x: x + 1, Entries(2).own(params, 1))
    lacking = Entries(2).lacking(params, masters, 1)
    assert jax.tree.map(lambda x: x.tolist(), lacking) == {"gain": 0.0, "bias": [1.0, 1.0, 0.0], "even": [1.0, 1.0]}
    masters = jax.tree.map(lambda x: x + 1, Entries(2).own(params, 0))
    assert float(Entries(2).lacking(params, masters, 0)["gain"]) == 1.0


def test_new_params_take_a_wire_that_a_user_adds(monkeypatch):
    monkeypatch.setitem(WIRES, "own", WIRES["8"])
    assert shards_of("ring:own", "mean", AxisComm("w", 4), None, gather_wire="own").gather_wire == "own"
    assert "asa" in with_halves((0, 0), "own")


def test_schedule_free_optimizers_are_refused():
    tx = jaxmpi.sharded(optax.contrib.schedule_free_adamw(1e-3), comm=SoloComm())
    with pytest.raises(UsageError, match=r"jaxmpi.sharded\(tx\): got a schedule-free optimizer.*leave it unsharded"):
        tx.init(FEW)


def test_params_of_other_types_and_no_params_are_refused():
    tx = jaxmpi.sharded(optax.adam(1e-3), comm=SoloComm())
    with pytest.raises(UsageError, match=r"sharded: w is bfloat16; expected float32"):
        tx.init({"w": jnp.zeros(3, jnp.bfloat16)})
    with pytest.raises(UsageError, match="got no params"):
        tx.update({"w": jnp.zeros(3)}, tx.init({"w": jnp.zeros(3)}))


# ---------------------------------------------------------------- checkpoints

TX = optax.adamw(1e-2)


def states_of(whole: Any, chunks: tuple[int, ...]) -> dict[int, Any]:
    """States of all workers with these slices of the optimizer's state; without any, each has all of it."""
    cut = [slices_of(whole, chunk, len(chunks)) for chunk in chunks] if chunks else [whole] * 3
    return {
        worker: create(
            PARAMS, {"mean": np.full(1, worker, np.float32)}, jax.tree.map(np.asarray, each), seed=1, worker=worker
        )
        for worker, each in enumerate(cut)
    }


EIGHT = (4, 0, 5, 1, 6, 2, 7, 3)


@pytest.mark.parametrize("before", [(), (1, 0), (1, 2, 0), EIGHT])
@pytest.mark.parametrize("after", [(), (0,), (0, 1, 2), EIGHT])
def test_any_number_of_workers_takes_up_what_any_other_has_left(tmp_path, before, after):
    whole = TX.init(PARAMS)
    noise = lambda x: RNG.standard_normal(x.shape).astype(np.float32) if x.dtype == jnp.float32 else x + 7  # noqa: E731
    whole = jax.tree.map(lambda x: np.asarray(noise(x)), whole)
    kept, wanted = states_of(whole, before), states_of(whole, after)
    save(
        tmp_path,
        files_of(kept, not before),
        SoloProcesses(),
        step=0,
        workers=len(kept),
        extra={"chunks": list(before)} if before else {},
        keep=Retention(1),
    )
    like = {worker: jax.tree.map(np.zeros_like, state) for worker, state in wanted.items()}
    shapes = dict(named_leaves(jax.eval_shape(TX.init, PARAMS)))
    saved = restore(
        tmp_path,
        like,
        SoloProcesses(),
        workers=len(wanted),
        replicated=not after,
        slicing=Slicing(shapes, after, Entries(len(after)).restored if after else None),
        say=pytest.fail,
    )
    assert saved
    owner = dict(enumerate(after))
    for worker, state in saved.states.items():
        for (name, got), (_, want) in zip(named(state.rule_state), named(wanted[worker].rule_state), strict=True):
            # A single entry is the first slice's; all others may hold anything.
            if want.size > 1 or owner.get(worker, 0) == 0:
                assert is_same(got, want), name
        assert is_same(state.params, PARAMS)


LAMB = optax.lamb(1e-2)
FORMS = ["whole", "entries 2", "entries 8", "leaves 2", "leaves 3", "masters, entries 3", "masters, leaves 8"]


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
        states = [whole] * workers
        return made_of(states, whole), Slicing(dict(named_leaves(shapes))), {}
    cut = Leaves(deal(FEW, workers)) if words[0] == "leaves" else Entries(workers)
    cut = cut.for_state_of(LAMB)
    chunks = tuple(range(workers))[::-1]
    leaves = {name: np.asarray(leaf) for name, leaf in named(whole)}

    def like(chunk: int) -> Any:
        own = lambda tree: jax.eval_shape(cut.own, tree, chunk)  # noqa: E731
        of_tx = jax.eval_shape(functools.partial(cut.init, LAMB), FEW, chunk)
        return whole | {
            "average": own(FEW),
            "of_rule": {"of_tx": of_tx, "masters": own(FEW)} if has_masters else of_tx,
        }

    states = [cut.restored(like(chunk), chunk, leaves.__getitem__) for chunk in chunks]
    return (
        made_of(states, whole),
        Slicing(dict(named_leaves(shapes)), chunks, cut.restored),
        {"chunks": list(chunks), "cut": cut.name, "saved": cut.saved},
    )


def made_of(states: list[Any], whole: Any) -> dict[int, Any]:
    return {
        worker: create(FEW, {}, jax.tree.map(np.asarray, each), seed=1, worker=worker)
        for worker, each in enumerate(states)
    }


@pytest.mark.parametrize("before", FORMS)
def test_whole_leaves_and_masters_are_taken_up_in_any_other_form(tmp_path, before):
    noise = lambda x: RNG.standard_normal(np.shape(x)).astype(np.float32) if x.dtype == jnp.float32 else x + 7  # noqa: E731
    noisy = functools.partial(jax.tree.map, noise)
    masters = noisy(FEW)
    whole = {"of_rule": {"of_tx": noisy(LAMB.init(FEW)), "masters": masters}, "average": noisy(FEW)}
    whole = jax.tree.map(np.asarray, whole | {"averaged": np.int32(3)})
    kept, _, extra = held_by(before, whole)
    if extra:
        saved = extra.pop("saved")
        kept = {w: each._replace(rule_state=saved(each.rule_state, extra["chunks"][w])) for w, each in kept.items()}
    facts = {"step": 0, "workers": len(kept), "extra": extra, "keep": Retention(1)}
    where = save(tmp_path, files_of(kept, not extra), SoloProcesses(), **facts)
    exported = model_of(where)
    assert is_same([exported[f"params/{name}"] for name in FEW], [whole["average"][name] for name in FEW])
    had = before.startswith("masters")
    for after in FORMS:
        has = after.startswith("masters")
        # Masters that are dropped become the params; those that begin are the params.
        truth = whole if had else whole | {"of_rule": whole["of_rule"] | {"masters": FEW}}
        wanted, slicing, _ = held_by(after, truth)
        like = {worker: jax.tree.map(np.zeros_like, state) for worker, state in wanted.items()}
        found = restore(
            tmp_path, like, SoloProcesses(), workers=len(wanted), replicated=after == "whole", slicing=slicing
        )
        assert found, (before, after)
        for worker, state in found.states.items():
            assert is_same(state.rule_state, wanted[worker].rule_state), (before, after)
            assert is_same(state.params, masters if had and not has else FEW), (before, after)


def named(tree: Any) -> list[tuple[str, Any]]:
    return named_leaves(tree)


# ---------------------------------------------------------------- the trainer
