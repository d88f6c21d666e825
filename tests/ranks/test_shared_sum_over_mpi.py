"""SharedSum between real processes, inside jit."""

import hashlib
import time
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi.comm import shared_sum
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import processes
from jaxmpi.functions.groups import sum_now

if not isinstance(processes(), MpiProcesses):
    pytest.skip("one rank has nobody to sum with", allow_module_level=True)
CONTROL = cast(MpiProcesses, processes())
SIZE, RANK = CONTROL.size, CONTROL.rank
ENGINE = shared_sum.SharedSum(CONTROL, "tests of SharedSum")
SHAPES = [(), (0, 4), (13,), (3, 5, 7), (shared_sum.SMALL + 1,), (shared_sum.CHUNK + 5,), (3 * shared_sum.CHUNK,)]


def vectors(shapes: list, seed: int = 0) -> list[np.ndarray]:
    """f32[size, *shape] each: every rank knows what every rank holds."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((SIZE, *shape)).astype(np.float32) for shape in shapes]


def in_rank_order(rows: np.ndarray, divisor: float = 1) -> np.ndarray:
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total / np.float32(divisor)


def same_everywhere(text: str) -> bool:
    mine = hashlib.sha256(text.encode()).hexdigest()
    return set(CONTROL.allgather_object(mine)) == {mine}


def test_sums_outside_a_program_follow_running_programs():
    """One rank is slow, and sizes differ: in another order they would not match."""

    @jax.jit
    def program(xs):
        wait = jax.pure_callback(lambda x: (time.sleep(0.1 * (RANK == 0)), x)[1], jax.ShapeDtypeStruct((), "f4"), xs[0])
        return ENGINE.sum([x + 0 * wait for x in xs], SIZE)

    rows = vectors(SHAPES)
    mine = [jnp.asarray(row[RANK]) for row in rows]
    for _ in range(5):
        late = program(mine)
        for tree, expected in ((sum_now(ENGINE, mine[1:], SIZE), rows[1:]), (late, rows)):
            for row, total in zip(expected, tree, strict=True):
                assert total.shape == row.shape[1:]
                np.testing.assert_array_equal(np.asarray(total), in_rank_order(row, SIZE))


def test_sums_and_mpi_calls_of_one_program_keep_one_order():
    """With mpi4jax's effect. Without it a rank may wait in a sum for one that waits for it in MPI."""
    import mpi4jax
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Clone()
    [effect] = jax.make_jaxpr(lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm))(1.0).effects
    engine = shared_sum.SharedSum(CONTROL, "in mpi4jax's order", effect=effect)

    @jax.jit
    def program(x, wait_mpi, wait_sum):  # ranks differ in what is ready first
        def late(wait, i):
            return jax.lax.fori_loop(0, wait, lambda _, y: jnp.sin(y @ y), x + i) * 0 + x

        pairs = [(late(wait_mpi, i), late(wait_sum, i)) for i in range(4)]
        return [(mpi4jax.allreduce(y, op=MPI.SUM, comm=comm), engine.sum([z])[0]) for y, z in pairs]

    x, slow, fast = jnp.ones((100, 100)), 30, 0
    assert jax.make_jaxpr(program)(x, slow, fast).effects == {effect}
    for _ in range(3):
        for total in jax.tree.leaves(program(x, *((slow, fast) if RANK % 2 else (fast, slow)))):
            assert (np.asarray(total) == SIZE).all()
    engine.close()


def test_the_program_is_the_same_on_all_ranks():
    text = jax.jit(lambda x: ENGINE.sum([x], SIZE)).lower(jnp.ones(5)).as_text()
    assert "tests of SharedSum" in text
    assert same_everywhere(text)
