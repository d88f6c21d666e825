"""Strategies in a `shard_map` over all processes, as a user would write it.

Run by tests/trainer/test_comm_xla.py, or by hand: `PYTHONPATH=tests mpirun -n 4 python tests/allreduce/over_xla.py`.
"""

from typing import Any

import jax
import numpy as np
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
from test_strategies import ROWS
from tolerances import bound

# Every algorithm once, with one wire or another.
NAMES = [f"{name}:{[*wires][i % len(wires)]}" for i, (name, wires) in enumerate(ROWS.items())]
N = 997  # prime: padded for every strategy
MESH, OVER_XLA = global_mesh("w")
CONTROL: MpiProcesses = processes()  # pyright: ignore[reportAssignmentType]
SIZE, RANK = CONTROL.size, CONTROL.rank
HOSTS = tuple(rank % 2 for rank in range(SIZE))  # as if dealt out to two


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


def check_mpi_beside() -> None:
    """The same array over MPI, in a job of both."""
    comm, rows = jaxmpi.world(), vectors(N)
    assert isinstance(comm, MpiComm)
    assert OVER_XLA.hosts == comm.hosts
    over_mpi = np.asarray(jaxmpi.exchange(rows[RANK], "ring16"))
    assert over_mpi.tobytes() == on_mesh(lambda x: jaxmpi.exchange(x, "ring16", comm=OVER_XLA), rows[RANK]).tobytes()


if __name__ == "__main__":
    check_strategies()
    check_mpi_beside()
    print(f"rank {RANK}: {len(NAMES)} strategies\n", end="")
