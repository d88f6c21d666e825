"""Shared memory between processes of one host, and room left for it.

No memory may stay behind when a job is killed. A `Segment` has no name: pickled, it is a process, a descriptor and an
inode. Others open it through /proc, and the kernel frees it with its last user.
"""

import errno
import mmap
import os
import re
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi.core.errors import UsageError, check

PAGE = 4096  # bytes; also more than the 64 at which devices on the host take an array as it lies


class GoneError(Exception):
    """The memory was given up before this process came to it."""


class Segment:
    """Shared bytes; pickled, an address at which this user's processes map them.

    The bytes go once nobody maps them: the arrays over them, here and there, and not this object, keep them alive. The
    address holds while this object lives.

    Args:
        size: in bytes.
        what: it is for, and the way out if there is no room.

    Raises:
        UsageError: there is no room; pickled, that the system has no such memory.
    """

    def __init__(self, size: int, what: str = "batches; lower data.prefetch or the local batch") -> None:
        size = max(size, 1)
        if not hasattr(os, "memfd_create"):  # not Linux: threads only
            self.bytes, self.address = mmap.mmap(-1, size), None
            return
        try:
            fd = os.memfd_create("jaxmpi")
            weakref.finalize(self, os.close, fd)
            reserve(fd, size)
        except OSError as error:
            purpose, _, way_out = what.partition("; ")
            raise UsageError(f"no shared memory for {size >> 20} MiB of {purpose}: {error}; {way_out}") from error
        self.bytes = mmap.mmap(fd, size)
        self.address = os.getpid(), fd, os.fstat(fd).st_ino, size

    def __reduce__(self) -> tuple[Any, ...]:
        check(self.address is not None, "loader processes need Linux; use data.loader = threads")
        return attached, self.address or ()

    def array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A new view, which only arrays made of it keep alive."""
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self.bytes, dtype, count, offset).reshape(shape)


# By version of control groups: where they are mounted, a process's own, files of limit and memory used, and the start
# of the lines of memory.stat that count page cache.
GROUPS = (
    ("/sys/fs/cgroup", r"^0::/(.*)$", "memory.max", "memory.current", ""),
    (
        "/sys/fs/cgroup/memory",
        r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$",
        *("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ),
)


def available_bytes() -> int:
    """Memory that processes may still take, page cache included.

    The least of this machine's and of this process's control groups; no limit if the kernel does not say.
    """

    def read(file: Path | str) -> str:
        with suppress(OSError):
            return Path(file).read_text()
        return ""

    machine = re.search(r"MemAvailable:\s+(\d+) kB", read("/proc/meminfo"))
    free = [int(machine[1]) << 10 if machine else sys.maxsize]
    for mount, line, limit_file, used_file, cache in GROUPS:
        own_group = re.search(line, read("/proc/self/cgroup"), re.MULTILINE)
        group = Path(mount, own_group[1] if own_group else "")
        for folder in (group, *group.parents):  # in a container the path is often the machine's: only the root is there
            limit, used = read(folder / limit_file).strip(), read(folder / used_file).strip()
            if limit.isdigit() and used.isdigit():
                files = re.findall(rf"^{cache}(?:in)?active_file (\d+)$", read(folder / "memory.stat"), re.MULTILINE)
                free.append(int(limit) - int(used) + sum(map(int, files)))
    return min(free)


def attached(pid: int, fd: int, inode: int, size: int) -> Segment:
    """The segment of another process.

    Raises:
        GoneError: that process has closed it.
    """
    segment = object.__new__(Segment)
    try:
        own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as error:
        raise GoneError(str(error)) from error
    try:
        if os.fstat(own_fd).st_ino != inode:  # its number was given to another file since
            raise GoneError(f"/proc/{pid}/fd/{fd} is another file now")
        segment.bytes = mmap.mmap(own_fd, size)
    finally:
        os.close(own_fd)
    return segment


# ---------------------------------------------------------------- files in memory


def folder() -> str:
    """A folder in memory; else one for temporary files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def reserve(handle: int, size_bytes: int) -> None:
    """Give a file in memory its size, with all pages if possible.

    A page that is missing when it is first written kills the process, so room is checked and taken here.

    Raises:
        OSError: there is no room.
    """
    if size_bytes - os.fstat(handle).st_size > available_bytes():  # the system would try, and kill processes meanwhile
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size_bytes)
    else:
        os.ftruncate(handle, size_bytes)
