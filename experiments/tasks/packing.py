"""A language model of packed sentences, which do not see each other.

mpirun -n 2 python -m jaxmpi.train experiments/tasks/packing.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi import Task
from jaxmpi.config import Data, Experiment, Optim

WINDOW, WORDS, WIDTH = 32, 16, 64


def packed(n, seed):
    """Windows of sentences counting by 1, 2 or 3; sentence 0 pads."""
    rng, words = np.random.default_rng(seed), np.zeros((2, n, WINDOW), np.int32)
    for row in range(n):
        at = 0
        while at + (long := rng.integers(3, 13)) <= WINDOW:
            words[0, row, at : at + long] = (rng.integers(WORDS) + rng.integers(1, 4) * np.arange(long)) % WORDS
            words[1, row, at : at + long], at = words[1, row].max() + 1, at + long
    return {"word": words[0], "sentence": words[1]}


def init(key, batch):
    shapes = {"words": (WORDS, WIDTH), "far": (WINDOW, 1), "hidden": (2 * WIDTH, WIDTH), "out": (WIDTH, WORDS)}
    return {n: 0.3 * jax.random.normal(jax.random.fold_in(key, i), s) for i, (n, s) in enumerate(shapes.items())}, {}


def loss(params, model_state, batch, key, train):
    place, x = jnp.arange(WINDOW), params["words"][batch["word"]]
    sees = (batch["sentence"][:, :, None] == batch["sentence"][:, None]) & (place[:, None] >= place)
    scores = jnp.where(sees, params["far"][abs(place[:, None] - place), 0], -1e9)
    hidden = jax.nn.relu(jnp.concatenate([jax.nn.softmax(scores) @ x, x], -1) @ params["hidden"])
    logits = hidden @ params["out"]
    each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["word"][:, 1:])
    return (each * counted(batch)).sum(-1) / counted(batch).sum(-1), model_state, logits


def counted(batch):
    return (batch["sentence"][:, 1:] == batch["sentence"][:, :-1]) & (batch["sentence"][:, 1:] > 0)


experiment = Experiment(
    task=Task(name="packing", init=init, loss=loss, weight=lambda batch: counted(batch).sum(-1)),
    data=Data("array", train=packed(1024, 0), validation=packed(128, 1)),
    optim=Optim("adam", lr=0.01),
    effective_batch=64,
    train_for="5ep",
)
