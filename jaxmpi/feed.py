"""Examples of one kind on their way to the devices: who reads which when, and what the wait for them was."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmpi import step as steps
from jaxmpi.config import Data, Experiment, check
from jaxmpi.data import Batch, Loader, Sampler, Source, open_source
from jaxmpi.workers import Workers


@dataclass
class Feed:
    """A source, and the share of it that this process's workers read at each step."""

    source: Source
    samplers: tuple[Sampler, ...]  # of this process's workers
    data: Data
    train: bool
    skipped: int = 0  # corrupt examples so far
    wait_s: float = 0.0  # seconds that batches have been waited for so far

    def facts(self) -> dict[str, Any]:
        """What must be the same on all ranks: how many examples and classes, and the source's digest of them."""
        digest, mean_image = getattr(self.source, "digest", None), self.data.mean_image
        return {
            "examples": len(self.source),
            "classes": int(self.source.classes or 0),
            "digest of names, labels or images": digest() if digest else "",
            "mean image": hashlib.sha256(Path(mean_image).read_bytes()).hexdigest() if mean_image else "",
        }

    @property
    def bytes_each(self) -> int:
        """Bytes of text that an example predicts; 0 where examples are no text."""
        return getattr(self.source, "bytes_each", 0)

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[steps.Batch]:
        """Batches of this process's workers, with a leading axis of workers where there are several."""
        loaders = [Loader(self.source, sampler, self.data, self.train, start, stop) for sampler in self.samplers]
        skipped, wait_s = self.skipped, self.wait_s
        try:
            for batches in zip(*loaders, strict=True):
                self.skipped = skipped + sum(loader.skipped for loader in loaders)
                self.wait_s = wait_s + sum(loader.wait_s for loader in loaders)
                yield stacked(batches)
        finally:
            for loader in loaders:
                loader.close()


def stacked(batches: Sequence[Batch]) -> steps.Batch:
    """What of the workers' batches goes to the devices."""
    arrays = [{"image": batch.image, "label": batch.label, "weight": batch.weight} for batch in batches]
    return arrays[0] if len(arrays) == 1 else steps.stack(arrays)


def open_feed(experiment: Experiment, split: str, local_batch: int, workers: Workers) -> Feed:
    """The source of a split, checked against the model.

    Raises:
        UsageError: the data is missing, or its classes are not the model's.
    """
    source = open_source(experiment.data, split)
    model = experiment.model
    spare = bool(model.label_shape) and source.classes <= model.classes  # a model may know more tokens than occur
    check(
        source.classes in (None, 0, model.classes) or spare,
        f"{source.name} has {source.classes} classes, model {model.name} has {model.classes}; "
        f"build the model with classes={source.classes}",
    )
    is_train = split == "train"
    samplers = tuple(
        Sampler(len(source), local_batch * workers.size, rank, workers.size, experiment.seed, shuffle=is_train)
        for rank in workers.mine
    )
    return Feed(source, samplers, experiment.data, is_train)
