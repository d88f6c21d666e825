"""Any source written in the packed format, and checked.

A shard is put in place whole, then its rows are appended to the index, then a note of the examples that it came from to
the file JOB; so a packing that was stopped continues behind the last whole shard. The manifest comes last: without it a
folder is no packed data set.

A packing is identified by its source and by the bytes that it makes of a good image. How it treats corrupt images
is not part of that: after a stop at one, `--on-error skip` continues behind the last whole shard.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import refuse_ways_out, sync_file, whole_file, write_all
from jaxmpi.data.decode import CorruptExample, corrupt_if_it_fails, decoded, encoded, encoded_again, resized
from jaxmpi.data.sources.base import Source, file_state, pair, sha256, where
from jaxmpi.data.sources.packed import (
    FORMAT,
    INDEX,
    MANIFEST,
    ROW,
    Manifest,
    PackedSource,
    check_manifest,
    check_record,
    shard_name,
)
from jaxmpi.data.sources.reading import in_order

Progress = Callable[[int], None]  # how many more examples are done
Record = tuple[bytes, int] | CorruptExample
MOST_JOB_BYTES = 1 << 23  # that are plausible
JOB = "packing.json"  # what is packed, then a note a shard, a line each, until all is finished; also the lock


@dataclasses.dataclass(frozen=True)
class PackingOptions:
    """Treatment of images and errors, and the size of a shard."""

    resize: int = 0  # px: shorter side; 0 keeps the size
    quality: int = 90  # quality of images that are compressed anew: JPEG 1 to 100, or 0 for PNG
    shard_bytes: int = 1 << 30  # at which a shard ends
    on_error: str = "stop"  # stop | skip: what a corrupt image does

    def __post_init__(self) -> None:
        for flag, value, fits, expected in (
            ("--resize", self.resize, self.resize >= 0, "px >= 0"),
            ("--quality", self.quality, 0 <= self.quality <= 100, "1 to 100, or 0 for PNG"),
            ("--shard-mb", self.shard_bytes, self.shard_bytes >= 1, "1 byte or more"),
            ("--on-error", self.on_error, self.on_error in ("stop", "skip"), "stop or skip"),
        ):
            if not fits:
                raise UsageError(f"{flag}: got {value!r}; expected {expected}")


class Packing(NamedTuple):
    """Result of packing."""

    records: int
    size_bytes: int
    skipped: int  # corrupt examples


class Shard(NamedTuple):
    """A shard that is whole: the note of it."""

    next: int  # first example behind it
    skipped: int
    records: int
    size_bytes: int


def pack(
    source: Source,
    folder: str | Path,
    options: PackingOptions | None = None,
    threads: int = 2,
    progress: Progress | None = None,
) -> Packing:
    """Pack a source's examples into a folder for one split, in their order; continue if an earlier packing was stopped.

    An image that needs no other size keeps its bytes, and is decoded to see that it can be. `threads` read and
    compress; `progress` is called with how many more examples are done.

    Raises:
        UsageError: the folder has something else; another process packs into it, an example cannot be packed, or the
            disk is full: how many examples are safe.
        CorruptExample: with `on_error` stop.
    """
    options, folder, progress = options or PackingOptions(), Path(folder), progress or (lambda n: None)
    job = {  # all on which the bytes depend
        "source": source.name,
        "examples": len(source),
        "digest": getattr(source, "digest", str)(),
        "files": _digest_states(source),
        **{name: getattr(options, name) for name in ("resize", "quality", "shard_bytes")},
    }
    shards: list[Shard] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_ways_out(folder, str(folder), "packing writes nothing through those: remove it")
        with (folder / JOB).open("a+b", buffering=0) as notes:
            try:
                fcntl.flock(notes, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{folder}: another process packs into it; wait for its end") from None
            if (folder / MANIFEST).exists():
                made = PackedSource(folder).manifest
                _check_same_job(made.made, job, folder)
                (folder / JOB).unlink(missing_ok=True)
                return Packing(made.records, sum(made.shard_bytes), int(made.made.get("skipped", 0)))
            shards += _resume(notes, folder, job, len(source))
            begin = _count_done(shards)
            progress(begin)
            work, examples = functools.partial(_pack_one, source, options=options), range(begin, len(source))
            with (
                (folder / INDEX).open("ab", 0) as index,
                contextlib.closing(in_order(work, examples, threads)) as packed,
            ):
                numbered = enumerate(packed, begin)
                while _count_done(shards) < len(source):
                    shard = _write_shard(folder, shards, numbered, index, options.shard_bytes, progress)
                    write_all(notes, json.dumps(shard).encode() + b"\n")
                    shards.append(shard)
            return _finish(source, folder, job, shards)
    except OSError as error:  # of writing alone: what reads the source raises others
        raise UsageError(
            f"{folder}: {error.strerror or error}; {_count_done(shards)} of {len(source)} examples are safe in whole "
            "shards. Make room, and run the same line again: it continues from there"
        ) from error


def _digest_states(source: Source) -> str:
    """Digest of the sizes and times of a source's files: `digest` is of their names and labels, which stay."""

    def describe(path: str) -> str:
        try:
            return " ".join(map(str, file_state(path)))
        except OSError:  # whoever comes to the file says what is wrong with it
            return ""

    return sha256(map(describe, getattr(source, "paths", tuple)()))


def _count_done(shards: list[Shard]) -> int:
    return shards[-1].next if shards else 0


# ---------------------------------------------------------------- what an earlier packing has left


def _check_same_job(earlier: dict[str, Any], job: dict[str, Any], folder: Path) -> None:
    odd = [f"{k}: got {v!r:.80}, expected {earlier.get(k)!r:.80}" for k, v in job.items() if earlier.get(k) != v]
    if odd:
        raise UsageError(
            f"{folder}: packed from something else: {', '.join(odd)}; give another folder, or delete this one"
        )


def _resume(notes: io.FileIO, folder: Path, job: dict[str, Any], examples: int) -> list[Shard]:
    """An earlier packing's shards, until one is missing or damaged; from now on notes and index are of these alone."""
    notes.seek(0)
    written: list[Any] = []
    with contextlib.suppress(ValueError, RecursionError):  # of a line during which the packing was stopped
        for line in notes.read(MOST_JOB_BYTES).splitlines():
            written.append(json.loads(line))
    earlier, *lines = [*written, None]
    shards: list[Shard] = []
    index, records = folder / INDEX, 0
    if isinstance(earlier, dict):
        _check_same_job(earlier, job, folder)
        rows = np.fromfile(index, ROW) if index.exists() else np.empty(0, ROW)
        for line in lines:
            if not (isinstance(line, list) and len(line) == 4 and all(isinstance(n, int) and n >= 0 for n in line)):
                break
            shard, path = Shard(*line), folder / shard_name(len(shards))
            lengths = rows["length"][records : records + shard.records]
            done = shard.next - _count_done(shards)
            is_counted = shard.records + shard.skipped == done > 0 and shard.next <= examples
            is_there = path.exists() and path.stat().st_size == shard.size_bytes == lengths.sum(dtype=np.uint64)
            if not (is_counted and is_there and len(lengths) == shard.records):
                break
            shards.append(shard)
            records += shard.records
    notes.truncate(0)
    write_all(notes, b"".join(json.dumps(line).encode() + b"\n" for line in (job, *shards)))
    if index.exists():
        os.truncate(index, records * ROW.itemsize)
    return shards


# ---------------------------------------------------------------- what is packed now


def _pack_one(source: Source, index: int, *, options: PackingOptions) -> Record:
    """An example's compressed image and label, or the `CorruptExample` to skip."""
    name, compressed = where(source, index), getattr(source, "encoded", None)
    try:
        if compressed is None:
            image, label = pair(source, index)
            if options.resize and image.ndim != 3:
                raise UsageError(f"{name}: got shape {image.shape}; expected an image to resize")
            blob = encoded(resized(image, options.resize) if options.resize else image, options.quality)
        else:
            original, label = compressed(index)
            with corrupt_if_it_fails(original, name, index):
                if not original:
                    raise UsageError("the file is empty")
                blob = encoded_again(original, options.resize, options.quality)
                if blob is original:
                    decoded(blob, channels=3, resize=0)
    except CorruptExample as error:
        if options.on_error == "skip":
            return error
        raise
    except OSError as error:
        raise UsageError(
            f"{name} (example {index}) cannot be read: {error}; what is packed is safe: run the same line again"
        ) from error
    return check_record(blob, label, source.classes, name)


def _write_shard(
    folder: Path,
    before: list[Shard],
    numbered: Iterator[tuple[int, Record]],
    index: io.FileIO,
    shard_bytes: int,
    progress: Progress,
) -> Shard:
    """Put the next shard in place, and its rows into the index."""
    offset = sum(shard.size_bytes for shard in before)
    rows, size_bytes, skipped, after = [], 0, 0, 0
    with whole_file(folder / shard_name(len(before))) as file:
        for number, record in numbered:
            after = number + 1
            progress(1)
            if isinstance(record, CorruptExample):
                print(f"skipped: {record.fault}", file=sys.stderr)
                skipped += 1
                continue
            blob, label = record
            write_all(file, blob)
            rows.append((offset + size_bytes, len(blob), label, zlib.crc32(blob)))
            size_bytes += len(blob)
            if size_bytes >= shard_bytes:
                break
    write_all(index, np.array(rows, ROW).tobytes())
    sync_file(index)
    return Shard(after, skipped, len(rows), size_bytes)


def _finish(source: Source, folder: Path, job: dict[str, Any], shards: list[Shard]) -> Packing:
    skipped = sum(shard.skipped for shard in shards)
    manifest = Manifest(
        records=sum(shard.records for shard in shards),
        classes=int(source.classes or 0),
        names=tuple(getattr(source, "names", ())),
        shard_bytes=tuple(shard.size_bytes for shard in shards),
        index_sha256=hashlib.sha256((folder / INDEX).read_bytes()).hexdigest(),
        made={**job, "skipped": skipped},
    )
    check_manifest(manifest, folder / MANIFEST)  # names are any object's
    with whole_file(folder / MANIFEST) as file:
        write_all(file, json.dumps({"format": FORMAT, **manifest._asdict()}, indent=1).encode())
    (folder / JOB).unlink()
    return Packing(manifest.records, sum(manifest.shard_bytes), skipped)


# ---------------------------------------------------------------- checks


def find_damage(
    packed: PackedSource, threads: int = 2, progress: Progress | None = None, decode: bool = False
) -> list[str]:
    """Damage by record, found by checksums, and with `decode` by decoding."""

    def look(index: int) -> str:
        try:
            packed[index] if decode else packed.cells(index)
        except CorruptExample as error:
            return error.fault
        except (OSError, UsageError) as error:
            return f"{packed.where(index)} (example {index}) cannot be read: {error}"
        return ""

    damage = []
    for text in in_order(look, range(len(packed)), threads):
        damage += [text] * bool(text)
        if progress:
            progress(1)
    return damage


def splits_in(folder: Path) -> list[Path]:
    """The folder, and those in it, that are packed, or partly."""
    inner = sorted(path for path in folder.iterdir() if not path.is_symlink()) if folder.is_dir() else []
    folders = [path for path in (folder, *inner) if any((path / name).exists() for name in (MANIFEST, INDEX, JOB))]
    if not folders:
        raise UsageError(f"{folder}: neither it nor a folder in it has a {MANIFEST}; make one with: jaxmpi data pack")
    return folders
