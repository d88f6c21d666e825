"""The optimizer between the halves of the exchange: the bits of workers that update all, with a share of the state."""

import functools
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
from jaxmpi.allreduce.api import exchange, exchange_gradients
from jaxmpi.allreduce.sharded import Shards, shards_of
from jaxmpi.checkpoint import format
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm
from jaxmpi.comm.control import SoloProcesses
from jaxmpi.config.optim import Optim
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.core.slices import mixed, slices_of
from jaxmpi.core.train_state import create
from jaxmpi.optim.optimizers import OPTIMIZERS, check_splits, optimizer
from jaxmpi.rules import base
from jaxmpi.rules.gradients import gradients
from launching import ROOT, train, train_here
from tolerances import U

RNG = np.random.default_rng(0)
PARAMS = {
    "kernel": RNG.standard_normal((7, 5)).astype(np.float32),  # no multiple of any number of workers
    "bias": RNG.standard_normal(5).astype(np.float32),
    "scale": np.float32(1.5) * np.ones((), np.float32),
    "big": RNG.standard_normal((3, 40, 2)).astype(np.float32),
    "empty": np.zeros((0, 4), np.float32),
}
STEPS = 200
LAYOUTS = [(2, None), (3, None), (4, (0, 1, 0, 1)), (8, (0, 0, 1, 1, 0, 0, 1, 1))]
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


class SplitShards:
    """Halves that are programs of their own, as the trainer has them: XLA fuses nothing across."""

    def __init__(self, shards: Shards) -> None:
        self.chunks, self.size, self.gives_square = shards.chunks, shards.size, shards.gives_square
        self.scatter, self.gather = program(shards.scatter), program(shards.gather)

    def chunk(self) -> jax.Array:
        return jnp.asarray(self.chunks)


def trained(tx: Any, strategy: str, comm: AxisComm, *, is_sharded: bool, clip_norm: float = 0.0) -> tuple[Any, Any]:
    """Params [workers, ...] and the rule's state after STEPS."""
    mean = program(functools.partial(exchange, strategy=strategy, comm=comm, bucket_bytes=4))
    shards = SplitShards(shards_of(strategy, "mean", comm, 4 << 20, clip_norm)) if is_sharded else None
    rule = gradients(tx, base.Exchange(mean, mean, program, shards=shards))
    params = tiled(PARAMS, comm.size)
    if rule.sharding:
        state = program(rule.sharding.init)(params, jnp.asarray(rule.sharding.chunks))
    else:
        state = program(rule.init)(params)
    rng = np.random.default_rng(1)
    curvature = jax.tree.map(lambda x: rng.uniform(0.5, 2, (comm.size, *x.shape)).astype(np.float32), PARAMS)
    gradient = program(lambda p, c, t: jax.tree.map(lambda w, a: a * (w - 0.3 * jnp.sin(a * t)), p, c))
    for t in range(STEPS):
        grads = gradient(params, curvature, jnp.full(comm.size, t, jnp.float32))
        params, state = rule.update(grads, state, params)
    return params, state


# ---------------------------------------------------------------- two halves


@pytest.mark.parametrize(("workers", "hosts"), LAYOUTS)
def test_two_halves_are_the_whole_and_each_worker_has_its_chunk(workers, hosts):
    comm = AxisComm("w", workers, hosts)
    x = RNG.standard_normal((workers, workers * 6)).astype(np.float32)
    able = with_halves(comm.hosts)
    assert {"asa", "ring", "hier-asa", "hier-ring"} <= set(able)
    for name in able:
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


@pytest.mark.parametrize("strategy", ["ar", "tree:32", "root:16", "topk1", "none"])
def test_a_strategy_without_halves_is_refused_with_those_that_have(strategy):
    with pytest.raises(UsageError, match=f"got strategy '{strategy}'.*asa, ring"):
        shards_of(strategy, "mean", SoloComm(), None)


# ---------------------------------------------------------------- the same params


@pytest.mark.parametrize(
    ("workers", "hosts", "strategy", "config"),
    [
        (3, None, "asa32", ADAMW),
        (4, None, "ring32", Optim("momentum", weight_decay=0.01)),
        (4, (0, 1, 0, 1), "hier-ring32", ADAMW),
        (3, None, "shm", ADAMW),
    ],
)
def test_params_are_those_of_workers_that_update_all_bit_for_bit(workers, hosts, strategy, config):
    comm, tx = AxisComm("w", workers, hosts), optimizer(config, lambda step: jnp.float32(0.01))
    whole, all_of_it = trained(tx, strategy, comm, is_sharded=False)
    params, state = trained(tx, strategy, comm, is_sharded=True)
    assert is_same(params, whole)
    assert not is_same(params, tiled(PARAMS, workers))
    # Each worker's share of the state: a slice of every leaf that is one of params', rounded up to whole entries.
    floats = lambda tree: sum(x[0].nbytes for x in jax.tree.leaves(tree) if x.dtype == jnp.float32)  # noqa: E731
    moments = floats(all_of_it) // sum(leaf.nbytes for leaf in PARAMS.values())
    assert floats(state) <= floats(all_of_it) / workers + 4 * moments * len(PARAMS)


def test_clipping_by_the_global_norm_is_that_of_the_whole_gradient():
    comm = AxisComm("w", 3)
    one = optimizer(Optim("sgd", clip_norm=0.5), lambda step: jnp.float32(0.01))
    bare = optimizer(Optim("sgd"), lambda step: jnp.float32(0.01))
    whole, _ = trained(one, "asa32", comm, is_sharded=False)
    params, _ = trained(bare, "asa32", comm, is_sharded=True, clip_norm=0.5)
    unclipped, _ = trained(bare, "asa32", comm, is_sharded=True)
    # A norm is a sum of 281 squares and a root; a step is at most lr * 0.5, so each is off by that times (281 + 4) u.
    off = STEPS * 0.01 * 0.5 * (281 + 4) * U
    for name in ("kernel", "bias", "scale", "big"):
        rounding = STEPS * U * np.abs(whole[name]).max()
        assert np.abs(params[name] - whole[name]).max() <= off + rounding
    assert np.abs(unclipped["big"] - whole["big"]).max() > 100 * off


def test_in_a_loop_of_one_s_own_updates_are_those_of_the_chain_bit_for_bit():
    comm = AxisComm("w", 3)
    chain = optax.chain(exchange_gradients("asa32", comm=comm), optax.adam(1e-2))
    cut = jaxmpi.sharded(optax.adam(1e-2), "asa32", comm=comm)
    grads = jax.tree.map(lambda x: RNG.standard_normal((3, *x.shape)).astype(np.float32), PARAMS)

    def stepped(tx: Any) -> tuple[Any, Any]:
        def step(params: Any, grads: Any) -> tuple[Any, Any]:
            state = tx.init(params)
            for scale in (1.0, 0.5):
                updates, state = tx.update(jax.tree.map(lambda g, s=scale: s * g, grads), state, params)
            return updates, state

        return jax.vmap(step, axis_name="w")(tiled(PARAMS, 3), grads)

    (updates, _), (sliced, state) = stepped(chain), stepped(cut)
    assert is_same(sliced, updates)
    assert jax.tree.map(lambda x: x.shape[1:], state[0].mu)["kernel"] == (12, 1)


def test_one_worker_runs_the_optimizer_itself():
    tx = jaxmpi.sharded(optax.adam(1e-2), comm=SoloComm())
    params = jax.tree.map(jnp.asarray, PARAMS)
    assert is_same(tx.init(params), optax.adam(1e-2).init(params))
    got, _ = tx.update(params, tx.init(params), params)
    want, _ = optax.adam(1e-2).update(params, optax.adam(1e-2).init(params), params)
    assert is_same(got, want)


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_knows_which_optimizers_can_be_cut(name):
    tx = optimizer(Optim(name), lambda step: jnp.float32(0.01))
    if OPTIMIZERS[name].elementwise:
        check_splits(Optim(name), tx, PARAMS)
        assert mixed(tx, PARAMS) == ""
        return
    # Schedule-free ones could be cut, but what they evaluate is made of all of z.
    assert mixed(tx, PARAMS) or OPTIMIZERS[name].averages
    with pytest.raises(UsageError, match=rf"shard_update: got on with optimizer {name},.*expected sgd, .*adamw"):
        check_splits(Optim(name), tx, PARAMS)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        optax.apply_if_finite(optax.adam(1e-3), 3),  # a worker whose slice is finite would go on alone
        optax.add_noise(0.1, 0.5, 0),  # equal noise for all slices
    ],
)
def test_what_mixes_entries_is_found_by_trying(tx):
    with pytest.raises(UsageError, match=r"sharded: the update of .* mixes entries"):
        check_splits(Optim("mine", transform=tx), tx, PARAMS)


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


@pytest.mark.parametrize("before", [(), (0,), (1, 0), (1, 2, 0)])
@pytest.mark.parametrize("after", [(), (0,), (1, 0), (0, 1, 2), (3, 1, 2, 0)])
def test_any_number_of_workers_takes_up_what_any_other_has_left(tmp_path, before, after):
    whole = TX.init(PARAMS)
    noise = lambda x: RNG.standard_normal(x.shape).astype(np.float32) if x.dtype == jnp.float32 else x + 7  # noqa: E731
    whole = jax.tree.map(lambda x: np.asarray(noise(x)), whole)
    kept, wanted = states_of(whole, before), states_of(whole, after)
    format.save(
        tmp_path,
        format.files_of(kept, not before),
        SoloProcesses(),
        step=0,
        workers=len(kept),
        extra={"chunks": list(before)} if before else {},
        keep=format.Retention(1),
    )
    like = {worker: jax.tree.map(np.zeros_like, state) for worker, state in wanted.items()}
    shapes = jax.eval_shape(TX.init, PARAMS)
    saved = format.restore(
        tmp_path,
        like,
        SoloProcesses(),
        workers=len(wanted),
        replicated=not after,
        slicing=format.Slicing(shapes, after),
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


def named(tree: Any) -> list[tuple[str, Any]]:
    return named_leaves(tree)


# ---------------------------------------------------------------- the trainer


@pytest.mark.e2e
def test_a_run_has_the_bits_of_workers_that_update_all_and_goes_on_without_them(tmp_path):
    experiment = str(ROOT / "experiments" / "digits.py")
    options = ["--optim.name", "adamw", "--optim.weight-decay", "0.01", "--effective-batch", "48", "--seed", "3"]
    options += ["--exchange.strategy", "asa32", "--checkpoint-every", "10st", "--eval-every", "40st"]
    for word in ("on", "off"):
        where = ["--run-dir", str(tmp_path / word), "--train-for", "20st", "--exchange.shard-update", word]
        ended = train(2, experiment, *options, *where, env={"XLA_FLAGS": ""})  # bits are those of users' programs
        assert ended.code == 0, ended.out
        assert ("updates sharded over 2 workers" in ended.out) == (word == "on")
    for word in ("on", "off"):
        ended = train_here(experiment, *options, "--run-dir", str(tmp_path / word), "--resume", "--train-for", "24st")
        assert ended.code == 0, ended.out
    for step in (20, 24):
        on, off = (jaxmpi.load(tmp_path / word, step=step).params for word in ("on", "off"))
        assert is_same(on, off), step
