"""Source: a `MapDataset` of Grain, which gives any example by its index.

Grain counts on behind the end: index e n + i of n examples is example i of epoch e, with the random choices of that
epoch. `endless` has the loaders ask so. Grain imports JAX, so it is read by threads.

`grain_streams` has `IterDataset`.
"""

import sys
from typing import Any

from jaxmpi.config.data import Data
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError, check
from jaxmpi.data.sources.arrays import PythonSource
from jaxmpi.data.sources.base import Source
from jaxmpi.data.sources.grain_streams import StreamSource, is_stream


class GrainSource(PythonSource):
    """A `MapDataset` of (image, label), or of dicts.

    Args:
        examples: the `MapDataset`.
        name: for errors.
    """

    in_process = True
    endless = True

    def _read(self, index: int) -> Any:
        example = self.examples[int(index)]
        check(
            example is not None,
            f"{self.where(index)}: got None, as MapDataset.filter leaves; filter what the MapDataset is made from",
        )
        return example

    def where(self, index: int) -> str:
        """The example and its epoch."""
        epoch, example = divmod(int(index), len(self))
        return f"{self.name}[{example}], epoch {epoch}"


def grain(config: Data, split: str) -> Source:
    """`data.train` or `data.validation`, a `MapDataset` or `IterDataset` of Grain."""
    try:
        import grain as library
    except ImportError as error:
        raise UsageError(f"grain: {error}; install it with {installing('jaxmpi[grain]')}") from error
    examples, name = config.train if split == "train" else config.validation, f"data.{split}"
    if is_stream(examples):
        return StreamSource(examples, name)
    check(
        isinstance(examples, library.MapDataset),
        f"{name}: got {type(examples).__name__}; expected a grain.MapDataset, a grain.IterDataset, or a function "
        "(worker, workers) -> IterDataset",
    )
    check(
        len(examples) < sys.maxsize, f"{name}: got an endless MapDataset; leave repeat() out: epochs are the trainer's"
    )
    return GrainSource(examples, name)
