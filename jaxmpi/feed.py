"""Examples of one kind on their way to the devices: who reads which when, and what the wait for them was."""

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxmpi import step as steps
from jaxmpi.config import Data, Experiment, check
from jaxmpi.data import Batch, Loader, Sampler, Source, load_mean_image, open_source
from jaxmpi.partition import Memory, keep
from jaxmpi.workers import Workers, spread


@dataclass
class Feed:
    """A source, and the share of it that this process's workers read at each step."""

    source: Source
    samplers: tuple[Sampler, ...]  # of this process's workers
    data: Data
    train: bool
    mesh: Mesh | None = None  # of all workers, where XLA exchanges between them
    skipped: int = 0  # corrupt examples so far
    wait_s: float = 0.0  # seconds that batches have been waited for so far
    memory: Memory | None = None  # what keeps the source's records in memory

    def facts(self) -> dict[str, Any]:
        """What must be the same on all ranks: how many examples and classes, and the source's digest of them."""
        digest, mean_image = getattr(self.source, "digest", None), self.data.mean_image
        load_mean_image(self.data)  # says what is wrong with it
        return {
            "examples": len(self.source),
            "classes": int(self.source.classes or 0),
            "digest of names, labels or images": digest() if digest else "",
            "order": self.samplers[0].name,
            "mean image": hashlib.sha256(Path(mean_image).read_bytes()).hexdigest() if mean_image else "",
        }

    @property
    def bytes_each(self) -> int:
        """Bytes of text that an example predicts; 0 where examples are no text."""
        return getattr(self.source, "bytes_each", 0)

    def batches(self, start: int = 0, stop: int | None = None) -> Generator[steps.Batch, None, None]:
        """Batches of this process's workers, with a leading axis of workers where there are several."""
        if self.memory:
            self.memory.begin(start, stop)
        loaders = [Loader(self.source, sampler, self.data, self.train, start, stop) for sampler in self.samplers]
        skipped, wait_s = self.skipped, self.wait_s
        try:
            for batches in zip(*loaders, strict=True):
                if self.memory:
                    self.memory.reached(batches[0].epoch)
                self.skipped = skipped + sum(loader.skipped for loader in loaders)
                self.wait_s = wait_s + sum(loader.wait_s for loader in loaders)
                yield stacked(batches, self.mesh)
        finally:
            for loader in loaders:
                loader.close()


def stacked(batches: Sequence[Batch], mesh: Mesh | None) -> steps.Batch:
    """What of the workers' batches goes to the devices; over a mesh this process's share of all workers'."""
    arrays = [{"image": batch.image, "label": batch.label, "weight": batch.weight} for batch in batches]
    return arrays[0] if mesh is None else spread(arrays, mesh)


def open_feed(experiment: Experiment, split: str, effective_batch: int, workers: Workers, micro_batch: int = 0) -> Feed:
    """The source of a split, checked against the model.

    Args:
        micro_batch: which divides each worker's batch, filled up; 0 where there is none.

    Raises:
        UsageError: the data is missing, or its classes are not the model's.
    """
    source = open_source(experiment.data, split)
    model = experiment.model
    is_counted = getattr(source, "is_counted", False)  # by what labels there are; the highest may be missing
    spare = bool(model.label_shape) and source.classes <= model.classes  # a model may know more tokens than occur
    check(
        source.classes in (None, 0, model.classes) or (is_counted and source.classes < model.classes) or spare,
        f"{source.name} has {source.classes} classes, model {model.name} has {model.classes}; "
        f"build the model with classes={source.classes}",
    )
    is_train, seed, multiple = split == "train", experiment.seed, micro_batch or 1
    if experiment.data.memory == "partition":
        memory, samplers = keep(source, experiment.data, seed, effective_batch, is_train, workers, multiple)
        return Feed(memory.source, samplers, experiment.data, is_train, workers.mesh, memory=memory)
    samplers = tuple(
        Sampler(len(source), effective_batch, rank, workers.size, seed, shuffle=is_train, multiple=multiple)
        for rank in workers.mine
    )
    return Feed(source, samplers, experiment.data, is_train, workers.mesh)
