"""Batches made ahead by a pool of loaders, in exact order, and handed over without a copy of their largest field.

Parallel loading, Ma et al. 2016, Algorithm 1. The paper's loader fills one buffer while the other is in use; here a
ring of `prefetch + 2` slots is filled: one for the step that runs, one for the next, `prefetch` for those made ahead.
"""

import collections
import logging
import os
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from jaxmpi.config.data import Data, to_loader_config
from jaxmpi.core.errors import UsageError
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.example import Augment, Example, ExampleReader, load_mean_image
from jaxmpi.data.loader_pool import LoaderPool, make_pool
from jaxmpi.data.loader_worker import NO_SLOT, Ring
from jaxmpi.data.sampler import Sampler, Share
from jaxmpi.data.sources.base import Source

_LOG = logging.getLogger(__name__)


class Batch(NamedTuple):
    """One worker's part of one step.

    The largest field lies in memory that is used again once nothing refers to it: no array made of it without a copy,
    and no array of a device that took it as it lies. Whoever keeps more batches than the ring has slots gets copies.

    In training sum(weight * loss), averaged over the workers, is the mean loss of the step's examples, however short
    the step: weight = size / count. In evaluation weight is 1, so sum(weight) counts examples. Weight 0 marks what only
    fills the shape.
    """

    fields: dict[str, np.ndarray]  # [local batch, ...] each; fields of a dict inside an example as `outer/inner`
    weight: np.ndarray  # f32[local batch]
    epoch: int
    step: int  # from the start of training; from 0 in an evaluation
    count: int  # examples of this step over all workers

    @property
    def image(self) -> np.ndarray:
        """u8 or f32[local batch, height, width, channels] of (image, label) examples."""
        return self.fields["image"]

    @property
    def label(self) -> np.ndarray:
        """i32[local batch] of (image, label) examples."""
        return self.fields["label"]


class _Pending(NamedTuple):
    step: int
    share: Share
    slot: int
    tickets: list[int]


class Loader:
    """An iterator over one worker's batches, which a pool makes ahead.

    At most `data.prefetch + 2` batches are kept, those in use included. Close it, or use it in a `with` statement, to
    release them; its end, an error or losing the last reference to it do so too. Order and contents do not depend on
    the number of loaders, nor on their kind.

    A corrupt example stops the run with `data.on_error = "stop"`. With "skip" it gets weight 0, on any number of
    workers the same: the step's gradient is the sum over the good examples divided by the count of all, and an
    evaluation counts the good ones only.

    Args:
        source: of the examples.
        sampler: what this worker reads at a step; its seed is the augmentation's too.
        config: of the run's data.
        train: random crop and mirror and averaging weights; otherwise an evaluation.
        start_step: first step to make; a resumed run gives the number of steps done.
        stop_step: end, exclusive. None: without an end in training, one epoch in an evaluation.
        pool: who makes the batches; None starts one of `data.loaders` for this loader alone.
        classes: that labels may name if the source does not say; 0: any number.
        labels: as of `example.ExampleReader`.

    Attributes:
        wait_s: seconds the consumer has waited for batches, in all.
        skipped: corrupt examples among the batches given out.

    Raises:
        UsageError: source and sampler do not fit, a mean image that is wrong, or a source that loader processes cannot
            have. From `next`: whatever making the batch raised, with the example named; `TrainingError` if an
            example cannot be read, or a loader died or stalls.
    """

    def __init__(
        self,
        source: Source,
        sampler: Sampler,
        config: Data,
        train: bool,
        start_step: int = 0,
        stop_step: int | None = None,
        pool: LoaderPool | None = None,
        classes: int = 0,
        labels: str = "classes",
    ) -> None:
        if len(source) != sampler.examples or (train and not len(source)):
            expected = f"the sampler's {sampler.examples}" + ", and >= 1 for training" * train
            raise UsageError(f"{source.name}: got {len(source)} examples; expected {expected}")
        augment = Augment(to_loader_config(config), train, sampler.seed, load_mean_image(config))
        self._sampler = sampler
        self._next = start_step
        self._stop = sampler.steps_per_epoch if stop_step is None and not train else stop_step
        self._prefetch = config.prefetch
        self._ahead: collections.deque[_Pending] = collections.deque()
        self._free: collections.deque[int] = collections.deque()  # slots
        self._filler: Example | None = None
        self._reader = ExampleReader(source, augment, config.on_error == "skip", classes, labels)
        self._pool = pool or make_pool(config, source, len(os.sched_getaffinity(0)))
        self._job = self._pool.open(self._reader)
        self._ring: Ring | None = None
        self._finalize = weakref.finalize(self, _release, self._pool, self._job, stop=pool is None)
        self.wait_s, self.skipped = 0.0, 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._job not in self._pool.jobs:
            raise StopIteration
        try:
            begin = time.perf_counter()
            self._request()
            if not self._ahead:
                raise StopIteration
            pending = self._ahead[0]
            answers = [self._pool.answer(ticket) for ticket in pending.tickets]
            self.wait_s += time.perf_counter() - begin
            corrupt = self._find_corrupt([failure for answer in answers for failure in answer.failures])
            batch = self._to_batch(pending, corrupt)
        except BaseException:
            self.close()
            raise
        self.skipped += len(corrupt)
        return batch

    def ready(self) -> bool:
        """Return True if `next` would give a batch without waiting."""
        return bool(self._ahead) and all(self._pool.has(ticket) for ticket in self._ahead[0].tickets)

    def close(self) -> None:
        """Release batches and loaders; a waiting `next` raises `CancelledError`."""
        self._ahead.clear()
        self._finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self) -> None:
        while self._stop is None or self._next < self._stop:
            if self._ring and (not self._free or len(self._ahead) > self._prefetch):
                return
            share, size = self._sampler.indices(self._next), self._pool.size
            if self._ring is None:
                row = self._first_row(share.epoch, share.indices) or self._filler_row()
                kinds = {name: "f4" if value.dtype.kind == "f" else value.dtype.str for name, value in row.items()}
                fields = {name: (value.shape, kinds[name]) for name, value in row.items()}
                self._ring = Ring(self._prefetch + 2, self._sampler.local_batch, fields)
                self._pool.attach(self._job, self._ring)
                self._free.extend(range(self._ring.slots))
            slot = self._free.popleft()
            tickets = [  # rows are dealt in turn, from a loader that changes with the step
                self._pool.request(
                    (first + self._next) % size, self._job, slot, share.epoch, first, size, share.indices[first::size]
                )
                for first in range(min(size, len(share.indices)))
            ]
            self._ahead.append(_Pending(self._next, share, slot, tickets))
            self._next += 1

    def _first_row(self, epoch: int, indices: Sequence[int] | np.ndarray) -> Example | None:
        """The first good row of these."""
        answer = self._pool.answer(self._pool.request(0, self._job, NO_SLOT, epoch, 0, 1, indices))
        self._find_corrupt(answer.failures)
        return answer.row

    def _filler_row(self) -> Example:
        """The source's first good example, for a batch without any: batch statistics see all rows."""
        if self._filler is None:
            source = self._reader.source
            row = self._first_row(0, range(len(source)))
            if row is None:
                raise UsageError(f"{source.name}: not one of {len(source)} examples is good")
            self._filler = {name: value.copy() for name, value in row.items()}  # a view would keep a part of a data set
        return self._filler

    def _find_corrupt(self, failures: list[tuple[int, BaseException]]) -> list[int]:
        """Positions of corrupt examples to skip; raise the first other failure."""
        for _, error in sorted(failures, key=lambda failure: failure[0]):
            if not (self._reader.skip and isinstance(error, CorruptExample)):
                raise error
            _LOG.warning("skipped: %s", error.fault)
        return [position for position, _ in failures]

    def _to_batch(self, pending: _Pending, corrupt: list[int]) -> Batch:
        """The batch of a slot; corrupt rows, and those behind the share, repeat good ones with weight 0."""
        ring, share = self._ring, pending.share
        assert ring is not None
        is_real = np.arange(ring.batch) < len(share.indices)
        is_real[corrupt] = False
        rows = ring.rows(pending.slot)
        empty, good = np.flatnonzero(~is_real), np.flatnonzero(is_real)
        filler = {} if len(good) or not len(empty) else self._filler_row()
        for name, values in rows.items():
            if len(empty):
                values[empty] = filler[name] if filler else values[np.resize(good, len(empty))]
        weight = self._sampler.size / share.count if self._reader.augment.train else 1.0
        fields = {name: values.copy() for name, values in rows.items() if name != ring.largest}
        self._ahead.popleft()
        if not self._free and not self._ahead:  # a caller that keeps all slots gets copies, else nothing would go on
            fields[ring.largest] = rows[ring.largest].copy()
            self._free.append(pending.slot)
        else:
            fields[ring.largest] = ring.lend(pending.slot, self._free.append)
        self._request()  # only now that all is copied: it may have the slot filled again
        return Batch(fields, is_real.astype(np.float32) * np.float32(weight), share.epoch, pending.step, share.count)


def _release(pool: LoaderPool, job: int, stop: bool) -> None:
    pool.close(job)
    if stop:
        pool.stop()
