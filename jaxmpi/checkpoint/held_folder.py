"""A run directory, held and locked while a run goes on, whatever others do to its name."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxmpi.core.errors import UsageError

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # error numbers of file systems without locks


class HeldFolder:
    """A folder held by its descriptor.

    A path is looked up anew at every use. Someone may remove, move or replace the folder while a run goes on. Then the
    path leads nowhere, or to what another job has made there.
    """

    def __init__(self, path: Path) -> None:
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
        if not _is_same(self._handle, self.path):
            return "has been removed, moved or replaced while the run went on"
        has_lock = self.lock is None or _is_same(self.lock, self.path / "lock")
        return "" if has_lock else "has lost its file `lock`, so another job may be in it"

    def close(self) -> None:
        """Let go of it, and of its lock."""
        os.close(self._handle)


def _is_same(handle: int, path: Path) -> bool:
    """Return True if a path leads to what a descriptor holds."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


@contextmanager
def locked(folder: Path) -> Iterator[HeldFolder]:
    """Hold a run directory until the end, locked against other jobs, if possible on all hosts.

    Both the folder and its file `lock` are locked: NFS locks no folders, and a file can be removed. The file names the
    holder. The lock ends with the process.

    Raises:
        UsageError: another job has it: its host and process.
    """
    home, path = HeldFolder(folder), folder / "lock"
    try:
        with path.open("a+") as file:
            try:
                is_locked = home.try_lock()
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                home.lock = None if is_locked else file.fileno()
            except BlockingIOError:
                holder = ""
                with suppress(OSError), path.open(errors="backslashreplace") as other:  # it may have been removed
                    holder = other.read(200).strip()
                raise UsageError(
                    f"run directory {str(folder)!r} is in use by {holder or 'another job'}; wait for its end, or name "
                    "another with --run-dir"
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            file.truncate(0)
            holder = f"process {os.getpid()} on {socket.gethostname()}\n"
            try:
                os.write(file.fileno(), holder.encode(errors="backslashreplace"))
            except OSError as error:  # as on a full disk; it does not name the file
                raise OSError(error.errno, error.strerror, str(path)) from error
            yield home
    finally:
        home.close()
