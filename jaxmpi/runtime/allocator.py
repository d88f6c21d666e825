"""Settings of the C allocator for memory that a program has freed.

Kept memory is used again without page faults, but it has holes where buffers of other sizes were: 0.3 to 0.9 of what
is in use was seen with language models, whose leaves are few and big. JAXMPI_ALLOCATOR=system leaves glibc as it comes,
JAXMPI_ALLOCATOR=keep has it keep freed memory in any case.
"""

import ctypes
import os
import resource
import tempfile
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8  # malloc.h
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _HUGE_BYTES = 14, 15, 2 << 20  # sys/mman.h
_MADVISE = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_TOP_PAD = 2**17  # bytes by which the heap grows beyond what is asked for, by default
_MOST_BYTES = 2**31 - 2**27  # below the threshold from which glibc gives the heap's top back


def keep_freed_memory() -> None:
    """Have glibc keep freed buffers, since fresh ones cost page faults, more than half of a big exchange's time.

    There is one arena, because those of other threads hold 64 MiB at most, and map larger buffers afresh each time.
    Arenas that exist already, as after the start of MPI, stay and are given to new threads, too: `use_main_arena`.
    """
    if os.environ.get("JAXMPI_ALLOCATOR") == "system":
        return
    _set({_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1})
    _grow_by_huge_pages()


_huge: list[tuple[int, int]] = []  # begin and bytes of reserved addresses


def _grow_by_huge_pages() -> None:
    """Reserve up to 2 GiB of addresses, in which the heap grows by pages of 2 MiB in place of 4 KiB.

    Without it a program's first ten exchanges fault a tree or more each, until the heap has room for all sizes in
    every order. Addresses take no memory until they are written. glibc 2.35 has a setting for this, but only in the
    environment that a process starts with. Nothing is reserved where addresses are limited or count as memory, or
    where another allocator is loaded, whose blocks do not lie in the heap.
    """
    libc, limits = ctypes.CDLL(None), (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    is_limited = any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)
    with suppress(OSError):
        is_limited |= Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    if _huge or is_limited or not hasattr(libc, "mallopt"):
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], _MADVISE
    size = min(_MOST_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8)
    _set({_M_TOP_PAD: _TOP_PAD})
    # Until `free` nothing may call malloc: a block above this one would pin the heap's top.
    begin = libc.malloc(size)
    aligned = -(-(begin or 0) // _HUGE_BYTES) * _HUGE_BYTES
    is_top = bool(begin) and begin + size <= libc.sbrk(0) < begin + size + _HUGE_BYTES
    if is_top:
        libc.madvise(aligned, begin + size - aligned, _MADV_HUGEPAGE)
    libc.free(begin)
    if is_top:
        _huge.append((aligned, begin + size - aligned))
        _set({_M_TOP_PAD: size})  # what glibc leaves when it gives the top of the heap back


def use_main_arena() -> str:
    """Have XLA take buffers from the main arena, if threads that started before have made others; else say why not.

    XLA's threads would be given those arenas in turn, from which a buffer above 64 MiB costs page faults at each use.
    The main thread always has the main arena, so programs run in the thread that calls them.
    """
    if os.environ.get("JAXMPI_ALLOCATOR") == "system" or arenas() == 1:
        return ""
    import jax
    from jax._src import xla_bridge  # nothing public shows whether a device has started

    if not xla_bridge.backends_are_initialized() and "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        return ""
    return (
        "threads that started before jaxmpi.world() have arenas in which a buffer above 64 MiB costs page faults "
        "at each use; set MALLOC_ARENA_MAX=1 for all ranks, or call jaxmpi.world() before the first JAX array"
    )


def arenas() -> int:
    """Number of arenas that glibc gives to threads; 1 elsewhere."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_info"):
        return 1
    libc.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile() as report:
        stream = ctypes.c_void_p(libc.fdopen(os.dup(report.fileno()), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        report.seek(0)
        return report.read().count(b"<heap nr=")


def is_settled() -> bool:
    """Return True if JAXMPI_ALLOCATOR says what becomes of freed memory."""
    return os.environ.get("JAXMPI_ALLOCATOR") in ("system", "keep")


def give_back_at_once() -> None:
    """Have glibc unmap each buffer of 1 MiB or more when freed."""
    for begin, size in _huge:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = _MADVISE
        madvise(begin, size, _MADV_NOHUGEPAGE)  # else the kernel may fill holes of given back pages again
    _huge.clear()
    _set({_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 2**20, _M_TRIM_THRESHOLD: 2**21, _M_TOP_PAD: _TOP_PAD})
    give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Return freed memory to the kernel now, as after a run's start."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    if _huge:  # these addresses are given back as well
        _huge.clear()
        _grow_by_huge_pages()


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        for name, value in options.items():
            mallopt(name, value)
