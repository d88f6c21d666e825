"""Contrastive learning of digits from two noisy views (SimCLR, InfoNCE).

mpirun -n 2 python -m jaxmpi.train experiments/tasks/contrastive.py

The negatives of a digit are the other digits of its worker's batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi import Task
from jaxmpi.config import Data, Experiment, Optim
from jaxmpi.data import open_source


def digits(split):
    source = open_source(Data("digits", channels=1), split)
    return {"pixels": np.stack([source[i][0] for i in range(len(source))])}


def init(key, batch):
    first, second = jax.random.split(key)
    return {"w1": 0.1 * jax.random.normal(first, (64, 64)), "w2": 0.1 * jax.random.normal(second, (64, 16))}, {}


def embed(params, pixels):
    z = jax.nn.relu(pixels.reshape(-1, 64) @ params["w1"]) @ params["w2"]
    return z / (jnp.linalg.norm(z, axis=-1, keepdims=True) + 1e-6)


def loss(params, model_state, batch, key, train):
    pixels = batch["pixels"].astype(jnp.float32) / 255
    key = key if train else jax.random.key(0)
    a, b = (embed(params, pixels * jax.random.bernoulli(k, 0.8, pixels.shape)) for k in jax.random.split(key))
    alike = jnp.where(batch["weight"][None] > 0, a @ b.T / 0.2, -1e9)  # rows that fill a batch up are nobody's pair
    return optax.softmax_cross_entropy_with_integer_labels(alike, jnp.arange(len(a))), model_state, alike


def found(alike, batch):
    hit = alike.argmax(-1) == jnp.arange(len(alike))
    return {"found": (hit, jnp.ones(len(alike)))}


def predict(params, model_state, batch):
    return embed(params, batch["pixels"] / 255)


experiment = Experiment(
    task=Task(name="pairs", init=init, loss=loss, metrics=found, maximize=("found",), predict=predict),
    data=Data("array", train=digits("train"), validation=digits("validation")),
    optim=Optim("adam", lr=3e-3),
    local_batch=32,
    train_for="5ep",
)
