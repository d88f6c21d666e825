"""Text as tokens: joined files, cut into windows of one length.

A window is an example: i32[window] in, i32[window] to predict. A token is a byte, or what a tokenizer makes of a whole
file. A function of a file's name says if the file is held out. So a file more or less moves no other.
"""

import contextlib
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data.sources.base import place_in_parts
from jaxmpi.data.sources.tokenizers import Tokenizer, tokenizer_of

BYTES = 256  # classes
BETWEEN = b"\0"  # files; no text holds it
HELD_OUT = 50  # one module of the standard library in so many
NOT_THE_LIBRARY = ("site-packages", "dist-packages", "__pycache__", "lib-dynload")
OF_THE_MACHINE = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")  # how names begin


class TextSource:
    """Files as one row of tokens, cut into windows.

    Examples are (i32[window], i32[window]). Window i holds tokens [i T, i T + T), T the window; its labels are tokens
    [i T + 1, i T + T + 1). So each token but the first is predicted once, from those before it in its window. The last
    n - 1 mod T tokens are left out.

    Args:
        root: what names are relative to.
        files: by name, in this order, which must be the same on all machines; a NUL is put between two.
        window: T, tokens, >= 1.
        name: of the source, for errors.
        tokenizer: makes the tokens of a file, without a NUL; None: they are its bytes.
        errors: what becomes of bytes that are no UTF-8, for a tokenizer: strict refuses them, replace takes U+FFFD.

    Attributes:
        bytes_each: mean bytes that are predicted in an example.
        tokens_each: tokens that are.

    Raises:
        UsageError: no files, fewer tokens than one window takes, or a file that cannot be read.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        window: int,
        name: str,
        tokenizer: Tokenizer | None = None,
        errors: str = "strict",
    ) -> None:
        self.name, self.files, self.window = name, tuple(files), window
        self.classes, self.token = (tokenizer.classes, "token") if tokenizer else (BYTES, "byte")
        _check_room(root, files, name)
        parts, size_bytes = [np.empty(0, np.uint8)], 0
        for file in files:
            blob = _content(root / file, name) + (b"" if tokenizer else BETWEEN)
            size_bytes += len(blob)
            path = root / file
            parts.append(
                tokenizer.tokens(_decoded(blob, path, name, errors), str(path))
                if tokenizer
                else np.frombuffer(blob, np.uint8)
            )
        self.ends = np.cumsum([len(part) for part in parts[1:]], dtype=np.int64)
        self.text = np.concatenate(parts)
        check(
            len(self) > 0,
            f"{name}: got {len(files)} files of {len(self.text)} {self.token}s in {root}; expected at least "
            f"data.window + 1 = {window + 1} {self.token}s",
        )
        self.tokens_each, self.bytes_each = window, window * size_bytes / len(self.text)

    def __len__(self) -> int:
        return max(len(self.text) - 1, 0) // self.window

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: got window {index} of {len(self)}")
        begin = index * self.window
        some = self.text[begin : begin + self.window + 1].astype(np.int32)
        return some[:-1], some[1:]

    def where(self, index: int) -> str:
        """The file in which window `index` begins, and the byte or token."""
        file, place = place_in_parts(self.ends, index * self.window)
        return f"{self.files[file]}, {self.token} {place}"

    def digest(self) -> str:
        """SHA-256 of names and tokens, all of them."""
        digest = hashlib.sha256("\0".join(self.files).encode(errors="surrogateescape"))
        digest.update(self.text.data)
        return digest.hexdigest()


def _check_room(root: Path, files: Sequence[str], name: str) -> None:
    """Raise `UsageError` if memory cannot hold all files twice.

    Files are read one by one, then joined. A sparse file may be larger than its disk, and so than memory.
    """
    need_bytes = 2 * sum(_size_bytes(root / file, name) for file in files)
    left_bytes = available_bytes()
    check(
        need_bytes <= left_bytes,
        f"{name}: {root}: {need_bytes / 1e9:,.1f} GB of memory are needed to read these {len(files)} files, and "
        f"{left_bytes / 1e9:,.1f} GB are left; take fewer or smaller files",
    )


def _size_bytes(path: Path, name: str) -> int:
    with _reading(path, name):
        return path.stat().st_size


def _content(path: Path, name: str) -> bytes:
    with _reading(path, name):
        return path.read_bytes()


def _decoded(blob: bytes, path: Path, name: str, errors: str) -> str:
    try:
        return blob.decode(errors=errors)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name}: {path}: {error}; a tokenizer takes UTF-8: convert the file, or take it away"
        ) from error


@contextlib.contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{name}: {path} cannot be read: {error}; mend it or take it away, on all machines") from error


def names(root: Path, suffix: str = "") -> list[str]:
    """Names of the files below a folder that end in `suffix`.

    Names are relative to the folder, with slashes. They are in the order of their bytes, which is the same on all
    machines. Hidden files and folders are left out.
    """
    paths = (path.relative_to(root) for path in root.rglob(f"*{suffix}") if path.is_file())
    kept = (path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))
    return sorted(kept, key=os.fsencode)


def text(config: Data, split: str) -> TextSource:
    """All files below DIR/<split>/ in alphabetical order; DIR is `data.dir`.

    Raises:
        UsageError: no such folder, or not enough in it.
    """
    check(bool(config.dir), "text: set data.dir to a folder DIR with files in DIR/train/ and DIR/validation/")
    folder = Path(config.dir) / (config.train_split if split == "train" else config.validation_split)
    check(folder.is_dir(), f"text: no folder {folder}; name the right one with --data.{split}-split")
    return TextSource(
        root=folder, files=names(folder), window=config.window, name="text", tokenizer=tokenizer_of(config.tokenizer)
    )


def stdlib(config: Data, split: str) -> TextSource:
    """Source code of Python's standard library, tests included: 31 MB.

    The source is on every machine, and the same for one version. One module in 50 is held out whole: a top-level file
    or package, or one below `test`.

    Raises:
        UsageError: this Python came without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    wanted = library_files(names(root, ".py"), held_out=split != "train")
    check(len(wanted) > 0, f"stdlib: found no Python source for {split} in {root}; use another Python, or source text")
    return TextSource(
        root=root,
        files=wanted,
        window=config.window,
        name="stdlib",
        tokenizer=tokenizer_of(config.tokenizer),
        errors="replace",
    )


def library_files(files: Iterable[str], *, held_out: bool) -> list[str]:
    """Files of the standard library that every machine has, of one split."""
    return [file for file in files if is_common(file) and is_held_out(module_of(file)) == held_out]


def is_common(file: str) -> bool:
    """Return True unless a file was installed later or is machine-specific."""
    parts = file.split("/")
    return not set(parts) & set(NOT_THE_LIBRARY) and not any(part.startswith(OF_THE_MACHINE) for part in parts)


def module_of(file: str) -> str:
    """`asyncio` for asyncio/base_events.py, `test/test_asyncio` for test/test_asyncio/utils.py."""
    parts = file.split("/")
    return "/".join(parts[: 2 if parts[0] == "test" else 1])


def is_held_out(module: str) -> bool:
    """Return True if a module is held out, by its name alone.

    So the answer is the same in every version and on every machine.
    """
    name = module.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") % HELD_OUT == 0
