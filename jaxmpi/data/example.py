"""One example as one row of a batch; errors name the example.

`ExampleReader.row` alone reads, augments and checks examples, since an error in a loader helps only if it names its
example. An image that cannot be decoded may be skipped. A file that cannot be read ends the run: to skip it would skip
a failed file system whole. A batch is one flat dict of arrays. Numbers become 32-bit ones, as devices have them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.host_arrays import check_holds
from jaxmpi.core.json_tree import nest
from jaxmpi.data.augment import Augment
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.sources.base import Source, to_array, where

MOST_CLASSES = 2**31 - 1  # labels are i32
Example = dict[str, np.ndarray]  # one example as a batch has it: `image` and `label`, or the fields of a dict


@dataclass(frozen=True)
class ExampleReader:
    """Reader of examples as batch rows; stateless, since loaders share it."""

    source: Source
    augment: Augment
    skip: bool  # True if a run goes on without corrupt examples
    classes: int = 0  # that labels may name if the source does not say; 0: any number
    # classes: numbers of classes, or of any number if that is not known; "classes or none": the same, or -1, which is
    # not counted; numbers: any.
    labels: str = "classes"

    def number(self, epoch: int, index: int) -> int:
        """Number by which the source knows an example."""
        return index + epoch * len(self.source) * bool(getattr(self.source, "endless", False))

    def row(self, epoch: int, index: int) -> Example:
        """Example `index` of the source.

        Raises:
            CorruptExample: it cannot be decoded.
            TrainingError: it cannot be read.
            Exception: whatever the source raises, with a note that names the example.
        """
        name = where(self.source, self.number(epoch, index))
        try:
            example = self._read(epoch, index, name)
            if isinstance(example, dict):
                example = self.augment.by_user(example, epoch, index, name)
                return {field: to_32_bits(value, f"{name}: {field}") for field, value in example.items()}
            image, label = example
            fields = {"image": image, "label": to_array(label, f"{name}: label")}
            image, label = self.augment.by_user(fields, epoch, index, name).values()
            if image.dtype.itemsize > 4:
                image = to_32_bits(image, f"{name}: image")
            return {"image": image, "label": self._check_label(label, name)}
        except CorruptExample:
            raise
        except OSError as error:
            raise unreadable(name, index, error) from error
        except Exception as error:
            error.add_note(f"while loading {name} (example {index}, epoch {epoch})")
            raise

    def _read(self, epoch: int, index: int, name: str) -> tuple[np.ndarray, Any] | Example:
        number, encoded = self.number(epoch, index), getattr(self.source, "encoded", None)
        if encoded is not None:
            blob, label = encoded(number)
            return self.augment.encoded(blob, epoch, index, name), label
        example = self.source[number]
        if isinstance(example, dict):
            self.augment.check_unused(name)
            return flatten(example, name)
        image, label = example
        return self.augment(to_array(image, name), epoch, index, name), label

    def _check_label(self, label: np.ndarray, name: str) -> np.ndarray:
        if self.labels == "numbers":
            return to_32_bits(label, f"{name}: label")
        is_whole, top = label.dtype.kind in "iu", self.source.classes or self.classes or MOST_CLASSES
        bottom = -1 if self.labels == "classes or none" else 0
        if not is_whole:
            raise UsageError(f"{name}: got label {label} of {label.dtype}; expected a whole number")
        if label.size and (label.min() < bottom or label.max() >= top):
            raise UsageError(f"{name}: got label {label}; expected {bottom} <= label < {top}")
        return label.astype(np.int32)


def flatten(example: dict[str, Any], name: str) -> Example:
    """Flatten a dict: inner dicts to `outer/inner`, tuples to `outer/[0]`."""
    fields: Example = {}
    for key, value in example.items():
        if not isinstance(key, str) or "/" in key or key in ("", "weight"):
            raise UsageError(
                f"{name}: got a field {key!r}; expected a name without /, and not weight, which the trainer adds"
            )
        inner = {f"[{i}]": element for i, element in enumerate(value)} if isinstance(value, tuple) else value
        if isinstance(inner, dict):
            fields |= {f"{key}/{field}": element for field, element in flatten(inner, name).items()}
        else:
            fields[key] = to_array(value, f"{name}: {key}")
    if not fields:
        raise UsageError(f"{name}: got an example without fields; expected a dict of arrays")
    return fields


def nested(fields: dict[str, Any]) -> dict[str, Any]:
    """The dict of dicts and tuples whose `flatten` this is."""

    def with_tuples(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        parts = {key: with_tuples(value) for key, value in tree.items()}
        names = [f"[{i}]" for i in range(len(parts))]
        return tuple(parts[name] for name in names) if parts.keys() == {*names} else parts

    return with_tuples(nest(fields, lambda name: name.split("/"), "fields"))


def to_32_bits(value: np.ndarray, name: str) -> np.ndarray:
    """Return numbers, with 64-bit whole ones as i32; refuse all else, and numbers that do not fit.

    Floats become f32 when they are copied into a batch.
    """
    if value.dtype.kind not in "biuf":
        raise UsageError(f"{name}: got {value.dtype}; expected numbers")
    if value.dtype.itemsize <= 4:
        return value
    if value.dtype.kind == "f":
        check_holds(name, value, np.float32)
        return value
    limits = np.iinfo(np.int32)
    if value.size and (value.min() < limits.min or value.max() > limits.max):
        raise UsageError(f"{name}: got {value.dtype} from {value.min()} to {value.max()}; expected 32 bits")
    return value.astype(np.int32)


def unreadable(name: str, index: int, error: OSError) -> TrainingError:
    """A file system's error as one that ends the run; no `CorruptExample`, whose skipping would skip all files."""
    return TrainingError(
        f"{name} (example {index}) cannot be read: {error}; files must not change while a run reads them"
    )
