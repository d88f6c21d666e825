"""NumPy's formats: headers and arrays of .npy files, and a source of named arrays, in .npz files or a .npy file each.

    DIR/<split>/<any>.npz          arrays [n, ...] by the names of the columns; files may differ in n alone
    DIR/<split>/<column>.npy       one array [n, ...] a column

Headers are checked against what is expected and the file's size, so no memory is taken for what a header claims and the
file does not hold. Nothing is unpickled. Rows are read where they lie, so files need not fit into memory. That needs
arrays that are stored as they are, in C order. Others (numpy.savez_compressed, Fortran order) are read into memory at
the start, and a note says how much.
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
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.files import open_plain
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data.sources.base import Source, TableSource, chosen, place_in_parts, split_files, split_name
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


def parse_header(path: str, blob: bytes) -> Header:
    """Header of the .npy file that begins with these bytes; one thread at a time in Python 3.11."""
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
    """Read the header of a .npy file, one thread at a time."""
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


# ---------------------------------------------------------------- the source

ARRAYS = Expected("numbers[n, ...]", lambda found: found.dtype.kind in "biuf" and bool(found.shape))


class StoredArray(NamedTuple):
    """An array that is read row by row."""

    file: int
    offset: int  # bytes before its first row
    dtype: np.dtype
    shape: tuple[int, ...]


class NumpySource(TableSource):
    """One split of NumPy files.

    Args:
        config: of the data.
        files: .npz files, or .npy files that are a column each.

    Attributes:
        notes: arrays that had to be read into memory, for the user.

    Raises:
        UsageError: a column is missing, is no array of numbers, or does not fit into memory; or it has another length
            or shape than the others.
    """

    def __init__(self, config: Data, files: Sequence[str]) -> None:
        self.opened, self.notes = OpenFiles(files), ()
        if files[0].endswith(".npz"):
            tables = [(path, _zip_members(path, number)) for number, path in enumerate(files)]
        else:
            columns = [(os.path.basename(path).removesuffix(".npy"), _Member(i, path)) for i, path in enumerate(files)]
            tables = [(os.path.dirname(files[0]), columns)]
        super().__init__(config, chosen(config, [name for name, _ in tables[0][1]], tables[0][0]))
        self.paths = [path for path, _ in tables]
        self.parts: list[list[StoredArray | np.ndarray]] = []
        for path, members in tables:
            found = [[member for each, member in members if each == name] for name in self.columns]
            odd = [name for name, same in zip(self.columns, found, strict=True) if len(same) != 1]
            check(not odd, f"{path}: got {', '.join(odd)} not once; expected the columns of {self.paths[0]}")
            part = [self._open(member, name) for (member,), name in zip(found, self.columns, strict=True)]
            self.parts.append(part)
            lengths = {name: array.shape[0] for name, array in zip(self.columns, part, strict=True)}
            is_one = len(set(lengths.values())) == 1
            check(is_one, f"{path}: got columns of lengths {lengths}; expected one length: write them again")
            for name, array, before in zip(self.columns, part, self.parts[0], strict=True):
                got, expected = (f"{x.dtype}{list(x.shape[1:])}" for x in (array, before))
                check(got == expected, f"{path}: {name}: got rows {got}; expected {expected} as in {self.paths[0]}")
        self.ends = np.cumsum([part[0].shape[0] for part in self.parts])
        self.labels = self.whole_numbers(1) if self.is_pair else None

    def _open(self, member: "_Member", name: str) -> StoredArray | np.ndarray:
        """An array to read row by row; one that is compressed or in Fortran order is read now."""
        found = member.header(name)
        if not (found.is_fortran or member.is_compressed):
            return StoredArray(member.file, member.begin() + found.offset, found.dtype, found.shape)
        why, left_bytes = f"{member.path}: {name} is compressed or in Fortran order", available_bytes()
        check(
            found.end <= left_bytes,
            f"{why}, and needs {found.end / 1e9:,.1f} GB of memory; {left_bytes / 1e9:,.1f} GB are left: write it with "
            "numpy.savez, in C order",
        )
        array = member.read(name)
        note = f"{why}: {array.nbytes:,} bytes read into memory; numpy.savez of C order would leave them in the file"
        self.notes = (*self.notes, note)
        return array

    def whole_numbers(self, column: int) -> np.ndarray | None:
        """i64[n] of a column of whole numbers; None of another."""
        arrays = [part[column] for part in self.parts]
        if any(array.dtype.kind not in "iu" or len(array.shape) != 1 for array in arrays):
            return None
        whole = [found if isinstance(found, np.ndarray) else self._rows(found, 0, found.shape) for found in arrays]
        return np.concatenate(whole).astype(np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def cells(self, index: int) -> Sequence[Any]:
        part, row = place_in_parts(self.ends, index)
        cells = [
            found[row] if isinstance(found, np.ndarray) else self._rows(found, row, found.shape[1:])
            for found in self.parts[part]
        ]
        return cells if self.labels is None else [cells[0], self.labels[index]]

    def _rows(self, found: StoredArray, row: int, shape: tuple[int, ...]) -> np.ndarray:
        each = found.dtype.itemsize * math.prod(found.shape[1:])
        rows = self.opened.read(found.file, np.empty(shape, found.dtype), found.offset + row * each)
        return rows.astype(found.dtype.newbyteorder("="), copy=False)

    def where(self, index: int) -> str:
        part, row = place_in_parts(self.ends, index)
        return f"{self.paths[part]}[{row}]"

    def digest(self) -> str:
        words = [*map(os.path.basename, self.opened.paths), *self.columns]
        return self.sha256(words, (f"{found.dtype}{found.shape}".encode() for part in self.parts for found in part))


class _Member(NamedTuple):
    """A .npy file, or one in a .npz file."""

    file: int
    path: str
    info: zipfile.ZipInfo | None = None

    @property
    def is_compressed(self) -> bool:
        return self.info is not None and self.info.compress_type != zipfile.ZIP_STORED

    def header(self, name: str) -> Header:
        """Its header; the array must take all bytes of a zip file's member."""
        if self.info is None:
            return read_header(self.path, ARRAYS)
        where, size = f"{self.path}: {name}", self.info.file_size
        with self._unzip(name) as file:
            blob = file.read(min(MOST_HEAD_BYTES, size))
        found = parse_header(where, blob)
        check(ARRAYS.fits(found), f"{where}: got {found}; expected {ARRAYS.words}")
        check(found.end == size, f"{where}: got {found}, so {found.end} bytes, in {size}; write it again")
        return found

    def begin(self) -> int:
        """Offset in the file."""
        if self.info is None:
            return 0
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(self.info.header_offset)
            lengths = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        begin = self.info.header_offset + LOCAL_HEADER.size + sum(lengths)
        missing = begin + self.info.file_size - size
        check(missing <= 0, f"{self.path}: {missing} bytes of {self.info.filename} are missing; write it again")
        return begin

    def read(self, name: str) -> np.ndarray:
        """The whole array."""
        if self.info is None:
            return np.ascontiguousarray(load_array(self.path, ARRAYS))
        with self._unzip(name) as file:
            return np.ascontiguousarray(np.lib.format.read_array(file, allow_pickle=False))

    @contextlib.contextmanager
    def _unzip(self, name: str) -> Iterator[Any]:
        assert self.info is not None
        try:
            with _open_zip(self.path) as archive, archive.open(self.info) as file:
                yield file
        except (OSError, ValueError, EOFError, NotImplementedError, zlib.error, zipfile.BadZipFile) as error:
            raise UsageError(f"{self.path}: {name}: {error}; expected {ARRAYS.words}: write it again") from error


def _zip_members(path: str, number: int) -> list[tuple[str, _Member]]:
    """Names of arrays, of which a zip file may have one twice, and where they lie."""
    with _open_zip(path) as file:
        return [(info.filename.removesuffix(".npy"), _Member(number, path, info)) for info in file.infolist()]


def _open_zip(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: {error}; expected a .npz file, as numpy.savez writes it") from error


def numpy_files(config: Data, split: str) -> Source:
    """NumPy files in DIR/<split>/, or DIR/<split>.npz; classes are counted, training's too."""

    def files(split: str) -> list[str]:
        folder = os.path.join(data_dir(config), split_name(config, split))
        is_npy = os.path.isdir(folder) and not any(name.endswith(".npz") for name in os.listdir(folder))
        return split_files(config, split, ".npy" if is_npy else ".npz")

    source = NumpySource(config, files(split))
    labels = dataclasses.replace(config, columns=source.columns[1:])
    return source.count_classes(config, split, lambda: NumpySource(labels, files("train")).whole_numbers(0))
