"""`batch_mean` over MPI ranks, forward and backward, inside jit and scan. Run as the other tests of this folder."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxmpi
from jaxmpi.model.batch_statistics import batch_mean, statistics_over
from tolerances import U

COMM = jaxmpi.world()
SIZE, RANK = COMM.size, int(COMM.rank)


def cubes(x: jax.Array, mean: jax.Array) -> jax.Array:
    """A loss that depends on the mean; f32[examples, 4] -> f32[]."""
    return ((x - mean[None]) ** 3).sum()


@jax.jit
def gradients(pieces: jax.Array) -> jax.Array:
    """Return the gradients of this worker's loss by its own examples, piece by piece; f32[pieces, examples, 4]."""

    def loss(x):
        with statistics_over(partial(jaxmpi.exchange, strategy="asa32", comm=COMM)):
            return cubes(x, batch_mean(x))

    return jax.lax.scan(lambda carry, x: (carry, jax.grad(loss)(x)), None, pieces)[1]


def test_derivative_is_that_of_the_mean_loss_of_all_workers():
    # f32[pieces, workers, examples, 4]: every rank knows what every rank holds. Ranks differ in mean and spread.
    spread = np.arange(1, SIZE + 1, dtype=np.float32)[:, None, None]
    x = spread * np.random.default_rng(0).standard_normal((2, SIZE, 3, 4), np.float32)

    def mean_loss(x):
        return cubes(x.reshape(-1, 4), x.mean((0, 1))) / SIZE

    want = np.stack([jax.grad(mean_loss)(piece)[RANK] * SIZE for piece in x])
    got = np.asarray(gradients(jnp.asarray(x[:, RANK])))
    # 3 (x - m)^2 less its mean over all: sums of 3 SIZE terms of at most 3 (2 max|x|)^2, in either of two orders.
    bound = 2 * (3 * SIZE + 8) * U * 3 * (2 * np.abs(x).max()) ** 2
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)
    of_own_mean = jax.vmap(jax.grad(lambda x: cubes(x, x.mean(0))))(x[:, RANK])
    assert SIZE == 1 or np.abs(got - of_own_mean).max() > 100 * bound
