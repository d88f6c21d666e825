"""NumPy's formats: headers and arrays of .npy files; sources of named arrays and of batch files.

    DIR/<split>/<any>.npz          numpy: arrays [n, ...] by the names of the columns; files may differ in n alone
    DIR/<split>/<column>.npy       numpy: one array [n, ...] a column
    DIR/train/00000.npy            batchfiles: u8[n, height, width, channels], as Theano-MPI has them, one file a batch
    DIR/train_labels.npy           batchfiles: int[examples], in the order of the files' names
    DIR/train_mean.npy             batchfiles: f32[height, width, channels], for data.mean_image

Headers are checked against what is expected and the file's size, so no memory is taken for what a header claims and the
file does not have. Nothing is unpickled. Rows are read where they lie if arrays are stored as they are, in C order.
Others (numpy.savez_compressed, Fortran order) are read into memory at the start, and a note says how much.

Of batch files training takes whole ones in a new order each epoch, and the examples of each in a new order
(`sampler.FileSampler`). Each is read once an epoch, in one go, or in spans if it is long: where a read takes long, one
for each image would take as many times longer as a file has images. If examples of all files are mixed, rows are read
one by one.
"""

import bisect
import contextlib
import copy
import dataclasses
import io
import itertools
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from jaxmpi.config.data import Data, data_dir
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import open_plain, whole_file, write_all
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data.sampler import Sampler
from jaxmpi.data.sources import base
from jaxmpi.data.sources.base import pair, place_in_parts
from jaxmpi.data.sources.packed import check_record
from jaxmpi.data.sources.reading import LastUsed, OpenFiles

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
            parts = []
            for number, path in enumerate(files):
                with base.refusing(path, "a .npz file, as numpy.savez writes it", zipfile.BadZipFile):
                    with zipfile.ZipFile(path) as file:  # which may have an array twice
                        members = [(info.filename.removesuffix(".npy"), (number, info)) for info in file.infolist()]
                parts.append((path, members))
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


def numpy_files(config: Data, split: str) -> base.Source:
    """NumPy files in DIR/<split>/, or DIR/<split>.npz; classes are counted, training's too."""

    def open_split(config: Data, name: str) -> NumpySource:
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

    return base.open_table(open_split, config, split)


# ---------------------------------------------------------------- batch files


LAYOUT = "DIR/<split>/<any>.npy, u8[n, height, width, channels], and DIR/<split>_labels.npy, int[examples]"
MOST_IMAGE_BYTES = 1 << 28  # 2^26 px of 4 channels
SPAN_BYTES = 64 << 20  # bytes of a file that are read in one go at most, or one example if it is longer
KEPT_BYTES = 4 * SPAN_BYTES  # bytes of spans kept by a loader process or all threads of a worker; two spans at least
IMAGES = Expected(
    "u8[n, height, width, channels] in C order, as numpy.ascontiguousarray gives it",
    lambda array: (
        array.dtype == np.uint8 and len(array.shape) == 4 and 0 not in array.shape[1:] and not array.is_fortran
    ),
)
LABELS = Expected("whole numbers, one an image", lambda array: array.dtype.kind in "iu" and len(array.shape) == 1)


class BatchFileSource(StoredRows):
    """One split of batch files below `root`.

    Raises:
        UsageError: no file, or a file or labels that are not as described; more or fewer labels than examples; or names
            whose order is not that of the numbers in them.
    """

    labels: np.ndarray

    def __init__(self, config: Data, split: str) -> None:
        super().__init__(config)
        folder = os.path.join(base.data_root(config, LAYOUT), base.split_name(config, split))
        names = sorted(file for file in os.listdir(folder) if file.endswith(".npy")) if os.path.isdir(folder) else []
        if not names:
            raise UsageError(f"batchfiles: found no .npy file in a folder {folder}; expected {LAYOUT}")
        _check_order(folder, names)
        self.files = [os.path.join(folder, name) for name in names]
        headers = [read_header(path, IMAGES) for path in self.files]
        shape = headers[0].shape[1:]
        if math.prod(shape) > MOST_IMAGE_BYTES:  # a file with holes can be larger than its disk
            raise UsageError(f"{self.files[0]}: got {math.prod(shape)} bytes an image; expected <= {MOST_IMAGE_BYTES}")
        for path, header in zip(self.files, headers, strict=True):
            if header.shape[1:] != shape:
                raise UsageError(f"{path}: got images of another shape than {shape} before it")
        self.arrays = [{"image": StoredArray(i, h.offset, h.dtype, h.shape)} for i, h in enumerate(headers)]
        self.set_parts(self.files, [header.shape[0] for header in headers])
        path = f"{folder}_labels.npy"
        labels = load_array(path, LABELS)
        for place in np.flatnonzero((labels < 0) | (labels > np.iinfo(np.int32).max))[:1]:
            raise UsageError(f"{path}: got label {labels[place]} at {place}; expected 0 <= label < 2^31")
        if len(labels) != self.ends[-1]:
            raise UsageError(f"{path}: got {len(labels)} labels for {self.ends[-1]} images")
        self.labels = labels.astype(np.int32)
        self.file_ends, self.opened = tuple(self.ends.tolist()), OpenFiles(self.files)
        self.spans: LastUsed[np.ndarray] | None = None  # if files are read whole
        rows = max(SPAN_BYTES // math.prod(shape), 1)
        self.span_ends = tuple(
            min(cut, end)
            for begin, end in itertools.pairwise([0, *self.file_ends])
            for cut in range(begin + rows, end + rows, rows)
            if end > begin
        )

    def whole_files(self) -> Self:
        """The same source, which reads files whole, or long ones in spans."""
        source = copy.copy(self)
        longest = int(np.diff(self.span_ends, prepend=0).max(initial=1)) * math.prod(self.arrays[0]["image"].shape[1:])
        source.spans = LastUsed(self._read_span, max(KEPT_BYTES // longest, 2))
        return source

    def _read_span(self, span: int) -> np.ndarray:
        """u8[n, height, width, channels], read-only."""
        begin, end = self.span_ends[span - 1] if span else 0, self.span_ends[span]
        part, row = place_in_parts(self.ends, begin)
        rows = self.read_rows(self.arrays[part]["image"], row, (end - begin,))
        rows.flags.writeable = False
        return rows

    def read(self, part: int, row: int, index: int) -> Sequence[Any]:
        if self.spans is None:
            return super().read(part, row, index)
        span = bisect.bisect_right(self.span_ends, index)
        rows = self.spans[span]  # the last of which is right before the span's end
        return rows[index - self.span_ends[span]].copy(), self.labels[index]


def _check_order(folder: str, names: list[str]) -> None:
    """Refuse numbers of different lengths in otherwise equal names."""
    alike: dict[str, str] = {}
    for name in names:
        first = alike.setdefault(re.sub(r"\d+", "0", name), name)
        if len(name) != len(first):
            raise UsageError(
                f"{folder}: got {first} and {name}, and files go by name, so that 10.npy comes before 2.npy; give all "
                "numbers leading zeros up to the same length, such as 00002.npy"
            )


# ---------------------------------------------------------------- writing


def write_batch_files(source: Any, root: str | Path, split: str, rows: int = 128, seed: int | None = 0) -> None:
    """Write a source's u8 images as batch files, labels and mean image.

    A file has `rows` images, the last perhaps fewer. Examples are mixed, by `seed`: training takes whole files, and a
    folder of images is sorted by class. With seed None they keep the order of the source.

    Files appear whole, under their names, or not at all, in place of those that were there. The labels come last, and
    those that were there go first, so what is not finished does not open.

    Raises:
        UsageError: no example, or no row; an image that is not u8[height, width, channels], or not of the first one's
            shape; a label that is no whole number in [0, 2^31); or a file cannot be written, as on a full disk: which.
    """
    name, folder, n = getattr(source, "name", "source"), Path(root) / split, len(source)
    if rows < 1 or not n:
        raise UsageError(f"{name}: got {n} examples, {rows} rows a file; expected 1 or more of both")
    labels_path, digits = Path(root) / f"{split}_labels.npy", max(5, len(str((n - 1) // rows)))
    order = np.arange(n) if seed is None else Sampler(n, n, seed=seed).indices(0).indices
    labels, files, total = np.zeros(n, np.int32), set(), np.zeros(1)
    for begin in range(0, n, rows):
        images = []
        for place, i in enumerate(order[begin : begin + rows].tolist(), begin):
            image, label = pair(source, i)
            _, labels[place] = check_record(b"", label, 0, f"{name}[{i}]")
            first = total if begin else images[0] if images else image
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape != first.shape:
                form = f"{image.dtype}{list(image.shape)}"
                raise UsageError(f"{name}[{i}]: got {form}; expected u8[height, width, channels] as before it")
            images.append(image)
        batch, file = np.stack(images), folder / f"{begin // rows:0{digits}}.npy"
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            labels_path.unlink(missing_ok=True)  # not before there are images to write
        total = total + batch.sum(0, dtype=np.float64)
        _save(file, batch)
        files.add(file)
    with _writing(folder):  # numbered files that an earlier, longer set has left
        for stale in set(folder.glob("*.npy")) - files:
            if stale.stem.isdecimal():
                stale.unlink()
    _save(Path(root) / f"{split}_mean.npy", (total / n).astype(np.float32))
    _save(labels_path, labels)


def _save(path: Path, array: np.ndarray) -> None:
    array = np.ascontiguousarray(array)  # stacked images keep their own order
    with _writing(path), whole_file(path) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        write_all(file, array.reshape(-1).view(np.uint8))  # NumPy's own writing does not say why it failed


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror or error}; the files before it are whole. Make room, and write all of them again"
        ) from error
