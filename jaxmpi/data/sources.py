"""Where examples come from: length and random access by index, one row in a table per kind.

A new source is one class and one row in `SOURCES`.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxmpi.config import Data, UsageError, check, lookup
from jaxmpi.data import batchfiles as batches
from jaxmpi.data.batchfiles import BatchFileSource
from jaxmpi.data.images import MODES, CorruptExample, corrupt_if_it_fails, decoded, resized
from jaxmpi.data.packed import MAX_RECORD_BYTES, Packed
from jaxmpi.data.sampler import random_bits
from jaxmpi.data.text import stdlib, text

SUFFIXES = (".jpg", ".jpeg", ".png")
SYNTHETIC_CLASSES = 1000  # as ImageNet, whose models this stands in for
SYNTHETIC_PX = 224


@runtime_checkable
class Source(Protocol):
    """Examples by index. Read from several threads at once.

    `source[i]` is (image, label): u8[height, width, channels], or any array that its owner has
    prepared, such as i32[window] tokens, and an int in [0, classes), or an array of such. A source may
    also have

    - `where(i) -> str`: the name of example i in errors.
    - `digest() -> str`: the same on all ranks where their data are.
    - `encoded(i) -> (bytes, label)`: example i as a JPEG, PNG or what else Pillow knows, any object with a buffer.
      Loaders then call it in place of `source[i]` and decode no more than a crop needs. May be None. What it raises
      ends the run; `CorruptExample` is skipped where `data.on_error` says so.
    - `bytes_each: int`: of text, the bytes that an example predicts.
    - `file_ends: tuple[int, ...]`: of each file of several examples, the index behind its last one: training then takes
      whole files (`data.shuffle_by`). Of `labels: int[n]`, if it has them, it is seen whether files are mixed.
    - `in_process: bool`: True where its contents change while it is read, so that loaders must be threads.
    - `awaited_s(i) -> float`: until when a loader may have waited for example i to come here, by `time.monotonic`: it
      is not stalled by that.

    Loaders that are processes get a source by pickle, once: it must open its files again there, and its NumPy arrays
    come out of memory that all loaders of a worker share, read-only.
    """

    name: str
    classes: int  # 0 where it is not known

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[np.ndarray, Any]: ...


def open_source(config: Data, split: str) -> Source:
    """The source that `data.source` names.

    Args:
        config: of the run.
        split: "train" or "validation"; `data.train_split` and so on say what it is called there.

    Raises:
        UsageError: no such source, or its data are missing: the error says what is expected where.
    """
    assert split in ("train", "validation"), split
    return lookup(SOURCES, config.source, "data source")(config, split)


def data_dir(config: Data) -> str:
    """`data.dir`, or the environment's JAXMPI_DATA; empty where neither is set."""
    return config.dir or os.environ.get("JAXMPI_DATA", "")


def where(source: Source, index: int) -> str:
    """What errors call example `index`: its file where it has one."""
    named = getattr(source, "where", None)
    return named(index) if named else f"{source.name}[{index}]"


def _split_name(config: Data, split: str) -> str:
    return config.train_split if split == "train" else config.validation_split


class ArraySource:
    """Images and labels that are in memory.

    Args:
        images: u8[n, height, width, channels] or [n, height, width], or prepared arrays (such as
            f32[n, ...]), which are handed on as they are.
        labels: int[n], in [0, classes).
        classes: 0 counts up to the largest label; the model may have more.
        name: in errors.

    Raises:
        UsageError: the lengths differ.
    """

    def __init__(self, images: Any, labels: Any, classes: int = 0, name: str = "array") -> None:
        check(len(images) == len(labels), f"{name}: got {len(images)} images, {len(labels)} labels")
        self.images, self.labels, self.name = images, labels, name
        self.classes, self.is_counted = classes or int(np.max(labels, initial=-1)) + 1, not classes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        return np.asarray(self.images[index]), self.labels[index]

    def digest(self) -> str:
        """Of all labels, and of 64 images spread over the whole: hashing all of a big array would take minutes."""
        digest = hashlib.sha256(np.asarray(self.labels, np.int64).tobytes())
        for i in np.linspace(0, len(self) - 1, min(len(self), 64)).astype(int):
            image = np.ascontiguousarray(self.images[i])
            digest.update(f"{image.dtype}{image.shape}".encode() + image.tobytes())
        return digest.hexdigest()


class PythonSource:
    """What the user gave as `data.train` or `data.validation`: (image, label) pairs or dicts."""

    def __init__(self, examples: Any, name: str) -> None:
        self.examples, self.name = examples, name
        self.classes = int(getattr(examples, "classes", 0))

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        example = self.examples[index]
        if isinstance(example, dict):
            example = example["image"], example["label"]
        image, label = example
        return np.asarray(image), label


def array(config: Data, split: str) -> Source:
    """`data.train` or `data.validation`, objects that an experiment file sets."""
    examples = config.train if split == "train" else config.validation
    check(
        hasattr(examples, "__len__") and hasattr(examples, "__getitem__"),
        f"data.{split}: got {type(examples).__name__}; expected an object with __len__ and "
        "__getitem__(i) -> (image, label), such as jaxmpi.data.ArraySource(images, labels)",
    )
    known = isinstance(examples, Source)
    return examples if known else PythonSource(examples, f"data.{split}")


def digits(config: Data, split: str) -> Source:
    """Handwritten digits that come with scikit-learn: 1,797 grey images of 8 x 8 px, 10 classes.

    Held out for validation, the same for ever: every fifth example, from the first, of all
    examples sorted by label (file order within a label). That is 360, and 20 % of each digit.
    Enlarged to `data.resize` once, here. Source: Alpaydin and Kaynak 1998, UCI repository.
    """
    rows = _digits_rows()
    held_out = np.zeros(len(rows), bool)
    held_out[np.argsort(rows[:, -1], kind="stable")[::5]] = True
    rows = rows[held_out if split == "validation" else ~held_out]
    grey = ((rows[:, :-1].astype(np.uint16) * 255 + 8) // 16).astype(np.uint8)  # 0..16 -> 0..255
    images = grey.reshape(-1, 8, 8, 1)
    if config.resize:
        images = np.stack([resized(image, config.resize) for image in images])
    return ArraySource(images, rows[:, -1].astype(np.int32), classes=10, name="digits")


def _digits_rows() -> np.ndarray:
    """u8[1797, 65]: 64 pixels in 0..16 and the label."""
    # Importing scikit-learn takes seconds, and every worker of a host would pay them at once.
    package = importlib.util.find_spec("sklearn")
    check(package is not None and package.origin is not None, "digits: scikit-learn is missing")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    check(path.is_file(), f"digits: {path} is missing; reinstall scikit-learn")
    return np.loadtxt(path, delimiter=",", dtype=np.uint8)


class SyntheticSource:
    """Made-up images for benchmarks: a coarse pattern per class under noise, so that it is learnable.

    Example i is a function of (split, i) alone.
    """

    def __init__(self, examples: int, px: int, channels: int, split: str) -> None:
        self.name, self.classes = "synthetic", SYNTHETIC_CLASSES
        self.examples, self.shape = examples, (px, px, channels)
        self.seed = 1 if split == "train" else 2
        self.cell = np.arange(px) * 7 // px  # pixel -> cell of a 7 x 7 pattern

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        label = index % self.classes
        channels = self.shape[-1]
        pattern = _bytes((7, 7, channels), seed=0, stream=label)[self.cell[:, None], self.cell]
        noise = _bytes(self.shape, self.seed, stream=index)
        return (pattern >> 1) + (noise >> 1), label


def _bytes(shape: tuple[int, ...], seed: int, stream: int) -> np.ndarray:
    n = int(np.prod(shape))
    bits = random_bits(-(-n // 8), seed, 0, stream=2, index=stream)
    return bits.astype("<u8", copy=False).view(np.uint8)[:n].reshape(shape)


def synthetic(config: Data, split: str) -> Source:
    """`data.synthetic_examples` made-up images in 1000 classes, an eighth of that for validation."""
    examples = config.synthetic_examples
    examples = examples if split == "train" else max(1, examples // 8)
    px = config.resize or config.crop or SYNTHETIC_PX
    return SyntheticSource(examples, px, config.channels, split)


class FolderSource:
    """Image files in one folder per class.

    Args:
        root: holds a folder per class; a class none of whose files is here may be absent.
        classes: names of the classes; the label is the position.
        channels: of the images, 1, 3 or 4.
        resize: px, shorter side; 0 keeps the size.

    Raises:
        UsageError: no images, or a folder that is no class.
    """

    def __init__(self, root: str, classes: Sequence[str], channels: int, resize: int) -> None:
        self.name, self.root, self.names = "imagefolder", root, tuple(classes)
        self.classes, self.channels, self.resize = len(classes), channels, resize
        extra = sorted(set(_folders(root)) - set(classes))
        check(not extra, f"{root}: class folders {extra[:5]} are not among the training classes")
        # A million Python strings take 100 MB a worker; one blob of names and offsets, a fifth.
        files = [_images(os.path.join(root, name)) for name in classes]
        self.labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(f) for f in files])
        names = [os.fsencode(name) for per_class in files for name in per_class]
        self.ends = np.cumsum([0, *map(len, names)], dtype=np.int64)
        self.blob = np.frombuffer(b"".join(names), np.uint8)
        check(
            len(names) > 0,
            f"{root}: found no {', '.join(SUFFIXES)} file; expected {_LAYOUT}",
        )

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """SHA-256 of the classes' and files' names and the labels, which stands for the order of the examples."""
        digest = hashlib.sha256("\0".join(self.names).encode(errors="surrogateescape"))
        for part in (self.blob.tobytes(), self.ends.tobytes(), self.labels.tobytes()):
            digest.update(part)
        return digest.hexdigest()

    def where(self, index: int) -> str:
        """The path of file `index`."""
        name = os.fsdecode(self.blob[self.ends[index] : self.ends[index + 1]].tobytes())
        return os.path.join(self.root, self.names[self.labels[index]], name)

    def encoded(self, index: int) -> tuple[bytes, int]:
        """The bytes of file `index`, and its label."""
        # A file that cannot be read is no corrupt image: never skipped. All of it is read at once, so without a buffer.
        with open(self.where(index), "rb", buffering=0) as file:
            blob = file.read() if (size := os.fstat(file.fileno()).st_size) <= MAX_RECORD_BYTES else None
        if blob is None:  # a file with holes may be larger than its disk
            raise CorruptExample(self.where(index), index, f"got {size} bytes; expected at most {MAX_RECORD_BYTES}")
        return blob, int(self.labels[index])

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        blob, label = self.encoded(index)
        return _decoded(blob, self.where(index), index, self.channels, self.resize), label


_LAYOUT = "DIR/<split>/<class>/<image>.jpg, .jpeg or .png"


def _folders(root: str) -> list[str]:
    with _listing(root), os.scandir(root) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and _is(e.is_dir))


def _is(kind: Callable[[], bool]) -> bool:
    """What an entry of a folder is; nothing where its link leads in a circle."""
    try:
        return kind()
    except OSError:
        return False


@contextlib.contextmanager
def _listing(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"imagefolder: {folder} cannot be listed: {error.strerror}; expected {_LAYOUT}") from error


def _images(folder: str) -> list[str]:
    def names() -> Iterator[str]:
        with _listing(folder), os.scandir(folder) as entries:
            for entry in entries:
                is_image = entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".")
                if is_image and _is(entry.is_file):
                    yield entry.name

    return sorted(names()) if os.path.isdir(folder) else []


def _decoded(blob: bytes, where: str, index: int, channels: int, resize: int) -> np.ndarray:
    with corrupt_if_it_fails(blob, where, index):
        return decoded(blob, channels, resize)


def imagefolder(config: Data, split: str) -> Source:
    """JPEG and PNG files in DIR/<split>/<class>/; classes are the training folders, sorted by name."""
    _check_channels(config)
    base = data_dir(config)
    check(bool(base), f"imagefolder: set data.dir or JAXMPI_DATA to a folder DIR with {_LAYOUT}")
    root = os.path.join(base, _split_name(config, split))
    there = ", ".join(_folders(base)[:8]) or "none" if os.path.isdir(base) else "it does not exist"
    check(
        os.path.isdir(root),
        f"imagefolder: no folder {root}; expected {_LAYOUT}. "
        f"Folders in {base}: {there}; name the right one with --data.{split}-split",
    )
    train = os.path.join(base, config.train_split)
    classes = _folders(train if os.path.isdir(train) else root)
    return FolderSource(root, classes, config.channels, config.resize)


def _check_channels(config: Data) -> None:
    check(
        config.channels in MODES,
        f"data.channels: got {config.channels}; {config.source} makes {', '.join(map(str, MODES))}",
    )


def batchfiles(config: Data, split: str) -> Source:
    """NumPy batch files in DIR/<split>/ and DIR/<split>_labels.npy; classes are counted, training's too."""
    base = data_dir(config)
    check(bool(base), f"batchfiles: set data.dir or JAXMPI_DATA to a folder DIR with {batches.LAYOUT}")
    train = batches.labels_path(base, config.train_split)
    source = BatchFileSource(base, _split_name(config, split))
    in_training = int(batches.load_labels(train).max(initial=-1)) + 1 if os.path.isfile(train) else 0
    source.classes = max(source.classes, in_training)
    return source


class PackedSource(Packed):
    """One split in the packed format, its images decoded.

    Args:
        folder: of the split.
        channels: of the images, 1, 3 or 4.
        resize: px, shorter side; 0 keeps the size.
    """

    def __init__(self, folder: str, channels: int, resize: int) -> None:
        super().__init__(folder)
        self.channels, self.resize = channels, resize

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        blob, label = self.encoded(index)
        return _decoded(blob, self.where(index), index, self.channels, self.resize), label


def packed(config: Data, split: str) -> Source:
    """What `jaxmpi data pack` has made, in DIR/<split>/."""
    _check_channels(config)
    base = data_dir(config)
    check(bool(base), "packed: set data.dir or JAXMPI_DATA to a folder that jaxmpi data pack has made")
    return PackedSource(os.path.join(base, _split_name(config, split)), config.channels, config.resize)


class TfdsSource:
    """One split of a prepared TensorFlow Datasets data set; TensorFlow itself is not needed.

    Args:
        builder: of the data set; its features hold `image` and `label`.
        split: a TFDS split, such as train or train[:80%].
        channels: of the images, 1, 3 or 4.
        resize: px, shorter side; 0 keeps the size.
    """

    def __init__(self, builder: Any, split: str, channels: int, resize: int) -> None:
        import tensorflow_datasets as tfds

        features = builder.info.features
        missing = {"image", "label"} - set(features)
        check(not missing, f"tfds {builder.name}: no feature {missing}; there are: {list(features)}")
        # Compressed bytes come out and are decoded here: small JPEG scales, and errors with a name.
        compressed = isinstance(features["image"], tfds.features.Image)
        decoders = {"image": tfds.decode.SkipDecoding()} if compressed else None
        self.records = builder.as_data_source(split=split, decoders=decoders)
        self.name, self.split, self.channels, self.resize = builder.name, split, channels, resize
        self.full_name = builder.info.full_name
        self.encoded = self._encoded if compressed else None
        self.folder = str(builder.data_path)
        self.classes = int(getattr(features["label"], "num_classes", None) or 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _tfds_in_folder, (self.folder, self.split, self.channels, self.resize, _own_modules())

    def __len__(self) -> int:
        return len(self.records)

    def digest(self) -> str:
        """Name, version and split: TFDS keeps what is prepared under one name the same."""
        return f"{self.full_name}[{self.split}]"

    def where(self, index: int) -> str:
        """Data set, split and record."""
        return f"tfds {self.name}[{self.split}][{index}]"

    def _encoded(self, index: int) -> tuple[Any, Any]:
        """The image of record `index`, compressed where it is stored so, and its label."""
        try:
            record = self.records[index]
        except RuntimeError as error:  # all that array_record says of a file that is gone, damaged or cannot be read
            raise OSError(str(error)) from error
        if record["image"] is None:  # and of one that ends too early it says nothing
            raise OSError("its file became shorter")
        return record["image"], record["label"]

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        image, label = self._encoded(index)
        if isinstance(image, bytes):
            image = _decoded(image, self.where(index), index, self.channels, self.resize)
        return image, label


def _tfds_in_folder(folder: str, split: str, channels: int, resize: int, modules: Sequence[str]) -> TfdsSource:
    """In a loader process, which imports what the trainer has."""
    from tensorflow_datasets.core import read_only_builder

    for module in modules:
        importlib.import_module(module)
    with _known_features():
        builder = read_only_builder.builder_from_directory(folder)
    return TfdsSource(builder, split, channels, resize)


def _own_modules() -> list[str]:
    """Those with features of the user's own that have been imported."""
    from tensorflow_datasets.core.features.feature import FeatureConnector

    modules = {feature.__module__ for feature in FeatureConnector._registered_features.values()}
    return sorted(module for module in modules if not module.startswith(_TFDS))


@contextlib.contextmanager
def _known_features() -> Iterator[None]:
    """Keep TFDS from importing what features.json names, which may be any module that Python finds."""
    from tensorflow_datasets.core.features.feature import FeatureConnector

    find, whole = FeatureConnector.cls_from_name, vars(FeatureConnector)["cls_from_name"]

    def known(name: Any) -> Any:
        is_known = isinstance(name, str) and (name.startswith(_TFDS) or name in FeatureConnector._registered_features)
        check(
            is_known,
            f"tfds: features.json: got {name!r:.80}; expected features of TFDS itself: others are code; if you trust "
            "them, import their module in the experiment file",
        )
        return find(name)

    setattr(FeatureConnector, "cls_from_name", staticmethod(known))  # noqa: B010 - a method there
    try:
        yield
    finally:
        setattr(FeatureConnector, "cls_from_name", whole)  # noqa: B010 - a method there


_TFDS = "tensorflow_datasets."
_TFDS_PREPARE = (
    'python -c "import tensorflow_datasets as tfds; '
    "tfds.builder('{name}'{where}, file_format='array_record').download_and_prepare()\""
)


def tfds(config: Data, split: str) -> Source:
    """The data set `data.name` as TFDS prepared it in `data.dir`, or in its own default folder."""
    _check_channels(config)
    check(bool(config.name), "tfds: set data.name to a data set, such as imagenet2012 or mnist:3.0.1")
    folder, name = data_dir(config), _split_name(config, split)
    try:
        from tensorflow_datasets.core import read_only_builder

        # From files only: the trainer neither downloads nor runs the code of a data set.
        with _known_features():
            builder = read_only_builder.builder_from_files(config.name, data_dir=folder or None)
        return TfdsSource(builder, name, config.channels, config.resize)
    except ImportError as error:  # of tensorflow-datasets or array-record
        raise UsageError(f"tfds: {error}; install it with pip install 'jaxmpi[tfds]'") from error
    except (LookupError, NotImplementedError, OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(_tfds_error(config.name, folder, name, error)) from error


def _tfds_error(name: str, folder: str, split: str, error: Exception) -> str:
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    if first_line.startswith("Unknown split"):
        return f"tfds {name}: {first_line}"
    place = f", data_dir={folder!r}" if folder else ""
    return (
        f"tfds {name}[{split}]: not prepared for random access in {folder or 'the default folder'} "
        f"({first_line}); preparing needs importlib_resources, and TensorFlow where images are made from arrays: "
        f"pip install importlib_resources tensorflow; "
        f"then run: {_TFDS_PREPARE.format(name=name, where=place)}"
    )


SOURCES: dict[str, Callable[[Data, str], Source]] = {
    "digits": digits,
    "synthetic": synthetic,
    "array": array,
    "imagefolder": imagefolder,
    "batchfiles": batchfiles,
    "tfds": tfds,
    "text": text,
    "stdlib": stdlib,
    "packed": packed,
}
