"""Tables with named columns: the choice of columns, and their cells.

Two columns are an input and its label. Any other number makes a dict, for a task of the user's own.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np

from jaxmpi.config.data import Data, data_dir
from jaxmpi.core.errors import UsageError, check
from jaxmpi.data.sources.base import _decoded, _split_name, check_plain_files

DEFAULT = ("image", "label")


class TableSource:
    """Rows of a table; a class of it reads cells.

    A cell is a number, an array, or the bytes of a compressed image.

    Attributes:
        columns: names of those that an example has.
    """

    is_compressed = False  # inputs are compressed images
    labels: np.ndarray | None = None  # int[n], of an input and its label if it is a whole number

    def __init__(self, config: Data, columns: Sequence[str]) -> None:
        self.name, self.columns = config.source, tuple(columns)
        self.channels, self.resize = config.channels, config.resize
        self.classes, self.is_counted = 0, False

    @property
    def is_pair(self) -> bool:
        """Return True if examples are an input and its label."""
        return len(self.columns) == 2

    @property
    def encoded(self) -> Any:
        """(bytes, label) by index if inputs are compressed images, else None."""
        return self.cells if self.is_compressed and self.is_pair else None

    def count(self, in_training: np.ndarray | None) -> None:
        """Count classes up to the largest label of this split and training."""
        counts = [int(labels.max(initial=-1)) + 1 for labels in (self.labels, in_training) if labels is not None]
        self.classes, self.is_counted = max(counts, default=0), bool(counts)

    def counted(self, config: Data, split: str, in_training: Callable[[], np.ndarray | None]) -> Self:
        """Return this source, its classes counted, also in training's labels if that split is another."""
        base, name = data_dir(config), config.train_split
        has_training = any(file == name or file.startswith((f"{name}-", f"{name}.")) for file in os.listdir(base))
        is_other = split != "train" and self.labels is not None and has_training
        self.count(in_training() if is_other else None)
        return self

    def sha256(self, words: Iterable[str], parts: Iterable[bytes] = ()) -> str:
        """Digest of words, of parts, and of the labels if any."""
        digest = hashlib.sha256("\0".join(words).encode())
        for part in parts:
            digest.update(part)
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        return digest.hexdigest()

    def cells(self, index: int) -> Sequence[Any]:
        """Cells of row `index`, in the order of `columns`."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """The file of row `index`, and its place there."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        values = [
            _decoded(cell, self.where(index), index, self.channels, self.resize)
            if isinstance(cell, (bytes, memoryview))
            else cell
            for cell in self.cells(index)
        ]
        return tuple(values) if self.is_pair else dict(zip(self.columns, values, strict=True))


def chosen(config: Data, there: Iterable[str], path: str) -> tuple[str, ...]:
    """`data.columns`, or image and label; raise `UsageError` if one of them is not there, or is there twice."""
    wanted, there = config.columns or DEFAULT, sorted(there)
    missing = [name for name in wanted if name not in there]
    check(
        not missing,
        f"{path}: got no column {', '.join(missing)}; there are {', '.join(there) or 'none'}: choose input and label "
        f"with data.columns, such as --data.columns {' '.join((there * 2)[:2])}",
    )
    twice = [name for name in wanted if there.count(name) > 1]
    check(not twice, f"{path}: got {' and '.join(twice)} more than once; expected each name once: write it again")
    return wanted


def split_files(config: Data, split: str, suffix: str) -> list[str]:
    """Files of a split, by name: in DIR/<split>/, else DIR/<split>.<suffix> and DIR/<split>-<any>.<suffix>.

    Raises:
        UsageError: no DIR, or no such file.
    """
    name, base = _split_name(config, split), data_dir(config)
    layout = f"DIR/{name}/<any>{suffix}, DIR/{name}{suffix} or DIR/{name}-<any>{suffix}"
    check(bool(base), f"{config.source}: set data.dir or JAXMPI_DATA to a folder DIR with {layout}")
    folder, starts = os.path.join(base, name), ("",)
    if not os.path.isdir(folder):
        folder, starts = base, (f"{name}-", f"{name}{suffix}")
    try:
        names = sorted(file for file in os.listdir(folder) if file.endswith(suffix) and not file.startswith("."))
    except OSError as error:
        raise UsageError(f"{folder} cannot be listed: {error.strerror}; expected {layout}") from error
    files = [os.path.join(folder, file) for file in names if file.startswith(starts)]
    check(
        bool(files),
        f"{config.source}: found no {suffix} file for {split} in {base}; expected {layout}; name the split with "
        f"--data.{split}-split",
    )
    check_plain_files(files, layout)
    return files
