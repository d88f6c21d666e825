"""Futexes: a host's processes sleep until a word of shared memory changes."""

import ctypes
import os
import platform
import time
from collections.abc import Callable

IS_X86 = platform.machine() in ("x86_64", "AMD64", "i686")
# x86 keeps stores in order, and loads; elsewhere a switch to the scheduler and back does.
fence: Callable[[], None] = (lambda: None) if IS_X86 else os.sched_yield
FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}  # the call's number, on Linux
FUTEX_WAIT, FUTEX_WAKE = 0, 1
_syscall = ctypes.CDLL(None).syscall


def futex_number() -> int | None:
    """The call's number if it works."""
    number = FUTEX.get(platform.machine()) if platform.system() == "Linux" else None
    works = number and _syscall(number, ctypes.byref(ctypes.c_uint32()), FUTEX_WAKE, 1, None, None, 0) == 0
    return number if works else None


_number = futex_number()


class Seconds(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


def sleep_on(address: int, seen: int, timeout_s: float) -> None:
    """Sleep until woken, while `address` holds `seen`; `timeout_s` is below 1."""
    if _number is None:
        time.sleep(0.0005)
        return
    low = ctypes.c_uint32(seen & 0xFFFFFFFF)  # the kernel compares 32 bits: the low ones, on these processors
    timeout = ctypes.byref(Seconds(0, int(timeout_s * 1e9)))
    _syscall(_number, ctypes.c_void_p(address), FUTEX_WAIT, low, timeout, None, 0)


def wake(address: int) -> None:
    """Wake all who sleep on the word at `address`."""
    if _number is not None:
        _syscall(_number, ctypes.c_void_p(address), FUTEX_WAKE, 2**31 - 1, None, None, 0)
