"""MpiComm against NumPy, for any number of ranks: run by tests/test_mpirun.py, or by hand with
`mpirun -n 3 python -m pytest tests/ranks`. Expected values come from rank and size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi.processes import processes
from references import sum_over_workers
from tolerances import bound

STRATEGIES = ["ar", "asa32", "asa16", "asabf16", "ring32", "ring16", "ring:bf16"]
COMM = jaxmpi.world()
SIZE, RANK = COMM.size, int(COMM.rank)


def vectors(n: int, seed: int = 0) -> np.ndarray:
    """f32[size, n]: every rank knows what every rank holds."""
    return np.random.default_rng(seed).standard_normal((SIZE, n)).astype(np.float32)


def same_bits_everywhere(array: jax.Array) -> bool:
    mine = np.asarray(array).tobytes().hex()
    return set(processes().gather(mine)) == {mine}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sum_equals_numpy_and_is_bitwise_equal_on_all_ranks(strategy):
    rows = [vectors(n, seed=n) for n in (0, 1, 13, 1000)]
    total = jaxmpi.exchange([row[RANK] for row in rows], strategy, op="sum")
    for row, got in zip(rows, total, strict=True):
        assert (np.abs(np.asarray(got) - sum_over_workers(row)) <= bound(strategy, row)).all()
        assert same_bits_everywhere(got)


def test_no_retrace_on_the_second_call():
    traces = []

    @jax.jit
    def step(x):
        traces.append(1)
        return jaxmpi.exchange(x, "ring16")

    for _ in range(3):
        step(jnp.ones(5) * RANK).block_until_ready()
    assert len(traces) == 1


def test_dtypes_and_shapes_are_kept_inside_and_outside_jit():
    tree = {"a": jnp.full((3, 5), RANK, jnp.bfloat16), "b": [jnp.float32(RANK), jnp.zeros((0, 2), jnp.float16)]}
    for call in (jaxmpi.exchange, jax.jit(jaxmpi.exchange)):
        mean = call(tree)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), mean) == jax.tree.map(lambda x: (x.shape, x.dtype), tree)
        assert float(mean["b"][0]) == (SIZE - 1) / 2


def test_nan_on_the_last_rank_reaches_all():
    x = jnp.where(RANK == SIZE - 1, jnp.nan, 1.0) * jnp.ones(7)
    for strategy in STRATEGIES:
        assert np.isnan(np.asarray(jaxmpi.exchange(x, strategy))).all()


def test_permute_with_idle_ranks():
    moved = jax.jit(lambda x: COMM.permute(x, [(0, SIZE - 1)]))(jnp.full(3, RANK + 1.0))
    assert np.asarray(moved).tolist() == [1.0 if RANK == SIZE - 1 else 0.0] * 3


def test_bcast_and_broadcast_give_the_roots_values():
    x = jnp.full(4, RANK, jnp.bfloat16)
    assert np.asarray(jax.jit(lambda v: COMM.bcast(v, SIZE - 1))(x)).tolist() == [SIZE - 1] * 4
    tree = jaxmpi.broadcast({"w": np.full((2, 3), RANK, np.int64), "none": None}, root=SIZE - 1)
    assert (tree["w"] == SIZE - 1).all()
    columns = np.arange(6.0).reshape(2, 3) * (RANK + 1)
    assert (jaxmpi.broadcast(columns.T) == np.arange(6.0).reshape(2, 3).T).all()  # whatever the order in memory


def test_ring_order_is_a_permutation_of_ranks():
    assert sorted(COMM.order) == list(range(SIZE))


def test_control_plane_sums_and_gathers():
    control = processes()
    assert control.sum(np.array([RANK, 1.0])).tolist() == [SIZE * (SIZE - 1) / 2, SIZE]
    assert control.gather(f"rank {RANK} \N{SNOWMAN}") == [f"rank {r} \N{SNOWMAN}" for r in range(SIZE)]


def test_a_program_is_compiled_by_one_rank_and_run_by_all():
    step = COMM.jit(lambda tree, x: {"y": (tree["a"] * x, tree["b"])}, donate_argnums=(0,))
    for _ in range(2):
        y, b = step({"a": jnp.arange(3.0) + RANK, "b": jnp.int32(RANK)}, np.float32(2))["y"]
        assert np.asarray(y).tolist() == [2.0 * (i + RANK) for i in range(3)]
        assert int(b) == RANK


def test_a_program_that_calls_back_into_python_runs_too():
    def shout(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x)
        return x + 1

    seen: list[float] = []
    assert float(COMM.jit(shout)(jnp.float32(RANK))) == RANK + 1
    jax.effects_barrier()
    assert seen == [RANK]


def test_same_on_all_ranks():
    jaxmpi.same_on_all_ranks("the plan", {"lr": 0.1, "sizes": [1, 2]})
    if SIZE > 1:
        with pytest.raises(jaxmpi.UsageError, match=r"the plan differs.*\n.*rank 1: lr: got 1, expected 0 \(rank 0\)"):
            jaxmpi.same_on_all_ranks("the plan", {"lr": int(RANK == 1)})


def test_what_differs_is_named_by_rank_and_path():
    if SIZE == 1:
        pytest.skip("one rank agrees with itself")
    tree = {"conv1": {"kernel": np.zeros((3, 3 + (RANK == 1)), np.float32)}}
    with pytest.raises(
        jaxmpi.UsageError, match=r"rank 1: leaf.conv1/kernel: got float32\[3, 4\], expected float32\[3, 3\]"
    ):
        jaxmpi.exchange(tree)
    with pytest.raises(jaxmpi.UsageError, match=r"strategy: got ring:32, expected asa:32 \(rank 0\)"):
        jaxmpi.exchange(np.zeros(3, np.float32), "ring:32" if RANK == 1 else "asa:32")
