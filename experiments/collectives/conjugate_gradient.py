"""A distributed conjugate gradient, differentiated to find a matrix's diagonal.

python -m jaxmpi.experiments.collectives.conjugate_gradient
mpirun -n 4 python -m jaxmpi.experiments.collectives.conjugate_gradient

A(d) x = b, A = L + diag(d), L the Laplacian of a ring: each rank has some rows. loss(d) = |x(d) - seen|^2. Its
derivative is one more solve, by the same function. Asserts the loss and the gradient of a dense solver.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmpi
from jaxmpi import collectives as mpi

ROWS, ITERATIONS = 240, 40
LEAST, MOST = 1.0, 6.0  # eigenvalues of A lie between, for d in [1, 2]


def product(d, x, comm):
    """A x of this rank's rows, f64[n]; two numbers go to neighbours."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    above = mpi.sendrecv(x[-1:], x[-1:], source=before, dest=after, sendtag=0, recvtag=0, comm=comm)
    below = mpi.sendrecv(x[:1], x[:1], source=after, dest=before, sendtag=1, recvtag=1, comm=comm)
    padded = jnp.concatenate([above, x, below])
    return (2 + d) * x - padded[:-2] - padded[2:]


def conjugate_gradient(multiply, b, comm):
    """Solve in `ITERATIONS` iterations; each sums two numbers over ranks."""

    def dot(x, y):
        return mpi.allreduce(jnp.vdot(x, y), comm=comm)

    def iteration(_, state):
        x, residual, direction, squared = state
        image = multiply(direction)
        step = squared / dot(direction, image)
        residual = residual - step * image
        after = dot(residual, residual)
        return x + step * direction, residual, residual + after / squared * direction, after

    return jax.lax.fori_loop(0, ITERATIONS, iteration, (jnp.zeros_like(b), b, b, dot(b, b)))[0]


def loss(d, b, seen, comm):
    """|x(d) - seen|^2 over all ranks."""
    multiply = lambda x: product(d, x, comm)  # noqa: E731
    solve = lambda multiply, b: conjugate_gradient(multiply, b, comm)  # noqa: E731
    x = jax.lax.custom_linear_solve(multiply, b, solve, symmetric=True)
    return mpi.allreduce(jnp.sum((x - seen) ** 2), comm=comm)


def dense_loss(d, b, seen):
    """The same in one process, by a dense matrix."""
    ring = 2 * jnp.eye(ROWS) - jnp.roll(jnp.eye(ROWS), 1, axis=0) - jnp.roll(jnp.eye(ROWS), -1, axis=0)
    return jnp.sum((jnp.linalg.solve(ring + jnp.diag(d), b) - seen) ** 2)


if __name__ == "__main__":
    comm = jaxmpi.world()
    jax.config.update("jax_enable_x64", True)
    d, b, seen = whole = np.random.default_rng(0).random((3, ROWS)) + 1
    mine = np.split(whole, comm.size, axis=1)[int(comm.rank)]
    value, gradient = jax.jit(jax.value_and_grad(lambda d, b, seen: loss(d, b, seen, comm)))(*mine)
    gathered = np.ravel(mpi.allgather(gradient))
    if comm.rank == 0:
        expected, dense = jax.jit(jax.value_and_grad(dense_loss))(d, b, seen)
        # |x - A^-1 b| <= e |A^-1 b|, e = 2 sqrt(k) ((sqrt(k) - 1) / (sqrt(k) + 1))^ITERATIONS, k the condition, and
        # rounding, some 20 u k an iteration. The loss is off by 2 |x - seen| e |x|; z, of A z = 2 (x - seen), by e |z|
        # and 2 e |x| / LEAST; the gradient is -z x.
        root = (MOST / LEAST) ** 0.5
        e = 2 * root * ((root - 1) / (root + 1)) ** ITERATIONS + 20 * 2.0**-53 * MOST / LEAST * ITERATIONS
        x, apart = np.linalg.norm(b) / LEAST, float(expected) ** 0.5
        off = abs(value - expected), np.linalg.norm(gathered - dense)
        bounds = 1.01 * 2 * apart * e * x, 1.01 * 2 * e * (2 * apart * x + x * x) / LEAST
        assert np.less_equal(off, bounds).all(), (off, bounds)
        print(f"{comm.size} ranks: off by {off[0]:.0e} <= {bounds[0]:.0e}, and {off[1]:.0e} <= {bounds[1]:.0e}")
