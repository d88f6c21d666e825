"""NumPy batch files, as Theano-MPI has them: one u8 file a batch, labels and mean image in files of their own.

    DIR/train/00000.npy            u8[n, height, width, channels]; files may differ in n alone
    DIR/train_labels.npy           int[examples], in the order of the files' names
    DIR/train_mean.npy             f32[height, width, channels], for data.mean_image

Nothing is unpickled. Examples are read one by one, so that the order of training is that of any other source.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.config import UsageError, check

LAYOUT = "DIR/<split>/<any>.npy, u8[n, height, width, channels], and DIR/<split>_labels.npy, int[examples]"


class Header(NamedTuple):
    """What a .npy file says of itself."""

    shape: tuple[int, ...]
    offset: int  # bytes before the array


class BatchFileSource:
    """One split of batch files.

    Args:
        root: DIR.
        split: name of the folder.
        classes: 0 counts up to the largest label.

    Raises:
        UsageError: no file, a file or labels that are not as described, or as many labels as there are no examples.
    """

    def __init__(self, root: str, split: str, classes: int = 0) -> None:
        self.name, self.folder = "batchfiles", os.path.join(root, split)
        check(os.path.isdir(self.folder), f"batchfiles: no folder {self.folder}; expected {LAYOUT}")
        self.files = sorted(name for name in os.listdir(self.folder) if name.endswith(".npy"))
        check(bool(self.files), f"{self.folder}: found no .npy file; expected {LAYOUT}")
        headers = [header(os.path.join(self.folder, name)) for name in self.files]
        self.shape = headers[0].shape[1:]
        odd = [i for i, found in enumerate(headers) if found.shape[1:] != self.shape]
        check(not odd, f"{self._path(odd[0] if odd else 0)}: got images of another shape than {self.shape} before it")
        self.offsets = np.array([found.offset for found in headers], np.int64)
        self.ends = np.cumsum([found.shape[0] for found in headers])
        self.labels = load_labels(labels_path(root, split))
        check(
            len(self.labels) == self.ends[-1],
            f"{labels_path(root, split)}: got {len(self.labels)} labels for {self.ends[-1]} images",
        )
        self.classes = classes or int(self.labels.max(initial=-1)) + 1

    def _path(self, file: int) -> str:
        return os.path.join(self.folder, self.files[file])

    def _place(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self.ends, index, side="right"))
        return file, index - (int(self.ends[file - 1]) if file else 0)

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """SHA-256 of the files' names and lengths, the shape and the labels."""
        digest = hashlib.sha256("\0".join([*self.files, str(self.shape)]).encode())
        for part in (self.ends, self.labels):
            digest.update(part.astype(np.int64).tobytes())
        return digest.hexdigest()

    def where(self, index: int) -> str:
        """The file of example `index`, and its row there."""
        file, row = self._place(index)
        return f"{self._path(file)}[{row}]"

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        file, row = self._place(index)
        image = np.empty(self.shape, np.uint8)
        with open(self._path(file), "rb") as opened:
            opened.seek(int(self.offsets[file]) + row * image.size)
            got = opened.readinto(image.data)
        if got != image.size:
            raise OSError(f"{self._path(file)} ends {image.size - got} bytes before the end of row {row}")
        return image, self.labels[index]


def header(path: str) -> Header:
    """The header of a batch file.

    Raises:
        UsageError: it is no array of u8[n, height, width, channels] in C order, or cut off.
    """
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
            offset, size = file.tell(), os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}; expected a .npy file") from error
    check(
        dtype == np.uint8 and len(shape) == 4 and not is_fortran,
        f"{path}: got {dtype}{list(shape)}{' in Fortran order' * is_fortran}; expected u8[n, height, width, channels] "
        "in C order, as numpy.ascontiguousarray gives it",
    )
    missing = offset + int(np.prod(shape, dtype=np.int64)) - size
    check(missing <= 0, f"{path}: {missing} bytes are missing at its end; write it again")
    return Header(shape, offset)


def labels_path(root: str, split: str) -> str:
    """Where the labels of a split are."""
    return os.path.join(root, f"{split}_labels.npy")


def load_labels(path: str) -> np.ndarray:
    """i32[examples] of a .npy file.

    Raises:
        UsageError: not a file of whole numbers >= 0.
    """
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}; expected a .npy file of labels") from error
    is_right = isinstance(found, np.ndarray) and found.dtype.kind in "iu" and found.ndim == 1
    got = f"{found.dtype}{list(found.shape)}" if isinstance(found, np.ndarray) else "an archive"
    check(is_right, f"{path}: got {got}; expected whole numbers, one an image")
    for place in np.flatnonzero((found < 0) | (found > np.iinfo(np.int32).max))[:1]:
        raise UsageError(f"{path}: got label {found[place]} at {place}; expected 0 <= label < 2^31")
    return found.astype(np.int32)


def write_batch_files(source: Any, root: str | Path, split: str, rows: int = 128) -> None:
    """Any source of u8 images of one size as batch files of `rows` images, with labels and mean image.

    Files appear whole, under their names, or not at all; the labels come last.

    Raises:
        UsageError: an image that is not u8[height, width, channels], or not of the first one's shape; or a file cannot
            be written, such as on a full disk: which.
    """
    folder = Path(root) / split
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    found, total = np.zeros(len(source), np.int32), None
    for number, batch in enumerate(_batches(source, rows, found)):
        sums = batch.sum(0, dtype=np.float64)
        total = sums if total is None else total + sums
        _save(folder / f"{number:05}.npy", batch)
    check(total is not None, f"{source.name}: got no examples to write")
    assert total is not None
    _save(Path(root) / f"{split}_mean.npy", (total / len(source)).astype(np.float32))
    _save(Path(labels_path(str(root), split)), found)


def _batches(source: Any, rows: int, found: np.ndarray) -> Iterator[np.ndarray]:
    shape = None
    for begin in range(0, len(source), rows):
        images = []
        for i in range(begin, min(begin + rows, len(source))):
            image, found[i] = source[i]
            shape = shape or image.shape
            check(
                image.dtype == np.uint8 and image.ndim == 3 and image.shape == shape,
                f"{source.name}[{i}]: got {image.dtype}{list(image.shape)}; expected u8[height, width, channels] as "
                "before it",
            )
            images.append(image)
        yield np.stack(images)


def _save(path: Path, array: np.ndarray) -> None:
    array, aside = np.ascontiguousarray(array), path.with_suffix(".tmp")  # stacked images keep their own order
    try:
        with _writing(path), aside.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            file.write(array.data)  # NumPy's own writing does not say why it failed
            file.flush()
            os.fsync(file.fileno())
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
