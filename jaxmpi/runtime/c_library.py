"""C sources of the package, compiled at their first use and cached.

A crash may leave part of a file, and to load a library that is cut kills the process by SIGBUS. So a cached library
ends with a SHA-256 of its name and content. It is compared before each use, and what does not match is compiled again.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import read_plain, sync_file
from jaxmpi.runtime.caches import cache_folder

COMPILE_S = 120.0  # at most; it takes 0.2 s
MOST_BYTES = 64 << 20  # of a library; the largest has 0.1 MB
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-fast-math", "-shared", "-fPIC", "-pthread")


def load(source: Path, headers: Sequence[Path] = (), constants: Mapping[str, Any] | None = None) -> ctypes.CDLL:
    """Load a source, compiled against XLA's header at the first use.

    A library is cached under a digest of all that it is made of. Where nothing can be cached, each process compiles it.

    Args:
        headers: of the package that it includes.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, or it fails.
    """
    included = [*headers, Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")]
    options = [f"-D{name}={value}" for name, value in (constants or {}).items()]
    about = repr((FLAGS, options, platform.machine(), platform.libc_ver())).encode()
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (source, *included)) + about).hexdigest()
    name = f"{source.stem}-{digest[:16]}.so"
    options += [f"-I{folder}" for folder in (jax.ffi.include_dir(), *{path.parent for path in headers})]
    try:
        cached = cache_folder("c") / name
        if not _is_whole(cached):
            _compile(source, options, cached)
        return ctypes.CDLL(str(cached))
    # Not writable, full, not private, a folder of that name, no home, a file system from which nothing is run.
    except (OSError, RuntimeError, UsageError):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # NFS keeps a file that is loaded
            _compile(source, options, Path(folder, name))
            return ctypes.CDLL(str(Path(folder, name)))


def compiler() -> list[str]:
    """The C compiler's command: that of CC, else cc, gcc or clang."""
    commands = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    return next((command for command in commands if command and shutil.which(command[0])), [])


def _compile(source: Path, options: Sequence[str], to: Path) -> None:
    """Compile a source to a file that appears only when its content is on the disk."""
    if not (command := compiler()):
        raise OSError("no C compiler is on the path (cc, gcc, clang, or CC)")
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        made = Path(folder, to.name)
        command = [*command, *FLAGS, *options, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
        if done.returncode:
            raise OSError(f"{command[0]} cannot compile {source.name}: {done.stderr.strip()[-500:]}")
        with made.open("r+b") as file:
            file.write(_checksum(to.name, file.read()))  # behind the library; the loader reads no further than it
            sync_file(file)
        # Ranks may compile at once. The first library stays, since on NFS another host's process that has loaded it
        # would lose it; only what is damaged is replaced.
        try:
            os.link(made, to)
        except OSError:  # it exists, or the file system has no links
            if not _is_whole(to):
                made.replace(to)


def _is_whole(path: Path) -> bool:
    """Return True if a library is what `_compile` wrote under this name."""
    try:
        content = read_plain(path, MOST_BYTES, "a compiled library")
    except UsageError:
        return False
    return content.endswith(_checksum(path.name, content[:-32]))


def _checksum(name: str, library: bytes) -> bytes:
    return hashlib.sha256(name.encode() + library).digest()
