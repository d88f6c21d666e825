"""Files opened, written and locked safely.

A path from outside may be a device, a pipe or a folder. `open_plain` opens without waiting, then checks the descriptor
and accepts regular files only. A write may end half-way, so `write_whole` and `made_whole` write aside and rename. A
folder may be moved or replaced during a run, and a lock may be of a replaced file. `HeldFolder` therefore keeps a
descriptor and compares it with its path.
"""

import errno
import fcntl
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


class HeldFolder:
    """A folder held by its descriptor, whatever others do to its name.

    A path is looked up anew at every use. Someone may remove, move or replace the folder while a run goes on. Then the
    path leads nowhere, or to what another job has made there.
    """

    def __init__(self, path: Path) -> None:
        """Hold the folder that the path leads to now.

        Raises:
            OSError: it is none, or cannot be read.
        """
        self.path = path
        self.lock: int | None = None  # descriptor of its file `lock`, if that alone keeps other jobs away
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def try_lock(self) -> bool:
        """Lock the folder itself until `close`; False if the file system cannot.

        Raises:
            BlockingIOError: another process has it.
        """
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (*NO_LOCKS, errno.EBADF, errno.EINVAL):  # those two if NFS wants a file
                raise
            return False
        return True

    def fate(self) -> str:
        """Predicate of a sentence on the folder's loss; empty if not lost."""
        if is_same(self._handle, self.path):
            return "" if self._keeps_lock(self.path) else "has lost its file `lock`, so another job may be in it"
        place = self.place()
        if place is None:
            return "has been removed while the run went on"
        return f"has been moved to {str(place)!r} while the run went on"

    def place(self) -> Path | None:
        """Its present path, on Linux; None if removed or without its lock."""
        place = Path(os.readlink(f"/proc/self/fd/{self._handle}"))  # if removed, with ` (deleted)` behind it
        return place if is_same(self._handle, place) and self._keeps_lock(place) else None

    def _keeps_lock(self, place: Path) -> bool:
        return self.lock is None or is_same(self.lock, place / "lock")

    def close(self) -> None:
        """Let go of it, and of its lock."""
        os.close(self._handle)


NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # error numbers of file systems without locks


def is_same(handle: int, path: Path) -> bool:
    """Return True if a path leads to what a descriptor holds."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


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
    """Refuse a stranger's folder with links, through which writes would leave it.

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
    """Return True if it is one itself, not a link to one."""
    return entry.is_dir(follow_symlinks=False)


def write_all(file: io.FileIO, content: Any) -> None:
    """Write every byte to an unbuffered file, perhaps in several parts.

    The file has no buffer, because a buffer's `close` would fail once more on a full disk. That second failure would
    hide the error that says how to go on.
    """
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def sync_file(file: IO[Any]) -> None:
    """Have the disk hold what was written to a file."""
    file.flush()
    os.fsync(file.fileno())


def write_whole(path: Path, raw: bytes) -> None:
    """Write a run's file aside, then rename it: nobody reads a part.

    Raises:
        TrainingError: it cannot be written, as on a full disk.
    """
    aside = path.with_suffix(".tmp")
    try:
        with writing(path):
            aside.write_bytes(raw)
            aside.replace(path)
    except TrainingError:
        with suppress(OSError):
            aside.unlink()
        raise


@contextmanager
def made_whole(file: Path) -> Iterator[Path]:
    """Yield a path that becomes the file when whole; failures leave nothing.

    Raises:
        UsageError: it exists or cannot be written.
    """
    check(not os.path.lexists(file), f"{file} exists; name a new file")
    aside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    is_mine = False
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        is_mine = True
        yield aside
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        os.rename(aside, file)
        is_mine = False
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error}; name another file, or make room") from error
    finally:
        if is_mine:
            aside.unlink(missing_ok=True)


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
