"""Silhouettes of animals from a Python package: no download, harder than digits.

The package's own loader imports TensorFlow, so its files are read here. They are pickles of two NumPy arrays; only the
three names that such a pickle needs are let through.
"""

import gzip
import importlib.metadata
import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError, check
from jaxmpi.data.decode import resized
from jaxmpi.data.sources.arrays import ArraySource
from jaxmpi.data.sources.base import Source

PACKAGE = "animal-shape-mnist"
FILES = ("animal_data_version_3.gz", "animal_label_version_3.gz")
SHAPE = (10_000, 28, 28)
CLASSES = 10
MOST_BYTES = 1 << 24  # bytes of a file at most, unpacked; twice the larger one
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda cls, shape, kind: np.ndarray.__new__(np.ndarray, shape, "u1"),
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _Arrays(pickle.Unpickler):
    """Reads arrays and calls nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of an array")
        return _ALLOWED[module_name, global_name]


def animals(config: Data, split: str) -> Source:
    """Silhouettes of ten kinds of animals; needs `jaxmpi[animals]`.

    The set has 9,716 different grey images of 28 x 28 px. The package has 10,000 images, 1,000 a class. Those that
    repeat an earlier one are left out, so that no held-out image is one of training. Held out is every fifth of each
    class, from its first. Enlarged to `data.resize` once, here. Source: animal-shape-mnist 0.39 (Mohammadi 2025, MIT
    licence).

    Raises:
        UsageError: the package is missing, or its files are not those of this version.
    """
    images, labels = (_array(name) for name in FILES)
    check(
        images.shape == SHAPE and images.dtype == np.uint8 and labels.shape == SHAPE[:1] and labels.dtype.kind in "iu",
        f"animals: got {images.dtype}{list(images.shape)} and {labels.dtype}{list(labels.shape)}; expected "
        f"u8{list(SHAPE)} and int{list(SHAPE[:1])}, as in {PACKAGE} 0.39",
    )
    firsts = {image.tobytes(): i for i, image in reversed([*enumerate(images)])}
    kept = np.sort([*firsts.values()])
    kept = kept[np.argsort(labels[kept], kind="stable")]
    place_in_class = np.concatenate([np.arange(n) for n in np.bincount(labels[kept], minlength=CLASSES)])
    rows = kept[(place_in_class % 5 == 0) == (split == "validation")]
    chosen = images[rows][..., None]
    if config.resize:
        chosen = np.stack([resized(image, config.resize) for image in chosen])
    return ArraySource(chosen, labels[rows].astype(np.int32), classes=CLASSES, name="animals")


def _array(name: str) -> np.ndarray:
    """One file of the package.

    Raises:
        UsageError: it is not there, or is no array.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(
            f"animals: the package {PACKAGE} is missing; install it with {installing('jaxmpi[animals]')}"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.name == name]
    check(bool(found), f"animals: {PACKAGE} has no file {name}; install version 0.39")
    try:
        with gzip.open(found[0]) as file:
            content = file.read(MOST_BYTES)
        array = _Arrays(io.BytesIO(content)).load()
    except (OSError, EOFError, zlib.error, pickle.UnpicklingError, ValueError, TypeError) as error:
        raise UsageError(f"animals: {found[0]}: {error}; install {PACKAGE} 0.39 again") from error
    check(isinstance(array, np.ndarray), f"animals: {found[0]}: got {type(array).__name__}; expected an array")
    return array
