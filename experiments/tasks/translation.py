"""A transformer for a made language: words backwards, each shifted by one.

mpirun -n 2 python -m jaxmpi.train experiments/tasks/translation.py
"""

import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi import Task
from jaxmpi.config import Data, Experiment, Optim
from jaxmpi.models.encoder_decoder import encoder_decoder

WORDS, LONGEST = 12, 6  # 0 pads, 1 begins a sentence
init, apply = encoder_decoder(WORDS, LONGEST, width=64, heads=4, layers=2)


def sentences(n, seed):
    rng, at = np.random.default_rng(seed), np.arange(LONGEST)
    long = rng.integers(2, LONGEST + 1, (n, 1))
    source = np.where(at < long, rng.integers(2, WORDS, (n, LONGEST)), 0).astype(np.int32)
    back = np.take_along_axis(source, np.maximum(long - 1 - at, 0), 1)
    return {"source": source, "target": np.where(at < long, (back - 1) % (WORDS - 2) + 2, 0).astype(np.int32)}


def loss(params, model_state, batch, key, train):
    target = batch["target"]
    logits = apply(params, batch["source"], jnp.pad(target, ((0, 0), (1, 0)), constant_values=1)[:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, target) * (target > 0)
    return each.sum(-1) / words(batch), model_state, logits  # 2 words or more


def words(batch):
    return (batch["target"] > 0).sum(-1)


def right(logits, batch):
    return {"words": (((logits.argmax(-1) == batch["target"]) & (batch["target"] > 0)).sum(-1), words(batch))}


experiment = Experiment(
    task=Task(
        name="translation",
        init=lambda key, batch: (init(key), {}),
        loss=loss,
        metrics=right,
        maximize=("words",),
        weight=words,
    ),
    data=Data("array", train=sentences(2048, 0), validation=sentences(256, 1)),
    optim=Optim("adam", lr=2e-3),
    effective_batch=64,
    train_for="5ep",
)
