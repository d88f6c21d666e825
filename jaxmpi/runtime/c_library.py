"""C sources of the package, compiled at their first use and kept."""

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
from jaxmpi.runtime.caches import cache_folder

COMPILE_S = 120.0  # at most; it takes 0.2 s
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-fast-math", "-shared", "-fPIC", "-pthread")


def compiler() -> list[str]:
    """The C compiler's command: that of CC, else cc, gcc or clang."""
    commands = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    return next((command for command in commands if command and shutil.which(command[0])), [])


def load(source: Path, headers: Sequence[Path] = (), constants: Mapping[str, Any] | None = None) -> ctypes.CDLL:
    """Load a source, compiled against XLA's header at the first use.

    A library is kept under a digest of all that it is made of. Ranks that compile it at once make the same one. Where
    nothing can be kept, each process compiles it.

    Args:
        source: to compile.
        headers: of its own that it includes.
        constants: to define.

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
        return _kept(source, options, cache_folder("c") / name)
    except (OSError, RuntimeError, UsageError):  # not writable, full, not private, nothing is run there, nobody's home
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:  # NFS keeps a file that is loaded
            return ctypes.CDLL(str(_compiled(source, options, Path(own, name))))


def _kept(source: Path, options: Sequence[str], path: Path) -> ctypes.CDLL:
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged, or of another compiler's machine
            path.unlink(missing_ok=True)
    return ctypes.CDLL(str(_compiled(source, options, path)))


def _compiled(source: Path, options: Sequence[str], to: Path) -> Path:
    if not (command := compiler()):
        raise OSError("no C compiler is on the path (cc, gcc, clang, or CC)")
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        made = Path(folder, to.name)
        command = [*command, *FLAGS, *options, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
        if done.returncode:
            raise OSError(f"{command[0]} cannot compile {source.name}: {done.stderr.strip()[-500:]}")
        # The first one stays: on NFS another host's process may have it loaded, and would lose it.
        try:
            os.link(made, to)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            made.replace(to)
        return to
