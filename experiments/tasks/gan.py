"""A GAN that learns a ring of eight points: two nets, two optimizers, one step.

mpirun -n 2 python -m jaxmpi.train experiments/tasks/gan.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmpi import Task
from jaxmpi.config import Data, Experiment, Optim

angle = 2 * np.pi * np.random.default_rng(0).integers(0, 8, 4096) / 8
points = np.stack([np.cos(angle), np.sin(angle)], 1) + 0.02 * np.random.default_rng(1).standard_normal((4096, 2))


def init(key, batch):
    net = lambda key, a, b: {"w1": jax.random.normal(key, (a, 64)), "w2": jax.random.normal(key, (64, b)) / 8}
    return {"generator": net(key, 9, 2), "critic": net(key, 3, 1)}, {}


def run(net, x):
    return jax.nn.leaky_relu(jnp.pad(x, ((0, 0), (0, 1)), constant_values=1) @ net["w1"]) @ net["w2"]


def loss(params, model_state, batch, key, train):
    frozen, z = jax.tree.map(jax.lax.stop_gradient, params), jax.random.normal(key, (len(batch["point"]), 8))
    made, shown = run(params["generator"], z), run(frozen["generator"], z)
    cross = lambda net, x, true: optax.sigmoid_binary_cross_entropy(run(net, x)[:, 0], true)
    critic = cross(params["critic"], batch["point"], 1.0) + cross(params["critic"], shown, 0.0)
    return critic + cross(frozen["critic"], made, 1.0), model_state, made


def radius(made, batch):
    return {"off_ring": (abs(jnp.linalg.norm(made, axis=-1) - 1), jnp.ones(len(made)))}


def two(schedule):
    return optax.multi_transform(
        {"generator": optax.adam(1e-3, b1=0.5), "critic": optax.adam(3e-3, b1=0.5)},
        lambda params: {name: {w: name for w in net} for name, net in params.items()},
    )


experiment = Experiment(
    task=Task(name="gan", init=init, loss=loss, metrics=radius),
    data=Data("array", train={"point": points}, validation={"point": points[:512]}),
    optim=Optim("two", transform=two),
    monitor="eval_off_ring",
    effective_batch=64,
    train_for="8ep",
)
