"""Scheduling and floating-point mode of one thread."""

import ctypes
import os
import platform
import struct
import threading


def flush_subnormals() -> bool:
    """Flush this thread's subnormals to 0, as XLA does; False if unsupported.

    Writes the control word through glibc's `fenv_t`, whose last word on x86 and first on ARM it is.
    """
    words, index, bits = {"x86_64": (8, 7, 0x8040), "aarch64": (2, 0, 1 << 24)}.get(platform.machine(), (0, 0, 0))
    libc = ctypes.CDLL(None)
    if not words or not hasattr(libc, "fesetenv"):
        return False
    environment = (ctypes.c_uint32 * words)()
    libc.fegetenv(environment)
    environment[index] |= bits
    return libc.fesetenv(environment) == 0


def take_short_turns() -> bool:
    """Request 0.1 ms turns of the kernel, to run soon after waking.

    Linux >= 6.12 heeds it for ordinary threads, also on busy cores; False if the call is not known.
    """
    number = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355}.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    # The kernel's `struct sched_attr`: size, policy, flags, nice, priority, and ns of runtime, deadline and period.
    attributes = struct.pack("IIQiIQQQ", 48, 0, 0, nice, 0, 100_000, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
