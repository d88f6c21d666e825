"""Sharded updates over MPI."""

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmpi
from jaxmpi.allreduce import early_scatter
from jaxmpi.allreduce.buckets import Order
from jaxmpi.allreduce.comm_thread import exchange_handlers
from jaxmpi.allreduce.zero import make_zero
from jaxmpi.comm import shared_params
from jaxmpi.comm.job import processes
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.comm.shared_params import SharedParams
from jaxmpi.comm.topology import AXIS
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.pytrees import tree_digest
from jaxmpi.core.sharding import ElementSharding, assign_tensors
from jaxmpi.rules.base import Exchange
from jaxmpi.rules.gradients import gradients
from jaxmpi.runtime import host_callbacks

COMM = jaxmpi.world()
pytestmark = pytest.mark.e2e  # optimizers are tried out, and take seconds to compile
SIZE, RANK = COMM.size, int(COMM.rank)
on_cpus = pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is refused on GPUs, or memory is the GPU's")
SHAPES = {"kernel": (97, 31), "scale": (), "big": (3, 3, 64, 64)}


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Optax counts on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def tree(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}


def run_steps(tx: optax.GradientTransformation, jit: Any, steps: int = 3) -> tuple[Any, Any]:
    """Updates and state after some steps, each with gradients of its own on every rank."""
    params, update = tree(0), jit(tx.update)
    state = tx.init(params)
    for step in range(1, steps + 1):
        updates, state = update(tree(step * SIZE + RANK), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize(
    ("strategy", "jit"),
    [("asa32", jax.jit), ("ring32", lambda function: function), ("shm", lambda function: function)],
    ids=["in jit", "outside", "in shared memory"],
)
def test_updates_are_those_of_the_chain_and_equal_on_all_ranks(strategy, jit):
    tx = optax.adam(1e-2) if jit is jax.jit else optax.sgd(1e-2, momentum=0.9)  # outside jit Adam compiles for seconds
    chain = optax.chain(jaxmpi.exchange_gradients(strategy, bucket_bytes=4), tx)
    steps = 3 if jit is jax.jit else 12
    whole, _ = run_steps(chain, jit, steps)
    params, state = run_steps(jaxmpi.sharded(tx, "element", strategy), jit, steps)
    # In one program XLA may multiply constants beforehand: 8 roundings of a step of 0.01, one of the sum.
    off = 3 * 2.0**-24 * (8 * 0.01 + 8) if jit is jax.jit else 0.0
    for name in SHAPES:
        assert np.abs(params[name]).max() < 8
        np.testing.assert_allclose(np.asarray(params[name]), np.asarray(whole[name]), rtol=0, atol=off, err_msg=name)
    assert len(set(processes().allgather_object(tree_digest(jax.device_get(params))))) == 1
    assert -(-97 * 31 // SIZE) in [leaf.size for leaf in jax.tree.leaves(state.shard)]


@pytest.mark.skipif(SIZE == 1, reason="one worker has no shards")
@pytest.mark.parametrize("strategy", ["asa:16", "hier-ring:32"])
def test_shards_sent_while_a_program_runs_equal_those_sent_after_it(strategy):
    """Sums, as XLA may divide by three workers as a product with 1/3 in one of the two programs."""
    exchange_handlers()  # all ranks make them together

    def scatter_and_gather(order: Order | None) -> Any:
        zero = make_zero(strategy, "sum", COMM, 16 << 10, clip_norm=1.0, gather_wire="16", order=order)
        computed = (order or Order()).record(lambda x: (jax.tree.map(lambda leaf: leaf * 2, x),))
        return jax.jit(lambda x: zero.gather(zero.scatter(computed(x)[0])[0], x, "16"))(tree(RANK))

    overlapped, alone = scatter_and_gather(Order()), scatter_and_gather(None)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), overlapped, alone)


@pytest.mark.skipif(SIZE == 1, reason="one worker has no shards")
@pytest.mark.parametrize("strategy", ["ring32", "shm"])
@pytest.mark.parametrize("shapes", [[(300_000,), (7, 5), (), (0, 3)], []], ids=["mixed", "none"])
def test_scatter_and_gather_outside_jit_have_the_bits_of_those_inside(strategy, shapes):
    """Also for a tree of a local class, which pickle cannot send to the other ranks of a host."""

    @jax.tree_util.register_pytree_node_class
    class Local:
        def __init__(self, leaves: Any) -> None:
            self.leaves = leaves

        def tree_flatten(self) -> tuple[Any, Any]:
            return self.leaves, None

        @classmethod
        def tree_unflatten(cls, _: Any, leaves: Any) -> "Local":
            return cls(leaves)

    rng = np.random.default_rng(RANK)
    given = Local([jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes])
    zero = make_zero(strategy, "mean", COMM, 4 << 20)
    scatter_and_gather = lambda tree: zero.gather(zero.scatter(tree)[0], tree)  # noqa: E731
    whole, inside = scatter_and_gather(given), jax.jit(scatter_and_gather)(given)
    assert isinstance(whole, Local)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), whole, inside)
    clipped = zero._replace(clip_norm=0.1).scatter(given)
    norm = np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in whole.leaves))
    # A sum of n squares in f32 is off by less than n u of itself.
    np.testing.assert_allclose(np.sqrt(float(clipped[1])), norm, rtol=sum(x.size for x in whole.leaves) * 2.0**-24)


@pytest.mark.skipif(SIZE == 1 or jax.local_device_count() < 2, reason="ranks with several devices")
@pytest.mark.parametrize("strategy", ["asa32", "shm"])
def test_devices_of_all_ranks_clip_by_the_norm_of_the_whole_gradient(strategy):
    mesh = Mesh(np.array(jax.local_devices()[:2]), (AXIS,))
    zero = make_zero(strategy, "mean", COMM, None, None, 0.5, mesh=mesh)
    each, where = [tree(worker) for worker in range(2 * SIZE)], NamedSharding(mesh, PartitionSpec(AXIS))
    local = each[2 * RANK : 2 * RANK + 2]
    _, norm = zero.scatter(jax.tree.map(lambda *x: jax.device_put(np.stack(x), where), *local))
    means = [np.mean([np.asarray(grads[name], np.float64) for grads in each], 0) for name in SHAPES]
    whole = np.sqrt(sum(np.square(mean).sum() for mean in means))
    np.testing.assert_allclose(np.sqrt(np.asarray(norm)), whole, rtol=sum(x.size for x in means) * 2.0**-24)


@pytest.mark.skipif(SIZE == 1, reason="one worker is compared with nobody")
@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["outside", "in jit"])
def test_ranks_that_assign_tensors_differently_are_refused(way):
    """Shards have one length, so messages would match: rank 1 assigns the two kernels the other way round."""
    params = {"a": jnp.ones((4, 5)), "b": jnp.ones((5, 4))}
    tx = jaxmpi.sharded(optax.lars(1e-2), "tensor", "asa32", cost=lambda shape: 2.0 if shape[RANK > 0] == 4 else 1.0)
    state = tx.init(params)
    with pytest.raises(jaxmpi.UsageError, match=r"rank 1: strategy: got asa:32, .*expected asa:32, "):
        way(tx.update)(params, state, params)


@pytest.mark.skipif(SIZE == 1, reason="one worker has nobody to sum with")
def test_ranks_agree_on_the_name_of_a_new_shared_sum():
    """One rank of a host traces for all."""
    part, world = COMM.split(RANK), COMM.split(0)
    assert isinstance(part, MpiComm)
    assert isinstance(world, MpiComm)
    if RANK == SIZE - 1:
        assert part.shared_sum.name
    assert len(set(world.processes.allgather_object(world.shared_sum.name))) == 1


# ---------------------------------------------------------------- params that the ranks of a host share


@on_cpus
@pytest.mark.skipif(SIZE == 1, reason="one worker has no shards")
@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_shared_params_equal_gathered_ones_and_stay_in_place(name):
    assignment = assign_tensors(tree(0), SIZE) if name == "lars" else None
    tx, control = getattr(optax, name)(1e-2, momentum=0.9), processes()

    def steps(host: Any) -> Iterator[Any]:
        """Params after each step, with gradients of its own on every rank."""
        zero = make_zero("shm", "mean", COMM, None, assignment, host=host)
        rule = gradients(tx, Exchange(lambda g: g, lambda g: g, COMM.jit, zero=zero))
        assert rule.sharding
        params, state = tree(RANK if host else 0), COMM.jit(rule.sharding.init)(tree(0), np.int32(RANK))
        if zero.shared_params:
            params = zero.shared_params.fill(params)  # of rank 0
            references.append(weakref.ref(zero.shared_params))
        for step in range(1, 4):
            params, state = rule.update(tree(step * SIZE + RANK), state, params)
            yield params

    before, references = None, list[Any]()
    for gathered, shared in zip(steps(None), steps(control), strict=True):
        for leaf in SHAPES:
            np.testing.assert_array_equal(np.array(shared[leaf]), np.asarray(gathered[leaf]), err_msg=leaf)
            if before:
                assert before[0][leaf].is_deleted()
                assert before[1][leaf] == shared[leaf].unsafe_buffer_pointer()
        before = shared, {leaf: shared[leaf].unsafe_buffer_pointer() for leaf in SHAPES}
    del before, shared
    gc.collect()
    assert [made() for made in references] == [None]  # a run that has ended keeps no memory


def gradients_of_language_model(params: Any, tokens: jax.Array) -> tuple:
    """Gradients, loss and |gradients|^2 of a small language model."""

    def loss(params: Any) -> jax.Array:
        x = jnp.take(params["words"], tokens, axis=0)
        carry, outputs = jax.lax.scan(lambda c, x: (y := jnp.tanh(c @ params["cell"] + x), y), jnp.zeros((3, 5)), x)
        logits = (params["gain"] * (outputs + carry) + params["bias"]) @ params["out"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return grads, value, sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(grads))


def pass_through(leaves: list[jax.Array], through: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Pass this rank's whole gradients on where the early exchange would scatter them."""
    through = [*leaves, *through]
    found = host_callbacks.call("passed on", through, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in through])
    return found[: len(leaves)], found[len(leaves) :]


def copy_operands(operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    """Copy operands to results, as a host callback."""
    for x, to in zip(operands, results, strict=True):
        np.copyto(to, x)


@on_cpus
@pytest.mark.skipif(SIZE == 1, reason="one worker has no shards")
def test_gradients_scattered_early_give_the_params_of_those_scattered_whole(monkeypatch):
    monkeypatch.setattr(early_scatter, "LARGE", 64)  # the zeros of the scan and of the lookup
    shapes = {"words": (11, 5), "cell": (5, 5), "bias": (5,), "gain": (), "out": (5, 11)}
    rng = np.random.default_rng(0)
    begin = {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}

    def steps(*, early: bool) -> Any:
        zero = make_zero("shm", "mean", COMM, 100, clip_norm=0.1, host=processes(), early=early)
        rule = gradients(optax.sgd(1e-2, momentum=0.9), Exchange(lambda g: g, lambda g: g, COMM.jit, zero=zero))
        assert rule.sharding
        assert zero.shared_params
        assert isinstance(COMM, MpiComm)
        whole = early_scatter.scattering(gradients_of_language_model, 100, pass_through)
        differentiate = COMM.jit(
            zero.scatter_early(gradients_of_language_model, COMM.shared_sum.name) if early else whole
        )
        state, params = COMM.jit(rule.sharding.init)(begin, np.int32(RANK)), zero.shared_params.fill(begin)
        seen = []
        for step in range(3):
            tokens = np.random.default_rng(step * SIZE + RANK).integers(0, 11, (4, 3))
            grads, *others = differentiate(params, tokens)
            seen.append(np.array(others))
            params, state = rule.update(grads, state, params)
        return seen, jax.tree.map(np.array, params)

    host_callbacks.register("passed on", copy_operands)
    try:
        jax.tree.map(np.testing.assert_array_equal, steps(early=True), steps(early=False))
    finally:
        host_callbacks.forget("passed on")


def shared_zeros() -> tuple[SharedParams, dict[str, jax.Array], dict[str, jax.Array]]:
    """Shared params, their arrays of zeros, and this rank's shard of ones."""
    shared = SharedParams(processes(), ElementSharding(SIZE), RANK)
    return shared, shared.fill({"w": np.zeros(4 * SIZE, np.float32)}), {"w": jnp.ones(4)}


@pytest.mark.skipif(SIZE == 1, reason="one worker shares nothing")
def test_no_rank_writes_shared_params_before_all_have_released_the_old_ones():
    shared, params, shard = shared_zeros()
    time.sleep(0.5 * (RANK == SIZE - 1))  # the others wait to write
    before = np.array(params["w"])
    assert np.array(shared.update(shard)["w"]).all()
    assert not before.any()


@pytest.mark.skipif(SIZE == 1, reason="one worker shares nothing")
def test_a_retained_view_of_shared_params_is_an_error_and_does_not_change(monkeypatch):
    monkeypatch.setattr(shared_params, "LET_GO_S", 0.5)
    shared, params, shard = shared_zeros()
    view = np.asarray(params["w"]) if RANK == 0 else None
    message = r"local rank 0: got w.*np\.array" if RANK == 0 else "local rank 0 failed in an update"
    with pytest.raises((UsageError, TrainingError), match=message):
        shared.update(shard)
    assert view is None or not view.any()
    processes().barrier()


@pytest.mark.skipif(SIZE == 1, reason="one worker shares nothing")
def test_refilling_shared_params_deletes_the_previous_arrays():
    shared, params, shard = shared_zeros()
    assert shared.fill(params)["w"] is params["w"]  # they are there already
    again = shared.fill({"w": np.full(4 * SIZE, 2, np.float32)})  # a rollback
    assert params["w"].is_deleted()
    assert (np.array(again["w"]) == 2).all()
    assert np.array(shared.update(shard)["w"]).all()
    assert again["w"].is_deleted()
