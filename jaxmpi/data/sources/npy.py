"""The .npy format: headers, checked against what is expected and the file's size, and whole arrays.

Nothing is unpickled, and no memory is taken for what a header claims and the file does not hold.
"""

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.files import open_plain

MOST_HEAD_BYTES = 12 + 10_000  # NumPy itself takes no longer one


class Header(NamedTuple):
    """Header of a .npy file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    is_fortran: bool
    offset: int  # bytes before the array

    @property
    def end(self) -> int:
        """Bytes of the file up to the array's last."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{' in Fortran order' * self.is_fortran}"


class Expected(NamedTuple):
    """Expected contents of a .npy file, in words, and their check."""

    words: str
    fits: Callable[[Header], bool]


def parse_header(path: str, blob: bytes) -> Header:
    """Header of the .npy file that begins with these bytes; one thread at a time in Python 3.11.

    Raises:
        UsageError: it is none.
    """
    file = io.BytesIO(blob)
    try:
        is_first = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
        check(min(shape, default=0) >= 0, f"shape {shape}")
    except Exception as error:  # Python parses the head, so there is no one error for damage in it
        reason = str(error)[:200] or type(error).__name__
        raise UsageError(f"{path}: {reason}; expected a .npy file: it is damaged, or another kind of file") from error
    return Header(dtype, shape, is_fortran, file.tell())


def read_header(path: str, expected: Expected) -> Header:
    """Read the header of a .npy file, one thread at a time.

    Raises:
        UsageError: it is none, another one than expected, or cut off.
    """
    with _open(path, expected) as (_, found):
        return found


def load_array(path: str, expected: Expected) -> np.ndarray:
    """The array of a .npy file; one thread at a time, and raises, as `read_header`."""
    with _open(path, expected) as (file, found):
        file.seek(found.offset)
        try:
            flat = np.fromfile(file, found.dtype, math.prod(found.shape))
        except MemoryError as error:  # a file with holes may be larger than its disk
            raise UsageError(
                f"{path}: got {found}, more than there is memory for; expected {expected.words}"
            ) from error
        check(flat.size == math.prod(found.shape), f"{path}: it cannot be read, or changed meanwhile")
        return flat.reshape(found.shape, order="F" if found.is_fortran else "C")


@contextlib.contextmanager
def _open(path: str, expected: Expected) -> Iterator[tuple[BinaryIO, Header]]:
    try:
        with open(open_plain(path, f"a .npy file, {expected.words}", follow=True), "rb") as file:
            found, size = parse_header(path, file.read(MOST_HEAD_BYTES)), os.fstat(file.fileno()).st_size
            check(expected.fits(found), f"{path}: got {found}; expected {expected.words}")
            check(found.end <= size, f"{path}: {found.end - size} bytes are missing at its end; write it again")
            yield file, found
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; expected a .npy file, {expected.words}") from error
