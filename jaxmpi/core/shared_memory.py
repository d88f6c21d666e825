"""Shared memory between processes of one host, and room left for it.

Large arrays should pass between processes without a copy, and no memory may stay behind when a job is killed. A
`Segment` has no name: pickled, it is a process, a descriptor and an inode. Others open it through /proc, and the kernel
frees it with its last user. A page that is missing at its first write kills the process. So `reserve` compares the size
with the memory left and takes all pages beforehand. `available_bytes` is the least of the machine's memory and the
limits of the control groups. Arrays with names use files in `folder()` instead.
"""

import errno
import mmap
import os
import re
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any, NamedTuple

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


def available_bytes() -> int:
    """Memory that processes may still take, page cache included.

    The least of this machine's and of this process's control groups; no limit if the kernel does not say.
    """
    machine = re.search(r"MemAvailable:\s+(\d+) kB", read(Path("/proc/meminfo")))
    free = [left_in(folder, files) for folder, files in memory_groups()]
    return min(*free, int(machine[1]) << 10 if machine else sys.maxsize)


class CgroupFiles(NamedTuple):
    """File names in one version of control groups: limit, memory used."""

    limit: str
    used: str
    files: str  # the start of the lines of memory.stat that count page cache


VERSIONS = {
    1: CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: CgroupFiles("memory.max", "memory.current", ""),
}


def memory_groups() -> list[tuple[Path, CgroupFiles]]:
    """Control groups that bound this process's memory, from its own up.

    In a container the path is often that of the machine, and only the root of the mount is there.
    """
    root, said = Path("/sys/fs/cgroup"), read(Path("/proc/self/cgroup"))
    groups = []
    places = {2: (root, r"^0::/(.*)$"), 1: (root / "memory", r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$")}
    for number, (mount, line) in places.items():
        own = re.search(line, said, re.MULTILINE)
        group = mount / (own[1] if own else "")
        groups += [(folder, VERSIONS[number]) for folder in (group, *group.parents)]
    return groups


def left_in(group: Path, names: CgroupFiles) -> int:
    """Memory left in a control group; its page cache counts as free."""
    limit, used = (read(group / name).strip() for name in (names.limit, names.used))
    if not (limit.isdigit() and used.isdigit()):
        return sys.maxsize
    files = re.findall(rf"^{names.files}(?:in)?active_file (\d+)$", read(group / "memory.stat"), re.MULTILINE)
    return int(limit) - int(used) + sum(map(int, files))


def read(file: Path) -> str:
    """A file of the kernel's; nothing if there is none."""
    try:
        return file.read_text()
    except OSError:
        return ""


def attached(pid: int, fd: int, inode: int, size: int) -> Segment:
    """The segment of another process.

    Raises:
        GoneError: that process has closed it.
    """
    segment = object.__new__(Segment)
    try:
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as error:
        raise GoneError(str(error)) from error
    try:
        if os.fstat(mine).st_ino != inode:  # its number was given to another file since
            raise GoneError(f"/proc/{pid}/fd/{fd} is another file now")
        segment.bytes = mmap.mmap(mine, size)
    finally:
        os.close(mine)
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
