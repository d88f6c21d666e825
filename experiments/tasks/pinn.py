"""A net that solves u'' = -u by derivatives inside the loss.

mpirun -n 2 python -m jaxmpi.train experiments/tasks/pinn.py
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi import Task
from jaxmpi.config import Data, Experiment, Optim

times = np.linspace(0, 3, 513, dtype=np.float32)


def init(key, batch):
    keys = jax.random.split(key, 3)
    return {"w1": jax.random.normal(keys[0], (1, 32)), "b1": jax.random.normal(keys[1], (32,)),
            "w2": 0.1 * jax.random.normal(keys[2], (32,))}, {}  # fmt: skip


def u(params, t):
    # u(0) = 0 and u'(0) = 1 by construction
    return t + t**2 * jnp.tanh(t * params["w1"][0] + params["b1"]) @ params["w2"]


def loss(params, model_state, batch, key, train):
    value = lambda t: u(params, t)
    residual = lambda t: jax.grad(jax.grad(value))(t) + value(t)
    return jnp.square(jax.vmap(residual)(batch["t"])), model_state, jax.vmap(value)(batch["t"])


def far(found, batch):
    return {"error": (abs(found - jnp.sin(batch["t"])), jnp.ones(len(found)))}


experiment = Experiment(
    task=Task(name="oscillator", init=init, loss=loss, metrics=far),
    data=Data("array", train={"t": times[1::2]}, validation={"t": times[::2]}),
    optim=Optim("adam", lr=0.003),
    effective_batch=32,
    train_for="100ep",
    eval_every="20ep",
)
