"""How one example becomes one row of a batch, with the example named in whatever goes wrong."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.data.augment import Augment
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.sources.base import Source, where

MOST_CLASSES = 2**31 - 1  # labels are i32


class Example(NamedTuple):
    """One example as a batch holds it."""

    image: np.ndarray
    label: np.ndarray  # i32[...]


@dataclass(frozen=True)
class Recipe:
    """Shared by loaders, so it holds no state."""

    source: Source
    augment: Augment
    skip: bool  # whether a run goes on without corrupt examples
    classes: int = 0  # that labels may name if the source does not say; 0: any number

    def row(self, epoch: int, index: int) -> Example:
        """Example `index` of the source.

        Raises:
            CorruptExample: it cannot be decoded.
            TrainingError: it cannot be read.
            Exception: whatever the source raises, with a note that names the example.
        """
        name = where(self.source, index)
        try:
            image, label = self._image(epoch, index, name)
            return Example(image, self._checked(np.asarray(label), name))
        except CorruptExample:
            raise
        except OSError as error:
            raise unreadable(name, index, error) from error
        except Exception as error:
            error.add_note(f"while loading {name} (example {index}, epoch {epoch})")
            raise

    def _image(self, epoch: int, index: int, name: str) -> tuple[np.ndarray, object]:
        encoded = getattr(self.source, "encoded", None)
        if encoded is not None:
            blob, label = encoded(index)
            return self.augment.encoded(blob, epoch, index, name), label
        image, label = self.source[index]
        return self.augment(image, epoch, index, name), label

    def _checked(self, label: np.ndarray, name: str) -> np.ndarray:
        is_whole, top = label.dtype.kind in "iu", self.source.classes or self.classes or MOST_CLASSES
        if is_whole and (label.size == 0 or (label.min() >= 0 and label.max() < top)):
            return label.astype(np.int32)
        # Texts are made here only: making them takes longer than looking at the label.
        check(is_whole, f"{name}: got label {label} of {label.dtype}; expected a whole number")
        raise UsageError(f"{name}: got label {label}; expected 0 <= label < {top}")


def unreadable(name: str, index: int, error: OSError) -> TrainingError:
    """Turn a file system's error into one that ends the run: skipping would skip a failed file system whole."""
    return TrainingError(
        f"{name} (example {index}) cannot be read: {error}; files must not change while a run reads them"
    )
