"""C sources of the package, compiled at their first use and kept."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxmpi.runtime.caches import cache_folder

COMPILE_S = 120.0  # at most; it takes 0.2 s
FLAGS = ("-std=c11", "-O2", "-shared", "-fPIC", "-pthread")


def compiler() -> str | None:
    """The C compiler: that of CC, else cc, gcc or clang."""
    return next(filter(None, map(shutil.which, filter(None, [os.environ.get("CC"), "cc", "gcc", "clang"]))), None)


def load(source: Path, defines: Sequence[str] = ()) -> ctypes.CDLL:
    """Load a source, compiled against XLA's header at the first use.

    A library is kept under a digest of all that it is made of. Ranks that compile it at once make the same one.

    Raises:
        OSError, subprocess.SubprocessError, UsageError: there is no compiler, it fails, or nothing can be kept.
    """
    command = [*FLAGS, *(f"-D{define}" for define in defines), f"-I{jax.ffi.include_dir()}"]
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_bytes()
    made_of = [source.read_bytes(), header, repr((FLAGS, *defines, platform.machine(), platform.libc_ver())).encode()]
    kept = cache_folder("c") / f"{source.stem}-{hashlib.sha256(b''.join(made_of)).hexdigest()[:16]}.so"
    if not kept.exists():
        if (cc := compiler()) is None:
            raise OSError("no C compiler is on the path (cc, gcc, clang, or CC)")
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            made = Path(folder, kept.name)
            done = subprocess.run(
                [cc, *command, str(source), "-o", str(made)], capture_output=True, text=True, timeout=COMPILE_S
            )
            if done.returncode:
                raise OSError(f"{cc} cannot compile {source.name}: {done.stderr.strip()[-500:]}")
            made.replace(kept)
    return ctypes.CDLL(str(kept))
