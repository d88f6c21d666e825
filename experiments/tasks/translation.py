"""A made language: words of a sentence backwards, each shifted by one. Encoder and decoder, padding, teacher forcing.

mpirun -n 2 python -m jaxmpi.train experiments/tasks/translation.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi import Task
from jaxmpi.config import Data, Experiment, Optim

WORDS, LONGEST, WIDTH = 12, 6, 64  # 0 pads, 1 begins a sentence


def sentences(n, seed):
    rng, at = np.random.default_rng(seed), np.arange(LONGEST)
    long = rng.integers(2, LONGEST + 1, (n, 1))
    source = np.where(at < long, rng.integers(2, WORDS, (n, LONGEST)), 0).astype(np.int32)
    back = np.take_along_axis(source, np.maximum(long - 1 - at, 0), 1)
    return {"source": source, "target": np.where(at < long, (back - 1) % (WORDS - 2) + 2, 0).astype(np.int32)}


def init(key, batch):
    shapes = {"words": (WORDS, WIDTH), "places": (2, LONGEST, WIDTH), "q": (WIDTH, WIDTH), "out": (2 * WIDTH, WORDS)}
    keys = jax.random.split(key, len(shapes))
    return {n: 0.1 * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}, {}


def loss(params, model_state, batch, key, train):
    source, target = batch["source"], batch["target"]
    encoded = params["words"][source] + params["places"][0]
    before = jnp.pad(target, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
    decoded = params["words"][before] + params["places"][1] + params["places"][0][words(batch) - 1][:, None]
    scores = jnp.einsum("bti,ij,bsj->bts", decoded, params["q"], encoded) - 1e9 * (source == 0)[:, None]
    logits = jnp.concatenate([jax.nn.softmax(scores) @ encoded, decoded], -1) @ params["out"]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, target) * (target > 0)
    return each.sum(-1) / words(batch), model_state, logits  # 2 words or more


def words(batch):
    return (batch["target"] > 0).sum(-1)


def right(logits, batch):
    return {"words": (((logits.argmax(-1) == batch["target"]) & (batch["target"] > 0)).sum(-1), words(batch))}


experiment = Experiment(
    task=Task(name="translation", init=init, loss=loss, metrics=right, weight=words),
    data=Data("array", train=sentences(2048, 0), validation=sentences(256, 1)),
    optim=Optim("adam", lr=0.01),
    effective_batch=64,
    train_for="5ep",
)
