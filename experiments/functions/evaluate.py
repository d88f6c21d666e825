"""Evaluation of images shifted in 25 ways, with predictions gathered in order.

python experiments/functions/evaluate.py
mpirun -n 2 python experiments/functions/evaluate.py

44,925 images lie in shared memory; a classifier trained on 200 images predicts all of them, in eight pieces a worker.
Asserts that one worker predicts the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from jaxmpi import functions as jm


def shifted(images):
    """Each image moved by up to 2 px: f32[25 n, 64]."""
    moves = [(i, j) for i in range(-2, 3) for j in range(-2, 3)]
    return np.concatenate([np.roll(images, move, axis=(1, 2)).reshape(-1, 64) for move in moves])


def distances(x, known):
    """Squared distances of rows of x to known ones: f32[n, 200]."""
    return (x**2).sum(1)[:, None] - 2 * x @ known.T + (known**2).sum(1)[None]


def predict(x, known, labels):
    """The label of the nearest known image."""
    nearest = jnp.argmin(distances(x, known), axis=1)
    return labels[nearest], nearest


if __name__ == "__main__":
    workers = jm.fork()
    pixels, digits = load_digits(return_X_y=True)
    images, labels = np.asarray(pixels, np.float32).reshape(-1, 8, 8), np.asarray(digits, np.int32)
    known = images[:200].reshape(200, 64)

    big = jm.shared(lambda: shifted(images))
    f = jm.function(predict, (jm.scatter, jm.broadcast, jm.broadcast), (jm.gather, jm.gather))
    predicted, nearest = f(big, known, labels[:200], slices=8)
    right = (np.asarray(predicted).reshape(25, -1) == labels).mean(1)
    print(f"{len(predicted)} predictions, right: {right[12]:.3f} in place, {right.min():.3f} at worst")

    alone, alone_nearest = jax.jit(predict)(big.array, known, labels[:200])
    assert (np.asarray(predicted) == np.asarray(alone)).all()
    assert (np.asarray(nearest) == np.asarray(alone_nearest)).all()
    print(f"{workers} workers predicted what one predicts")
