"""Batches made ahead by threads, in exact order and of one shape.

The consumer asks for parts of a batch, threads make them, and whoever finishes the last part
puts the batch together. Decoding releases the GIL, so that threads are enough while it dominates.
"""

import collections
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from jaxmpi.config import Data, UsageError, check
from jaxmpi.data.augment import Augment, load_mean_image
from jaxmpi.data.images import CorruptExample
from jaxmpi.data.sampler import Sampler, Share
from jaxmpi.data.sources import Source, where

JOIN_S = 5.0  # a thread stuck in a read must not keep an error from being shown

_LOG = logging.getLogger(__name__)


class Batch(NamedTuple):
    """One worker's part of one step, in arrays that nobody else holds.

    In training sum(weight * loss), averaged over the workers, is the mean loss of the step's
    examples, however short the step: weight = size / count. In evaluation weight is 1, so that
    sum(weight) counts examples. Weight 0 marks what only fills the shape.
    """

    image: np.ndarray  # u8 or f32[local batch, height, width, channels]
    label: np.ndarray  # i32[local batch]
    weight: np.ndarray  # f32[local batch]
    epoch: int
    step: int  # from the start of training; from 0 in an evaluation
    count: int  # examples of this step over all workers


Row = tuple[np.ndarray, np.ndarray]  # image, label


@dataclass(frozen=True)
class _Recipe:
    """How examples become rows and rows a batch; shared by the threads, so it holds no state."""

    source: Source
    sampler: Sampler
    augment: Augment
    skip: bool

    def row(self, epoch: int, index: int) -> Row | CorruptExample:
        name = where(self.source, index)
        try:
            image, label = self.source[index]
            label = self._checked(np.asarray(label), name)
            return self.augment(image, epoch, index, name), label
        except CorruptExample as error:
            if self.skip:
                return error
            raise
        except Exception as error:
            error.add_note(f"while loading {name} (example {index}, epoch {epoch})")
            raise

    def _checked(self, label: np.ndarray, name: str) -> np.ndarray:
        check(label.dtype.kind in "iu", f"{name}: got label {label} of {label.dtype}; expected a whole number")
        top = self.source.classes or np.iinfo(np.int32).max
        in_range = label.size == 0 or (label.min() >= 0 and label.max() < top)
        check(bool(in_range), f"{name}: got label {label}; expected 0 <= label < {top}")
        return label.astype(np.int32)

    def batch(self, step: int, rows: list[Row | CorruptExample]) -> Batch:
        """Rows in the order of the share, and fillers of weight 0 up to the local batch."""
        share = self.sampler.indices(step)
        good = [row for row in rows if not isinstance(row, CorruptExample)] or [self._filler()]
        fill = itertools.cycle(good)
        padded: list[Row | CorruptExample | None] = [*rows, *[None] * (self.sampler.local_batch - len(rows))]
        is_real = [isinstance(row, tuple) for row in padded]
        images, labels = zip(*[row if isinstance(row, tuple) else next(fill) for row in padded], strict=True)
        weight = self.sampler.size / share.count if self.augment.train else 1.0
        return Batch(
            image=_stacked(images, self.source, share),
            label=np.stack(labels),
            weight=np.asarray(is_real, np.float32) * np.float32(weight),
            epoch=share.epoch,
            step=step,
            count=share.count,
        )

    def _filler(self) -> Row:
        """The source's first good example: real pixels, since a model's batch statistics see them."""
        rows = (self.row(0, index) for index in range(len(self.source)))
        good = next((row for row in rows if not isinstance(row, CorruptExample)), None)
        if good is None:
            raise UsageError(f"{self.source.name}: not one of {len(self.source)} examples is good")
        return good


def _stacked(images: tuple[np.ndarray, ...], source: Source, share: Share) -> np.ndarray:
    shapes = [image.shape for image in images]
    if len(set(shapes)) > 1:
        odd = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
        name = where(source, share.indices[odd]) if odd < len(share.indices) else source.name
        raise UsageError(_shape_error(name, shapes[odd], shapes[0]))
    stacked = np.stack(images)
    return stacked.astype(np.float32, copy=False) if stacked.dtype.kind == "f" else stacked


def _shape_error(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return f"{name}: got an image of shape {got}; expected {expected} as before it; set data.crop"


class _Making:
    """One batch while its parts are made; `future` then holds (batch, skipped examples)."""

    def __init__(self, recipe: _Recipe, step: int, parts: int) -> None:
        self.recipe, self.step, self.parts = recipe, step, parts
        self.rows: dict[int, Row | CorruptExample] = {}
        self.errors: dict[int, BaseException] = {}
        self.left, self.lock = parts, threading.Lock()
        self.future: Future[tuple[Batch, list[CorruptExample]]] = Future()

    def make(self, part: int) -> None:
        """Every `parts`-th example of the share, from `part` on."""
        position = part
        try:
            share = self.recipe.sampler.indices(self.step)
            for position in range(part, len(share.indices), self.parts):
                if self.future.cancelled():
                    return
                index = int(share.indices[position])
                self.rows[position] = self.recipe.row(share.epoch, index)
        except BaseException as error:  # whatever it is, the consumer raises it
            self.errors[position] = error
        with self.lock:
            self.left -= 1
            is_last = self.left == 0
        if is_last and self.future.set_running_or_notify_cancel():
            self._finish()

    def _finish(self) -> None:
        try:
            if self.errors:  # the same one of several whatever the threads' speed
                raise self.errors[min(self.errors)]
            rows = [self.rows[position] for position in range(len(self.rows))]
            batch = self.recipe.batch(self.step, rows)
            skipped = [row for row in rows if isinstance(row, CorruptExample)]
            self.future.set_result((batch, skipped))
        except BaseException as error:
            self.future.set_exception(error)


Job = Callable[[], None]


class _Crew:
    """Threads that do jobs in the order asked for. They do not know the loader they work for."""

    def __init__(self, threads: int) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=_work, args=(self.jobs,), daemon=True, name=f"jaxmpi-loader-{i}")
            for i in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the threads after the example each is at; what is queued is dropped."""
        try:
            while True:
                self.jobs.get_nowait()
        except queue.Empty:
            pass
        for _ in self.threads:
            self.jobs.put(None)
        deadline = time.monotonic() + JOIN_S
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # else an idle thread keeps its last batch alive


class Loader:
    """An iterator over one worker's batches, made ahead by `data.threads` threads.

    At most `data.prefetch` batches wait, and one more is in the making. Close it, or use it in a
    `with` statement, to end its threads; its end, an error or losing the last reference to it do
    so too. Order and contents do not depend on the number of threads.

    A corrupt example stops the run with `data.on_error = "stop"`. With "skip" it gets weight 0, on
    any number of workers the same: the step's gradient is the sum over the good examples divided
    by the count of all, and an evaluation counts the good ones only.

    Args:
        source: of the examples.
        sampler: what this worker reads at a step; its seed is the augmentation's too.
        config: of the run's data.
        train: random crop and mirror and averaging weights; otherwise an evaluation.
        start_step: first step to make; a resumed run gives the number of steps done.
        stop_step: end, exclusive. None goes on for ever in training; one epoch in an evaluation.

    Attributes:
        wait_s: seconds the consumer has waited for batches, in all.
        skipped: corrupt examples among the batches given out.

    Raises:
        UsageError: source and sampler do not fit, or a mean image that is wrong. From `next`:
            whatever making the batch raised, with the example named.
    """

    def __init__(
        self,
        source: Source,
        sampler: Sampler,
        config: Data,
        train: bool,
        start_step: int = 0,
        stop_step: int | None = None,
    ) -> None:
        check(
            len(source) == sampler.examples,
            f"{source.name}: got {len(source)} examples; expected the sampler's {sampler.examples}",
        )
        check(len(source) > 0 or not train, f"{source.name}: got 0 training examples; expected >= 1")
        augment = Augment(config, train, sampler.seed, load_mean_image(config))
        self._recipe = _Recipe(source, sampler, augment, skip=config.on_error == "skip")
        stop = sampler.steps_per_epoch if stop_step is None and not train else stop_step
        self._steps = itertools.count(start_step) if stop is None else iter(range(start_step, stop))
        self._ahead: collections.deque[_Making] = collections.deque()
        self._window, self._shape = config.prefetch + 1, None
        self._crew = _Crew(config.threads)
        self._end = weakref.finalize(self, self._crew.stop)
        self.wait_s, self.skipped = 0.0, 0
        for _ in range(self._window):
            self._ask()

    def _ask(self) -> None:
        step = next(self._steps, None)
        if step is None or not self._end.alive:
            return
        parts = max(1, min(len(self._crew.threads), self._recipe.sampler.local_batch))
        making = _Making(self._recipe, step, parts)
        self._ahead.append(making)
        for part in range(parts):
            self._crew.jobs.put(lambda part=part: making.make(part))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if not self._ahead:
            self.close()
            raise StopIteration
        try:
            begin = time.perf_counter()
            batch, skipped = self._ahead[0].future.result()
            self.wait_s += time.perf_counter() - begin
            self._check_shape(batch)
        except BaseException:
            self.close()
            raise
        self._ahead.popleft()
        self._ask()
        self.skipped += len(skipped)
        for example in skipped:
            _LOG.warning("skipped: %s", example)
        return batch

    def _check_shape(self, batch: Batch) -> None:
        self._shape = self._shape or batch.image.shape
        name = f"{self._recipe.source.name}, step {batch.step}"
        check(
            batch.image.shape == self._shape,
            _shape_error(name, batch.image.shape[1:], self._shape[1:]),
        )

    def close(self) -> None:
        """End the threads; a thread that waits for a batch here gets `CancelledError`."""
        for making in self._ahead:
            making.future.cancel()
        self._ahead.clear()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
