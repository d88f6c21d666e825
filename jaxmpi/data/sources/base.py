"""What a source of examples is, and what sources of files share: names of splits, files and columns, and digests."""

import contextlib
import hashlib
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxmpi.config.data import Data, data_dir
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import open_plain
from jaxmpi.core.host_arrays import check_unmasked
from jaxmpi.data.decode import corrupt_if_it_fails, decoded

DEFAULT = ("image", "label")  # columns


@runtime_checkable
class Source(Protocol):
    """Examples by index, read from several threads at once.

    `source[i]` is (image, label), or a dict of arrays with other names for a task of the user's own. An image is
    u8[height, width, channels], or any array that its owner has prepared, such as i32[window] tokens. A label is an int
    in [0, classes), or an array of such. A source may also have

    - `where(i) -> str`: the name of example i in errors.
    - `notes: tuple[str, ...]`: lines for the user at the start.
    - `digest() -> str`: the same on all ranks if their data are.
    - `paths() -> Iterable[str]`: its files; `jaxmpi data pack` sees by their sizes and times whether they have changed.
    - `encoded(i) -> (bytes, label)`: example i as a JPEG, PNG or what else Pillow knows, any object with a buffer.
      Loaders then call it in place of `source[i]` and decode no more than a crop needs. May be None. Its errors
      end the run; `CorruptExample` is skipped if `data.on_error` says so.
    - `bytes_each: float`: of text, the mean bytes that an example predicts, and `tokens_each: int`, its tokens.
    - `file_ends: tuple[int, ...]`: of each file of several examples, the index behind its last one: training then takes
      whole files (`data.shuffle_by`). Its `labels: int[n]`, if it has them, show whether files are mixed.
    - `whole_files() -> Source`: the same examples, each file read in one go, or in few spans that end at `span_ends`:
      training then mixes the examples inside each, too.
    - `in_process: bool`: True if its contents change while it is read, so that loaders must be threads.
    - `endless: bool`: True if examples change by epoch: example i of epoch e is asked for as number e len + i.
    - `awaited_s(i) -> float`: until when a loader may have waited for example i to come here, by `time.monotonic`: it
      is not stalled by that.

    Loaders that are processes get a source by pickle, once. It must open its files again there. Its NumPy arrays come
    out of memory that all loaders of a worker share, read-only.
    """

    name: str
    classes: int  # 0 if it is not known

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def where(source: Source, index: int) -> str:
    """Name of example `index` in errors: its file, if it has one."""
    named = getattr(source, "where", None)
    return named(index) if named else f"{source.name}[{index}]"


def pair(source: Source, index: int) -> tuple[np.ndarray, Any]:
    """(image, label) of an example."""
    example, name = source[index], where(source, index)
    if isinstance(example, dict):
        raise UsageError(f"{name}: got the fields {', '.join(example)}; expected an image and a label")
    image, label = example
    check_unmasked(f"{name}: label", label)
    return to_array(image, name), label


def to_array(value: Any, where: str) -> np.ndarray:
    """`np.asarray`, but a masked array is refused."""
    check_unmasked(where, value)
    return np.asarray(value)


def place_in_parts(ends: np.ndarray, index: int) -> tuple[int, int]:
    """The part that has example `index`, and its place there; `ends`: of each part, the index behind its last."""
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


def sha256(words: Iterable[str], parts: Iterable[Any] = ()) -> str:
    """Digest of words, file names among them, and of parts that have a buffer."""
    digest = hashlib.sha256("\0".join(words).encode(errors="surrogateescape"))
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


class TableSource:
    """Rows of stored columns, in parts; a class of it reads them: numbers, arrays, or the bytes of compressed images.

    Two `columns` are an input and its label (`is_pair`). Any other number makes a dict, for a task of the user's own.
    """

    is_compressed = False  # inputs are compressed images
    columns: tuple[str, ...]
    labels: np.ndarray | None = None  # int[n], of an input and its label if it is a whole number
    file_ends: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # of the classes
    classes, is_counted = 0, False
    parts: tuple[str, ...] = ()  # names of files, or of what is in them
    files: Sequence[str] = ()  # paths
    ends = np.zeros(0, np.int64)  # of each part, the index behind its last row

    def __init__(self, config: Data, columns: Sequence[str] = DEFAULT) -> None:
        self.name, self.columns, self.is_pair = config.source, tuple(columns), len(columns) == 2
        self.channels, self.resize = config.channels, config.resize

    def set_parts(self, names: Iterable[str], rows: Sequence[int]) -> None:
        """Say where rows are, and how many."""
        self.parts, self.ends = tuple(names), np.cumsum(rows, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def where(self, index: int) -> str:
        """The file of row `index`, and its place there."""
        part, row = place_in_parts(self.ends, index)
        return f"{self.parts[part]}[{row}]"

    def paths(self) -> Iterable[str]:
        """The files that are read."""
        return self.files

    def digest(self) -> str:
        """The same for files of the same names, lengths and labels."""
        labels = [] if self.labels is None else [self.labels]
        return sha256([*map(os.path.basename, self.parts), *self.columns], [self.ends, *labels])

    @property
    def encoded(self) -> Any:
        """(bytes, label) by index if inputs are compressed images, else None."""
        return self.cells if self.is_compressed and self.is_pair else None

    def cells(self, index: int) -> Sequence[Any]:
        """Cells of row `index`, in the order of `columns`."""
        return self.read(*place_in_parts(self.ends, index), index)

    def read(self, part: int, row: int, index: int) -> Sequence[Any]:
        """Cells of a row of a part."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        values = list(self.cells(index))
        for place, cell in enumerate(values):
            if isinstance(cell, bytes | memoryview):
                with corrupt_if_it_fails(cell, self.where(index), index):
                    values[place] = decoded(cell, self.channels, self.resize)
        return tuple(values) if self.is_pair else dict(zip(self.columns, values, strict=True))


def open_table(open_split: Callable[[Data, str], Any], config: Data, split: str) -> Any:
    """The table of a split; classes that it does not name are counted up to the largest label of it and of training."""
    source = open_split(config, split)
    if source.classes or source.labels is None or not source.is_pair:
        return source
    labels, name = [source.labels], config.train_split
    files = os.listdir(data_dir(config)) if split != "train" else []
    if any(file == name or file.startswith((f"{name}-", f"{name}.")) for file in files):
        labels.append(open_split(config, "train").labels)
    source.classes, source.is_counted = (
        max(int(column.max(initial=-1)) + 1 for column in labels if column is not None),
        True,
    )
    return source


def choose_columns(config: Data, fields: Iterable[str], path: str) -> tuple[str, ...]:
    """`data.columns`, or image and label; raise `UsageError` if one of them is not there exactly once."""
    wanted, fields = config.columns or DEFAULT, sorted(fields)
    odd = [name for name in wanted if fields.count(name) != 1]
    if odd:
        likely = sorted(fields, key=lambda name: name in ("label", "labels", "target", "y"))  # the label comes last
        raise UsageError(
            f"{path}: expected column {', '.join(odd)} once; there are {', '.join(fields) or 'none'}: choose "
            f"{'it' if len(wanted) == 1 else 'input and label, in this order,'} with --data.columns, such as "
            f"--data.columns {' '.join((likely * 2)[: min(len(wanted), 2)])}"
        )
    return wanted


# ---------------------------------------------------------------- packages, and files of a split


def import_package(purpose: str, extra: str, *modules: str) -> Any:
    """The package of these modules, which are imported; `purpose` needs it, and `jaxmpi[extra]` installs it."""
    try:
        package, *_ = [importlib.import_module(module) for module in modules]
        return package
    except ImportError as error:
        raise UsageError(f"{purpose}: {error}; install it with {installing(f'jaxmpi[{extra}]')}") from error


@contextlib.contextmanager
def refusing(path: str, expected: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn `OSError`, and what else a library raises of a file that it does not take, into a `UsageError`."""
    try:
        yield
    except (OSError, *errors) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path}: {error}; expected {expected}: it is damaged, or of another kind") from error


def split_name(config: Data, split: str) -> str:
    """What a split is called in the source."""
    return config.train_split if split == "train" else config.validation_split


HOLD_OUT = "--data.holdout 0.1 for a share of the training examples"


def name_split(split: str) -> str:
    """The way out if a split is not there."""
    return f"name the split with --data.{split}-split" + (f", or {HOLD_OUT}" if split == "validation" else "")


def data_root(config: Data, layout: str) -> str:
    """`data.dir`, or JAXMPI_DATA; refuse neither."""
    root = data_dir(config)
    if not root:
        raise UsageError(f"{config.source}: set data.dir or JAXMPI_DATA to a folder DIR with {layout}")
    return root


def split_files(config: Data, split: str, suffix: str) -> list[str]:
    """Files of a split, by name: in DIR/<split>/, or DIR/<split>.<suffix> and DIR/<split>-<any>.<suffix>; not both."""
    name = split_name(config, split)
    layout = f"DIR/{name}/<any>{suffix}, DIR/{name}{suffix} or DIR/{name}-<any>{suffix}"
    base = data_root(config, layout)
    inner = os.path.join(base, name)
    files: list[str] = []
    for folder, starts in ((inner, ("",)), (base, (f"{name}-", f"{name}{suffix}"))):
        try:
            names = sorted(os.listdir(folder)) if folder == base or os.path.isdir(folder) else []
        except OSError as error:
            expected = f"expected {layout} with --data.dir DIR"
            raise UsageError(f"{folder} cannot be listed: {error.strerror}; {expected}") from error
        names = [file for file in names if file.endswith(suffix) and file.startswith(starts) and file[0] != "."]
        if files and names:
            raise UsageError(f"got {files[0]} and {os.path.join(folder, names[0])}; expected one of {layout}, not both")
        files += [os.path.join(folder, file) for file in names]
    if not files:
        raise UsageError(
            f"{config.source}: found no {suffix} file for {split} in {base}; expected {layout}; {name_split(split)}"
        )
    check_plain_files(files, layout)
    check_complete(files)
    return files


def check_complete(files: Sequence[str]) -> None:
    """Refuse a set of files named `<any>-00001-of-00003<any>` of which one is missing, as after a broken download."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if found := re.search(r"^(.*)-(\d+)-of-(\d+)\b", file):
            numbers.setdefault((found[1], int(found[3])), set()).add(int(found[2]))
    for (name, count), there in numbers.items():
        first = 1 if count in there else 0
        if absent := sorted(set(range(first, first + count)) - there):
            raise UsageError(f"{name}-*-of-{count}: got {len(there)} files; expected {count}, also number {absent[0]}")


def file_state(path: str) -> tuple[int, int, int, int]:
    """Size, modification time, time of the inode's change, and inode: what changes whenever a file's contents do.

    The first two can be kept by whoever mends or relabels a file (rsync, cp -p). Nobody sets the third.
    """
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def check_plain_files(paths: Iterable[str], expected: str) -> None:
    """Raise `UsageError` for a pipe, a device or a folder: libraries would wait for what it never gives."""
    for path in paths:
        os.close(open_plain(path, expected, follow=True))
