"""Source: named NumPy arrays, in .npz files or a .npy file each.

    DIR/<split>/<any>.npz          arrays [n, ...] by the names of the columns; files may differ in n alone
    DIR/<split>/<column>.npy       one array [n, ...] a column

Rows are read where they lie, so files need not fit into memory. That needs arrays that are stored as they are, in C
order. Others (numpy.savez_compressed, Fortran order) are read into memory at the start, and a note says how much.
Nothing is unpickled.
"""

import contextlib
import dataclasses
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from jaxmpi.config.data import Data, data_dir
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data.sources.base import Source, _split_name, place_in_parts
from jaxmpi.data.sources.columns import TableSource, chosen, split_files
from jaxmpi.data.sources.npy import MOST_HEAD_BYTES, Expected, Header, parse_header, read_header
from jaxmpi.data.sources.open_files import OpenFiles

ARRAYS = Expected("numbers[n, ...]", lambda found: found.dtype.kind in "biuf" and bool(found.shape))
LOCAL_HEADER = struct.Struct("<26xHH")  # local header of a zip file's member: lengths of its name and its extra field


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
        tables = [Archive(path) for path in files] if files[0].endswith(".npz") else [Columns(files)]
        super().__init__(config, chosen(config, tables[0].names, tables[0].path))
        self.opened = OpenFiles(files)
        self.notes: tuple[str, ...] = ()
        self.paths = [table.path for table in tables]
        self.parts: list[list[StoredArray | np.ndarray]] = []
        for number, table in enumerate(tables):
            odd = [name for name in self.columns if table.names.count(name) != 1]
            check(not odd, f"{table.path}: got {', '.join(odd)} not once; expected the columns of {self.paths[0]}")
            self.parts.append([table.stored(name, number) or self._read(table, name) for name in self.columns])
            self._check(table)
        self.ends = np.cumsum([part[0].shape[0] for part in self.parts])
        self.labels = self.whole_numbers(1) if self.is_pair else None

    def whole_numbers(self, column: int) -> np.ndarray | None:
        """i64[n] of a column of whole numbers; None of another."""
        arrays = [part[column] for part in self.parts]
        if any(array.dtype.kind not in "iu" or len(array.shape) != 1 for array in arrays):
            return None
        whole = [found if isinstance(found, np.ndarray) else self._rows(found, 0, found.shape) for found in arrays]
        return np.concatenate(whole).astype(np.int64)

    def _read(self, table: "Archive | Columns", name: str) -> np.ndarray:
        array = table.read(name)
        note = f"{table.path}: {name} is compressed or in Fortran order: {array.nbytes:,} bytes read into memory"
        self.notes = (*self.notes, f"{note}; numpy.savez of C order would leave them in the file")
        return array

    def _check(self, table: "Archive | Columns") -> None:
        part, first = self.parts[-1], self.parts[0]
        lengths = {name: found.shape[0] for name, found in zip(self.columns, part, strict=True)}
        is_one = len(set(lengths.values())) == 1
        check(is_one, f"{table.path}: got columns of lengths {lengths}; expected one length: write them again")
        for name, found, before in zip(self.columns, part, first, strict=True):
            got, expected = (f"{x.dtype}{list(x.shape[1:])}" for x in (found, before))
            check(got == expected, f"{table.path}: {name}: got rows {got}; expected {expected} as in {self.paths[0]}")

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
        rows = np.empty(shape, found.dtype)
        each = found.dtype.itemsize * int(np.prod(found.shape[1:]))
        missing = self.opened.read(found.file, rows, found.offset + row * each)
        if missing:
            raise OSError(f"{self.opened.paths[found.file]} ends {missing} bytes before the end of row {row}")
        return rows.astype(found.dtype.newbyteorder("="), copy=False)

    def where(self, index: int) -> str:
        part, row = place_in_parts(self.ends, index)
        return f"{self.paths[part]}[{row}]"

    def digest(self) -> str:
        """SHA-256 of the files' names, columns, lengths, shapes, and the labels."""
        words = [*map(os.path.basename, self.opened.paths), *self.columns]
        return self.sha256(words, (f"{found.dtype}{found.shape}".encode() for part in self.parts for found in part))


class Columns:
    """A .npy file a column."""

    def __init__(self, files: Sequence[str]) -> None:
        self.path = os.path.dirname(files[0])
        self._files = {os.path.basename(path).removesuffix(".npy"): (i, path) for i, path in enumerate(files)}
        self.names = tuple(self._files)

    def stored(self, name: str, number: int) -> StoredArray | None:
        """An array to read row by row; None if stored otherwise."""
        file, path = self._files[name]
        found = read_header(path, ARRAYS)
        return None if found.is_fortran else StoredArray(file, found.offset, found.dtype, found.shape)

    def read(self, name: str) -> np.ndarray:
        """A whole array."""
        path = self._files[name][1]
        _check_memory(os.path.getsize(path), path, name)
        return np.ascontiguousarray(np.load(path, allow_pickle=False))


class Archive:
    """A .npz file.

    Raises:
        UsageError: it is none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with _open_zip(path) as file:
            members = file.infolist()
        self.names = tuple(info.filename.removesuffix(".npy") for info in members)  # a zip file may have one twice
        self._members = dict(zip(self.names, members, strict=True))

    def stored(self, name: str, number: int) -> StoredArray | None:
        """An array to read row by row; None if stored otherwise."""
        info, found = self._members[name], self._header(name)
        if info.compress_type != zipfile.ZIP_STORED or found.is_fortran:
            return None
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(info.header_offset)
            start = info.header_offset + LOCAL_HEADER.size + sum(LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size)))
        missing = start + found.end - size
        check(missing <= 0, f"{self.path}: {name}: {missing} bytes are missing at its end; write it again")
        return StoredArray(number, start + found.offset, found.dtype, found.shape)

    def read(self, name: str) -> np.ndarray:
        """A whole array."""
        _check_memory(self._header(name).end, self.path, name)
        with self._open(name) as file:
            return np.ascontiguousarray(np.lib.format.read_array(file, allow_pickle=False))

    def _header(self, name: str) -> Header:
        """An array's header; the array must take all bytes of the member."""
        where, size = f"{self.path}: {name}", self._members[name].file_size
        with self._open(name) as file:
            blob = file.read(min(MOST_HEAD_BYTES, size))
        found = parse_header(where, blob)
        check(ARRAYS.fits(found), f"{where}: got {found}; expected {ARRAYS.words}")
        check(found.end == size, f"{where}: got {found}, so {found.end} bytes, in {size}; write it again")
        return found

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with _open_zip(self.path) as archive, archive.open(self._members[name]) as file:
                yield file
        except (OSError, ValueError, EOFError, NotImplementedError, zlib.error, zipfile.BadZipFile) as error:
            raise UsageError(f"{self.path}: {name}: {error}; expected {ARRAYS.words}: write it again") from error


def _open_zip(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: {error}; expected a .npz file, as numpy.savez writes it") from error


def _check_memory(need_bytes: int, path: str, name: str) -> None:
    left_bytes = available_bytes()
    check(
        need_bytes <= left_bytes,
        f"{path}: {name} is compressed or in Fortran order, and needs {need_bytes / 1e9:,.1f} GB of memory; "
        f"{left_bytes / 1e9:,.1f} GB are left: write it with numpy.savez, in C order",
    )


def numpy_files(config: Data, split: str) -> Source:
    """NumPy files in DIR/<split>/, or DIR/<split>.npz; classes are counted, training's too."""
    source = NumpySource(config, _list_files(config, split))
    labels = dataclasses.replace(config, columns=source.columns[1:])
    return source.counted(config, split, lambda: NumpySource(labels, _list_files(config, "train")).whole_numbers(0))


def _list_files(config: Data, split: str) -> list[str]:
    folder = os.path.join(data_dir(config), _split_name(config, split))
    is_folder = os.path.isdir(folder)
    is_npy = is_folder and not any(name.endswith(".npz") for name in os.listdir(folder))
    return split_files(config, split, ".npy" if is_npy else ".npz")
