"""Origin of a run: commit, versions of packages, digests of files."""

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

from jaxmpi.core.errors import check


def project_root(path: Path) -> Path:
    """The nearest folder above the experiment with a pyproject.toml or .git, else the one above its own."""
    for folder in path.resolve().parents:
        if (folder / "pyproject.toml").exists() or (folder / ".git").exists():
            return folder
    return path.resolve().parent.parent


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


PACKAGES = ("jaxmpi", "jax", "jaxlib", "flax", "optax", "numpy", "mpi4py", "mpi4jax")


def versions() -> dict[str, str]:
    """Installed versions of what can change numbers, and of Python."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit(root: Path | None) -> str:
    """The commit of the project, `+` behind it if files differ; empty outside git."""
    try:
        git = partial(subprocess.run, cwd=root, capture_output=True, text=True, timeout=10, check=True)
        head = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        return head + ("+" if git(["git", "status", "--porcelain"]).stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):  # there is no git, no repository, or no answer in time
        return ""


# ---------------------------------------------------------------- models of the project


def check_models_here(what: str) -> None:
    """Raise `UsageError` unless `python -m models` finds a package in this folder: jaxmpi itself knows no model."""
    check(
        PathFinder.find_spec("models", [os.getcwd(), *sys.path]) is not None,
        f"{what}: no package models in {os.getcwd()}, and jaxmpi installs none; run this in a clone of jaxmpi, or "
        "beside a models/ of your own whose `python -m models` knows --tree",
    )
