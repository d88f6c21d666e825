"""Names and manifests of checkpoints, which are checked for damage.

A checkpoint may be cut off, damaged, or come from a stranger. Its folder gets its final name when it is whole, so the
name alone finds candidates. The manifest has a checksum of itself and a row for each leaf. `read_manifest` opens a
regular file of bounded size and checks every field before anyone uses it. A field of the wrong kind raises `Damaged`,
after which the caller takes an older checkpoint. The module imports no JAX: the supervisor of a job reads the newest
step.
"""

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.json_tree import parse_json

FORMAT = 2
MANIFEST_BYTES = 1 << 28  # limit of a plausible manifest: a leaf takes some hundred bytes
COUNT = 1 << 53  # limit of a plausible count
_NAME = re.compile(r"step_\d{8,19}", re.ASCII)  # i64, such as time.time_ns()


class Damaged(UsageError):
    """A checkpoint unlike what was written; an older one may be whole."""


# ---------------------------------------------------------------- which there are


def worker_file(worker: int) -> str:
    """The name of a worker's own file."""
    return f"worker_{worker:05d}.bin"


def found(folder: Path) -> list[Path]:
    """Checkpoints with a manifest, oldest first; links are not followed."""
    return [path for path in candidates(folder) if (path / "manifest.json").is_file()]


def candidates(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name, oldest first.

    A checkpoint is renamed to this name when it is whole, so one without a manifest is damaged.
    """
    if not folder.is_dir():
        return []
    return sorted(
        (p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()), key=step_of
    )


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step_"))


def newest(folder: Path) -> dict[str, Any] | None:
    """The newest manifest that is whole; None if there is none."""
    for path in reversed(found(folder)):
        try:
            return read_manifest(path)
        except Damaged:  # `restore` reports it
            continue
    return None


# ---------------------------------------------------------------- manifests


def sealed(manifest: dict[str, Any]) -> str:
    """The manifest as JSON, with its own checksum as the last field."""
    return json.dumps({**manifest, "crc32": checksum(manifest)})


def checksum(manifest: dict[str, Any]) -> int:
    """CRC-32 of a manifest's fields except `crc32`."""
    return zlib.crc32(json.dumps({k: v for k, v in manifest.items() if k != "crc32"}).encode())


_FIELDS = {"step": int, "workers": int, "files": dict, "extra": dict}
_EXTRA: dict[str, Callable[[Any], bool]] = {  # checks of the values with which a run resumes, if present
    "elapsed_s": lambda got: is_count(got) or (type(got) is float and 0 <= got < COUNT),
    "skipped": lambda got: is_count(got),
    "chunks": lambda got: isinstance(got, list) and all(map(is_count, got)) and sorted(got) == [*range(len(got))],
    "cut": lambda got: got in ("entries", "leaves"),
    "experiment": lambda got: isinstance(got, dict),
    "monitor": lambda got: isinstance(got, str),
    "tally": lambda got: isinstance(got, list) and all(type(n) is float and abs(n) < COUNT for n in got),
}
_ROW = {"path": str, "shape": list, "dtype": str, "offset": int, "crc32": int}


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest and check its checksum and every field's type.

    Raises:
        Damaged: it differs from what was written.
        UsageError: another format.
    """
    file = path / "manifest.json"
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        undamaged(size <= MANIFEST_BYTES, f"{file}: damaged, more than {MANIFEST_BYTES} bytes")
        text = opened.read(size)  # asked for more, Python would reserve as much
    try:
        manifest = parse_json(text, file)
    except UsageError as error:
        raise Damaged(str(error)) from error
    undamaged(isinstance(manifest, dict), f"{file}: damaged, got {type(manifest).__name__}; expected an object")
    is_sealed = manifest.get("crc32") == checksum(manifest)
    got = manifest.get("format")
    undamaged(is_sealed or "crc32" not in manifest, f"{file}: damaged, its checksum does not match")
    check(type(got) is int and got == FORMAT, f"{path}: got format {got!r:.80}; expected {FORMAT}")
    undamaged(is_sealed, f"{file}: damaged, it has no checksum")
    check_fields(file, manifest)
    return manifest


def best_first(paths: Iterable[Path]) -> list[Path]:
    """The checkpoints that were evaluated, the best first, the older first among equals.

    A run may go on with another `monitor`, whose values compare with none before: only those of the newest count.
    """
    scores: dict[Path, float] = {}
    monitor = None
    for path in sorted(paths, key=step_of, reverse=True):
        try:
            manifest = read_manifest(path)
        except (UsageError, OSError):  # damaged: kept only as one of the newest; resuming reports it
            continue
        score, by = manifest.get("score"), manifest["extra"].get("monitor", "")
        if isinstance(score, float) and math.isfinite(score):
            monitor = by if monitor is None else monitor
            if by == monitor:
                scores[path] = score
    return sorted(scores, key=lambda path: (scores[path], step_of(path)))


def check_fields(file: Path, manifest: dict[str, Any]) -> None:
    """Raise `Damaged` if a manifest's field has a wrong type or value."""
    for name, kind in _FIELDS.items():
        got = manifest.get(name)
        undamaged(type(got) is kind, f"{file}: {name}: got {got!r:.80}; expected {kind}")
    step, workers = step_of(file.parent), manifest["workers"]
    undamaged(manifest["step"] == step, f"{file}: step: got {manifest['step']!r:.80}; expected {step}")
    for name, index in manifest["files"].items():
        rows = index if isinstance(index, list) else [index]
        undamaged(all(map(is_row, rows)), f"{file}: {name:.80}: damaged, not an index of leaves")
    undamaged(
        0 < workers <= len(manifest["files"]), f"{file}: workers: got {workers!r:.80}; expected one file for each"
    )
    names = {"common.bin", *map(worker_file, range(workers))}  # they become paths
    undamaged(
        manifest["files"].keys() == names,
        f"{file}: files: got {[*manifest['files']]!r:.80}; expected common.bin and one for each worker",
    )
    for name, holds in _EXTRA.items():
        got = manifest["extra"].get(name)
        undamaged(name not in manifest["extra"] or holds(got), f"{file}: extra: {name}: got {got!r:.80}: damaged")


def is_count(got: Any) -> bool:
    """Return True for a plausible count."""
    return type(got) is int and 0 <= got < COUNT


def is_row(row: Any) -> bool:
    """Return True for a well-formed leaf entry of the index."""
    typed = isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in _ROW.items())
    return typed and row["offset"] >= 0 and all(type(n) is int for n in row["shape"])


def undamaged(holds: bool, message: str) -> None:
    """Raise `Damaged(message)` unless `holds`."""
    if not holds:
        raise Damaged(message)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read; refuse links and devices.

    Raises:
        Damaged: it is not a regular file, or there is none.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Damaged(f"{path}: no such file, though a checkpoint has one, or no regular one: {error}") from error
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise Damaged(f"{path}: got something other than a regular file")
    return file
