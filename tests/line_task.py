"""A task of four functions whose steps can be made by hand: points near a line, tokens as weights."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi import Task
from jaxmpi.config import Data, Experiment, Optim
from jaxmpi.tasks.base import Batch


def line(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Points near a line, of three features; how many tokens each stands for."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.array([1, -2, 3], np.float32), "tokens": rng.integers(1, 9, n)}


def init(key: jax.Array, batch: Batch):
    return {"w": jnp.zeros(batch["x"].shape[1:])}, {}


def loss(params, model_state, batch, key, train):
    far = batch["x"] @ params["w"] - batch["y"]
    return jnp.square(far), model_state, far


def far(outputs, batch):
    return {"far": (abs(outputs), jnp.ones(len(outputs)))}


LINE = Task(name="line", init=init, loss=loss, metrics=far)
BY_TOKEN = dataclasses.replace(LINE, weight=lambda batch: batch["tokens"])
STEPS = 7


def lines(folder: Path, task: Task = LINE, **fields) -> Experiment:
    base = {
        "task": task,
        "data": Data("array", train=line(50), validation=line(13, 1), loader="threads"),
        "optim": Optim("sgd", lr=0.01),
        "effective_batch": 12,  # 50 = 4 x 12 + 2: an epoch's last step is short
        "train_for": f"{STEPS}st",
        "run_dir": str(folder / f"run{len(list(folder.iterdir()))}"),
        "quiet": True,
    }
    return Experiment(**base | fields)
