"""Figures of a whole validation set, such as AUC or Spearman's correlation, which are no sums over examples.

Ranks gather the outputs and labels of each batch, and rank 0 keeps them in the order of the data, whatever the number
of workers. After the last batch it calls the user's function and broadcasts the figures, so that all ranks monitor the
same numbers.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from jaxmpi.comm.agreement import on_all_ranks
from jaxmpi.comm.topology import Workers, local_rows
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.core.train_state import Batch

WholeSetFunction = Callable[[Any, Any], dict[str, Any]]


class WholeSet:
    """One evaluation's outputs and labels, and what `Experiment.whole_set` makes of them."""

    def __init__(self, function: WholeSetFunction, workers: Workers) -> None:
        self.function, self.workers = function, workers
        self.tables: dict[str, str] = {}  # arrays that the function returned, as texts; on rank 0
        self._parts: list[tuple[Any, Any]] = []  # outputs and labels of batches; on rank 0

    def add(self, batch: Batch, outputs: Any) -> None:
        """Gather a batch's rows; all ranks call it."""
        fields = {name: value for name, value in batch.items() if name != "weight"}
        labels = fields.get("label", fields)
        outputs, labels, weight = gather_rows((outputs, labels, batch["weight"]), self.workers)
        if self.workers.processes.rank == 0:
            real = weight > 0
            self._parts.append(jax.tree.map(lambda x: x[real], (outputs, labels)))

    def figures(self, taken: Collection[str]) -> dict[str, float]:
        """Figures by the user's function; all ranks call it.

        Args:
            taken: names of the figures that there are.
        """
        control = self.workers.processes

        def judge() -> dict[str, float]:
            if control.rank != 0 or not self._parts:
                return {}
            outputs, labels = jax.tree.map(lambda *parts: np.concatenate(parts), *self._parts)
            named = self.function(outputs, labels)
            if not isinstance(named, dict):
                raise UsageError(f"whole_set: got a {type(named).__name__}; expected a dict of name: number")
            numbers = {}
            for name, value in named.items():
                values = np.asarray(value)
                if name in taken or not np.issubdtype(values.dtype, np.number):
                    raise UsageError(
                        f"whole_set: {name}: got {value!r:.200}; expected a number, under a name of its own"
                    )
                if values.ndim:
                    self.tables[name] = np.array2string(values, threshold=10_000, max_line_width=200)
                else:
                    numbers[name] = float(values)
            return numbers

        return on_all_ranks(control, judge)[0]


def gather_rows(tree: PyTree, workers: Workers) -> PyTree:
    """Every worker's rows of a batch in the order of the data, on all ranks; float64 carries 32 bits exactly."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [local_rows(leaf, workers) for leaf in leaves]  # [workers of this process, rows, ...]
    every = workers.processes.allgather_array(np.concatenate([x.ravel().astype(np.float64) for x in arrays]))
    parts = np.split(every, np.cumsum([x.size for x in arrays])[:-1], axis=1)
    # Example j of a batch is worker (j mod w)'s.
    rows = [part.reshape(-1, *x.shape[1:]).swapaxes(0, 1) for x, part in zip(arrays, parts, strict=True)]
    return structure.unflatten(
        [each.reshape(-1, *x.shape[2:]).astype(x.dtype) for x, each in zip(arrays, rows, strict=True)]
    )
