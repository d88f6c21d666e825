"""Origin of a run: commit, versions of packages, digests of files, the signature of the user who has begun it."""

import hmac
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from jaxmpi.core.errors import UsageError
from jaxmpi.runtime.compile_cache import cache_folder

KEY_BYTES = 32  # of the key with which a user signs

PACKAGE = Path(__file__).resolve().parent.parent  # jaxmpi


def project_root(path: Path) -> Path:
    """The nearest folder above with pyproject.toml or .git, else two levels up.

    For an experiment that was installed with jaxmpi it is the current folder: above site-packages may be any project.
    """
    if path.resolve().is_relative_to(PACKAGE):
        return Path.cwd()
    for folder in path.resolve().parents:
        if (folder / "pyproject.toml").exists() or (folder / ".git").exists():
            return folder
    return path.resolve().parent.parent


PACKAGES = ("jaxmpi", "jax", "jaxlib", "flax", "optax", "numpy", "mpi4py", "mpi4jax")


def versions() -> dict[str, str]:
    """Installed versions of what can change numbers, and of Python."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["python"] = sys.version.split()[0]
    return found


def commit(root: Path | None) -> str:
    """The project's commit, with `+` if files differ; empty outside git."""
    try:
        git = partial(subprocess.run, cwd=root, capture_output=True, text=True, timeout=10, check=True)
        head = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        return head + ("+" if git(["git", "status", "--porcelain"]).stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):  # there is no git, no repository, or no answer in time
        return ""


def sign(value: Any) -> str:
    """A signature of a JSON value by this user's own key; empty if no private folder can keep the key.

    A run directory may come from anyone and still belong to this user, as an unpacked archive does. The key never
    leaves this user's folder, so a value with this signature was written by this user.
    """
    try:
        key = cache_folder("key") / "key"
        if not key.exists():
            with tempfile.NamedTemporaryFile(dir=key.parent) as file:
                file.write(os.urandom(KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
                with suppress(FileExistsError):  # another process was first
                    os.link(file.name, key)
        secret = key.read_bytes()
        if len(secret) != KEY_BYTES:  # a crash may leave an empty file, with which anybody can sign
            key.unlink()
            return ""
        return hmac.new(secret, json.dumps(value).encode(), "sha256").hexdigest()
    except (OSError, RuntimeError, UsageError):
        return ""
