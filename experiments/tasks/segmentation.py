"""Segmentation of made discs and squares on noise in three classes.

mpirun -n 2 python -m jaxmpi.train experiments/tasks/segmentation.py
"""

import jax
import numpy as np
from flax import nnx

from jaxmpi.config import Data, Experiment, Optim
from jaxmpi.model import nnx_model

PX = 16


def shapes(n: int, seed: int) -> dict[str, np.ndarray]:
    """Images u8[n, PX, PX, 1]; labels 0 background, 1 disc, 2 square."""
    rng, (row, column) = np.random.default_rng(seed), np.mgrid[:PX, :PX]
    (y, x), r, kind = rng.integers(4, 12, (2, n, 1, 1)), rng.integers(2, 5, (n, 1, 1)), rng.integers(1, 3, (n, 1, 1))
    dy, dx = abs(row - y), abs(column - x)
    inside = np.where(kind == 1, dy**2 + dx**2 <= r**2, np.maximum(dy, dx) <= r)
    images = 120 * inside + rng.integers(0, 100, inside.shape)
    return {"image": images[..., None].astype(np.uint8), "label": (kind * inside).astype(np.int32)}


class Pixels(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.List([nnx.Conv(width, 16, (5, 5), rngs=rngs) for width in (1, 16, 16)])
        self.logits = nnx.Conv(16, 3, (1, 1), rngs=rngs)

    def __call__(self, x):
        for layer in self.hidden:
            x = jax.nn.relu(layer(x))
        return self.logits(x)


model = nnx_model(lambda rngs: Pixels(rngs), name="pixels", input_shape=(PX, PX, 1), classes=3)
data = Data("array", channels=1, train=shapes(512, 0), validation=shapes(128, 1))
experiment = Experiment(
    model=model._replace(label_shape=(PX, PX)),
    task="segmentation",
    data=data,
    optim=Optim("adam", lr=3e-3),
    monitor="eval_iou",
    effective_batch=32,
    train_for="4ep",
)
