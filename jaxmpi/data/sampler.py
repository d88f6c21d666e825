"""Which examples a worker reads at a step: pure index arithmetic.

Permute globally, then share out each step's examples. So N workers see in a step the examples that one worker would
see. A step number is all that a resumed run needs, on any number of workers. Examples are permuted (`Sampler`), or
whole files of them, which are then read in sequence (`FileSampler`).
"""

import functools
import math
import operator
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.errors import UsageError

UNBOUNDED = 1 << 40  # examples of a stream that is not known to end
_LOCK = threading.Lock()  # loader threads that enter an epoch together permute it once


class Share(NamedTuple):
    """One worker's part of one step."""

    epoch: int
    indices: np.ndarray  # i64[n], n <= local batch, 0 in a step too short for this worker
    count: int  # examples of the step over all workers

    def filled(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices i64[length], filled up with 0, and weights f32[length], 1 or 0: one shape for a compiled step."""
        more = length - len(self.indices)
        if more < 0:
            raise UsageError(f"filled: got {length}; expected {len(self.indices)} or more, the indices that there are")
        return np.pad(self.indices, (0, more)), (np.arange(length) < len(self.indices)).astype(np.float32)


def random_bits(n: int, seed: int, epoch: int, stream: int, index: int = 0) -> np.ndarray:
    """Random u64[n] from the arguments alone: they are Philox's key and counter.

    Raw bits because NumPy keeps those the same for ever, and its distributions not.
    """
    key = np.array([seed, epoch], np.uint64)
    counter = np.array([0, 0, index, stream], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(n)


@functools.lru_cache(maxsize=2)  # batches made ahead cross from one epoch into the next
def _permutation(examples: int, seed: int, epoch: int) -> np.ndarray:
    # The index in the low bits makes sort keys unique, so that any sort gives the same order.
    low = np.uint64(2 ** max(examples - 1, 1).bit_length() - 1)
    keys = random_bits(examples, seed, epoch, stream=0) & ~low
    keys |= np.arange(examples, dtype=np.uint64)
    keys.sort()
    order = (keys & low).astype(np.int64)
    order.flags.writeable = False
    return order


@functools.lru_cache(maxsize=16)  # a step is of few files
def _rows(examples: int, seed: int, epoch: int, file: int) -> np.ndarray:
    """i64[n]: the rows of a file in the order of an epoch."""
    return np.argsort(random_bits(examples, seed, epoch, stream=5, index=file), kind="stable")


@dataclass(frozen=True)
class Sampler:
    """The order of examples, and one worker's share of it.

    An epoch visits every example once. Step k of an epoch takes examples [k B, (k + 1) B) of its order, B the effective
    batch. Worker r takes every size-th of these examples from the r-th on. The last step of an epoch may be short:
    shares then differ by at most one example.

    Args:
        examples: length of the source; 0 only without `shuffle`.
        effective_batch: examples of one step over all workers, >= 1.
        rank, size: of this worker, and number of workers.
        seed: of the order.
        shuffle: a new permutation every epoch. Without it the order is that of the source and there is one epoch:
            evaluation, every example exactly once.
        multiple: of which the local batch is made one, if micro-batches must divide it.
    """

    examples: int
    effective_batch: int
    rank: int = 0
    size: int = 1
    seed: int = 0
    shuffle: bool = True
    multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("examples", "effective_batch", "rank", "size", "seed", "multiple"):
            value: Any = getattr(self, name)
            if not hasattr(value, "__index__"):
                raise UsageError(f"{name}: got {value!r:.80}; expected a whole number")
            object.__setattr__(self, name, operator.index(value))  # of NumPy's numbers, too
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed: got {self.seed}; expected 0 to 2^64 - 1")
        if self.examples < 0 or (self.examples == 0 and self.shuffle):
            raise UsageError(f"got {self.examples} training examples; expected >= 1")
        if self.effective_batch < 1:
            raise UsageError(f"effective batch: got {self.effective_batch}; expected >= 1")
        if not 0 <= self.rank < self.size:
            raise UsageError(f"got rank {self.rank} of {self.size} workers; expected rank in [0, {self.size})")

    @property
    def name(self) -> str:
        """Facts that distinguish this order from others of the same seed; empty if nothing does."""
        return ""

    @property
    def steps_per_epoch(self) -> int:
        """Steps that visit every example once; the last may be short."""
        return math.ceil(self.examples / self.effective_batch)

    @property
    def local_batch(self) -> int:
        """The most examples of a worker's step, rounded up to a multiple."""
        return math.ceil(self.effective_batch / self.size / self.multiple) * self.multiple

    def indices(self, step: int) -> Share:
        """Indices that this worker reads at `step`, counted over all epochs; `IndexError` past the last.

        Raises:
            UsageError: it is no whole number below 2^63.
        """
        _check_step(step)
        epoch, batch = divmod(operator.index(step), max(self.steps_per_epoch, 1))
        if step < 0 or (epoch and not self.shuffle) or not self.examples:
            raise IndexError(f"got step {step} of {self.steps_per_epoch}")
        begin = batch * self.effective_batch
        end = min(begin + self.effective_batch, self.examples)
        return Share(epoch, self._part(self._order(epoch, begin, end)), end - begin)

    def _part(self, order: np.ndarray) -> np.ndarray:
        return order[self.rank :: self.size]

    def _order(self, epoch: int, begin: int, end: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(begin, end)
        with _LOCK:
            return _permutation(self.examples, self.seed, epoch)[begin:end]


def _check_step(step: Any) -> None:
    if not (hasattr(step, "__index__") and step < 2**63):
        raise UsageError(f"step: got {step!r:.80}; expected a whole number below 2^63")


@dataclass(frozen=True)
class FileSampler(Sampler):
    """Whole files in a new order every epoch; examples of a file keep their order unless `mixed`.

    An epoch is all files, one after another in the order of a permutation, and worker r of N takes the r-th of N
    consecutive parts of each step. If a file has as many examples as the local batch, that is the order of Ma et al.
    2016, section 3.3: one file a worker and step. With files of any lengths N workers still see in a step the examples
    that one worker would see. A step's examples come from few files: mix examples before they are written to files.

    Args:
        file_ends: of each file, the index behind its last example; the last is `examples`.
        mixed: the examples of each file in a new order every epoch, too: for files that are read whole.
    """

    file_ends: tuple[int, ...] = ()
    mixed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = np.diff(self.file_ends, prepend=0)
        if sum(lengths.tolist()) != self.examples or lengths.min(initial=0) < 0:
            raise UsageError(
                f"file_ends: got {self.file_ends[-1:]} at last; expected rising numbers up to {self.examples} examples"
            )

    @property
    def name(self) -> str:
        """Facts that distinguish this order from others of the same seed."""
        return ("whole files, mixed" if self.mixed else "whole files") if self.shuffle else ""

    def _order(self, epoch: int, begin: int, end: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(begin, end)
        with _LOCK:
            files = _permutation(len(self.file_ends), self.seed, epoch)
        ends = np.array(self.file_ends, np.int64)
        lengths = np.diff(ends, prepend=0)
        until = np.cumsum(lengths[files])  # place in the epoch behind each file, in the order of the epoch
        places = np.arange(begin, end)
        turns = np.searchsorted(until, places, side="right")
        if not self.mixed:
            return ends[files[turns]] - (until[turns] - places)
        begins = ends - lengths
        order = np.empty(len(places), np.int64)
        for turn in np.unique(turns).tolist():
            file, is_here = int(files[turn]), turns == turn
            rows = places[is_here] - (until[turn] - lengths[file])
            order[is_here] = begins[file] + _rows(int(lengths[file]), self.seed, epoch, file)[rows]
        return order

    def _part(self, order: np.ndarray) -> np.ndarray:
        begin, end = (len(order) * rank // self.size for rank in (self.rank, self.rank + 1))
        return order[begin:end]


def numbered(place: int, count: Any) -> Any:
    """Number of example `count` of the place-th stream of this process."""
    return place * UNBOUNDED + count


def place_of(number: int) -> tuple[int, int]:
    """(place, count) of a number."""
    return divmod(number, UNBOUNDED)


@dataclass(frozen=True)
class StreamSampler(Sampler):
    """Examples in the order in which a stream gives them.

    From one stream for all, worker r takes examples as `Sampler` without `shuffle`. From a stream of its own, the
    `place`-th of this process, it takes the next B / size; `lengths` are those of all workers' own streams.
    """

    shuffle: bool = False
    place: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Facts that distinguish this order from others of the same seed."""
        return f"a stream for each of {self.size} workers" if self.lengths else "one stream"

    @property
    def each(self) -> int:
        """Examples of a worker in a step that is not short."""
        return math.ceil(self.effective_batch / self.size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that visit every example once; shorter streams are filled up."""
        return math.ceil(max(self.lengths) / self.each) if self.lengths else super().steps_per_epoch

    def indices(self, step: int) -> Share:
        """Numbers of the examples that this worker reads at `step`."""
        if not self.lengths:
            share = super().indices(step)
            return share._replace(indices=numbered(self.place, share.indices))
        _check_step(step)
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"got step {step} of {self.steps_per_epoch}")
        begin = step * self.each
        counts = [max(0, min(length - begin, self.each)) for length in self.lengths]
        indices = np.arange(begin, begin + counts[self.rank])
        return Share(0, numbered(self.place, indices), sum(counts))
