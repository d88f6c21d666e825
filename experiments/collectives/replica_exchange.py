"""A replica-exchange sampler of the Ising model, its eight temperatures on ranks.

python -m jaxmpi.experiments.collectives.replica_exchange
mpirun -n 4 python -m jaxmpi.experiments.collectives.replica_exchange

Replicas keep their spins and swap temperatures, so only energies travel (Swendsen and Wang 1986). Asserts that ranks
sample what one process samples.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmpi
from jaxmpi import collectives as mpi

SIDE, REPLICAS, ROUNDS, SWEEPS = 16, 8, 50, 4
BETAS = 0.25 + np.arange(REPLICAS) / 32  # across the critical 0.4407; steps of 1 / 32 make products with energies exact
DRAWN = np.log(np.random.default_rng(1).random((ROUNDS, REPLICAS - 1)))  # for swaps; the same on all ranks
# Chance x 2^32 of a flip, by temperature, of a spin whose product with the sum of its neighbours is -4, -2, 0, 2, 4.
CHANCES = np.uint32(np.minimum(np.exp(-2 * BETAS[:, None] * np.arange(-4, 5, 2)), 1) * (2**32 - 1))
EVEN = np.indices((SIDE, SIDE)).sum(0) % 2 == 0


def field(spins: jax.Array) -> jax.Array:
    """The sum of each spin's four neighbours."""
    rows, columns = (jnp.roll(spins, 1, axis) + jnp.roll(spins, -1, axis) for axis in (-2, -1))
    return rows + columns


def sweep(spins: jax.Array, chances: jax.Array, key: jax.Array) -> jax.Array:
    """Metropolis's step of every spin of i32[SIDE, SIDE], even ones first."""
    for places, bits in zip((EVEN, ~EVEN), jax.random.bits(key, (2, SIDE, SIDE), jnp.uint32), strict=True):
        flips = places & (bits <= chances[(spins * field(spins) + 4) // 2])
        spins = jnp.where(flips, -spins, spins)
    return spins


def swapped(place: jax.Array, energy: jax.Array, drawn: jax.Array, turn: jax.Array) -> jax.Array:
    """Temperature of every replica, i32[REPLICAS], after swaps of neighbours in temperature."""
    at = jnp.argsort(place)  # replica at each temperature
    gain = (energy[at[1:]] - energy[at[:-1]]).astype(jnp.float32) / 32
    swaps = (gain >= drawn) & (jnp.arange(REPLICAS - 1) % 2 == turn % 2)
    return (jnp.arange(REPLICAS) + jnp.pad(swaps, (0, 1)) - jnp.pad(swaps, (1, 0)))[place]


def sample(comm) -> tuple[jax.Array, jax.Array]:
    """Final spins of this rank's replicas; summed |magnetization| at every temperature."""
    mine = REPLICAS // comm.size * int(comm.rank) + jnp.arange(REPLICAS // comm.size)
    keys = jax.vmap(lambda replica: jax.random.fold_in(jax.random.key(0), replica))(mine)

    def one_round(state, inputs):
        (spins, place), (turn, drawn) = state, inputs
        chances = jnp.asarray(CHANCES)[place[mine]]

        def again(i, spins):
            now = jax.vmap(lambda key: jax.random.fold_in(key, SWEEPS * turn + i))(keys)
            return jax.vmap(sweep)(spins, chances, now)

        spins = jax.lax.fori_loop(0, SWEEPS, again, spins)
        magnetization = jnp.zeros(REPLICAS, jnp.int32).at[place[mine]].add(jnp.abs(spins.sum((1, 2))))
        energy = mpi.allgather(-(spins * field(spins)).sum((1, 2)) // 2, comm=comm).reshape(-1)
        return (spins, swapped(place, energy, drawn, turn)), magnetization

    start = jnp.ones((len(mine), SIDE, SIDE), jnp.int32), jnp.arange(REPLICAS)
    (spins, _), magnetization = jax.lax.scan(one_round, start, (jnp.arange(ROUNDS), jnp.float32(DRAWN)))
    return spins, mpi.allreduce(magnetization.sum(0), comm=comm)


if __name__ == "__main__":
    comm = jaxmpi.world()
    spins, magnetization = jax.jit(lambda: sample(comm))()
    gathered = mpi.allgather(spins)
    if comm.rank == 0:
        alone, expected = jax.jit(lambda: sample(jaxmpi.SoloComm()))()
        # Every decision compares integers, or an exact product with a number drawn before: nothing is rounded, bound 0.
        assert np.array_equal(gathered.reshape(alone.shape), alone)
        assert np.array_equal(magnetization, expected)
        means = np.asarray(magnetization) / ROUNDS / SIDE**2
        print(f"{comm.size} ranks: |m| " + " ".join(f"{m:.2f}" for m in means) + ", as one process samples")
