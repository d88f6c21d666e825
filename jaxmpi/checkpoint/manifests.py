"""Which checkpoints there are, and their manifests, which are checked for damage.

    RUN/checkpoints/step_00000125/
        manifest.json       step, workers, and for each file its leaves: path, shape, dtype, offset, crc32; a crc32
        common.bin          state that is equal on all workers
        worker_00003.bin    worker 3's own state

No pickle: leaves are raw bytes. A checkpoint may be cut off, damaged, or come from a stranger. Its folder gets its
final name when it is whole, so the name alone finds candidates. `read_manifest` opens a regular file of bounded size
and checks every field before anyone uses it; `Damaged` has the caller take an older checkpoint. This module imports no
JAX: the supervisor of a job reads the newest step.
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
AGAIN = "bring them back, or begin again at step 0 with --from-start in place of --resume, which keeps what is there"
_NAME = re.compile(r"step_\d{8,19}", re.ASCII)  # i64, such as time.time_ns()


class Damaged(UsageError):
    """A checkpoint unlike what was written; an older one may be whole."""


def check_undamaged(holds: bool, message: str) -> None:
    """Raise `Damaged(message)` unless `holds`."""
    if not holds:
        raise Damaged(message)


# ---------------------------------------------------------------- which there are


def worker_file(worker: int) -> str:
    """The name of a worker's own file."""
    return f"worker_{worker:05d}.bin"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step_"))


def checkpoint_folders(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name, oldest first; one without a manifest is damaged. Links are not followed."""
    if not folder.is_dir():
        return []
    named = (path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir() and not path.is_symlink()), key=step_of)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints with a manifest, oldest first."""
    return [path for path in checkpoint_folders(folder) if (path / "manifest.json").is_file()]


def newest_manifest(folder: Path) -> dict[str, Any] | None:
    """The newest manifest that is whole; None if there is none."""
    for path in reversed(complete_checkpoints(folder)):
        try:
            return read_manifest(path)
        except Damaged:  # `restore` reports it
            continue
    return None


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


# ---------------------------------------------------------------- manifests


def seal_manifest(manifest: dict[str, Any]) -> str:
    """The manifest as JSON, with its own checksum as the last field."""
    return json.dumps({**manifest, "crc32": checksum(manifest)})


def checksum(manifest: dict[str, Any]) -> int:
    """CRC-32 of a manifest's fields except `crc32`."""
    return zlib.crc32(json.dumps({k: v for k, v in manifest.items() if k != "crc32"}).encode())


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest and check its checksum and every field's type."""
    file = path / "manifest.json"
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        check_undamaged(size <= MANIFEST_BYTES, f"{file}: damaged, more than {MANIFEST_BYTES} bytes")
        text = opened.read(size)  # asked for more, Python would reserve as much
    try:
        manifest = parse_json(text, file)
    except UsageError as error:
        raise Damaged(str(error)) from error
    check_undamaged(isinstance(manifest, dict), f"{file}: damaged, got {type(manifest).__name__}; expected an object")
    is_sealed = manifest.get("crc32") == checksum(manifest)
    check_undamaged(is_sealed or "crc32" not in manifest, f"{file}: damaged, its checksum does not match")
    got = manifest.get("format")
    check(type(got) is int and got == FORMAT, f"{path}: got format {got!r:.80}; expected {FORMAT}")
    check_undamaged(is_sealed, f"{file}: damaged, it has no checksum")
    _check_fields(file, manifest)
    return manifest


_FIELDS = {"step": int, "workers": int, "files": dict, "extra": dict}
_ROW = {"path": str, "shape": list, "dtype": str, "offset": int, "crc32": int}
_EXTRA: dict[str, Callable[[Any], bool]] = {  # checks of the values with which a run resumes, if present
    "elapsed_s": lambda got: _is_count(got) or (type(got) is float and 0 <= got < COUNT),
    "skipped": lambda got: _is_count(got),
    "chunks": lambda got: isinstance(got, list) and all(map(_is_count, got)) and sorted(got) == [*range(len(got))],
    "cut": lambda got: got in ("entries", "leaves"),
    "experiment": lambda got: isinstance(got, dict) and _is_positive(got.get("effective batch", 1)),
    "exchange": lambda got: (
        isinstance(got, dict) and got.keys() >= {"asked", "bucket_bytes"} and isinstance(got.get("strategy"), str)
    ),
    "scaled_for": lambda got: _is_positive(got),
    "group_size": lambda got: _is_count(got),
    "monitor": lambda got: isinstance(got, str),
    "class_names": lambda got: isinstance(got, list) and all(isinstance(name, str) for name in got),
    "tally": lambda got: isinstance(got, list) and all(type(n) is float and abs(n) < COUNT for n in got),
}


def _check_fields(file: Path, manifest: dict[str, Any]) -> None:
    """Raise `Damaged` if a manifest's field has a wrong type or value."""

    def refuse_unless(holds: bool, name: str, got: object, expected: object) -> None:
        check_undamaged(holds, f"{file}: {name}: got {got!r:.80}; expected {expected}: damaged")

    for name, kind in _FIELDS.items():
        refuse_unless(type(manifest.get(name)) is kind, name, manifest.get(name), kind.__name__)
    step, workers, files = step_of(file.parent), manifest["workers"], manifest["files"]
    refuse_unless(manifest["step"] == step, "step", manifest["step"], step)
    for name, index in files.items():
        is_index = isinstance(index, list) and all(map(_is_row, index))
        refuse_unless(is_index, f"{name:.80}", index, "an index of leaves")
    refuse_unless(0 < workers <= len(files), "workers", workers, "one file for each")
    names = {"common.bin", *map(worker_file, range(workers))}  # they become paths
    refuse_unless(files.keys() == names, "files", [*files], "common.bin and one for each worker")
    for name, holds in _EXTRA.items():
        got = manifest["extra"].get(name)
        refuse_unless(name not in manifest["extra"] or holds(got), f"extra: {name}", got, "what a run writes")


def _is_count(got: Any) -> bool:
    """Return True for a plausible count."""
    return type(got) is int and 0 <= got < COUNT


def _is_positive(got: Any) -> bool:
    return _is_count(got) and got > 0


def _is_row(row: Any) -> bool:
    """Return True for a well-formed leaf entry of the index."""
    typed = isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in _ROW.items())
    return typed and row["offset"] >= 0 and all(type(n) is int for n in row["shape"])


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read; refuse links and devices."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Damaged(f"{path}: no such file, though a checkpoint has one, or no regular one: {error}") from error
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise Damaged(f"{path}: got something other than a regular file")
    return file
