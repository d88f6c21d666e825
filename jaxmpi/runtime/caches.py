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

from jaxmpi.core.errors import UsageError, check
from jaxmpi.runtime.launchers import my_rank


def cache_folder(name: str) -> Path:
    """Return the user's private cache folder of this name, made if absent.

    Raises:
        OSError, RuntimeError, UsageError: it cannot be written, nobody's home, or others may write it.
    """
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmpi"
    for folder in (above, above / name):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder == above and folder.stat().st_uid == os.getuid():
            folder.chmod(0o700)  # versions up to 0.1 made it as the umask had it
        check_private(folder)
    check(os.access(folder, os.W_OK | os.X_OK), f"{str(folder)!r} is not writable")
    return folder


def check_private(folder: Path) -> None:
    """Refuse a folder that others own or may fill with code.

    Raises:
        UsageError: its owner, or its mode.
    """
    found = folder.stat()
    owner = found.st_uid
    check(owner == os.getuid(), f"{str(folder)!r} belongs to user {owner}; expected user {os.getuid()}, this process's")
    check(
        not found.st_mode & 0o022,
        f"others may write {str(folder)!r} (mode {stat.S_IMODE(found.st_mode):o}); empty it, then: chmod go-w",
    )


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


def use_compilation_cache() -> None:
    """Keep compiled programs in a private folder, so that ranks share them."""
    import jax

    own = getattr(jax.config, "jax_compilation_cache_dir", None)  # user's folder, JAX_COMPILATION_CACHE_DIR included
    try:
        if own is None:
            jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
        elif "://" not in own and Path(own).exists():
            check_private(Path(own))
    except (OSError, RuntimeError, UsageError) as error:  # not writable, not private, or nobody's home
        jax.config.update("jax_compilation_cache_dir", None)
        if my_rank() == 0:
            name = "JAX_COMPILATION_CACHE_DIR" if own else "XDG_CACHE_HOME"
            print(f"jaxmpi: nothing compiled is kept: {error}; or set {name}", file=sys.stderr)
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
