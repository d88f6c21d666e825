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


def stepped(tx: optax.GradientTransformation, jit: Any, steps: int = 3) -> tuple[Any, Any]:
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
    chain = optax.chain(jaxmpi.exchange_gradients(strategy, bucket_bytes=4), optax.adam(1e-2))
    steps = 3 if jit is jax.jit else 12
    whole, _ = stepped(chain, jit, steps)
    params, state = stepped(jaxmpi.sharded(optax.adam(1e-2), "element", strategy), jit, steps)
    # In one program XLA may multiply constants beforehand: 8 roundings of a step of 0.01, one of the sum.
    off = 3 * 2.0**-24 * (8 * 0.01 + 8) if jit is jax.jit else 0.0
    for name in SHAPES:
        assert np.abs(params[name]).max() < 8
        np.testing.assert_allclose(np.asarray(params[name]), np.asarray(whole[name]), rtol=0, atol=off, err_msg=name)
    assert len(set(processes().allgather_object(tree_digest(jax.device_get(params))))) == 1
    assert state.shard[0].mu["kernel"].size == -(-97 * 31 // SIZE)


@pytest.mark.skipif(SIZE == 1, reason="one worker has no slices")
@pytest.mark.parametrize("strategy", ["asa:16", "hier-ring:32"])
def test_slices_that_travel_beside_a_program_are_those_that_do_not(strategy):
    """Sums, as XLA may divide by three workers as a product with 1/3 in one of the two programs."""
    exchange_handlers()  # all ranks make them together

    def there_and_back(beside: Order | None) -> Any:
        halves = make_zero(strategy, "sum", COMM, 16 << 10, clip_norm=1.0, gather_wire="16", order=beside)
        order = beside or Order()
        computed = order.record(lambda x: (jax.tree.map(lambda leaf: leaf * 2, x),))
        return jax.jit(lambda x: halves.gather(halves.scatter(computed(x)[0])[0], x, "16"))(tree(RANK))

    beside, alone = there_and_back(Order()), there_and_back(None)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), beside, alone)


@pytest.mark.skipif(SIZE == 1, reason="one worker has no slices")
@pytest.mark.parametrize("strategy", ["ring32", "shm"])
@pytest.mark.parametrize("shapes", [[(300_000,), (7, 5), (), (0, 3)], []], ids=["mixed", "none"])
def test_halves_in_pieces_have_the_bits_of_those_in_one_program(strategy, shapes):
    """Also of a tree of a class that the other ranks of a host could not be sent: pickle knows nothing of it."""

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
    halves = make_zero(strategy, "mean", COMM, 4 << 20)
    there_and_back = lambda tree: halves.gather(halves.scatter(tree)[0], tree)  # noqa: E731
    whole, inside = there_and_back(given), jax.jit(there_and_back)(given)
    assert isinstance(whole, Local)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), whole, inside)
    clipped = halves._replace(clip_norm=0.1).scatter(given)
    norm = np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in whole.leaves))
    # A sum of n squares in f32 is off by less than n u of itself.
    np.testing.assert_allclose(np.sqrt(float(clipped[1])), norm, rtol=sum(x.size for x in whole.leaves) * 2.0**-24)


@pytest.mark.skipif(SIZE == 1 or jax.local_device_count() < 2, reason="ranks with several devices")
@pytest.mark.parametrize("strategy", ["asa32", "shm"])
def test_devices_of_all_ranks_clip_by_the_norm_of_the_whole_gradient(strategy):
    mesh = Mesh(np.array(jax.local_devices()[:2]), (AXIS,))
    zero = make_zero(strategy, "mean", COMM, None, None, 0.5, mesh=mesh)
    each, where = [tree(worker) for worker in range(2 * SIZE)], NamedSharding(mesh, PartitionSpec(AXIS))
    mine = each[2 * RANK : 2 * RANK + 2]
    _, norm = zero.scatter(jax.tree.map(lambda *x: jax.device_put(np.stack(x), where), *mine))
    means = [np.mean([np.asarray(grads[name], np.float64) for grads in each], 0) for name in SHAPES]
    whole = np.sqrt(sum(np.square(mean).sum() for mean in means))
    np.testing.assert_allclose(np.sqrt(np.asarray(norm)), whole, rtol=sum(x.size for x in means) * 2.0**-24)


@pytest.mark.skipif(SIZE == 1, reason="one worker is compared with nobody")
@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["outside", "in jit"])
def test_ranks_that_deal_tensors_otherwise_are_refused(way):
    """Rows have one length, so messages would fit: rank 1 has the two kernels the other way round."""
    params = {"a": jnp.ones((4, 5)), "b": jnp.ones((5, 4))}
    tx = jaxmpi.sharded(optax.lars(1e-2), "tensor", "asa32", cost=lambda shape: 2.0 if shape[RANK > 0] == 4 else 1.0)
    state = tx.init(params)
    with pytest.raises(jaxmpi.UsageError, match=r"rank 1: strategy: got asa:32, .*dealt \w+, expected asa:32, .*dealt"):
        way(tx.update)(params, state, params)


@pytest.mark.skipif(SIZE == 1, reason="one worker has nobody to sum with")
def test_ranks_that_have_summed_with_others_before_give_a_new_sum_one_name():
    """One rank of a host traces for all."""
    part, world = COMM.split(RANK), COMM.split(0)
    assert isinstance(part, MpiComm)
    assert isinstance(world, MpiComm)
    if RANK == SIZE - 1:
        assert part.shared_sum.name
    assert len(set(world.processes.allgather_object(world.shared_sum.name))) == 1


# ---------------------------------------------------------------- params that the ranks of a host share


@on_cpus
@pytest.mark.skipif(SIZE == 1, reason="one worker has no slices")
@pytest.mark.parametrize("name", ["adam", "lars"])
def test_params_that_ranks_share_are_those_that_are_gathered_and_stay_where_they_are(name):
    dealt = assign_tensors(tree(0), SIZE) if name == "lars" else None
    tx, control = getattr(optax, name)(1e-2), processes()

    def steps(host: Any) -> Iterator[Any]:
        """Params after each step, with gradients of its own on every rank."""
        halves = make_zero("shm", "mean", COMM, None, dealt, host=host)
        rule = gradients(tx, Exchange(lambda g: g, lambda g: g, COMM.jit, zero=halves))
        assert rule.sharding
        params, state = tree(RANK if host else 0), COMM.jit(rule.sharding.init)(tree(0), np.int32(RANK))
        if halves.shared_params:
            params = halves.shared_params.fill(params)  # of rank 0
            gone.append(weakref.ref(halves.shared_params))
        for step in range(1, 4):
            params, state = rule.update(tree(step * SIZE + RANK), state, params)
            yield params

    before, gone = None, list[Any]()
    for gathered, shared in zip(steps(None), steps(control), strict=True):
        for leaf in SHAPES:
            np.testing.assert_array_equal(np.array(shared[leaf]), np.asarray(gathered[leaf]), err_msg=leaf)
            if before:
                assert before[0][leaf].is_deleted()
                assert before[1][leaf] == shared[leaf].unsafe_buffer_pointer()
        before = shared, {leaf: shared[leaf].unsafe_buffer_pointer() for leaf in SHAPES}
    del before, shared
    gc.collect()
    assert [made() for made in gone] == [None]  # a run that has ended keeps no memory


def differentiated(params: Any, tokens: jax.Array) -> tuple:
    """Gradients, loss and |gradients|^2 of a small language model."""

    def loss(params: Any) -> jax.Array:
        x = jnp.take(params["words"], tokens, axis=0)
        carry, outputs = jax.lax.scan(lambda c, x: (y := jnp.tanh(c @ params["cell"] + x), y), jnp.zeros((3, 5)), x)
        logits = (params["gain"] * (outputs + carry) + params["bias"]) @ params["out"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return grads, value, sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(grads))


def passed_on(leaves: list[jax.Array], through: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Gradients of this rank, whole, where others would be scattered."""
    through = [*leaves, *through]
    found = host_callbacks.call("passed on", through, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in through])
    return found[: len(leaves)], found[len(leaves) :]


def copied(operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    """Do what "passed on" does."""
    for x, to in zip(operands, results, strict=True):
        np.copyto(to, x)


@on_cpus
@pytest.mark.skipif(SIZE == 1, reason="one worker has no slices")
def test_gradients_that_are_scattered_as_they_come_give_the_params_of_those_that_are_scattered_whole(monkeypatch):
    monkeypatch.setattr(early_scatter, "LARGE", 64)  # the zeros of the scan and of the lookup
    shapes = {"words": (11, 5), "cell": (5, 5), "bias": (5,), "gain": (), "out": (5, 11)}
    rng = np.random.default_rng(0)
    begin = {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}

    def steps(*, early: bool) -> Any:
        halves = make_zero("shm", "mean", COMM, 100, clip_norm=0.1, host=processes(), early=early)
        rule = gradients(optax.sgd(1e-2, momentum=0.9), Exchange(lambda g: g, lambda g: g, COMM.jit, zero=halves))
        assert rule.sharding
        assert halves.shared_params
        assert isinstance(COMM, MpiComm)
        whole = early_scatter.scattering(differentiated, 100, passed_on)
        of = COMM.jit(halves.scatter_early(differentiated, COMM.shared_sum.name) if early else whole)
        state, params = COMM.jit(rule.sharding.init)(begin, np.int32(RANK)), halves.shared_params.fill(begin)
        seen = []
        for step in range(3):
            tokens = np.random.default_rng(step * SIZE + RANK).integers(0, 11, (4, 3))
            grads, *others = of(params, tokens)
            seen.append(np.array(others))
            params, state = rule.update(grads, state, params)
        return seen, jax.tree.map(np.array, params)

    host_callbacks.register("passed on", copied)
    try:
        jax.tree.map(np.testing.assert_array_equal, steps(early=True), steps(early=False))
    finally:
        host_callbacks.forget("passed on")


def shared_zeros() -> tuple[SharedParams, dict[str, jax.Array], dict[str, jax.Array]]:
    """A place, its params of zeros, and this rank's slice of ones."""
    place = SharedParams(processes(), ElementSharding(SIZE), RANK)
    return place, place.fill({"w": np.zeros(4 * SIZE, np.float32)}), {"w": jnp.ones(4)}


@pytest.mark.skipif(SIZE == 1, reason="one worker shares nothing")
def test_no_rank_writes_shared_params_before_all_have_let_go_of_those_before():
    place, params, own = shared_zeros()
    time.sleep(0.5 * (RANK == SIZE - 1))  # the others wait to write
    before = np.array(params["w"])
    assert np.array(place.update(own)["w"]).all()
    assert not before.any()


@pytest.mark.skipif(SIZE == 1, reason="one worker shares nothing")
def test_a_view_of_shared_params_that_is_kept_is_an_error_and_they_do_not_change(monkeypatch):
    monkeypatch.setattr(shared_params, "LET_GO_S", 0.5)
    place, params, own = shared_zeros()
    view = np.asarray(params["w"]) if RANK == 0 else None
    told = r"local rank 0: got w.*np\.array" if RANK == 0 else "local rank 0 failed in an update"
    with pytest.raises((UsageError, TrainingError), match=told):
        place.update(own)
    assert view is None or not view.any()
    processes().barrier()


@pytest.mark.skipif(SIZE == 1, reason="one worker shares nothing")
def test_shared_params_that_are_filled_anew_delete_the_arrays_before_as_a_step_does():
    place, params, own = shared_zeros()
    assert place.fill(params)["w"] is params["w"]  # they are there already
    again = place.fill({"w": np.full(4 * SIZE, 2, np.float32)})  # a rollback
    assert params["w"].is_deleted()
    assert (np.array(again["w"]) == 2).all()
    assert np.array(place.update(own)["w"]).all()
    assert again["w"].is_deleted()
