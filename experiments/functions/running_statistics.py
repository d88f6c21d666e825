"""Running mean, variance, extremes and histogram of data that come in chunks.

python experiments/functions/running_statistics.py
mpirun -n 2 python experiments/functions/running_statistics.py

Each worker adds its share to its own state, in three pieces a chunk; the states are combined once, at the end. Counts
and extremes are exact; mean and variance are asserted to be NumPy's.
"""

import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from jaxmpi import functions as jm

CHUNK = 300


def count(x):
    """Number, sums, squares, histogram, maxima and minima of rows of pixels.

    The number is i32[], the histogram of grey levels i32[17], all others i32[64]: one for each pixel.
    """
    x = x.astype(jnp.int32)
    levels = (x[:, :, None] == jnp.arange(17)).sum((0, 1))
    return {"n": jnp.int32(len(x)), "sum": x.sum(0), "squares": (x * x).sum(0), "levels": levels}, x.max(0), x.min(0)


if __name__ == "__main__":
    workers = jm.fork()
    x = np.asarray(load_digits(return_X_y=True)[0], np.int32)

    zeros = {
        name: np.zeros(shape, np.int32) for name, shape in [("n", ()), ("sum", 64), ("squares", 64), ("levels", 17)]
    }
    sums = jm.variable(zeros)
    high, low = jm.variable(np.zeros(64, np.int32)), jm.variable(np.full(64, 16, np.int32))

    def update(x, high, low):
        """New value of each variable."""
        added, highest, lowest = count(x)
        return added, jnp.maximum(high, highest), jnp.minimum(low, lowest)

    see = jm.function(update, (jm.scatter, high, low), (), ((sums, jm.add), (high, jm.max), (low, jm.min)))
    for start in range(0, len(x), CHUNK):
        see(x[start : start + CHUNK], slices=3)

    total = sums.reduce("sum")
    mean = np.asarray(total["sum"]) / int(total["n"])
    variance = np.asarray(total["squares"]) / int(total["n"]) - mean**2
    assert int(total["n"]) == len(x)
    assert (np.asarray(high.reduce("max")) == x.max(0)).all()
    assert (np.asarray(low.reduce("min")) == x.min(0)).all()
    assert (np.asarray(total["levels"]) == np.bincount(x.ravel(), minlength=17)).all()
    np.testing.assert_allclose(mean, x.mean(0))
    np.testing.assert_allclose(variance, x.var(0), atol=1e-9)
    print(f"{len(x)} examples: mean of the pixels {mean.mean():.3f}, variance {variance.mean():.3f}")
    print(f"{workers} workers counted what one counts")
