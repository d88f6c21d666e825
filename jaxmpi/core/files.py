"""Files opened, written and locked safely: a path from outside may be anything, and a write may end half-way."""

import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from jaxmpi.core.errors import TrainingError, UsageError, check


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written; ranks may call it concurrently."""
    try:
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror}; name a file in a folder that exists"
        ) from error


def open_plain(path: str | Path, expected: str, follow: bool = False) -> int:
    """A file descriptor for reading, without waiting; only of a plain file, or of a link to one if `follow`.

    Raises:
        UsageError: it is missing, a link, a folder, a pipe or a device; `expected` says what it should be.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; expected {expected}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise UsageError(f"{path}: got no plain file; expected {expected}")
    return file


def read_plain(path: str | Path, most_bytes: int, expected: str) -> bytes:
    """All of a plain file; `UsageError` if it is none, larger than it may be, or cannot be read."""
    with open(open_plain(path, expected), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        check(size <= most_bytes, f"{path}: got {size} bytes; expected at most {most_bytes}")
        try:
            return file.read(size)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error}; copy it again") from error


def refuse_ways_out(folder: Path, name: str, why: str) -> None:
    """Refuse a stranger's folder with links, through which writes would leave it.

    Args:
        name: of the folder in the error.
        why: what would be written, and the way out.
    """
    with os.scandir(folder) as entries:
        kinds = {entry.name: stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) for entry in entries}
    odd = sorted(each for each, kind in kinds.items() if kind not in (stat.S_IFREG, stat.S_IFDIR))
    check(not odd, f"{name}: {', '.join(odd[:5])}: got a link, or no regular file; {why}")


def write_all(file: io.FileIO, content: Any) -> None:
    """Write every byte to an unbuffered file: a buffer's `close` would fail once more on a full disk.

    That second failure would hide the error that says how to go on.
    """
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def sync_file(file: IO[Any]) -> None:
    """Have the disk hold what was written to a file."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def whole_file(path: Path) -> Iterator[io.FileIO]:
    """An unbuffered file to write that appears whole, in place of an earlier one, or not at all."""
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with aside.open("wb", buffering=0) as file:
            yield file
            sync_file(file)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: Path, raw: bytes) -> None:
    """Write a run's file: nobody reads a part.

    Raises:
        TrainingError: it cannot be written, as on a full disk.
    """
    with writing(path), whole_file(path) as file:
        write_all(file, raw)


@contextmanager
def made_whole(file: Path) -> Iterator[Path]:
    """Yield a path that becomes the file when whole; failures leave nothing.

    Raises:
        UsageError: it exists or cannot be written.
    """
    check(not os.path.lexists(file), f"{file} exists; name a new file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{file.name}.", suffix=".tmp", dir=file.parent) as folder:
            aside = Path(folder, file.name)
            yield aside
            with aside.open("rb") as file_to_sync:
                os.fsync(file_to_sync.fileno())
            aside.rename(file)
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error}; name another file, or make room") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make file system errors name the file and the way out.

    Raises:
        TrainingError: in the place of OSError.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{str(path)!r} cannot be written: {error.strerror or error}; checkpoints that are saved stay. Make room, "
            f"then go on with --resume --run-dir {path.parent}"
        ) from error
