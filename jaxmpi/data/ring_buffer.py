"""A ring of batches, and pickles, in memory that a worker and loaders share; without a name, so none is left behind."""

import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.shared_memory import PAGE, Segment


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


class SharedPickle:
    """Any object for several loaders, pickled once, its arrays in shared memory."""

    def __init__(self, content: Any) -> None:
        parts: list[pickle.PickleBuffer] = []
        self.text = pickle.dumps(content, protocol=5, buffer_callback=parts.append)
        raws = [part.raw() for part in parts]
        self.sizes = [raw.nbytes for raw in raws]
        self.segment = Segment(sum(map(_round_up, self.sizes)))
        for array, raw in zip(self._arrays(), raws, strict=True):
            array[:] = np.frombuffer(raw, np.uint8)

    def _arrays(self) -> list[np.ndarray]:
        ends = np.cumsum([0, *map(_round_up, self.sizes)])
        return [self.segment.array(int(end), (size,), np.uint8) for end, size in zip(ends, self.sizes, strict=False)]

    def open(self) -> Any:
        """The object; its arrays are read-only."""
        arrays = self._arrays()
        for array in arrays:
            array.flags.writeable = False
        return pickle.loads(self.text, buffers=arrays)


class Field(NamedTuple):
    """One array of a row."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def size(self, rows: int) -> int:
        """Bytes of so many rows."""
        return rows * math.prod(self.shape) * np.dtype(self.dtype).itemsize


class RingLayout(NamedTuple):
    """Layout of a ring: `slots` batches of `batch` rows, field by field.

    In a slot the rows of a field lie together, from the start of a page.
    """

    slots: int
    batch: int
    fields: tuple[Field, ...]

    @property
    def slot_size(self) -> int:
        """Bytes of one slot."""
        return sum(_round_up(field.size(self.batch)) for field in self.fields)

    @property
    def largest(self) -> str:
        """Name of the field with the most bytes; the first of several."""
        return max(self.fields, key=lambda field: field.size(1)).name


class Ring:
    """Slots for batches, and a flag that makes loaders drop queued work."""

    def __init__(self, layout: RingLayout, segment: Segment | None = None) -> None:
        self.layout = layout
        self.segment = segment or Segment(PAGE + layout.slots * layout.slot_size)
        self.closed = self.segment.array(0, (1,), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ring, (self.layout, self.segment)

    def rows(self, slot: int) -> dict[str, np.ndarray]:
        """[batch, ...] of every field of a slot, new views."""
        views, offset, batch = {}, PAGE + slot * self.layout.slot_size, self.layout.batch
        for field in self.layout.fields:
            views[field.name] = self.segment.array(offset, (batch, *field.shape), field.dtype)
            offset += _round_up(field.size(batch))
        return views

    def lend(self, slot: int, take_back: Callable[[int], None]) -> np.ndarray:
        """Return a view of a slot's largest field, lent to the caller.

        `take_back(slot)` is called once nothing in the process, a device included, uses the memory any more.
        """
        lent = self.rows(slot)[self.layout.largest]
        assert isinstance(lent.base, np.ndarray)  # the array that all views of it keep alive, and no others
        weakref.finalize(lent.base, take_back, slot).atexit = False
        return lent
