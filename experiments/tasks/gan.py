"""A GAN of two-dimensional points: two nets, two optimizers, one step.

mpirun -n 2 python -m jaxmpi.train experiments/tasks/gan.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi import Task
from jaxmpi.config import Data, Experiment, Optim

CENTRE = np.array([2.0, -1.0], np.float32)
points = CENTRE + 0.3 * np.random.default_rng(0).standard_normal((4096, 2), np.float32)


def init(key, batch):
    layer = lambda a, b: {"w": jax.random.normal(key, (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b)}
    return {"generator": [layer(8, 64), layer(64, 2)], "critic": [layer(2, 64), layer(64, 1)]}, {}


def run(net, x):
    for layer in net[:-1]:
        x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"])
    return x @ net[-1]["w"] + net[-1]["b"]


def loss(params, model_state, batch, key, train):
    frozen, z = jax.tree.map(jax.lax.stop_gradient, params), jax.random.normal(key, (len(batch["point"]), 8))
    made, shown = run(params["generator"], z), run(frozen["generator"], z)
    cross = lambda net, x, true: optax.sigmoid_binary_cross_entropy(run(net, x)[:, 0], true)
    critic = cross(params["critic"], batch["point"], 1.0) + cross(params["critic"], shown, 0.0)
    return critic + cross(frozen["critic"], made, 1.0), model_state, made


def distance(made, batch):
    return {"distance": (jnp.linalg.norm(made - CENTRE, axis=-1), jnp.ones(len(made)))}


def two(schedule):
    return optax.multi_transform(
        {"generator": optax.adam(1e-3, b1=0.5), "critic": optax.adam(3e-3, b1=0.5)},
        lambda params: {name: jax.tree.map(lambda _, name=name: name, net) for name, net in params.items()},
    )


experiment = Experiment(
    task=Task(name="gan", init=init, loss=loss, metrics=distance),
    data=Data("array", train={"point": points}, validation={"point": points[:512]}),
    optim=Optim("two", transform=two),
    monitor="eval_distance",
    effective_batch=64,
    train_for="8ep",
)
