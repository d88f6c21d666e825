"""State of a worker between two steps, enough to go on exactly."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.core.pytrees import PyTree


class TrainState(NamedTuple):
    """State k is the state after k updates."""

    step: Any  # i32[]: updates so far; the sampler's position follows from it
    params: PyTree  # equal on all workers
    model_state: PyTree  # this worker's batch statistics and the like
    rule_state: PyTree  # this worker's, unless the rule says that it is replicated
    key: Any  # u32[2]: this worker's random stream, folded with the step


def worker_key(seed: int, worker: int) -> np.ndarray:
    """A worker's key data, u32[2]: its own, and equal in every run."""
    return np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(seed), worker)))


def create(params: PyTree, model_state: PyTree, rule_state: PyTree, *, seed: int, worker: int) -> TrainState:
    """State 0 of a worker."""
    return TrainState(
        step=np.zeros((), np.int32),
        params=params,
        model_state=model_state,
        rule_state=rule_state,
        key=worker_key(seed, worker),
    )


Batch = dict[str, Any]  # image [batch, ...], label i32[batch, ...], weight f32[batch]
