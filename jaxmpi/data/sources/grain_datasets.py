"""Source: a `MapDataset` of Grain, which gives any example by its index, or an `IterDataset`, which streams them.

Of a `MapDataset` of n examples, index e n + i is example i of epoch e, with the random choices of that epoch; `endless`
has the loaders ask so. Grain imports JAX, so it is read by threads.

A stream has no examples by index, so a resumed run needs the iterator's state. Loaders read ahead of training: the
state is noted at the end of each step and kept until that step is trained, so a checkpoint has the state behind the
examples that were trained, not behind those that were read. One thread reads all streams of a process, in order.

Every worker reads one `IterDataset` whole and keeps its share of each step. So N workers see in a step what one worker
would see, and any number of workers may resume. A function of (worker, workers) gives each worker a stream of its own,
which it alone reads. Such a run is resumed on as many workers.
"""

import copy
import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from jaxmpi.config.data import Data
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.data.sampler import UNBOUNDED, place_of
from jaxmpi.data.sources.arrays import PythonSource
from jaxmpi.data.sources.base import Source, import_package


def is_stream(examples: Any) -> bool:
    """Return True for an `IterDataset`, or a function that makes one."""
    return callable(examples) or (hasattr(examples, "__iter__") and not hasattr(examples, "__getitem__"))


class StreamReader:
    """One stream, read from its beginning or the end of a step.

    A step takes `per_step` examples of it, those of other workers included.
    """

    def __init__(self, dataset: Any, name: str, per_step: int) -> None:
        self.dataset, self.name, self.per_step = dataset, name, per_step
        self._states: dict[int, str] = {}  # by step, as JSON: where the iterator stood behind it
        self._lock = threading.Lock()  # a loader reads, and the run saves
        self._read = 0  # examples
        self._iterator: Any = None
        self._last: Any = None

    def begin(self, step: int, state: str = "") -> None:
        """Continue behind a step, from its state or the one that is noted."""
        with self._lock:
            state = state or self._states.get(step, "")
            self._iterator, self._read = iter(self.dataset), step * self.per_step
            if step:
                self._iterator.set_state(json.loads(state))
            self._states = {}
            self._note()

    def read(self, count: int) -> Any:
        """Example `count`, which must be new, the last again, or 0; raise `TrainingError` if the stream has ended."""
        with self._lock:
            if self._iterator is None or count < self._read - 1:
                assert count == 0, f"{self.name}: example {count} after {self._read}"
                for example in self.dataset:
                    return example
                raise UsageError(f"{self.name}: got no examples; expected >= 1")
            self._advance_to(count + 1)
            return self._last

    def state(self, step: int) -> str:
        """State of the iterator behind a step, as JSON."""
        if step not in self._states:
            with self._lock:
                self._advance_to(step * self.per_step)  # past examples that other workers read
        return self._states[step]

    def forget(self, step: int) -> None:
        """Drop states of steps before."""
        for noted in list(self._states):  # at once, since a loader adds to them
            if noted < step:
                del self._states[noted]

    def count(self, limit_s: float) -> int:
        """The stream's examples."""
        begin, count = time.monotonic(), 0
        for count, _ in enumerate(self.dataset, 1):
            if (took_s := time.monotonic() - begin) > limit_s:
                raise UsageError(
                    f"{self.name}: got {count} examples in {took_s:.0f} s; expected a stream that ends: leave repeat() "
                    "out, or raise data.stall_timeout_s"
                )
        return count

    def _advance_to(self, examples: int) -> None:
        while self._read < examples:
            try:
                self._last = next(self._iterator)
            except StopIteration:
                raise TrainingError(
                    f"{self.name} has ended after {self._read} examples, before the run: repeat it, as in "
                    "MapDataset.repeat(), or train for fewer steps"
                ) from None
            self._read += 1
            if self._read % self.per_step == 0:
                self._note()

    def _note(self) -> None:
        try:
            self._states[self._read // self.per_step] = json.dumps(self._iterator.get_state())
        except TypeError as error:
            expected = "expected JSON values, as Grain's own checkpoints"
            raise UsageError(f"{self.name}: state: {error}; {expected}") from error


class StreamSource(PythonSource):
    """Streams of this process's workers.

    Example `count` of the place-th stream has number `sampler.numbered(place, count)`.

    Args:
        given: an `IterDataset` for all workers, or a function (worker, workers) -> `IterDataset`.
        name: for errors.
    """

    in_process = True

    def __init__(self, given: Any, name: str) -> None:
        super().__init__(given, name)
        self.is_own = callable(given)  # each worker has a stream of its own
        self.examples_in_all = UNBOUNDED
        self.lengths: tuple[int, ...] = ()  # examples in each worker's stream, of all workers; empty: all read one
        self.readers: tuple[StreamReader, ...] = ()

    def open(self, mine: Sequence[int], workers: int, per_step: int) -> None:
        """Open the streams of some workers, of which a step takes `per_step` examples each."""
        import grain

        readers = []
        for worker in mine:
            dataset, name = self.examples, self.stream_name(worker, workers)
            dataset = dataset(worker, workers) if self.is_own else dataset
            if not isinstance(dataset, grain.IterDataset):
                raise UsageError(f"{name}: got {type(dataset).__name__}; expected a grain.IterDataset")
            readers.append(StreamReader(dataset, name, per_step))
        self.readers = tuple(readers)

    def stream_name(self, worker: int, workers: int) -> str:
        """Name of a worker's stream in errors."""
        return f"{self.name}({worker}, {workers})" if self.is_own else self.name

    def count(self, limit_s: float) -> list[int]:
        """Examples of the streams that differ."""
        return [reader.count(limit_s) for reader in (self.readers if self.is_own else self.readers[:1])]

    def begin(self, step: int, states: Sequence[str] = ()) -> None:
        """Continue behind a step, from these states or those that are noted."""
        for place, reader in enumerate(self.readers):
            reader.begin(step, states[place] if states else "")

    def with_new_readers(self) -> "StreamSource":
        """A copy with new readers, to read both in turns."""
        duplicate = copy.copy(self)
        duplicate.readers = tuple(StreamReader(reader.dataset, reader.name, reader.per_step) for reader in self.readers)
        return duplicate

    def __len__(self) -> int:
        return self.examples_in_all

    def _read(self, index: int) -> Any:
        place, count = place_of(index)
        return self.readers[place].read(count)

    def where(self, index: int) -> str:
        place, count = place_of(int(index))
        return f"{self.readers[place].name}, example {count}"


class GrainSource(PythonSource):
    """A `MapDataset` of (image, label), or of dicts."""

    in_process = True
    endless = True

    def _read(self, index: int) -> Any:
        example = self.examples[int(index)]
        if example is None:
            raise UsageError(
                f"{self.where(index)}: got None, as MapDataset.filter leaves; filter what the MapDataset is made from"
            )
        return example

    def where(self, index: int) -> str:
        epoch, example = divmod(int(index), len(self))
        return f"{self.name}[{example}], epoch {epoch}"


def grain(config: Data, split: str) -> Source:
    """`data.train` or `data.validation`, a `MapDataset` or `IterDataset` of Grain."""
    library = import_package("grain", "grain", "grain")
    examples, name = config.train if split == "train" else config.validation, f"data.{split}"
    if is_stream(examples):
        return StreamSource(examples, name)
    if not isinstance(examples, library.MapDataset):
        raise UsageError(
            f"{name}: got {type(examples).__name__}; expected a grain.MapDataset, a grain.IterDataset, or a function "
            "(worker, workers) -> IterDataset"
        )
    if len(examples) >= sys.maxsize:
        raise UsageError(f"{name}: got an endless MapDataset; leave repeat() out: epochs are the trainer's")
    return GrainSource(examples, name)
