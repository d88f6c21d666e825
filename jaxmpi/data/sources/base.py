"""The protocol of a source, and what all sources share."""

import os
import stat
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.host_arrays import check_unmasked
from jaxmpi.data.decode import MODES, corrupt_if_it_fails, decoded


@runtime_checkable
class Source(Protocol):
    """Examples by index. Read from several threads at once.

    `source[i]` is (image, label), or a dict of arrays with other names. A task of the user's own takes
    the fields of such a dict. An image is u8[height, width, channels], or any array that its owner has
    prepared, such as i32[window] tokens. A label is an int in [0, classes), or an array of such. A
    source may also have

    - `where(i) -> str`: the name of example i in errors.
    - `notes: tuple[str, ...]`: lines for the user at the start.
    - `digest() -> str`: the same on all ranks if their data are.
    - `encoded(i) -> (bytes, label)`: example i as a JPEG, PNG or what else Pillow knows, any object with a buffer.
      Loaders then call it in place of `source[i]` and decode no more than a crop needs. May be None. Its errors
      end the run; `CorruptExample` is skipped if `data.on_error` says so.
    - `bytes_each: float`: of text, the mean bytes that an example predicts, and `tokens_each: int`, its tokens.
    - `file_ends: tuple[int, ...]`: of each file of several examples, the index behind its last one: training then takes
      whole files (`data.shuffle_by`). Its `labels: int[n]`, if it has them, show whether files are mixed.
    - `whole_files() -> Source`: the same examples, each file read in one go, or in few spans that end at `span_ends`:
      training then mixes the examples inside each, too.
    - `in_process: bool`: True if its contents change while it is read, so that loaders must be threads.
    - `endless: bool`: True if examples change by epoch: example i of epoch e is asked for as number e len + i.
    - `awaited_s(i) -> float`: until when a loader may have waited for example i to come here, by `time.monotonic`: it
      is not stalled by that.

    Loaders that are processes get a source by pickle, once. It must open its files again there. Its NumPy arrays come
    out of memory that all loaders of a worker share, read-only.
    """

    name: str
    classes: int  # 0 if it is not known

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def where(source: Source, index: int) -> str:
    """Name of example `index` in errors: its file, if it has one."""
    named = getattr(source, "where", None)
    return named(index) if named else f"{source.name}[{index}]"


def pair(source: Source, index: int) -> tuple[np.ndarray, Any]:
    """(image, label) of an example.

    Raises:
        UsageError: it is a dict of other fields.
    """
    example = source[index]
    if isinstance(example, dict):
        check(False, f"{where(source, index)}: got the fields {', '.join(example)}; expected an image and a label")
    image, label = example
    check_unmasked(f"{where(source, index)}: label", label)
    return to_array(image, where(source, index)), label


def place_in_parts(ends: np.ndarray, index: int) -> tuple[int, int]:
    """The part that has example `index`, and its place there.

    Args:
        ends: of each part, the index behind its last example.
    """
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


def to_array(value: Any, where: str) -> np.ndarray:
    """`np.asarray`, but a masked array is refused."""
    check_unmasked(where, value)
    return np.asarray(value)


def check_plain_files(paths: Iterable[str], expected: str) -> None:
    """Raise `UsageError` for a pipe, a device or a folder: libraries would wait for what it never gives."""
    for path in paths:
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; expected {expected}") from error
        check(stat.S_ISREG(mode), f"{path}: got no plain file; expected {expected}")


def _split_name(config: Data, split: str) -> str:
    return config.train_split if split == "train" else config.validation_split


def _decoded(blob: Any, where: str, index: int, channels: int, resize: int) -> np.ndarray:
    with corrupt_if_it_fails(blob, where, index):
        return decoded(blob, channels, resize)


def _check_channels(config: Data) -> None:
    check(
        config.channels in MODES,
        f"data.channels: got {config.channels}; {config.source} makes {', '.join(map(str, MODES))}",
    )
