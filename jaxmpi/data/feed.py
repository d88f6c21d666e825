"""Batches of one split, from the source to this process's devices.

A step must wait neither for decoding nor for the copy to the device: loaders make batches ahead, and the copy of the
next one starts before the current one is yielded. Which examples a worker reads follows from seed, epoch and step, so
ranks send no messages about them; only streams have a state. Weights of examples need their sum over all workers before
the backward pass: ranks add two numbers on the host just before the step. (An allreduce inside the gradients' program
would have every rank compile that program for itself.)
"""

import collections
import contextlib
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmpi.comm import topology
from jaxmpi.comm.job import Processes
from jaxmpi.comm.topology import Workers
from jaxmpi.config.data import Data, to_loader_config, validation_sets
from jaxmpi.config.schema import Experiment
from jaxmpi.core import train_state
from jaxmpi.core.errors import AgreedError, UsageError
from jaxmpi.core.pytrees import signature
from jaxmpi.data import mpi_loaders as mpi_loaders  # a kind of loaders
from jaxmpi.data.batch_loader import Loader
from jaxmpi.data.example import Augment, ExampleReader, load_mean_image, nested
from jaxmpi.data.loader_pool import LoaderPool, make_pool
from jaxmpi.data.sampler import UNBOUNDED, FileSampler, Sampler, StreamSampler
from jaxmpi.data.shuffle import MemoryShuffle, keep_in_memory
from jaxmpi.data.sources.base import Source
from jaxmpi.data.sources.grain_datasets import StreamSource
from jaxmpi.data.sources.registry import open_source
from jaxmpi.model.contract import Model
from jaxmpi.runtime.process import rank_cores
from jaxmpi.tasks.registry import find_spec, make_task


@dataclass
class DeviceFeed:
    """A source, and what this process's workers read of it."""

    source: Source
    samplers: tuple[Sampler, ...]  # samplers of this process's workers
    data: Data
    train: bool
    pool: LoaderPool  # the loaders of all feeds of this process
    mesh: Mesh | None = None  # mesh of all workers, if XLA exchanges between them
    skipped: int = 0  # corrupt examples so far
    wait_s: float = 0.0  # seconds that batches have been waited for so far
    memory: MemoryShuffle | None = None  # keeps the source's records in memory
    classes: int = 0  # that labels may name if the source does not say; 0: any number
    labels: str = "classes"  # as of example.ExampleReader
    model: Any = None  # a Model, which the source's classes fit; None: the task is the user's own
    weigh: Callable[[train_state.Batch], Any] | None = None  # an example's weight in the loss; None: 1
    control: Processes | None = None  # over which weights are summed

    def __post_init__(self) -> None:
        # Of a language model's text: mean bytes and tokens that an example predicts; else 0.
        self.bytes_each, self.tokens_each = (
            getattr(self.source, name, 0.0) if self.model else 0.0 for name in ("bytes_each", "tokens_each")
        )

    def facts(self) -> dict[str, Any]:
        """Facts of the data that must be equal on all ranks."""
        mean_image = self.data.mean_image
        load_mean_image(self.data)  # says what is wrong with it
        return {
            "examples": len(self.source) if self.has_epochs else "unknown",
            "classes": int(self.source.classes or 0),
            "digest of names, labels or images": getattr(self.source, "digest", str)(),
            "order": self.samplers[0].name,
            "mean image": hashlib.sha256(Path(mean_image).read_bytes()).hexdigest() if mean_image else "",
            **({} if self.model else {"fields": signature(self.example())}),
        }

    def example(self) -> train_state.Batch:
        """Shapes of a batch of one example without its weight: the model's, or the source's first example's."""
        if self.model and self.labels != "numbers":
            label = jax.ShapeDtypeStruct((1, *self.model.label_shape), np.int32)
            return {"image": self.model.example(), "label": label}
        return self.source_example()

    def source_example(self) -> train_state.Batch:
        """Shapes and dtypes of the source's first example as a batch of one: u8 for images to be normalised."""
        augment = Augment(to_loader_config(self.data), self.train, self.samplers[0].seed, load_mean_image(self.data))
        if not len(self.source):
            raise UsageError(f"{self.source.name}: got 0 examples; expected >= 1")
        row = ExampleReader(self.source, augment, False, labels=self.labels).row(0, 0)
        kinds = {name: np.float32 if value.dtype.kind == "f" else value.dtype for name, value in row.items()}
        return nested({name: jax.ShapeDtypeStruct((1, *row[name].shape), kinds[name]) for name in row})

    @contextlib.contextmanager
    def open_until_agreed(self, *agreed: type[Exception]) -> Iterator[None]:
        """Keep records in memory until all ranks leave this together, by an `AgreedError` or `agreed` ones too.

        An error of one rank alone closes nothing.
        """
        try:
            yield
        except (AgreedError, *agreed):
            if self.memory:
                self.memory.close()
            raise
        if self.memory:
            self.memory.close()

    @property
    def has_epochs(self) -> bool:
        """Return True if the length is known; a training stream's is not."""
        return len(self.source) != UNBOUNDED

    def positions(self, step: int) -> list[str]:
        """States of this process's streams behind a step; empty without streams."""
        readers = self.source.readers if isinstance(self.source, StreamSource) else ()
        return [reader.state(step) for reader in readers]

    def go_to(self, step: int, positions: Sequence[str]) -> None:
        """Have the next batches begin behind a step, at all workers' positions in a checkpoint."""
        if isinstance(self.source, StreamSource):
            states = [positions[sampler.rank % len(positions)] for sampler in self.samplers] if step else ()
            self.source.begin(step, states)

    def batches(self, start: int = 0, stop: int | None = None) -> Generator[train_state.Batch, None, None]:
        """Yield batches on this process's devices.

        Over a mesh they have a leading axis of workers. If the next one has been made, its copy to the device starts
        before the step of this one.
        """
        if self.memory:
            self.memory.begin(start, stop)
        source = self.source
        if isinstance(source, StreamSource):
            source = source if self.train else source.with_new_readers()  # an evaluation may begin within another
            source.begin(start)
        loaders = [
            Loader(source, sampler, self.data, self.train, start, stop, self.pool, self.classes, self.labels)
            for sampler in self.samplers
        ]
        skipped, wait_s = self.skipped, self.wait_s
        # Batches with their step, the skipped examples so far, and the examples' weights if they differ.
        ahead: collections.deque[tuple[train_state.Batch, int, int, list[np.ndarray]]] = collections.deque()

        def put_next() -> bool:
            batches = [batch for batch in (next(loader, None) for loader in loaders) if batch is not None]
            if batches:
                trees = [{**nested(batch.fields), "weight": batch.weight} for batch in batches]
                weights = [self._weights(tree) for tree in trees] if self.weigh and self.train else []
                skipped_here = sum(loader.skipped for loader in loaders)
                ahead.append((_put_on_devices(trees, self.mesh), batches[0].step, skipped_here, weights))
            return bool(batches)

        try:
            while ahead or put_next():
                batch, step, skipped_here, weights = ahead.popleft()
                for reader in source.readers if isinstance(source, StreamSource) else ():
                    reader.forget(step)
                if self.memory:  # at the same batch on all ranks, however far each is ahead
                    self.memory.reached(step)
                if all(loader.ready() for loader in loaders):
                    put_next()
                self.skipped = skipped + skipped_here
                self.wait_s = wait_s + sum(loader.wait_s for loader in loaders)
                if weights:  # N w_j / sum w, over the examples of all N workers
                    local = np.array([sum(array.sum() for array in weights), len(weights)])
                    total, workers = self.control.allreduce_sum(local) if self.control else local
                    scale = workers / total if total else 0.0
                    scaled = [(array * scale).astype(np.float32) for array in weights]
                    batch = {**batch, "weight": _put_on_devices(scaled, self.mesh)}
                yield batch
                del batch  # its memory is to be free before the next one is requested
        finally:
            for loader in loaders:
                loader.close()

    def _weights(self, tree: dict[str, Any]) -> np.ndarray:
        """f64[local batch]: weights of examples in the loss; 0 for fillers."""
        assert self.weigh is not None
        weights, n = np.asarray(self.weigh(tree), np.float64), len(tree["weight"])
        if weights.shape != (n,) or not (np.isfinite(weights) & (weights >= 0)).all():
            raise UsageError(f"weight: got {weights}; expected {n} finite numbers >= 0, one an example")
        return np.where(tree["weight"] > 0, weights, 0)


def _put_on_devices(arrays: Sequence[Any], mesh: Mesh | None) -> Any:
    """Put the workers' trees on their devices; a mesh adds a leading axis, of which this process has its part.

    A device that shares the host's memory takes the largest field of a batch where it lies.
    """
    if mesh is None:
        return jax.device_put(arrays[0])
    along = NamedSharding(mesh, PartitionSpec(topology.AXIS))
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]

    def join(*parts: np.ndarray) -> jax.Array:
        put = [jax.device_put(part[None], device) for part, device in zip(parts, local, strict=True)]
        return jax.make_array_from_single_device_arrays((mesh.size, *parts[0].shape), along, put)

    return jax.tree.map(join, *arrays)


def open_feed(
    experiment: Experiment,
    split: str,
    effective_batch: int,
    workers: Workers,
    micro_batch: int = 0,
    pool: LoaderPool | None = None,
) -> DeviceFeed:
    """The source of a split, checked against the model.

    Training data of another number of classes makes the model again, if it knows how: `DeviceFeed.model`.

    Args:
        micro_batch: which divides each worker's batch, filled up; 0 if there is none.
        pool: of another feed, which this one shares if loaders of that kind suit it; else it has one of its own, of
            `data.loaders` loaders a worker.
    """
    data, is_train, multiple = experiment.data, split == "train", micro_batch or 1
    source = open_source(data, split)
    is_stream = isinstance(source, StreamSource)
    if is_stream:
        _open_streams(source, is_train, effective_batch, data, workers)
    for note in getattr(source, "notes", ()) if workers.processes.rank == 0 else ():
        print(f"jaxmpi: {note}", file=sys.stderr)
    spec, model = find_spec(experiment), experiment.model
    labels = spec.labels if spec else "numbers"
    if spec is not None and labels != "numbers":
        model = _fit_classes(model, source, is_train)
    memory, order = None, {"size": workers.size, "seed": experiment.seed, "multiple": multiple}
    if data.memory == "partition":
        memory, samplers = keep_in_memory(source, data, order["seed"], effective_batch, is_train, workers, multiple)
        source = memory.source
    elif is_stream:
        if data.shuffle_by.startswith("files"):
            raise UsageError(f"data.shuffle_by: got {data.shuffle_by}; {source.name} is a stream: leave it out")
        make = partial(StreamSampler, len(source), effective_batch, lengths=source.lengths, **order)
        samplers = tuple(make(rank=rank, place=place) for place, rank in enumerate(workers.mine))
    else:
        source, sampler = _choose_sampler(source, data, is_train, workers)
        make = partial(sampler, len(source), effective_batch, shuffle=is_train, **order)
        samplers = tuple(make(rank=rank) for rank in workers.mine)
    own_pool = make_pool(data, source, rank_cores(), len(workers.mine))
    if pool is None or (pool.kind, pool.size) != (own_pool.kind, own_pool.size):
        pool = own_pool
    return DeviceFeed(
        source=source,
        samplers=samplers,
        data=data,
        train=is_train,
        pool=pool,
        mesh=workers.mesh,
        memory=memory,
        classes=0 if experiment.loss or model is None else model.classes,  # to one's own loss labels may be anything
        labels=labels,
        model=model,
        weigh=make_task(dataclasses.replace(experiment, model=model)).weight,
        control=None if workers.asynchronous else workers.processes,
    )


def open_validation(
    experiment: Experiment, effective_batch: int, workers: Workers, pool: LoaderPool | None = None
) -> dict[str, DeviceFeed]:
    """The feed of each validation set by the prefix of its figures, as `open_feed` opens it."""
    feeds = dict[str, DeviceFeed]()
    for prefix, data in validation_sets(experiment.data).items():
        part = dataclasses.replace(experiment, data=data)
        feeds[prefix] = open_feed(part, "validation", effective_batch, workers, pool=pool)
        pool = feeds[prefix].pool
    return feeds


def _choose_sampler(source: Source, data: Data, is_train: bool, workers: Workers) -> tuple[Source, Callable[..., Any]]:
    """The source to read, which gives examples or whole files, and the sampler of that order."""
    shuffle_by = data.shuffle_by
    ends, span_ends = (getattr(source, name, None) for name in ("file_ends", "span_ends"))
    if ends is None and shuffle_by.startswith("files"):
        raise UsageError(
            f"data.shuffle_by: got {shuffle_by}; {source.name} has no files of several examples: use auto or examples"
        )
    if span_ends is None and shuffle_by == "files-mixed":
        raise UsageError(
            f"data.shuffle_by: got files-mixed; {source.name} does not read its files in one go: use auto or files"
        )
    if not ends or shuffle_by == "examples":
        return source, Sampler
    if is_train and shuffle_by == "auto" and not _is_mixed(source):
        if workers.processes.rank == 0:
            print(
                f"jaxmpi: {source.name}: neighbours have the same label, so whole files would make batches of few "
                "classes: examples are taken one by one; write_batch_files mixes them (data.shuffle_by)",
                file=sys.stderr,
            )
        return source, Sampler
    if span_ends is None:
        return source, partial(FileSampler, file_ends=ends)
    sampler = partial(FileSampler, file_ends=ends if shuffle_by == "files" else span_ends, mixed=shuffle_by != "files")
    return source.whole_files(), sampler  # pyright: ignore[reportAttributeAccessIssue] - there with span_ends


def _is_mixed(source: Source) -> bool:
    """Return True if neighbours' labels differ at least half as often as in a random order, or are not known.

    If files are not mixed, such as files sorted by class, a batch of whole files would have few classes.
    """
    labels = getattr(source, "labels", None)
    if labels is None or len(labels) < 2:
        return True
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    return float(np.mean(labels[1:] != labels[:-1])) >= 0.5 * (1 - float(np.sum(shares**2)))


def _open_streams(source: StreamSource, is_train: bool, effective_batch: int, data: Data, workers: Workers) -> None:
    """Open this process's streams, and count those of an evaluation.

    Communicates: the counts, if each worker has a stream of its own.

    Raises:
        UsageError: a stream for an evaluation does not end, or has no examples.
    """
    per_step = -(-effective_batch // workers.size) if source.is_own else effective_batch
    source.open(workers.mine, workers.size, per_step)
    if is_train:
        source.lengths = (UNBOUNDED,) * workers.size if source.is_own else ()
        return
    counts = source.count(data.stall_timeout_s)
    if source.is_own:
        counts = [n for rank_counts in workers.processes.allgather_object(counts) for n in rank_counts]
        source.lengths = tuple(counts)
    for worker, n in enumerate(counts):
        if not n:
            way_out = ": give each worker some, or all workers one IterDataset" if source.is_own else ""
            raise UsageError(f"{source.stream_name(worker, workers.size)}: got no examples; expected >= 1{way_out}")
    source.examples_in_all = sum(counts)


def _fit_classes(model: Model, source: Source, is_train: bool) -> Model:
    """The model for the source's classes: a model may know more tokens, or more classes than labels that occur."""
    may_have_more = bool(model.label_shape) or getattr(source, "is_counted", False)
    if source.classes in (None, 0, model.classes) or (may_have_more and source.classes < model.classes):
        return model
    fitted = model.with_classes(source.classes) if is_train and model.with_classes else model
    if fitted.classes != source.classes:
        raise UsageError(
            f"{source.name} has {source.classes} classes, model {model.name} has {fitted.classes}; "
            f"build the model with classes={source.classes}"
        )
    return fitted


def reshard_feed(feed: DeviceFeed, workers: Workers, micro_batch: int = 0) -> DeviceFeed:
    """The feed for other workers, with the same order and counts."""
    replace = partial(dataclasses.replace, feed.samplers[0], size=workers.size, multiple=micro_batch or 1)
    return dataclasses.replace(feed, samplers=tuple(replace(rank=rank) for rank in workers.mine))
