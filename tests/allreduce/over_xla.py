"""Strategies, compressors and sharded updates in a `shard_map` over all processes, as a user would write it.

Run by tests/trainer/test_comm_xla.py, or by hand:
`PYTHONPATH=tests mpirun -n 4 python tests/allreduce/over_xla.py all`.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmpi
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import ring_order
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import processes
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.comm.xla_mesh import global_mesh
from references import by_name, padded, sum_over_workers
from test_strategies import ROWS, SUMS
from tolerances import U, bound

# All, or every algorithm once, with one wire or another.
ONCE = [f"{name}:{[*wires][i % len(wires)]}" for i, (name, wires) in enumerate(ROWS.items())]
NAMES = SUMS if sys.argv[1:] == ["all"] else ONCE
N = 997  # prime: padded for every strategy
MESH, OVER_XLA = global_mesh("w")
CONTROL: MpiProcesses = processes()  # pyright: ignore[reportAssignmentType]
SIZE, RANK = CONTROL.size, CONTROL.rank
HOSTS = tuple(rank % 2 for rank in range(SIZE))  # as if dealt out to two
COMPRESSORS = ["lowrank2", "topk5/ring16"]


def vectors(n: int) -> np.ndarray:
    """f32[size, n]: every rank knows what every rank holds."""
    return np.random.default_rng(0).standard_normal((SIZE, n)).astype(np.float32)


def on_mesh(function: Any, x: np.ndarray) -> Any:
    """A function of this rank's array on this rank's device, in one program of all ranks."""
    along = NamedSharding(MESH, P("w"))
    whole = jax.make_array_from_process_local_data(along, x[None])
    row = lambda x: jax.tree.map(lambda y: y[None], function(x[0]))  # noqa: E731
    run = jax.jit(jax.shard_map(row, mesh=MESH, in_specs=P("w"), out_specs=P("w"), check_vma=False))
    return jax.tree.map(lambda y: np.asarray(y.addressable_data(0))[0], run(whole))


def same_bits_everywhere(x: np.ndarray) -> bool:
    mine = x.tobytes().hex()
    return set(CONTROL.allgather_object(mine)) == {mine}


def check_strategies() -> None:
    """The same bits on all ranks, those of the oracle; XLA's own allreduce within rounding."""
    rows, across = vectors(N), AxisComm("w", SIZE, HOSTS, one_at_a_time=True)

    def sums(x: jax.Array) -> dict[str, jax.Array]:
        comms = {name: OVER_XLA if name.startswith("shm") else across for name in [*NAMES, "none"]}
        return {name: jaxmpi.exchange(x, name, "sum", comm) for name, comm in comms.items()}

    got = on_mesh(sums, rows[RANK])
    assert (got.pop("none") == SIZE * rows[RANK]).all()
    for name, total in got.items():
        assert same_bits_everywhere(total), name
        assert (np.abs(total - sum_over_workers(rows)) <= bound(name, rows, 2)).all(), name
        if not name.startswith("ar"):
            expected = by_name(name, padded(rows, SIZE), ring_order(HOSTS), HOSTS)
            assert total.tobytes() == expected[:N].tobytes(), name


def check_compressors() -> None:
    """The amount sent and the amount still owed add up to what was meant; all ranks get the same bits."""
    rows = vectors(40 * 24).reshape(SIZE, 40, 24)

    def four_steps(grads: jax.Array, tx: Any) -> tuple[jax.Array, jax.Array]:
        state, total = tx.init(grads), 0 * grads
        for _ in range(4):
            mean, state = tx.update(grads, state)
            total += mean
        return total, state.error

    transformations = {name: jaxmpi.exchange_gradients(name, comm=OVER_XLA) for name in COMPRESSORS}
    got = on_mesh(lambda x: {name: four_steps(x, tx) for name, tx in transformations.items()}, rows[RANK])
    for name, (total, owed) in got.items():
        assert same_bits_everywhere(total), name
        owed = CONTROL.allreduce_sum(owed.astype(np.float64).reshape(-1)) / SIZE
        meant = 4 * rows.astype(np.float64).mean(0).reshape(-1)
        # 4 steps of fewer than 8 + 2 SIZE roundings of numbers below 64.
        assert np.abs(total.reshape(-1) + owed - meant).max() <= 4 * (8 + 2 * SIZE) * 64 * 2.0**-24, name


def is_optimizer(part: Any) -> bool:
    return isinstance(part, optax.GradientTransformation)


def check_sharded() -> None:
    """A slice of the velocity on every worker, and params within rounding of those of workers that update all."""
    begin, lr, mu, steps = {"kernel": vectors(N)[0], "bias": vectors(5)[1]}, 0.01, 0.9, 3
    grads, sgd = {name: vectors(x.size) for name, x in begin.items()}, optax.sgd(lr, momentum=mu)

    def trained(mine: jax.Array, tx: Any) -> tuple[Any, Any]:
        params, state = jax.tree.map(jnp.asarray, begin), tx.init(begin)
        for t in range(steps):
            mean = {"kernel": mine[:N] / (1 + t), "bias": mine[N:] / (1 + t)}
            updates, state = tx.update(mean, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    row = np.concatenate([grads[name][RANK] for name in ("kernel", "bias")])
    ways = {
        name: (
            optax.chain(jaxmpi.exchange_gradients(name, comm=OVER_XLA), sgd),
            jaxmpi.sharded(sgd, "element", name, comm=OVER_XLA),
        )
        for name in ("ar", "asa32")
    }
    got = on_mesh(lambda mine: jax.tree.map(functools.partial(trained, mine), ways, is_leaf=is_optimizer), row)
    for name, ((whole, every), (params, state)) in got.items():
        for leaf, of in params.items():
            assert same_bits_everywhere(of), (name, leaf)
            # Means are within two bounds of each other, the velocity is at most ten of the largest; 4 roundings a step.
            mean, largest = 2 * bound("ar", grads[leaf]) / SIZE, np.abs(grads[leaf]).max(0)
            off = steps * (lr * 10 * (mean + 4 * U * largest) + 4 * U * (np.abs(begin[leaf]) + 10 * lr * largest))
            assert (np.abs(of - whole[leaf]) <= off).all(), (name, leaf)
            assert np.abs(of - begin[leaf]).max() > 1e-3
        slices, all_of_it = (sum(x.nbytes for x in jax.tree.leaves(each)) for each in (state, every))
        assert all_of_it / SIZE <= slices <= 1.05 * all_of_it / SIZE, name


def check_mpi_beside() -> None:
    """The same array over MPI, in a job of both."""
    comm, rows = jaxmpi.world(), vectors(N)
    assert isinstance(comm, MpiComm)
    assert OVER_XLA.hosts == comm.hosts
    over_mpi = np.asarray(jaxmpi.exchange(rows[RANK], "ring16"))
    assert over_mpi.tobytes() == on_mesh(lambda x: jaxmpi.exchange(x, "ring16", comm=OVER_XLA), rows[RANK]).tobytes()


if __name__ == "__main__":
    check_strategies()
    check_compressors()
    check_sharded()
    check_mpi_beside()
    print(f"rank {RANK}: {len(NAMES)} strategies and {len(COMPRESSORS)} compressors\n", end="")
