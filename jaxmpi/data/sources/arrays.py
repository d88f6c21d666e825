"""Sources in memory: arrays, scikit-learn's digits, synthetic images.

`ArraySource` and `FieldSource` hold arrays that an experiment file sets; `PythonSource` wraps any object with a length
and items. Digits (Alpaydin and Kaynak 1998) are read from scikit-learn's file without importing it, which takes seconds
on every rank. Synthetic images have a pattern for each class under noise, so that a model can learn them. Ranks compare
a digest of their arrays; it covers 64 examples spread over the whole, since to hash all of a big array would take
minutes.
"""

import hashlib
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.host_arrays import check_unmasked
from jaxmpi.data.decode import resized
from jaxmpi.data.sampler import random_bits
from jaxmpi.data.sources.base import Source, to_array, where

SYNTHETIC_CLASSES = 1000  # as ImageNet, whose models this stands in for
SYNTHETIC_PX = 224
PILLOW_MODES = ("L", "RGB", "RGBA", "I", "F")  # whose arrays are the image; others need a palette, or another space


class ArraySource:
    """Images and labels that are in memory.

    Args:
        images: u8[n, height, width, channels] or [n, height, width], or prepared arrays (such as
            f32[n, ...]). Prepared arrays are handed on as they are.
        labels: int[n], in [0, classes); or numbers [n, ...] for tasks that come near to them.
        classes: 0 counts up to the largest label; the model may have more.
        name: in errors.

    Raises:
        UsageError: the lengths differ.
    """

    def __init__(self, images: Any, labels: Any, classes: int = 0, name: str = "array") -> None:
        for field, value in {"images": images, "labels": labels}.items():
            check_unmasked(f"{name}: {field}", value)
        check(len(images) == len(labels), f"{name}: got {len(images)} images, {len(labels)} labels")
        self.images, self.labels, self.name = images, labels, name
        is_whole = np.asarray(labels[:1]).dtype.kind in "iu"
        counted = int(np.max(labels)) + 1 if is_whole and np.size(labels) else 0
        self.classes, self.is_counted = classes or counted, not classes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        return np.asarray(self.images[index]), self.labels[index]

    def digest(self) -> str:
        """Digest of all labels, and of 64 images spread over the whole."""
        labels = np.asarray(self.labels)
        digest = hashlib.sha256((labels if labels.dtype.kind == "f" else labels.astype(np.int64)).tobytes())
        for i in np.linspace(0, len(self) - 1, min(len(self), 64)).astype(int):
            image = np.ascontiguousarray(self.images[i])
            digest.update(f"{image.dtype}{image.shape}".encode() + image.tobytes())
        return digest.hexdigest()


class PythonSource:
    """The user's `data.train` or `data.validation`: (image, label) pairs, or dicts of arrays."""

    def __init__(self, examples: Any, name: str) -> None:
        self.examples, self.name = examples, name
        self.classes = int(getattr(examples, "classes", 0))

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        example = self._read(index)
        if isinstance(example, dict):
            if example.keys() != {"image", "label"}:
                return example
            example = example["image"], example["label"]
        is_pair = isinstance(example, tuple) and len(example) == 2
        check(is_pair, f"got {type(example).__name__}; expected (image, label), or a dict of arrays of any names")
        image, label = example
        mode = getattr(image, "mode", "L") if hasattr(image, "getbands") else "L"
        check(
            mode in PILLOW_MODES or mode.startswith("I;16"),
            f"{where(self, index)}: got a Pillow image of mode {mode}, whose numbers are not its colours; expected "
            f'{", ".join(PILLOW_MODES)}: convert it, as image.convert("RGB")',
        )
        return to_array(image, where(self, index)), label

    def _read(self, index: int) -> Any:
        return self.examples[index]


class FieldSource:
    """Arrays [n, ...] in nested dicts and tuples, whose rows are examples.

    Raises:
        UsageError: the lengths differ.
    """

    def __init__(self, fields: dict[str, Any], name: str = "array") -> None:
        self.fields, self.name, self.classes = fields, name, 0
        lengths = lengths_of(fields)
        check(bool(lengths), f"{name}: got no fields; expected a dict of arrays [examples, ...]")
        check(
            len(set(lengths.values())) == 1,
            f"{name}: got fields of lengths {lengths}; expected one length: each row is an example",
        )
        self.examples = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return row_of(self.fields, index)

    def digest(self) -> str:
        """Digest of 64 examples spread over the whole."""
        digest = hashlib.sha256()
        for i in np.linspace(0, len(self) - 1, min(len(self), 64)).astype(int):
            feed_digest(self[int(i)], digest.update)
        return digest.hexdigest()


def lengths_of(fields: dict[Any, Any], outer: str = "") -> dict[str, int]:
    """Lengths of all arrays, by `outer/inner`."""
    lengths: dict[str, int] = {}
    for key, value in fields.items():
        inner = dict(enumerate(value)) if isinstance(value, tuple) else value
        check_unmasked(f"{outer}{key}", inner)
        lengths |= lengths_of(inner, f"{outer}{key}/") if isinstance(inner, dict) else {f"{outer}{key}": len(inner)}
    return lengths


def row_of(fields: Any, index: int) -> Any:
    """One row of all arrays."""
    if isinstance(fields, dict):
        return {key: row_of(value, index) for key, value in fields.items()}
    return tuple(row_of(value, index) for value in fields) if isinstance(fields, tuple) else fields[index]


def feed_digest(row: dict[Any, Any], update: Callable[[bytes], None]) -> None:
    """Digest names, types, shapes and bytes of a row, sorted by name."""
    for key, value in sorted(row.items()):
        update(str(key).encode())
        value = dict(enumerate(value)) if isinstance(value, tuple) else value
        if isinstance(value, dict):
            feed_digest(value, update)
        else:
            each = np.ascontiguousarray(value)
            update(f"{each.dtype}{each.shape}".encode() + each.tobytes())


def array(config: Data, split: str) -> Source:
    """`data.train` or `data.validation`, objects that an experiment file sets."""
    examples = config.train if split == "train" else config.validation
    if isinstance(examples, dict):
        is_pair, name = examples.keys() == {"image", "label"}, f"data.{split}"
        examples = (
            ArraySource(examples["image"], examples["label"], name=name) if is_pair else FieldSource(examples, name)
        )
    check(
        hasattr(examples, "__len__") and hasattr(examples, "__getitem__"),
        f"data.{split}: got {type(examples).__name__}; expected an object with __len__ and "
        "__getitem__(i) -> (image, label), such as jaxmpi.data.ArraySource(images, labels), or -> a dict of arrays; or "
        "a dict of arrays [n, ...]",
    )
    known = isinstance(examples, Source)
    return examples if known else PythonSource(examples, f"data.{split}")


def digits(config: Data, split: str) -> Source:
    """Handwritten digits of scikit-learn: 1,797 grey images of 8 x 8 px.

    Held out for validation, the same for ever: every fifth example, from the first, of all
    examples sorted by label (file order within a label). That is 360, and 20 % of each digit.
    Enlarged to `data.resize` once, here. Source: Alpaydin and Kaynak 1998, UCI repository.
    """
    # Importing scikit-learn takes seconds, and every worker of a host would pay them at once.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise UsageError("digits: scikit-learn is missing")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    check(path.is_file(), f"digits: {path} is missing; reinstall scikit-learn")
    rows = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    check(rows.shape == (1797, 65), f"digits: {path}: got {rows.shape}; expected 64 pixels and a label: reinstall it")
    held_out = np.zeros(len(rows), bool)
    held_out[np.argsort(rows[:, -1], kind="stable")[::5]] = True
    rows = rows[held_out if split == "validation" else ~held_out]
    grey = ((rows[:, :-1].astype(np.uint16) * 255 + 8) // 16).astype(np.uint8)  # 0..16 -> 0..255
    images = grey.reshape(-1, 8, 8, 1)
    if config.resize:
        images = np.stack([resized(image, config.resize) for image in images])
    return ArraySource(images, rows[:, -1].astype(np.int32), classes=10, name="digits")


class SyntheticSource:
    """Images for benchmarks: a coarse, learnable pattern per class, under noise; a function of (split, i) alone."""

    def __init__(self, examples: int, px: int, channels: int, split: str) -> None:
        self.name, self.classes = "synthetic", SYNTHETIC_CLASSES
        self.examples, self.shape = examples, (px, px, channels)
        self.seed = 1 if split == "train" else 2
        self.cell = np.arange(px) * 7 // px  # pixel -> cell of a 7 x 7 pattern

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        label = index % self.classes
        pattern = _random_bytes((7, 7, self.shape[-1]), seed=0, stream=label)[self.cell[:, None], self.cell]
        return (pattern >> 1) + (_random_bytes(self.shape, self.seed, stream=index) >> 1), label


def _random_bytes(shape: tuple[int, ...], seed: int, stream: int) -> np.ndarray:
    n = int(np.prod(shape))
    bits = random_bits(-(-n // 8), seed, 0, stream=2, index=stream)
    return bits.astype("<u8", copy=False).view(np.uint8)[:n].reshape(shape)


def synthetic(config: Data, split: str) -> Source:
    """`data.synthetic_examples` made-up images in 1000 classes, an eighth of that for validation."""
    examples = config.synthetic_examples
    examples = examples if split == "train" else max(1, examples // 8)
    px = config.resize or config.crop or SYNTHETIC_PX
    return SyntheticSource(examples, px, config.channels, split)
