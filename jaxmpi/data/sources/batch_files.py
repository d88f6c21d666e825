"""NumPy batch files, as Theano-MPI has them: one u8 file a batch.

    DIR/train/00000.npy            u8[n, height, width, channels]; files may differ in n alone
    DIR/train_labels.npy           int[examples], in the order of the files' names
    DIR/train_mean.npy             f32[height, width, channels], for data.mean_image

Nothing is unpickled. Training takes whole files in a new order each epoch, and the examples of each in a new order
(`sampler.FileSampler`). So each is read once an epoch, in one go (`open_files.Spans`). On some file systems a read
takes long. There, a read for each image would take as many times longer as a file has images. A file need not fit into
memory: longer ones are cut into spans. If examples of all files are mixed, rows are read one by one.
"""

import bisect
import contextlib
import copy
import hashlib
import io
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from jaxmpi.config.data import Data, data_dir
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.files import open_plain, sync_file
from jaxmpi.data.sampler import Sampler
from jaxmpi.data.sources.base import Source, _split_name, pair, place_in_parts
from jaxmpi.data.sources.open_files import SPAN_BYTES, OpenFiles, Spans
from jaxmpi.data.sources.packed import check_record

LAYOUT = "DIR/<split>/<any>.npy, u8[n, height, width, channels], and DIR/<split>_labels.npy, int[examples]"
MOST_IMAGE_BYTES = 1 << 28  # 2^26 px of 4 channels
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


IMAGES = Expected(
    "u8[n, height, width, channels] in C order, as numpy.ascontiguousarray gives it",
    lambda found: (
        found.dtype == np.uint8 and len(found.shape) == 4 and 0 not in found.shape[1:] and not found.is_fortran
    ),
)
LABELS = Expected("whole numbers, one an image", lambda found: found.dtype.kind in "iu" and len(found.shape) == 1)


class BatchFileSource:
    """One split of batch files.

    Args:
        root: DIR.
        split: name of the folder.
        classes: 0 counts up to the largest label; the model may have more.

    Raises:
        UsageError: no file, or a file or labels that are not as described; more or fewer labels than examples; or names
            whose order is not that of the numbers in them.
    """

    def __init__(self, root: str, split: str, classes: int = 0) -> None:
        self.name, self.folder = "batchfiles", os.path.join(root, split)
        check(os.path.isdir(self.folder), f"batchfiles: no folder {self.folder}; expected {LAYOUT}")
        self.files = sorted(name for name in os.listdir(self.folder) if name.endswith(".npy"))
        check(bool(self.files), f"{self.folder}: found no .npy file; expected {LAYOUT}")
        _check_order(self.folder, self.files)
        headers = [header(os.path.join(self.folder, name)) for name in self.files]
        self.shape = headers[0].shape[1:]
        each = math.prod(self.shape)  # bytes of an image; a file with holes can be larger than its disk
        check(each <= MOST_IMAGE_BYTES, f"{self._path(0)}: got {each} bytes an image; expected <= {MOST_IMAGE_BYTES}")
        odd = [i for i, found in enumerate(headers) if found.shape[1:] != self.shape]
        check(not odd, f"{self._path(odd[0] if odd else 0)}: got images of another shape than {self.shape} before it")
        self.offsets = np.array([found.offset for found in headers], np.int64)
        self.ends = np.cumsum([found.shape[0] for found in headers])
        self.labels = load_labels(labels_path(root, split))
        check(
            len(self.labels) == self.ends[-1],
            f"{labels_path(root, split)}: got {len(self.labels)} labels for {self.ends[-1]} images",
        )
        self.classes, self.is_counted = classes or int(self.labels.max(initial=-1)) + 1, not classes
        self.opened = OpenFiles([self._path(i) for i in range(len(self.files))])
        self.spans: Spans | None = None  # if files are read whole
        self.span_ends = self._cut(max(SPAN_BYTES // max(each, 1), 1))

    def _cut(self, rows: int) -> tuple[int, ...]:
        begins = [0, *self.ends.tolist()]
        return tuple(
            min(cut, end)
            for begin, end in itertools.pairwise(begins)
            for cut in range(begin + rows, end + rows, rows)
            if end > begin
        )

    def whole_files(self) -> Self:
        """The same source, which reads files whole, or long ones in spans."""
        each, begins = math.prod(self.shape), [0, *self.span_ends[:-1]]
        places = []
        for begin, end in zip(begins, self.span_ends, strict=True):
            file, row = place_in_parts(self.ends, begin)
            places.append((file, int(self.offsets[file]) + row * each, (end - begin) * each))
        source = copy.copy(self)
        source.spans = Spans(self.opened, np.array(places, np.int64).reshape(-1, 3))
        return source

    @property
    def file_ends(self) -> tuple[int, ...]:
        """Index behind the last image of each file."""
        return tuple(self.ends.tolist())

    def _path(self, file: int) -> str:
        return os.path.join(self.folder, self.files[file])

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """SHA-256 of the files' names and lengths, the shape and the labels."""
        digest = hashlib.sha256("\0".join([*self.files, str(self.shape)]).encode(errors="surrogateescape"))
        for part in (self.ends, self.labels):
            digest.update(part.astype(np.int64).tobytes())
        return digest.hexdigest()

    def where(self, index: int) -> str:
        """The file of example `index`, and its row there."""
        file, row = place_in_parts(self.ends, index)
        return f"{self._path(file)}[{row}]"

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        if self.spans:
            span = bisect.bisect_right(self.span_ends, index)
            begin = self.span_ends[span - 1] if span else 0
            rows = self.spans.read(span).reshape(-1, *self.shape)
            return rows[index - begin].copy(), self.labels[index]
        file, row = place_in_parts(self.ends, index)
        image = np.empty(self.shape, np.uint8)
        missing = self.opened.read(file, image, int(self.offsets[file]) + row * image.size)
        if missing:
            raise OSError(f"{self._path(file)} ends {missing} bytes before the end of row {row}")
        return image, self.labels[index]


def _check_order(folder: str, names: list[str]) -> None:
    """Raise `UsageError` if numbers in otherwise equal names differ in length."""
    alike: dict[str, str] = {}
    for name in names:
        first = alike.setdefault(re.sub(r"\d+", "0", name), name)
        check(
            len(name) == len(first),
            f"{folder}: got {first} and {name}, and files go by name, so that 10.npy comes before 2.npy; give all "
            "numbers leading zeros up to the same length, such as 00002.npy",
        )


def header(path: str, expected: Expected = IMAGES) -> Header:
    """Read the header of a .npy file, on the main thread only.

    Reading is not safe in threads of Python 3.11.

    Raises:
        UsageError: it is none, another one than expected, or cut off.
    """
    with _reading(path, expected) as (_, found):
        return found


def load_array(path: str, expected: Expected) -> np.ndarray:
    """The array of a .npy file; for threads see `header`.

    Raises:
        UsageError: as of `header`.
    """
    with _reading(path, expected) as (file, found):
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
def _reading(path: str, expected: Expected) -> Iterator[tuple[BinaryIO, Header]]:
    """A .npy file, and its header, checked against `expected` and the size."""
    try:
        with open(open_plain(path, f"a .npy file, {expected.words}", follow=True), "rb") as file:
            found, size = head(path, file.read(MOST_HEAD_BYTES)), os.fstat(file.fileno()).st_size
            check(expected.fits(found), f"{path}: got {found}; expected {expected.words}")
            missing = found.end - size
            check(missing <= 0, f"{path}: {missing} bytes are missing at its end; write it again")
            yield file, found
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; expected a .npy file, {expected.words}") from error


def head(path: str, blob: bytes) -> Header:
    """Header of the .npy file that begins with these bytes.

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


def labels_path(root: str, split: str) -> str:
    """Path of a split's labels."""
    return os.path.join(root, f"{split}_labels.npy")


def load_labels(path: str) -> np.ndarray:
    """i32[examples] of a .npy file.

    Raises:
        UsageError: not a file of whole numbers >= 0.
    """
    found = load_array(path, LABELS)
    for place in np.flatnonzero((found < 0) | (found > np.iinfo(np.int32).max))[:1]:
        raise UsageError(f"{path}: got label {found[place]} at {place}; expected 0 <= label < 2^31")
    return found.astype(np.int32)


def write_batch_files(source: Any, root: str | Path, split: str, rows: int = 128, seed: int | None = 0) -> None:
    """Write a source's u8 images as batch files, labels and mean image.

    A file has `rows` images, the last perhaps fewer. Examples are mixed, by `seed`: training takes whole files, and a
    folder of images is sorted by class. With seed None they keep the order of the source.

    Files appear whole, under their names, or not at all, in place of those that were there. The labels come last, and
    those that were there go first, so what is not finished does not open.

    Raises:
        UsageError: no example, or no row; an image that is not u8[height, width, channels], or not of the first one's
            shape; or a file cannot be written, such as on a full disk: which.
    """
    check(rows > 0, f"rows: got {rows}; expected how many images a file has, from 1 on")
    check(len(source) > 0, f"{getattr(source, 'name', 'the source')}: got no examples to write")
    folder, labels, names = Path(root) / split, Path(labels_path(str(root), split)), _names(-(-len(source) // rows))
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    found = np.zeros(len(source), np.int32)
    total: Any = 0.0
    order = np.arange(len(source)) if seed is None else Sampler(len(source), len(source), seed=seed).indices(0).indices
    for name, batch in zip(names, _batches(source, rows, order.tolist(), found), strict=True):
        with _writing(folder):
            labels.unlink(missing_ok=True)  # not before there are images to write
        total = total + batch.sum(0, dtype=np.float64)
        _save(folder / name, batch)
    _remove_others(folder, names)
    _save(Path(root) / f"{split}_mean.npy", (total / len(source)).astype(np.float32))
    _save(labels, found)


def _names(files: int) -> list[str]:
    """Names of so many batch files, which sort as their numbers do."""
    digits = max(5, len(str(files - 1)))
    return [f"{number:0{digits}}.npy" for number in range(files)]


def _remove_others(folder: Path, names: list[str]) -> None:
    """Remove the numbered files that an earlier, longer set has left."""
    with _writing(folder):
        for left in set(folder.glob("*.npy")) - {folder / name for name in names}:
            if left.stem.isdecimal():
                left.unlink()


def _batches(source: Any, rows: int, order: list[int], found: np.ndarray) -> Iterator[np.ndarray]:
    """Yield u8[<= rows, ...] of the examples in `order`.

    Their labels go to `found`, in the same order.
    """
    shape = None
    for begin in range(0, len(order), rows):
        images = []
        for place, i in enumerate(order[begin : begin + rows], begin):
            image, label = pair(source, i)
            _, found[place] = check_record(b"", label, 0, f"{getattr(source, 'name', 'source')}[{i}]")
            shape = shape or image.shape
            check(
                image.dtype == np.uint8 and image.ndim == 3 and image.shape == shape,
                f"{getattr(source, 'name', 'source')}[{i}]: got {image.dtype}{list(image.shape)}; expected "
                "u8[height, width, channels] as before it",
            )
            images.append(image)
        yield np.stack(images)


def _save(path: Path, array: np.ndarray) -> None:
    array, aside = np.ascontiguousarray(array), path.with_suffix(".tmp")  # stacked images keep their own order
    try:
        with _writing(path), aside.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            file.write(array.data)  # NumPy's own writing does not say why it failed
            sync_file(file)
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror or error}; the files before it are whole. Make room, and write all of them again"
        ) from error


def batchfiles(config: Data, split: str) -> Source:
    """NumPy batch files in DIR/<split>/ and DIR/<split>_labels.npy; classes are counted, training's too."""
    base = data_dir(config)
    check(bool(base), f"batchfiles: set data.dir or JAXMPI_DATA to a folder DIR with {LAYOUT}")
    train = labels_path(base, config.train_split)
    source = BatchFileSource(base, _split_name(config, split))
    in_training = int(load_labels(train).max(initial=-1)) + 1 if os.path.isfile(train) else 0
    source.classes = max(source.classes, in_training)
    return source
