"""Settings of the C allocator for memory that a program has freed.

Kept memory is used again without page faults, but it has holes where buffers of other sizes were: 0.3 to 0.9 of what
is in use was seen with language models, whose leaves are few and big. JAXMPI_ALLOCATOR=system leaves glibc as it comes,
JAXMPI_ALLOCATOR=keep has it keep freed memory in any case.
"""

import ctypes
import os
import tempfile
import threading
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # malloc.h


def keep_freed_memory() -> None:
    """Have glibc keep freed buffers, since fresh ones cost page faults.

    Page faults of big buffers take more than half of a big exchange's time. There is one arena, because those of other
    threads hold 64 MiB at most, and map larger buffers afresh each time. Arenas that exist already, as after the start
    of MPI, stay and are given to new threads, too: `arenas` counts them.
    """
    if os.environ.get("JAXMPI_ALLOCATOR") == "system":
        return
    _set({_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1})
    _keeps_freed.set()
    _grow_by_huge_pages()


_keeps_freed = threading.Event()


def _grow_by_huge_pages() -> None:
    """Reserve addresses for the heap to grow into, in which the kernel gives 2 MiB at a fault in place of 4 KiB.

    Without it a program's first ten exchanges fault a tree or more each, until the heap has room for all sizes in
    every order. Addresses take no memory until they are written. glibc 2.35 has a setting for this, but only in the
    environment that a process starts with.
    """
    libc, address_space = ctypes.CDLL(None), Path("/proc/sys/vm/overcommit_memory")
    if not hasattr(libc, "mallopt") or not address_space.exists() or address_space.read_text().strip() == "2":
        return  # not glibc on Linux; or addresses count as memory
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if begin := libc.malloc(size):
        huge, madv_hugepage = 2 << 20, 14  # sys/mman.h
        aligned = -(-begin // huge) * huge
        libc.madvise(aligned, begin + size - aligned, madv_hugepage)
        libc.free(begin)  # the top of the heap, since _M_TRIM_THRESHOLD


def arenas() -> int:
    """Number of arenas that glibc gives to threads; 1 elsewhere."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_info"):
        return 1
    libc.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile() as told:
        stream = ctypes.c_void_p(libc.fdopen(os.dup(told.fileno()), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        told.seek(0)
        return told.read().count(b"<heap nr=")


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


def is_settled() -> bool:
    """Return True if JAXMPI_ALLOCATOR says what becomes of freed memory."""
    return os.environ.get("JAXMPI_ALLOCATOR") in ("system", "keep")


def give_back_at_once() -> None:
    """Have glibc unmap each buffer of 1 MiB or more when freed."""
    _keeps_freed.clear()
    _set({_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 2**20, _M_TRIM_THRESHOLD: 2**21})
    give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Return freed memory to the kernel now, as after a run's start."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    if _keeps_freed.is_set():
        _grow_by_huge_pages()  # the addresses are given back as well


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        for name, value in options.items():
            mallopt(name, value)
