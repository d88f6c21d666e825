"""Settings of the C allocator: freed memory is kept, until it is given back."""

import ctypes


def keep_freed_memory() -> None:
    """Have glibc keep freed buffers: fresh big ones cost page faults, more than half of a big exchange's time.

    One arena, because the arenas of other threads hold 64 MiB at most and map what is bigger afresh each time; threads
    that exist already keep theirs. JAXMPI_ALLOCATOR=system leaves glibc as it comes.
    """
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(m_arena_max, 1)
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Return freed memory to the kernel now, as after the start of a run, which takes more than a step."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
