"""The contract of a task."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree

Batch = dict[str, Any]
Judged = tuple[jax.Array, PyTree, Any] | tuple[jax.Array, PyTree, Any, dict[str, jax.Array]]  # see `Task.loss`
Ratios = dict[str, tuple[jax.Array, jax.Array]]


def no_metrics(outputs: Any, batch: Batch) -> Ratios:
    """Nothing but the loss."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A batch's losses, metrics and predictions, as pure functions.

    A step's loss is L = sum_j w_j l_j / sum_j w_j over the examples j of all workers. It is exact, however unequal
    their shares. A batch has the fields of the source's examples, [batch, ...] each, with dicts inside dicts as they
    are. It also has `weight` f32[batch], which is 0 if an example only fills the batch up. The trainer leaves such
    examples out of all sums, so a task need not look at `weight`. A loss that compares examples with each other
    (contrastive ones) sees those of one worker.

    Args:
        name: for messages.
        init: (key, batch) -> (params, model_state), of a batch of one example, all zeros.
        loss: (params, model_state, batch, key, train) -> (l f32[batch], model_state, outputs), and perhaps a fourth,
            {name: f32[batch] or f32[]}: scalars to show, as means over examples. `key` is this step's and worker's; in
            evaluation nothing may be random.
        metrics: (outputs, batch) -> {name: (sums, counts)}, f32[batch] or f32[batch, k] each. `eval_<name>` is
            sum_j sums_j / sum_j counts_j, of k columns the mean over those with a count; `train_<name>` is the same
            over the examples of the steps since the last progress line.
        maximize: names of the metrics whose highest value is the best, such as `("accuracy",)`; of all others, and of
            the loss, it is the lowest. The best checkpoint and `EarlyStop` follow.
        predict: (params, model_state, batch) -> outputs [batch, ...], any tree; None: the outputs of `loss`.
        weight: (batch) -> w f32[batch], such as an example's number of tokens; None: 1 each. It gets NumPy arrays and
            JAX's, so it may use operators and methods only: `(batch["label"] >= 0).sum(-1)`.

    Raises:
        UsageError: a part that is no function.
    """

    name: str
    init: Callable[[jax.Array, Batch], tuple[PyTree, PyTree]] = field(repr=False)
    loss: Callable[[PyTree, PyTree, Batch, jax.Array, bool], Judged] = field(repr=False)
    metrics: Callable[[Any, Batch], Ratios] = field(default=no_metrics, repr=False)
    maximize: tuple[str, ...] = ()
    predict: Callable[[PyTree, PyTree, Batch], Any] | None = field(default=None, repr=False)
    weight: Callable[[Batch], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"a task's name: got {self.name!r}; expected text")
        for part in ("init", "loss", "metrics", "predict", "weight"):
            value = getattr(self, part)
            if not callable(value) and not (value is None and part in ("predict", "weight")):
                raise UsageError(f"task {self.name}: {part}: got {value!r}; expected a function")

    def mode_of(self, figure: str) -> str:
        """`max` or `min`: which value of a figure such as `eval_top1` is the best."""
        return "max" if figure.removeprefix("eval_") in self.maximize else "min"
