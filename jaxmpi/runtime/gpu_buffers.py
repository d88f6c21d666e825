"""Host arrays of GPU buffers, for Python functions in CUDA programs.

XLA calls a handler while it puts a program's work on a stream, and gives it addresses of the GPU. So operands are
copied to the host behind that work, the function reads and fills memory of the host, and its results are copied back.
That memory is page-locked, since CUDA copies other memory through a buffer of its own, and it is kept for the next
call, since to lock pages takes longer than to copy into them.

The calls are those of CUDA's driver, which is there wherever a GPU is. The runtime library has another name with each
version of CUDA, and takes device 0 for granted; the driver knows the device of a stream.
"""

import ctypes
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.errors import TrainingError

PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: page-locked for all devices of the process
ALIGNED_BYTES = 64
LEAST_BYTES = 1 << 20  # bytes of a page-locked block at least
READ, WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype, _memory_at.argtypes = ctypes.py_object, (c_void_p, ctypes.c_ssize_t, c_int)


class DriverError(TrainingError):
    """CUDA's driver has answered with an error."""


class Buffer(NamedTuple):
    """An array in memory, row-major."""

    dtype: np.dtype
    shape: tuple[int, ...]
    address: int  # may be null if there are no bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of all its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, *, is_written: bool) -> np.ndarray:
        """The array itself, without a copy, if its memory is the host's."""
        if not (size_bytes := self.size_bytes):
            return np.empty(self.shape, self.dtype)
        memory = _memory_at(self.address, size_bytes, WRITE if is_written else READ)
        return np.ndarray(self.shape, self.dtype, memory)


@contextmanager
def on_host(
    stream: int | None, operands: Sequence[Buffer], results: Sequence[Buffer]
) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Yield host copies of operands, and arrays that become the results.

    An operand in a result's buffer is in that result's array. If an array has bytes, this waits for the stream's work
    so far.
    """
    sizes: dict[int, int] = {}  # by address; XLA may pass the beginning of a buffer as well
    for x in [*operands, *results]:
        sizes[x.address] = max(sizes.get(x.address, 0), x.size_bytes)
    offsets, end = {}, 0
    for address, size_bytes in sizes.items():
        offsets[address], end = end, end + -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
    if not end:
        yield [x.array(is_written=False) for x in operands], [x.array(is_written=True) for x in results]
        return
    with _device_of(stream), _page_locked(end) as block:
        host = {address: block + offset for address, offset in offsets.items()}
        read = {x.address for x in operands if x.size_bytes}
        for address in read:
            _call_driver("cuMemcpyDtoHAsync_v2", host[address], address, sizes[address], stream)
        if read:
            _call_driver("cuStreamSynchronize", stream)
        sources, targets = ([x._replace(address=host[x.address]) for x in every] for every in (operands, results))
        yield [x.array(is_written=False) for x in sources], [x.array(is_written=True) for x in targets]
        filled = [x for x in results if x.size_bytes]
        for x in filled:
            _call_driver("cuMemcpyHtoDAsync_v2", x.address, host[x.address], x.size_bytes, stream)
        if filled:
            _call_driver("cuStreamSynchronize", stream)


@functools.cache
def driver() -> Any:
    """CUDA's driver, which XLA has loaded."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyDtoHAsync_v2.argtypes = (c_void_p, c_uint64, c_size_t, c_void_p)
    library.cuMemcpyHtoDAsync_v2.argtypes = (c_uint64, c_void_p, c_size_t, c_void_p)
    library.cuMemHostAlloc.argtypes = (ctypes.POINTER(c_void_p), c_size_t, c_uint)
    for name in ("cuStreamSynchronize", "cuMemFreeHost", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"):
        getattr(library, name).argtypes = (c_void_p,)
    library.cuStreamGetCtx.argtypes = (c_void_p, ctypes.POINTER(c_void_p))
    return library


def _call_driver(call: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver."""
    code = getattr(driver(), call)(*arguments)
    if code:
        text = c_char_p()
        driver().cuGetErrorString(code, byref(text))
        raise DriverError(f"{call}: CUDA's driver gives error {code}: {(text.value or b'unknown').decode()}")


@contextmanager
def _device_of(stream: int | None) -> Iterator[None]:
    """Make the stream's device current in this thread, which may have none."""
    context = c_void_p()
    _call_driver("cuStreamGetCtx", stream, byref(context))
    _call_driver("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        driver().cuCtxPopCurrent_v2(byref(context))


_kept: list[tuple[int, int]] = []  # address and bytes of each; as many as calls were under way at once
_lock = threading.Lock()


@contextmanager
def _page_locked(size_bytes: int) -> Iterator[int]:
    """Address of a page-locked block of so many bytes or more, until the end."""
    with _lock:
        address, has_bytes = _kept.pop() if _kept else (0, 0)
    if has_bytes < size_bytes:
        if address:
            _call_driver("cuMemFreeHost", address)
        has_bytes, made = max(size_bytes, LEAST_BYTES), c_void_p()
        _call_driver("cuMemHostAlloc", byref(made), has_bytes, PORTABLE)
        address = made.value or 0
    try:
        yield address
    except BaseException:
        with suppress(DriverError):  # it may be copied to still: to free it waits for that
            _call_driver("cuMemFreeHost", address)
        raise
    with _lock:
        _kept.append((address, has_bytes))
