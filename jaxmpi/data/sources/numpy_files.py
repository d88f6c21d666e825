"""NumPy's formats: headers and arrays of .npy files, and a source of named arrays, in .npz files or a .npy file each.

    DIR/<split>/<any>.npz          arrays [n, ...] by the names of the columns; files may differ in n alone
    DIR/<split>/<column>.npy       one array [n, ...] a column

Headers are checked against what is expected and the file's size, so no memory is taken for what a header claims and the
file does not have. Nothing is unpickled. Rows are read where they lie if arrays are stored as they are, in C order.
Others (numpy.savez_compressed, Fortran order) are read into memory at the start, and a note says how much.
"""

import contextlib
import dataclasses
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxmpi.config.data import Data, data_dir
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import open_plain
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data.sources import base
from jaxmpi.data.sources.open_files import OpenFiles

MOST_HEAD_BYTES = 12 + 10_000  # NumPy itself takes no longer one
LOCAL_HEADER = struct.Struct("<26xHH")  # local header of a zip file's member: lengths of its name and its extra field


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


ARRAYS = Expected("numbers[n, ...]", lambda header: header.dtype.kind in "biuf" and bool(header.shape))


def parse_header(path: str, blob: bytes) -> Header:
    """Header of the .npy file that begins with these bytes; one thread at a time in Python 3.11."""
    file = io.BytesIO(blob)
    try:
        is_first = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
        if min(shape, default=0) < 0:
            raise ValueError(f"shape {shape}")
    except Exception as error:  # Python parses the head, so there is no one error for damage in it
        reason = str(error)[:200] or type(error).__name__
        raise UsageError(f"{path}: {reason}; expected a .npy file: it is damaged, or another kind of file") from error
    return Header(dtype, shape, is_fortran, file.tell())


def read_header(path: str, expected: Expected) -> Header:
    """Read the header of a .npy file, one thread at a time."""
    with _open(path, expected) as (_, header):
        return header


def load_array(path: str, expected: Expected) -> np.ndarray:
    """The array of a .npy file; one thread at a time, and raises, as `read_header`."""
    with _open(path, expected) as (file, header):
        file.seek(header.offset)
        _check_room(path, header.end)  # a file with holes may be larger than its disk
        flat = np.fromfile(file, header.dtype, math.prod(header.shape))
        if flat.size != math.prod(header.shape):
            raise UsageError(f"{path}: it cannot be read, or changed meanwhile")
        return flat.reshape(header.shape, order="F" if header.is_fortran else "C")


@contextlib.contextmanager
def _open(path: str, expected: Expected) -> Iterator[tuple[BinaryIO, Header]]:
    with base.refusing(path, f"a .npy file, {expected.words}"):
        with open(open_plain(path, f"a .npy file, {expected.words}", follow=True), "rb") as file:
            header, size = parse_header(path, file.read(MOST_HEAD_BYTES)), os.fstat(file.fileno()).st_size
            if not expected.fits(header):
                raise UsageError(f"{path}: got {header}; expected {expected.words}")
            if header.end > size:
                raise UsageError(f"{path}: {header.end - size} bytes are missing at its end; write it again")
            yield file, header


def _check_room(name: str, size_bytes: int) -> None:
    left_bytes = available_bytes()
    if size_bytes > left_bytes:
        raise UsageError(
            f"{name}: {size_bytes / 1e9:,.1f} GB of memory are needed to read it, {left_bytes / 1e9:,.1f} GB are left: "
            "write it with numpy.savez, in C order, or take smaller arrays"
        )


# ---------------------------------------------------------------- the source


class StoredArray(NamedTuple):
    """An array that is read row by row."""

    file: int
    offset: int  # bytes before its first row
    dtype: np.dtype
    shape: tuple[int, ...]


class StoredRows(base.TableSource):
    """Rows of arrays, read where they lie in files, or from memory; also of batch files."""

    opened: OpenFiles
    arrays: list[dict[str, StoredArray | np.ndarray]]  # by part and column

    def read(self, part: int, row: int, index: int) -> Sequence[Any]:
        return [
            self.labels[index]
            if name == self.columns[-1] and self.labels is not None
            else self.read_rows(self.arrays[part][name], row, ())
            for name in self.columns
        ]

    def read_rows(self, array: StoredArray | np.ndarray, row: int, rows: tuple[int, ...]) -> np.ndarray:
        """[*rows, ...] from `row` on: (n,) is n rows, () a single one, without an axis of rows."""
        if isinstance(array, np.ndarray):
            return array[row : row + rows[0]] if rows else array[row]
        row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
        into = np.empty((*rows, *array.shape[1:]), array.dtype)
        values = self.opened.read(array.file, into, array.offset + row * row_bytes)
        return values.astype(array.dtype.newbyteorder("="), copy=False)


class NumpySource(StoredRows):
    """One split of NumPy files: .npz files, or .npy files that are a column each.

    `notes` name arrays that had to be read into memory. Refused: a column that is missing, is no array of numbers, does
    not fit into memory, or has another length or shape than the others.
    """

    def __init__(self, config: Data, files: Sequence[str]) -> None:
        self.files, self.opened, self.arrays = files, OpenFiles(files), []
        if files[0].endswith(".npz"):
            parts = [(path, _list_zip(path, number)) for number, path in enumerate(files)]
        else:
            columns = [(os.path.basename(path).removesuffix(".npy"), (i, None)) for i, path in enumerate(files)]
            parts = [(os.path.dirname(files[0]), columns)]
        for path, members in parts:
            super().__init__(config, base.choose_columns(config, [name for name, _ in members], path))
            arrays = {name: open_array(files, name, *dict(members)[name]) for name in self.columns}
            self.arrays.append(arrays)
            self._check_part(path, parts[0][0], arrays)
        self.set_parts((path for path, _ in parts), [arrays[self.columns[0]].shape[0] for arrays in self.arrays])
        labels = [arrays[self.columns[-1]] for arrays in self.arrays] if len(self.columns) in (1, 2) else []
        if labels and all(array.dtype.kind in "iu" and len(array.shape) == 1 for array in labels):
            self.labels = np.concatenate([self.read_rows(array, 0, array.shape) for array in labels]).astype(np.int64)

    def _check_part(self, path: str, first: str, arrays: dict[str, StoredArray | np.ndarray]) -> None:
        for name, array in arrays.items():
            got, expected = (f"{x.dtype}{list(x.shape[1:])}" for x in (array, self.arrays[0][name]))
            if got != expected:
                raise UsageError(f"{path}: {name}: got rows {got}; expected {expected} as in {first}")
            if isinstance(array, np.ndarray):
                self.notes += (
                    f"{path}: {name} is compressed or in Fortran order: {array.nbytes:,} bytes read into memory; "
                    "numpy.savez of C order would leave them in the file",
                )
        lengths = {name: array.shape[0] for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"{path}: got columns of lengths {lengths}; expected one length: write them again")


def open_array(
    files: Sequence[str], name: str, number: int, info: zipfile.ZipInfo | None = None
) -> StoredArray | np.ndarray:
    """An array to read row by row, of a .npy file or a member of a .npz file.

    One that is compressed or in Fortran order is read now.
    """
    path = files[number]
    if info is None:
        header = read_header(path, ARRAYS)
        if header.is_fortran:
            return np.ascontiguousarray(load_array(path, ARRAYS))
        return StoredArray(number, header.offset, header.dtype, header.shape)
    errors, where = (ValueError, EOFError, struct.error, NotImplementedError, zlib.error), f"{path}: {name}"
    with base.refusing(where, ARRAYS.words, *errors, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        with archive.open(info) as file:
            header = parse_header(where, file.read(min(MOST_HEAD_BYTES, info.file_size)))
            if not ARRAYS.fits(header) or header.end != info.file_size:
                raise UsageError(f"{where}: got {header}, {header.end} bytes of {info.file_size}; write it again")
            if header.is_fortran or info.compress_type != zipfile.ZIP_STORED:
                _check_room(f"{where}, compressed or in Fortran order", header.end)
                file.seek(0)
                return np.ascontiguousarray(np.lib.format.read_array(file, allow_pickle=False))
        # Stored as it is, a member lies behind a header of its own, whose length only that header says.
        with open(path, "rb") as raw:
            raw.seek(info.header_offset)
            lengths = LOCAL_HEADER.unpack(raw.read(LOCAL_HEADER.size))
        begin = info.header_offset + LOCAL_HEADER.size + sum(lengths)
        return StoredArray(number, begin + header.offset, header.dtype, header.shape)


def _list_zip(path: str, number: int) -> list[tuple[str, tuple[int, zipfile.ZipInfo]]]:
    """Names of arrays, of which a zip file may have one twice, and where they lie."""
    expected = "a .npz file, as numpy.savez writes it"
    with base.refusing(path, expected, zipfile.BadZipFile), zipfile.ZipFile(path) as file:
        return [(info.filename.removesuffix(".npy"), (number, info)) for info in file.infolist()]


def numpy_files(config: Data, split: str) -> base.Source:
    """NumPy files in DIR/<split>/, or DIR/<split>.npz; classes are counted, training's too."""

    def open_split(name: str) -> NumpySource:
        folder = os.path.join(data_dir(config), base.split_name(config, name))
        names = os.listdir(folder) if os.path.isdir(folder) else []
        npz, npy = (sorted(file for file in names if file.endswith(suffix)) for suffix in (".npz", ".npy"))
        if npz and npy:
            raise UsageError(
                f"{folder}: got {npz[0]} and {npy[0]}; expected .npz files, or a .npy file a column, not both"
            )
        # Of training, beside another split, only labels are read: images that are compressed would take memory.
        columns = config.columns if name == split else (config.columns or base.DEFAULT)[1:]
        settings = dataclasses.replace(config, columns=columns)
        return NumpySource(settings, base.split_files(config, name, ".npy" if npy else ".npz"))

    return base.open_table(config, split, open_split)
