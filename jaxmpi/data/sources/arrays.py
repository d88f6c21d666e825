"""Sources in memory: arrays and objects of an experiment, digits, silhouettes of animals, synthetic images.

Ranks compare a digest of arrays, which covers some of the examples. Animals are read from the files of their package
without importing it, which takes seconds on every rank, and TensorFlow.
"""

import gzip
import importlib.metadata
import io
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError
from jaxmpi.core.host_arrays import check_unmasked
from jaxmpi.data.decode import resized
from jaxmpi.data.sampler import random_bits
from jaxmpi.data.sources.base import Source, sha256, to_array, where

SYNTHETIC_CLASSES = 1000  # as ImageNet, whose models this stands in for
SYNTHETIC_PX = 224
PILLOW_MODES = (
    "L",
    "RGB",
    "RGBA",
    "I",
    "F",
    "I;16",
)  # whose numbers are colours; others have a palette, or a space


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
        if not isinstance(example, tuple) or len(example) != 2:
            got = type(example).__name__
            raise UsageError(f"got {got}; expected (image, label), or a dict of arrays of any names")
        image, label = example
        if hasattr(image, "getbands") and image.mode.partition(";")[0] not in PILLOW_MODES:
            image = image.convert("RGB")
        return to_array(image, where(self, index)), label

    def _read(self, index: int) -> Any:
        return self.examples[index]


class FieldSource:
    """Arrays [n, ...] in nested dicts and tuples, whose rows are examples."""

    def __init__(self, fields: dict[str, Any], name: str = "array") -> None:
        self.fields, self.name, self.classes = fields, name, 0
        lengths = {field: len(array) for field, array in _leaves(fields)}
        if len(set(lengths.values())) != 1:
            raise UsageError(
                f"{name}: got fields of lengths {lengths}; expected a dict of arrays [examples, ...] of one length: "
                "each row is an example"
            )
        self.examples = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> Any:
        return _row(self.fields, index)

    def digest(self) -> str:
        rows = (sorted(_leaves(self[i])) for i in _spread(len(self)))
        return sha256((), (field.encode() + _content(value) for row in rows for field, value in row))


class ArraySource(FieldSource):
    """Images and labels that are in memory.

    Args:
        images: u8[n, height, width, channels] or [n, height, width], or prepared arrays, which are handed on as they
            are.
        labels: int[n], in [0, classes); or numbers [n, ...] for tasks that come near to them.
        classes: 0 counts up to the largest label; the model may have more.
        name: in errors.
    """

    def __init__(self, images: Any, labels: Any, classes: int = 0, name: str = "array") -> None:
        super().__init__({"images": images, "labels": labels}, name)
        self.images, self.labels = images, labels
        is_whole = np.asarray(labels[:1]).dtype.kind in "iu"
        counted = int(np.max(labels)) + 1 if is_whole and np.size(labels) else 0
        self.classes, self.is_counted = classes or counted, not classes

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        return np.asarray(self.images[index]), self.labels[index]

    def digest(self) -> str:
        labels = np.asarray(self.labels)
        labels = labels if labels.dtype.kind == "f" else labels.astype(np.int64)
        return sha256((), (labels.tobytes(), *(_content(self.images[i]) for i in _spread(len(self)))))


def _leaves(fields: dict[Any, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        inner = dict(enumerate(value)) if isinstance(value, tuple) else value
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{outer}{key}/")
        else:
            check_unmasked(f"{outer}{key}", inner)
            yield f"{outer}{key}", inner


def _row(fields: Any, index: int) -> Any:
    if isinstance(fields, dict):
        return {key: _row(value, index) for key, value in fields.items()}
    return tuple(_row(value, index) for value in fields) if isinstance(fields, tuple) else fields[index]


def _spread(examples: int) -> list[int]:
    """64 examples spread over the whole: to hash all of a big array would take minutes."""
    return np.linspace(0, examples - 1, min(examples, 64)).astype(int).tolist()


def _content(value: Any) -> bytes:
    array = np.ascontiguousarray(value)
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()


def array(config: Data, split: str) -> Source:
    """`data.train` or `data.validation`, objects that an experiment file sets."""
    examples, name = config.train if split == "train" else config.validation, f"data.{split}"
    if isinstance(examples, dict):
        if examples.keys() == {"image", "label"}:
            return ArraySource(examples["image"], examples["label"], name=name)
        return FieldSource(examples, name)
    if not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__"):
        raise UsageError(
            f"{name}: got {type(examples).__name__}; expected an object with __len__ and __getitem__(i) -> (image, "
            "label), such as jaxmpi.data.ArraySource(images, labels), or -> a dict of arrays; or a dict of arrays "
            "[n, ...]"
        )
    return examples if isinstance(examples, Source) else PythonSource(examples, name)


def digits(config: Data, split: str) -> Source:
    """Handwritten digits, as scikit-learn has them: 1,797 grey images of 8 x 8 px.

    Held out for validation, always the same: every fifth example, from the first, of all examples sorted by label (file
    order within a label). That is 360, and 20 % of each digit. Enlarged to `data.resize` once, here. Source: Alpaydin
    and Kaynak 1998, UCI repository (CC BY 4.0); the file is scikit-learn's copy.
    """
    rows = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",", dtype=np.uint8)  # 64 pixels, a label
    held_out = np.zeros(len(rows), bool)
    held_out[np.argsort(rows[:, -1], kind="stable")[::5]] = True
    rows = rows[held_out if split == "validation" else ~held_out]
    grey = ((rows[:, :-1].astype(np.uint16) * 255 + 8) // 16).astype(np.uint8)  # 0..16 -> 0..255
    return _enlarged_source(grey.reshape(-1, 8, 8, 1), rows[:, -1], config, "digits")


def _enlarged_source(images: np.ndarray, labels: np.ndarray, config: Data, name: str) -> Source:
    """A source of ten classes, its images enlarged once."""
    if config.resize:
        images = np.stack([resized(image, config.resize) for image in images])
    return ArraySource(images, labels.astype(np.int32), classes=10, name=name)


PACKAGE = "animal-shape-mnist"
FILES = ("animal_data_version_3.gz", "animal_label_version_3.gz")
MOST_BYTES = 1 << 24  # bytes of a file at most, unpacked; twice the larger one
_ALLOWED: dict[tuple[str, str], Any] = {  # all that a pickle of a NumPy array needs
    ("numpy.core.multiarray", "_reconstruct"): lambda cls, shape, kind: np.ndarray.__new__(np.ndarray, shape, "u1"),
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays and calls nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of an array")
        return _ALLOWED[module_name, global_name]


def animals(config: Data, split: str) -> Source:
    """Silhouettes of ten kinds of animals; needs `jaxmpi[animals]`.

    The package has 10,000 grey images of 28 x 28 px, 1,000 a class. Those that repeat an earlier one are left out, so
    that no held-out image is one of training: 9,716 differ. Held out is every fifth of each class, from its first.
    Enlarged to `data.resize` once, here. Source: animal-shape-mnist 0.39 (Mohammadi 2025, MIT licence).
    """
    images, labels = (_read_animals(name) for name in FILES)
    firsts = {image.tobytes(): i for i, image in reversed([*enumerate(images)])}
    chosen = np.sort([*firsts.values()])
    chosen = chosen[np.argsort(labels[chosen], kind="stable")]
    place_in_class = np.concatenate([np.arange(n) for n in np.bincount(labels[chosen], minlength=10)])
    rows = chosen[(place_in_class % 5 == 0) == (split == "validation")]
    return _enlarged_source(images[rows][..., None], labels[rows], config, "animals")


def _read_animals(name: str) -> np.ndarray:
    try:
        [path] = [file.locate() for file in importlib.metadata.files(PACKAGE) or [] if file.name == name]
        with gzip.open(str(path)) as file:
            return _ArrayUnpickler(io.BytesIO(file.read(MOST_BYTES))).load()
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(
            f"animals: the package {PACKAGE} is missing; install it with {installing('jaxmpi[animals]')}"
        ) from error
    except (OSError, EOFError, zlib.error, pickle.UnpicklingError, ValueError, TypeError) as error:
        raise UsageError(f"animals: {name}: {error}; install {PACKAGE} 0.39 again") from error


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
