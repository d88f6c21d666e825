"""Folders of compiled programs, of the package's C sources, and of measurements, trusted if only this user may write.

A crash may leave part of a file, and to load a library that is cut kills the process by SIGBUS. So a cached library
ends with a SHA-256 of its name and content. It is compared before each use, and what does not match is compiled again.
"""

import ctypes
import hashlib
import json
import os
import platform
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import read_plain, sync_file

NO_CACHE = (OSError, RuntimeError, UsageError)  # not writable, full, not private, or nobody's home
COMPILE_S = 120.0  # at most; it takes 0.2 s
MOST_BYTES = 64 << 20  # of a library; the largest has 0.1 MB
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-fast-math", "-shared", "-fPIC", "-pthread")


def cache_folder(name: str) -> Path:
    """Return the user's private cache folder of this name, made if absent.

    Raises:
        OSError, RuntimeError, UsageError: as NO_CACHE.
    """
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmpi"
    for folder in (above, above / name):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{str(folder)!r} is not writable")
    return folder


def _check_private(folder: Path) -> None:
    """Refuse a folder that others own or may fill with code."""
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise UsageError(f"{str(folder)!r} belongs to user {found.st_uid}; expected user {os.getuid()}, this process's")
    if found.st_mode & 0o022:
        mode = f"{stat.S_IMODE(found.st_mode):o}"
        raise UsageError(f"others may write {str(folder)!r} (mode {mode}); empty it, then: chmod go-w")


def json_file(name: str, key: Mapping[str, Any]) -> Path:
    """Path of the value that is cached for a key, in a folder of this name."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder(name) / f"{digest[:16]}.json"


def write_json(name: str, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
    """Cache a value for a key, whole or not at all; print why if not."""
    try:
        path = json_file(name, key)
        aside = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}.tmp")
        aside.write_text(json.dumps({**value, "key": key}, indent=1) + "\n")
        aside.replace(path)
    except NO_CACHE as error:
        print(f"jaxmpi: {name}: what was measured is not cached: {error}; set XDG_CACHE_HOME", file=sys.stderr)


def read_json(name: str, key: Mapping[str, Any], parse: Callable[[Any], Any]) -> Any:
    """`parse` of the value that is cached for a key; None if it is missing or damaged, or with JAXMPI_PROBE=fresh."""
    try:
        value = parse(json.loads(json_file(name, key).read_text()))
    except (*NO_CACHE, ValueError, TypeError, KeyError, AttributeError):  # also a file of another version
        return None
    return None if os.environ.get("JAXMPI_PROBE") == "fresh" else value


def use_compilation_cache() -> str:
    """Keep compiled programs in a private folder, so that ranks share them; return why not, or an empty text."""
    import jax

    chosen = getattr(jax.config, "jax_compilation_cache_dir", None)  # the user's, JAX_COMPILATION_CACHE_DIR included
    try:
        if chosen is None:
            jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
        elif "://" not in chosen and Path(chosen).exists():
            _check_private(Path(chosen))
    except NO_CACHE as error:
        jax.config.update("jax_compilation_cache_dir", None)
        variable = "JAX_COMPILATION_CACHE_DIR" if chosen else "XDG_CACHE_HOME"
        return f"nothing compiled is kept: {error}; or set {variable}"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return ""


# ---------------------------------------------------------------- C sources


def load_c(source: Path, headers: Sequence[Path] = (), constants: Mapping[str, Any] | None = None) -> ctypes.CDLL:
    """Load a source, compiled against XLA's header at the first use.

    A library is cached under a digest of all that it is made of. Where nothing can be cached, each process compiles it.

    Args:
        headers: of the package that it includes.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, or it fails.
    """
    import jax

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
    except NO_CACHE:  # also a folder of that name, or a file system from which nothing is run
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
