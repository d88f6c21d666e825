"""Files that a stranger may have made: opened only where they are plain files, of a size that was asked for."""

import os
import stat
from pathlib import Path

from jaxmpi.config import UsageError, check


def open_plain(path: str | Path, expected: str, follow: bool = False) -> int:
    """A file descriptor for reading, without waiting; only of a plain file.

    Args:
        path: of the file.
        expected: what it should be, for the error.
        follow: whether it may be a link to one.

    Raises:
        UsageError: it is missing, a link, a folder, a pipe or a device.
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
    """All of a plain file.

    Raises:
        UsageError: it is none, larger than it may be, or cannot be read.
    """
    with open(open_plain(path, expected), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        check(size <= most_bytes, f"{path}: got {size} bytes; expected at most {most_bytes}")
        try:
            return file.read(size)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error}; copy it again") from error


def refuse_ways_out(folder: Path, name: str, why: str) -> None:
    """Keep what is written within a folder that someone else may have made: it would go where a link leads.

    Args:
        folder: to look at, without its folders.
        name: of the folder in the error.
        why: what would be written, and the way out.

    Raises:
        UsageError: something in it is neither a file nor a folder.
    """
    with os.scandir(folder) as entries:
        odd = [entry.name for entry in entries if not (entry.is_file(follow_symlinks=False) or is_folder(entry))]
    check(not odd, f"{name}: {', '.join(sorted(odd)[:5])}: got a link, or no regular file; {why}")


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is one itself, not a link to one."""
    return entry.is_dir(follow_symlinks=False)
