"""Source: a folder of images, one folder a class."""

import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.sources.base import Source, TableSource, data_root, sha256, split_name
from jaxmpi.data.sources.packed import MAX_RECORD_BYTES

SUFFIXES = (".jpg", ".jpeg", ".png")
LAYOUT = "DIR/<split>/<class>/<image>.jpg, .jpeg or .png"


class FolderSource(TableSource):
    """Image files in one folder per class below `root`; a class none of whose files is here may be absent.

    The label is the class's position in `classes`. `notes` say what was left out. Refused: no images, or a folder that
    is no class.
    """

    is_compressed = is_labelled = True
    labels: np.ndarray

    def __init__(self, config: Data, root: str, classes: Sequence[str]) -> None:
        super().__init__(config)
        self.root, self.names, self.classes = root, tuple(classes), len(classes)
        extra = sorted(set(_list_folders(root)) - set(classes))
        if extra:
            raise UsageError(f"{root}: class folders {extra[:5]} are not among the training classes")
        files, left_out = [], []
        for name in classes:
            images, others = _list_images(os.path.join(root, name))
            files.append(images)
            left_out += others
        kind, first = f"not {', '.join(SUFFIXES)} files", min(left_out, default="")
        self.notes = (f"{root}: left out {kind}: {len(left_out)}, such as {first}",) if left_out else ()
        self.set_parts(classes, [len(images) for images in files])
        self.labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(images) for images in files])
        # A million Python strings take 100 MB a worker; one blob of names and offsets, a fifth.
        names = [os.fsencode(name) for images in files for name in images]
        self.offsets = np.cumsum([0, *map(len, names)], dtype=np.int64)
        self.blob = np.frombuffer(b"".join(names), np.uint8)
        if not names:
            raise UsageError(f"{root}: found no {', '.join(SUFFIXES)} file; expected {LAYOUT}")

    def digest(self) -> str:
        return sha256(self.names, (self.blob, self.offsets, self.labels))

    def paths(self) -> Iterable[str]:
        return map(self.where, range(len(self)))

    def where(self, index: int) -> str:
        name = os.fsdecode(self.blob[self.offsets[index] : self.offsets[index + 1]].tobytes())
        return os.path.join(self.root, self.names[self.labels[index]], name)

    def cells(self, index: int) -> tuple[bytes, int]:
        # A file that cannot be read is no corrupt image: never skipped. All of it is read at once, so without a buffer.
        with open(self.where(index), "rb", buffering=0) as file:
            blob = file.read() if (size := os.fstat(file.fileno()).st_size) <= MAX_RECORD_BYTES else None
        if blob is None:  # a file with holes may be larger than its disk
            raise CorruptExample(self.where(index), index, f"got {size} bytes; expected at most {MAX_RECORD_BYTES}")
        return blob, int(self.labels[index])


def imagefolder(config: Data, split: str) -> Source:
    """JPEG and PNG files in DIR/<split>/<class>/.

    Classes are the class folders of the training split, sorted by name; those of this split if there is no other. With
    `data.holdout` folders of classes may lie right below DIR. A validation split without folders, and without a
    training split beside it, has images without labels, to predict.
    """
    base = data_root(config, LAYOUT)
    root, train = os.path.join(base, split_name(config, split)), os.path.join(base, config.train_split)
    if config.holdout and not os.path.isdir(train) and os.path.isdir(base):
        root = train = base  # classes right below it
    if not os.path.isdir(base):
        raise UsageError(f"imagefolder: no folder {base}; expected {LAYOUT} with --data.dir DIR")
    if not os.path.isdir(root):
        folders = ", ".join(_list_folders(base)[:8])
        above, name = os.path.split(os.path.abspath(base))
        is_alone = split == "validation" and not os.path.isdir(train)
        whole = f", or for all of them --data.dir {above} --data.validation-split {name}" * is_alone
        raise UsageError(
            f"imagefolder: no folder {root}; expected {LAYOUT}. Folders in {base}: {folders or 'none'}. If these are "
            f"classes, give --data.holdout 0.2{whole}; if one is the split, name it with --data.{split}-split"
        )
    classes = _list_folders(train if os.path.isdir(train) else root)
    if classes or split == "train":
        return FolderSource(config, root, classes)
    images = FolderSource(config, root, [""])
    images.is_labelled, images.classes = False, 0  # any number
    return images


def _list_folders(root: str) -> list[str]:
    return [entry.name for entry in _scan(root) if _is(entry.is_dir)]


def _list_images(folder: str) -> tuple[list[str], list[str]]:
    """Names of the images in a folder, sorted, and paths of all else that is not hidden."""
    images, others = [], []
    for entry in _scan(folder) if os.path.isdir(folder) else ():
        if entry.name.lower().endswith(SUFFIXES) and _is(entry.is_file):
            images.append(entry.name)
        else:
            others.append(entry.path)
    return images, others


def _scan(folder: str) -> list[os.DirEntry[str]]:
    """Entries of a folder by name, hidden ones left out."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise UsageError(f"imagefolder: {folder} cannot be listed: {error.strerror}; expected {LAYOUT}") from error


def _is(kind: Callable[[], bool]) -> bool:
    try:
        return kind()
    except OSError:  # as for a circular link
        return False
