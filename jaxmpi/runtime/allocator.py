"""Settings of the C allocator for memory that a program has freed.

Kept memory is used again without page faults, but it has holes where buffers of other sizes were: 0.3 to 0.9 of what
is in use was seen with language models, whose leaves are few and big. JAXMPI_ALLOCATOR=system leaves glibc as it comes,
JAXMPI_ALLOCATOR=keep has it keep freed memory in any case.
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # malloc.h


def keep_freed_memory() -> None:
    """Have glibc keep freed buffers, since fresh ones cost page faults.

    Page faults of big buffers take more than half of a big exchange's time. There is one arena, because those of other
    threads hold 64 MiB at most, and map larger buffers afresh each time. Threads that exist already keep theirs.
    """
    if os.environ.get("JAXMPI_ALLOCATOR") == "system":
        return
    _set({_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1})


def is_settled() -> bool:
    """Return True if JAXMPI_ALLOCATOR says what becomes of freed memory."""
    return os.environ.get("JAXMPI_ALLOCATOR") in ("system", "keep")


def give_back_at_once() -> None:
    """Have glibc unmap each buffer of 1 MiB or more when freed."""
    _set({_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 2**20, _M_TRIM_THRESHOLD: 2**21})
    give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Return freed memory to the kernel now, as after a run's start."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        for name, value in options.items():
            mallopt(name, value)
