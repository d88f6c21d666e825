"""Futexes: a host's processes sleep until a word of shared memory changes."""

import ctypes
import os
import platform
import time
from collections.abc import Callable

# x86 keeps stores in order, and loads; elsewhere a switch to the scheduler and back does.
IS_X86 = platform.machine() in ("x86_64", "AMD64", "i686")
fence: Callable[[], None] = (lambda: None) if IS_X86 else os.sched_yield
FUTEX_WAIT, FUTEX_WAKE = 0, 1
_call = ctypes.CDLL(None).syscall
_number = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(platform.machine(), 0)
if platform.system() != "Linux" or _call(_number, ctypes.byref(ctypes.c_uint32()), FUTEX_WAKE, 1, None, None, 0) != 0:
    _number = 0  # the call does not work


def sleep_on(address: int, seen: int, timeout_s: float) -> None:
    """Sleep until woken, while `address` holds `seen`; `timeout_s` is below 1."""
    if not _number:
        time.sleep(0.0005)
        return
    low = ctypes.c_uint32(seen & 0xFFFFFFFF)  # the kernel compares 32 bits: the low ones, on these processors
    timeout = (ctypes.c_long * 2)(0, int(timeout_s * 1e9))  # `struct timespec`
    _call(_number, ctypes.c_void_p(address), FUTEX_WAIT, low, timeout, None, 0)


def wake(address: int) -> None:
    """Wake all who sleep on the word at `address`."""
    if _number:
        _call(_number, ctypes.c_void_p(address), FUTEX_WAKE, 2**31 - 1, None, None, 0)
