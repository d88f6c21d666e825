"""Memory that a worker and its loaders share: it has no name, so nothing is left of it, however they end."""

import pickle
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.shared_memory import PAGE, Segment


class Parcel:
    """Any object for several loaders: pickled once, its arrays in one segment that all of them map."""

    def __init__(self, content: Any) -> None:
        parts: list[pickle.PickleBuffer] = []
        self.text = pickle.dumps(content, protocol=5, buffer_callback=parts.append)
        raws = [part.raw() for part in parts]
        self.sizes = [raw.nbytes for raw in raws]
        self.segment = Segment(sum(map(aligned, self.sizes)))
        for place, raw in zip(self._places(), raws, strict=True):
            place[:] = np.frombuffer(raw, np.uint8)

    def _places(self) -> list[np.ndarray]:
        ends = np.cumsum([0, *map(aligned, self.sizes)])
        return [self.segment.array(int(end), (size,), np.uint8) for end, size in zip(ends, self.sizes, strict=False)]

    def open(self) -> Any:
        """The object; its arrays are read-only."""
        places = self._places()
        for place in places:
            place.flags.writeable = False
        return pickle.loads(self.text, buffers=places)


def aligned(size: int) -> int:
    """`size` bytes, up to whole pages."""
    return -(-size // PAGE) * PAGE


class Layout(NamedTuple):
    """Layout of a ring: `slots` batches of `batch` rows."""

    slots: int
    batch: int
    image: tuple[tuple[int, ...], str]  # shape and dtype of a row
    label: tuple[tuple[int, ...], str]

    def sizes(self) -> tuple[int, int]:
        """Bytes of one slot's images and labels, in whole pages."""
        rows = ((self.batch, *shape) for shape, _ in (self.image, self.label))
        types = (np.dtype(dtype).itemsize for _, dtype in (self.image, self.label))
        images, labels = (aligned(int(np.prod(row)) * size) for row, size in zip(rows, types, strict=True))
        return images, labels


class Ring:
    """Slots for batches, and a flag that tells loaders to drop what is queued for them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.segment = Segment(PAGE + layout.slots * sum(layout.sizes()))
        self.closed = self.segment.array(0, (1,), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ring, (self.layout, self.segment)

    def images(self, slot: int) -> np.ndarray:
        """u8 or f32[batch, ...] of a slot, a new view."""
        shape, dtype = self.layout.image
        return self.segment.array(self._offset(slot), (self.layout.batch, *shape), dtype)

    def labels(self, slot: int) -> np.ndarray:
        """i32[batch, ...] of a slot, a new view."""
        shape, dtype = self.layout.label
        offset = self._offset(slot) + self.layout.sizes()[0]
        return self.segment.array(offset, (self.layout.batch, *shape), dtype)

    def _offset(self, slot: int) -> int:
        return PAGE + slot * sum(self.layout.sizes())

    def lend(self, slot: int, take_back: Callable[[int], None]) -> np.ndarray:
        """The images of a slot; `take_back(slot)` once nothing in the process, a device neither, uses them."""
        images = self.images(slot)
        assert isinstance(images.base, np.ndarray)  # what all views of these images keep alive, and no others
        weakref.finalize(images.base, take_back, slot).atexit = False
        return images


def _ring(layout: Layout, segment: Segment) -> Ring:
    ring = object.__new__(Ring)
    ring.layout, ring.segment, ring.closed = layout, segment, segment.array(0, (1,), np.int64)
    return ring
