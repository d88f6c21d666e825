"""The folder of compiled programs and measurements, trusted if only this user may write."""

import hashlib
import json
import os
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmpi.core.errors import UsageError


def cache_folder(name: str) -> Path:
    """Return the user's private cache folder of this name, made if absent.

    Raises:
        OSError, RuntimeError, UsageError: it cannot be written, nobody's home, or others may write it.
    """
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmpi"
    for folder in (above, above / name):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_private(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{str(folder)!r} is not writable")
    return folder


def check_private(folder: Path) -> None:
    """Refuse a folder that others own or may fill with code.

    Raises:
        UsageError: its owner, or its mode.
    """
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
    except (OSError, RuntimeError, UsageError) as error:
        print(f"jaxmpi: {name}: what was measured is not cached: {error}; set XDG_CACHE_HOME", file=sys.stderr)


def use_compilation_cache() -> str:
    """Keep compiled programs in a private folder, so that ranks share them; return why not, or an empty text."""
    import jax

    chosen = getattr(jax.config, "jax_compilation_cache_dir", None)  # the user's, JAX_COMPILATION_CACHE_DIR included
    try:
        if chosen is None:
            jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
        elif "://" not in chosen and Path(chosen).exists():
            check_private(Path(chosen))
    except (OSError, RuntimeError, UsageError) as error:  # not writable, not private, or nobody's home
        jax.config.update("jax_compilation_cache_dir", None)
        variable = "JAX_COMPILATION_CACHE_DIR" if chosen else "XDG_CACHE_HOME"
        return f"nothing compiled is kept: {error}; or set {variable}"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return ""
