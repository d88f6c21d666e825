"""Examples of one kind on their way to the devices: who reads which when, and what the wait for them was."""

import collections
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmpi import spawned as spawned  # a kind of loaders
from jaxmpi import step as steps
from jaxmpi.config import Data, Experiment, check
from jaxmpi.data import Batch, Crew, Loader, Sampler, Source, kind_for, open_source
from jaxmpi.workers import Workers


@dataclass
class Feed:
    """A source, and the share of it that this process's workers read at each step."""

    source: Source
    samplers: tuple[Sampler, ...]  # of this process's workers
    data: Data
    train: bool
    crew: Crew  # the loaders of all feeds of this process
    mesh: jax.sharding.Mesh | None  # of local devices, where this process runs several workers
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

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[steps.Batch]:
        """Batches on the devices of this process's workers, with a leading axis of workers where there are several.

        The next one is on its way to the device before the step of this one begins, if it has been made by then.
        """
        loaders = [Loader(self.source, s, self.data, self.train, start, stop, self.crew) for s in self.samplers]
        skipped, wait_s = self.skipped, self.wait_s
        ahead: collections.deque[tuple[steps.Batch, int]] = collections.deque()  # and skipped examples up to it

        def put_next() -> bool:
            batches = [batch for batch in (next(loader, None) for loader in loaders) if batch is not None]
            if batches:
                ahead.append((on_devices(batches, self.mesh), sum(loader.skipped for loader in loaders)))
            return bool(batches)

        try:
            while ahead or put_next():
                batch, of_these = ahead.popleft()
                if all(loader.ready() for loader in loaders):
                    put_next()
                self.skipped = skipped + of_these
                self.wait_s = wait_s + sum(loader.wait_s for loader in loaders)
                yield batch
                del batch  # its memory is to be free before the next one is asked for
        finally:
            for loader in loaders:
                loader.close()


def on_devices(batches: Sequence[Batch], mesh: jax.sharding.Mesh | None) -> steps.Batch:
    """What of the workers' batches goes to the devices, each worker's part to its own.

    A device that shares the host's memory takes images where they lie.
    """
    arrays = [{"image": batch.image, "label": batch.label, "weight": batch.weight} for batch in batches]
    if mesh is None:
        return jax.device_put(arrays[0])
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(steps.AXIS))

    def joined(*parts: np.ndarray) -> jax.Array:
        placed = [jax.device_put(part[None], device) for part, device in zip(parts, mesh.devices.flat, strict=True)]
        return jax.make_array_from_single_device_arrays((len(parts), *parts[0].shape), spread, placed)

    return jax.tree.map(joined, *arrays)


def open_feed(experiment: Experiment, split: str, local_batch: int, workers: Workers, crew: Crew | None = None) -> Feed:
    """The source of a split, checked against the model.

    Args:
        crew: of another feed, which this one shares; None makes one, of `data.loaders` loaders a worker.

    Raises:
        UsageError: the data is missing, or its classes are not the model's.
    """
    data, model = experiment.data, experiment.model
    source = open_source(data, split)
    check(
        source.classes in (None, 0, model.classes),
        f"{source.name} has {source.classes} classes, model {model.name} has {model.classes}; "
        f"build the model with classes={source.classes}",
    )
    is_train = split == "train"
    samplers = tuple(
        Sampler(len(source), local_batch * workers.size, rank, workers.size, experiment.seed, shuffle=is_train)
        for rank in workers.mine
    )
    loaders = data.loaders * len(workers.mine)
    crew = crew or Crew(kind_for(data, source), loaders, data.stall_s)
    return Feed(source, samplers, data, is_train, crew, workers.mesh)
