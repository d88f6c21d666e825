"""Start of asynchronous workers: the center, each worker's state, and progress."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.buckets import round_up
from jaxmpi.allreduce.wires import BLOCK
from jaxmpi.checkpoint import manifests
from jaxmpi.checkpoint.restore import first_whole, read_file
from jaxmpi.comm.topology import Workers
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.train_state import TrainState
from jaxmpi.optim import optimizers
from jaxmpi.rules.base import Asynchronous
from jaxmpi.rules.parameter_server import Counters

# ---------------------------------------------------------------- params as one vector


class ParamsVector(NamedTuple):
    """How a tree of floating-point leaves lies in f32[n].

    Zeros fill up each leaf to whole blocks, the floats that share a scale on wires 16 and 8: no block has two leaves.
    """

    structure: Any
    like: list[jax.ShapeDtypeStruct]

    @classmethod
    def of(cls, params: PyTree) -> "ParamsVector":
        """Layout of params.

        Raises:
            UsageError: a leaf is no float32, bfloat16 or float16, by path.
        """
        for name, leaf in named_leaves(params):
            is_small = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize <= 4
            check(is_small, f"params {name}: got {leaf.dtype}; a center holds float32, bfloat16 or float16")
        leaves, structure = jax.tree.flatten(params)
        return cls(structure, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])

    @property
    def n(self) -> int:
        """Floats in all."""
        return sum(round_up(leaf.size, BLOCK) for leaf in self.like)

    def vector(self, params: PyTree) -> np.ndarray:
        """f32[n], a copy."""
        flat, start = np.zeros(self.n, np.float32), 0
        for leaf in jax.tree.leaves(params):
            flat[start : start + leaf.size] = np.asarray(leaf, np.float32).reshape(-1)
            start += round_up(leaf.size, BLOCK)
        return flat

    def tree(self, vector: np.ndarray) -> PyTree:
        """Params of f32[n] as NumPy arrays; those in f32 share its memory."""
        starts = np.cumsum([0, *(round_up(leaf.size, BLOCK) for leaf in self.like)])
        shaped = [
            vector[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype, copy=False)
            for start, leaf in zip(starts, self.like, strict=False)
        ]
        return jax.tree.unflatten(self.structure, shaped)


def on_device(tree: PyTree) -> PyTree:
    """Copies that are committed to this worker's device, as step results are."""
    return jax.device_put(jax.tree.map(jnp.array, tree), jax.local_devices()[0])


# ---------------------------------------------------------------- a start


@dataclass
class AsyncStart:
    """Start of a run: state 0, or the part of a checkpoint."""

    center: np.ndarray  # f32[n]
    state: TrainState
    counters: Counters
    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    weight: float = 0.0  # weight of this worker in gossip


def load_start(
    folder: Path, state: TrainState, workers: Workers, rule: Asynchronous, resume: bool, say: Callable[[str], None]
) -> AsyncStart:
    """State 0; with `resume` the newest checkpoint, for any number of workers.

    Args:
        folder: RUN/checkpoints.
        say: is called with a line for each damaged one that is passed over.
    """
    read = partial(start_from_checkpoint, state=state, worker=workers.mine[0], workers=workers.size, rule=rule)
    found = first_whole(folder, workers.processes, read, say) if resume else None
    workers.processes.assert_same("the checkpoint to resume from", {"step": found.step if found else 0})
    return found or AsyncStart(ParamsVector.of(state.params).vector(state.params), state, Counters())


def start_from_checkpoint(path: Path, state: TrainState, worker: int, workers: int, rule: Asynchronous) -> AsyncStart:
    """A worker's start from its part of a checkpoint, else the center.

    On another number of workers weights of gossip begin anew, so that they sum to 1.
    """
    manifest = manifests.read_manifest(path)
    center = read_file(path, manifest, "common.bin", {"center": state.params})["center"]
    mine, weight = state._replace(step=np.array(manifest["step"], np.int32), params=center), 0.0
    name = manifests.worker_file(worker)
    if manifest["files"].get(name):
        own = read_file(path, manifest, name, {**state._asdict(), "weight": np.zeros(())})
        weight = float(own.pop("weight")) * (manifest["workers"] == workers)
        mine = TrainState(**own)
    if rule.starts_at_center:
        mine = mine._replace(params=center)
    mine = mine._replace(
        rule_state=optimizers.set_step(mine.rule_state, manifest["step"])
    )  # a new worker's is of step 0
    extra = manifest["extra"]
    stored = extra.get("tally")
    # A tally of an older version may be shorter: what it did not count begins at 0.
    is_whole = (
        isinstance(stored, list) and len(stored) <= len(Counters._fields) and all(type(x) is float for x in stored)
    )
    most = len(Counters._fields)
    manifests.undamaged(is_whole, f"{path}: tally: got {stored!r:.80}; expected at most {most} numbers: damaged")
    return AsyncStart(
        center=ParamsVector.of(state.params).vector(center),
        state=mine,
        counters=Counters(*extra["tally"]),
        step=manifest["step"],
        extra=extra,
        weight=weight,
    )
