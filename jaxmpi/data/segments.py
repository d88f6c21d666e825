"""Memory that a worker and its loaders share: it has no name, so nothing is left of it, however they end."""

import errno
import mmap
import os
import pickle
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.config import UsageError, check

PAGE = 4096  # bytes; also more than the 64 at which devices on the host take an array as it lies


class GoneError(Exception):
    """The memory was given up before this process came to it."""


class Segment:
    """`size` bytes. Pickled, it is an address, at which processes of this user map the same bytes.

    The bytes go once nobody maps them: the arrays over them, here and there, and not this object, keep them alive. The
    address holds while this object lives.

    Raises:
        UsageError: there is no room; pickled, that the system has no such memory.
    """

    def __init__(self, size: int) -> None:
        size = max(size, 1)
        if not hasattr(os, "memfd_create"):  # not Linux: threads only
            self.bytes, self.address = mmap.mmap(-1, size), None
            return
        try:
            fd = os.memfd_create("jaxmpi")
            weakref.finalize(self, os.close, fd)
            if size > available_bytes():  # the system would try, and kill processes meanwhile
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            os.posix_fallocate(fd, 0, size)  # now, since a page that cannot be had later kills the process
        except OSError as error:
            raise UsageError(
                f"no shared memory for {size >> 20} MiB of batches: {error}; lower data.prefetch or the local batch"
            ) from error
        self.bytes = mmap.mmap(fd, size)
        self.address = os.getpid(), fd, os.fstat(fd).st_ino, size

    def __reduce__(self) -> tuple[Any, ...]:
        check(self.address is not None, "loader processes need Linux; use data.loader = threads")
        return attached, self.address or ()

    def array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A new view; arrays made of it keep it alive, and those of other calls do not."""
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self.bytes, dtype, count, offset).reshape(shape)


def available_bytes() -> int:
    """Memory that processes may take yet, page cache included: of this machine, or of the control groups that this one
    is in where that is less; no limit where the kernel does not say.
    """
    machine = re.search(r"MemAvailable:\s+(\d+) kB", read(Path("/proc/meminfo")))
    free = [left_in(folder, version) for folder, version in memory_groups()]
    return min(*free, int(machine[1]) << 10 if machine else sys.maxsize)


class Version(NamedTuple):
    """The names of one version of control groups: where the kernel writes what a group may take and has taken."""

    limit: str
    used: str
    files: str  # the start of the lines of memory.stat that count page cache


VERSIONS = {
    1: Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: Version("memory.max", "memory.current", ""),
}


def memory_groups() -> list[tuple[Path, Version]]:
    """The control groups that bound this process's memory, its own first, then those that hold it.

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


def left_in(group: Path, version: Version) -> int:
    """Of a control group; it counts files in the page cache, which go when memory is needed."""
    limit, used = (read(group / name).strip() for name in (version.limit, version.used))
    if not (limit.isdigit() and used.isdigit()):
        return sys.maxsize
    files = re.findall(rf"^{version.files}(?:in)?active_file (\d+)$", read(group / "memory.stat"), re.MULTILINE)
    return int(limit) - int(used) + sum(map(int, files))


def read(file: Path) -> str:
    """A file of the kernel's; nothing where there is none."""
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


class Parcel:
    """Any object for several loaders: pickled once, its arrays in one segment that all of them map."""

    def __init__(self, content: Any) -> None:
        parts: list[pickle.PickleBuffer] = []
        self.text = pickle.dumps(content, protocol=5, buffer_callback=parts.append)
        raws = [part.raw() for part in parts]
        self.sizes = [raw.nbytes for raw in raws]
        self.segment = Segment(sum(map(aligned, self.sizes)))
        for place, raw in zip(self._places(), raws, strict=True):
            place[:] = np.frombuffer(raw, np.uint8)

    def _places(self) -> list[np.ndarray]:
        ends = np.cumsum([0, *map(aligned, self.sizes)])
        return [self.segment.array(int(end), (size,), np.uint8) for end, size in zip(ends, self.sizes, strict=False)]

    def open(self) -> Any:
        """The object; its arrays are read-only."""
        places = self._places()
        for place in places:
            place.flags.writeable = False
        return pickle.loads(self.text, buffers=places)


def aligned(size: int) -> int:
    """`size` bytes, up to whole pages."""
    return -(-size // PAGE) * PAGE


class Layout(NamedTuple):
    """What a ring holds: `slots` batches of `batch` rows."""

    slots: int
    batch: int
    image: tuple[tuple[int, ...], str]  # shape and dtype of a row
    label: tuple[tuple[int, ...], str]

    def sizes(self) -> tuple[int, int]:
        """Bytes of one slot's images and labels, in whole pages."""
        rows = ((self.batch, *shape) for shape, _ in (self.image, self.label))
        types = (np.dtype(dtype).itemsize for _, dtype in (self.image, self.label))
        images, labels = (aligned(int(np.prod(row)) * size) for row, size in zip(rows, types, strict=True))
        return images, labels


class Ring:
    """Slots for batches, and a flag that tells loaders to drop what is queued for them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.segment = Segment(PAGE + layout.slots * sum(layout.sizes()))
        self.closed = self.segment.array(0, (1,), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ring, (self.layout, self.segment)

    def images(self, slot: int) -> np.ndarray:
        """u8 or f32[batch, ...] of a slot, a new view."""
        shape, dtype = self.layout.image
        return self.segment.array(self._offset(slot), (self.layout.batch, *shape), dtype)

    def labels(self, slot: int) -> np.ndarray:
        """i32[batch, ...] of a slot, a new view."""
        shape, dtype = self.layout.label
        offset = self._offset(slot) + self.layout.sizes()[0]
        return self.segment.array(offset, (self.layout.batch, *shape), dtype)

    def _offset(self, slot: int) -> int:
        return PAGE + slot * sum(self.layout.sizes())

    def lend(self, slot: int, take_back: Callable[[int], None]) -> np.ndarray:
        """The images of a slot; `take_back(slot)` once nothing in the process, a device neither, uses them."""
        images = self.images(slot)
        assert isinstance(images.base, np.ndarray)  # what all views of these images keep alive, and no others
        weakref.finalize(images.base, take_back, slot).atexit = False
        return images


def _ring(layout: Layout, segment: Segment) -> Ring:
    ring = object.__new__(Ring)
    ring.layout, ring.segment, ring.closed = layout, segment, segment.array(0, (1,), np.int64)
    return ring
