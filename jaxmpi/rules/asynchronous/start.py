"""Start of an asynchronous worker: params as one vector, state 0 or its part of a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.wires import BLOCK
from jaxmpi.checkpoint import manifests
from jaxmpi.checkpoint.restore import first_whole, read_file
from jaxmpi.comm.topology import Workers
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.train_state import TrainState
from jaxmpi.optim import optimizers
from jaxmpi.rules.asynchronous.center import Counters
from jaxmpi.rules.base import Asynchronous


class ParamsVector(NamedTuple):
    """How a tree of floating-point leaves lies in f32[n].

    Zeros fill up each leaf to whole blocks, the floats that share a scale on wires 16 and 8: no block has two leaves.
    """

    structure: Any
    like: list[jax.ShapeDtypeStruct]

    @classmethod
    def from_params(cls, params: PyTree) -> "ParamsVector":
        """Layout of params.

        Raises:
            UsageError: a leaf is no float32, bfloat16 or float16, by path.
        """
        for name, leaf in named_leaves(params):
            if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize > 4:
                raise UsageError(f"params {name}: got {leaf.dtype}; a center holds float32, bfloat16 or float16")
        leaves, structure = jax.tree.flatten(params)
        return cls(structure, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])

    @property
    def starts(self) -> list[int]:
        """Where each leaf begins; then n."""
        return np.cumsum([0, *(-(-leaf.size // BLOCK) * BLOCK for leaf in self.like)]).tolist()

    @property
    def n(self) -> int:
        """Floats in all."""
        return self.starts[-1]

    def vector(self, params: PyTree) -> np.ndarray:
        """f32[n], a copy."""
        flat = np.zeros(self.n, np.float32)
        for start, leaf in zip(self.starts, jax.tree.leaves(params), strict=False):
            flat[start : start + leaf.size] = np.asarray(leaf, np.float32).reshape(-1)
        return flat

    def tree(self, vector: np.ndarray) -> PyTree:
        """Params of f32[n] as NumPy arrays; those in f32 share its memory."""
        leaves = [
            vector[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype, copy=False)
            for start, leaf in zip(self.starts, self.like, strict=False)
        ]
        return jax.tree.unflatten(self.structure, leaves)


def on_device(tree: PyTree) -> PyTree:
    """Copies that are committed to this worker's device, as step results are."""
    return jax.device_put(jax.tree.map(jnp.array, tree), jax.local_devices()[0])


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
    return found or AsyncStart(ParamsVector.from_params(state.params).vector(state.params), state, Counters())


def start_from_checkpoint(path: Path, state: TrainState, worker: int, workers: int, rule: Asynchronous) -> AsyncStart:
    """A worker's start from its part of a checkpoint, else the center.

    On another number of workers weights of gossip begin anew, so that they sum to 1.
    """
    manifest = manifests.read_manifest(path)
    center = read_file(path, manifest, "common.bin", {"center": state.params})["center"]
    started, weight = state._replace(step=np.array(manifest["step"], np.int32), params=center), 0.0
    name = manifests.worker_file(worker)
    if manifest["files"].get(name):
        stored = read_file(path, manifest, name, {**state._asdict(), "weight": np.zeros(())})
        weight = float(stored.pop("weight")) * (manifest["workers"] == workers)
        started = TrainState(**stored)
    if rule.starts_at_center:
        started = started._replace(params=center)
    # A new worker's optimizer is at step 0: it would warm up while the others' rate has long fallen.
    started = started._replace(rule_state=optimizers.set_step(started.rule_state, manifest["step"]))
    tally = manifest["extra"].get("tally")  # of an older version it may be shorter: what that did not count begins at 0
    most = len(Counters._fields)
    is_whole = isinstance(tally, list) and len(tally) <= most and all(type(x) is float for x in tally)
    manifests.undamaged(is_whole, f"{path}: tally: got {tally!r:.80}; expected at most {most} numbers: damaged")
    return AsyncStart(
        center=ParamsVector.from_params(state.params).vector(center),
        state=started,
        counters=Counters(*tally),
        step=manifest["step"],
        extra=manifest["extra"],
        weight=weight,
    )
