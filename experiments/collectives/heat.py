"""Heat on a torus by a nine-point stencil, in blocks on ranks.

python -m jaxmpi.experiments.collectives.heat
mpirun -n 4 python -m jaxmpi.experiments.collectives.heat

A step receives an edge or a corner from each of 8 neighbours. Asserts that ranks compute what one process computes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxmpi
from jaxmpi import collectives as mpi

SIDE, STEPS = 48, 40
RATE = 0.1  # time step x diffusivity / spacing^2
LAPLACIAN = np.array([[1, 4, 1], [4, -20, 4], [1, 4, 1]]) / 6
ITSELF = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]])
WEIGHTS = (ITSELF + RATE * LAPLACIAN).astype(np.float32)  # weights of a step: all are positive, and they sum to 1
AROUND = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
EDGE = {-1: slice(0, 1), 0: slice(None), 1: slice(-1, None)}  # part of a block towards a neighbour, by direction


def layout(ranks: int) -> tuple[int, int]:
    """Rows and columns of blocks, as square as can be."""
    rows = max(n for n in range(1, int(ranks**0.5) + 1) if ranks % n == 0)
    return rows, ranks // rows


def with_halo(u: jax.Array, comm) -> jax.Array:
    """Block f32[n, m] with its halo: f32[n + 2, m + 2]."""
    rows, columns = layout(comm.size)
    row, column = divmod(int(comm.rank), columns)
    padded = jnp.pad(u, 1)
    for tag, (i, j) in enumerate(AROUND):  # send towards (i, j), receive from the other side
        dest = (row + i) % rows * columns + (column + j) % columns
        source = (row - i) % rows * columns + (column - j) % columns
        sent = u[EDGE[i], EDGE[j]]
        got = mpi.sendrecv(sent, sent, source=source, dest=dest, sendtag=tag, recvtag=tag, comm=comm)
        inside = {-1: slice(-1, None), 0: slice(1, -1), 1: slice(0, 1)}
        padded = padded.at[inside[i], inside[j]].set(got)
    return padded


def stencil(padded: jax.Array) -> jax.Array:
    """A step of the points inside a border."""
    n, m = padded.shape[0] - 2, padded.shape[1] - 2
    terms = [WEIGHTS[i, j] * padded[i : i + n, j : j + m] for i in range(3) for j in range(3)]
    return functools.reduce(jnp.add, terms)


if __name__ == "__main__":
    comm = jaxmpi.world()
    rows, columns = layout(comm.size)
    row, column = divmod(int(comm.rank), columns)
    start = np.random.default_rng(0).random((SIDE, SIDE), np.float32)
    block = np.split(np.split(start, rows)[row], columns, axis=1)[column]
    run = jax.jit(lambda u: jax.lax.fori_loop(0, STEPS, lambda _, u: stencil(with_halo(u, comm)), u))
    blocks = mpi.allgather(run(block))
    if comm.rank == 0:
        got = np.block([[blocks[i * columns + j] for j in range(columns)] for i in range(rows)])
        alone = jax.jit(lambda u: jax.lax.fori_loop(0, STEPS, lambda _, u: stencil(jnp.pad(u, 1, mode="wrap")), u))
        # A step multiplies each term by at most 1 + 9 u: a product, eight additions. It takes means, so earlier errors
        # do not grow, and numbers stay below the largest at the start, but for errors of second order.
        bound = 1.01 * 2 * STEPS * 9 * 2.0**-24 * start.max()
        off = np.abs(got - alone(start)).max()
        assert off <= bound, (off, bound)
        print(f"{comm.size} ranks: {rows} x {columns} blocks, at most {off:.1e} from one process, <= {bound:.1e}")
