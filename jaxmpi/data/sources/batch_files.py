"""NumPy batch files, as Theano-MPI has them: one u8 file a batch.

    DIR/train/00000.npy            u8[n, height, width, channels]; files may differ in n alone
    DIR/train_labels.npy           int[examples], in the order of the files' names
    DIR/train_mean.npy             f32[height, width, channels], for data.mean_image

Training takes whole files in a new order each epoch, and the examples of each in a new order (`sampler.FileSampler`).
Each is read once an epoch, in one go, or in spans if it is long: where a read takes long, one for each image would take
as many times longer as a file has images. If examples of all files are mixed, rows are read one by one.
"""

import bisect
import contextlib
import copy
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import whole_file, write_all
from jaxmpi.data.sampler import Sampler
from jaxmpi.data.sources.base import Source, data_root, open_table, pair, place_in_parts, split_name
from jaxmpi.data.sources.numpy_files import Expected, StoredArray, StoredRows, load_array, read_header
from jaxmpi.data.sources.open_files import LastUsed, OpenFiles
from jaxmpi.data.sources.packed import check_record

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

    def __init__(self, config: Data, root: str, split: str) -> None:
        super().__init__(config)
        folder = os.path.join(root, split)
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
        labels = f"{folder}_labels.npy"
        self.labels = load_labels(labels)
        if len(self.labels) != self.ends[-1]:
            raise UsageError(f"{labels}: got {len(self.labels)} labels for {self.ends[-1]} images")
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
        begin, end = self._begin(span), self.span_ends[span]
        part, row = place_in_parts(self.ends, begin)
        rows = self.read_rows(self.arrays[part]["image"], row, (end - begin,))
        rows.flags.writeable = False
        return rows

    def _begin(self, span: int) -> int:
        return self.span_ends[span - 1] if span else 0

    def read(self, part: int, row: int, index: int) -> Sequence[Any]:
        if self.spans is None:
            return super().read(part, row, index)
        span = bisect.bisect_right(self.span_ends, index)
        return self.spans[span][index - self._begin(span)].copy(), self.labels[index]


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


def load_labels(path: str) -> np.ndarray:
    """i32[examples] of a .npy file of whole numbers >= 0."""
    labels = load_array(path, LABELS)
    for place in np.flatnonzero((labels < 0) | (labels > np.iinfo(np.int32).max))[:1]:
        raise UsageError(f"{path}: got label {labels[place]} at {place}; expected 0 <= label < 2^31")
    return labels.astype(np.int32)


def batchfiles(config: Data, split: str) -> Source:
    """NumPy batch files in DIR/<split>/ and DIR/<split>_labels.npy; classes are counted, training's too."""
    root = data_root(config, LAYOUT)
    return open_table(config, split, lambda split: BatchFileSource(config, root, split_name(config, split)))


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
