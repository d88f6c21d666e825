"""`jaxmpi data`: write any source in the packed format, and check it.

A shard is put in place whole, with its rows and a note of the examples it came from; so a packing that was stopped
goes on behind the last whole shard. The manifest comes last: without it a folder is no packed data set.

A packing is the same one as long as its source and the bytes it makes of a good image are the same. What it does with
corrupt images is not part of that: after a stop at one, `--on-error skip` goes on behind the last whole shard.
"""

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import io
import json
import math
import os
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rich import progress
from rich.console import Console

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError, check, lookup
from jaxmpi.core.files import refuse_ways_out, write_all
from jaxmpi.data.decode import CorruptExample, corrupt_if_it_fails, decoded, encoded, encoded_again, resized
from jaxmpi.data.sources.base import Source, pair, where
from jaxmpi.data.sources.packed import (
    INDEX,
    MANIFEST,
    ROW,
    Manifest,
    Packed,
    PackedSource,
    checked,
    shard_name,
    write_manifest,
)
from jaxmpi.data.sources.registry import SOURCES, open_source
from jaxmpi.data.sources.vocabulary import words_main

A = TypeVar("A")
B = TypeVar("B")
Progress = Callable[[int], None]  # how many more examples are done
JOB = "packing.json"
MOST_NOTE_BYTES = 1 << 16  # of a file that says what is packed, or how far; a few hundred are used
AHEAD = 4  # examples in memory, per thread
SHOWN = 20  # damaged records that are named


@dataclasses.dataclass(frozen=True)
class PackingOptions:
    """Treatment of images and errors, and the size of a shard."""

    resize: int = 0  # px: shorter side; 0 keeps the size
    quality: int = 90  # of images that are compressed anew: JPEG 1 to 100, or 0 for PNG
    shard_bytes: int = 1 << 30  # at which a shard ends
    on_error: str = "stop"  # stop | skip: what a corrupt image does
    verify: str = "decode"  # decode | header: how an image that keeps its bytes is verified

    def __post_init__(self) -> None:
        check(self.resize >= 0, f"--resize: got {self.resize} px; expected >= 0")
        check(0 <= self.quality <= 100, f"--quality: got {self.quality}; expected 1 to 100, or 0 for PNG")
        check(self.shard_bytes >= 1, f"--shard-mb: got {self.shard_bytes} bytes; expected >= 1")
        check(self.on_error in ("stop", "skip"), f"--on-error: got {self.on_error!r}; stop or skip")
        check(self.verify in ("decode", "header"), f"--verify: got {self.verify!r}; decode or header")

    def made(self) -> dict[str, Any]:
        """Fields on which the bytes of a good image depend."""
        return {"resize": self.resize, "quality": self.quality, "shard_bytes": self.shard_bytes}


class Packing(NamedTuple):
    """Result of packing."""

    records: int
    size_bytes: int
    skipped: int  # corrupt examples


class Shard(NamedTuple):
    """A shard that is whole, and where it came from."""

    next: int  # first example behind it
    records: int
    size_bytes: int
    skipped: int
    rows_crc32: int


# ---------------------------------------------------------------- one example


def record_of(source: Source, index: int, *, options: PackingOptions) -> tuple[bytes, int] | CorruptExample:
    """An example's compressed image and label, or the `CorruptExample` to skip.

    Raises:
        UsageError: its label or image is none that can be packed, or it cannot be read.
        CorruptExample: with `on_error` stop.
    """
    name = where(source, index)
    try:
        blob, label = _compressed(source, index, options, name)
    except CorruptExample as error:
        if options.on_error == "skip":
            return error
        raise
    except OSError as error:
        raise UsageError(
            f"{name} (example {index}) cannot be read: {error}; what is packed is safe: run the same line again"
        ) from error
    return checked(blob, label, source.classes, name)


def _compressed(source: Source, index: int, options: PackingOptions, name: str) -> tuple[bytes, Any]:
    compressed = getattr(source, "encoded", None)
    if compressed is None:
        image, label = pair(source, index)
        check(not options.resize or image.ndim == 3, f"{name}: got shape {image.shape}; no image to resize")
        return _encoded(image, options), label
    blob, label = compressed(index)
    with corrupt_if_it_fails(blob, name, index):
        check(len(blob) > 0, "the file is empty")
        again = encoded_again(blob, options.resize, options.quality)
        if again is blob and options.verify == "decode":
            decoded(blob, channels=3, resize=0)
    return again, label


def _encoded(image: np.ndarray, options: PackingOptions) -> bytes:
    return encoded(resized(image, options.resize) if options.resize else image, options.quality)


def in_order(
    work: Callable[[A], B], items: Iterable[A], threads: int, stall_timeout_s: float | None = None
) -> Generator[B]:
    """`map(work, items)` by threads, at most AHEAD results per thread ahead.

    Args:
        stall_timeout_s: seconds that one item may take; None: as long as it likes.

    Raises:
        TimeoutError: it has taken longer; its thread is left alone, and does not keep the process from ending.
    """
    waiting: collections.deque[Future[B]] = collections.deque()
    asked: queue.SimpleQueue[tuple[Future[B], A] | None] = queue.SimpleQueue()
    for _ in range(threads):
        threading.Thread(target=_serve, args=(work, asked), name="jaxmpi-pack", daemon=True).start()
    try:
        for item in items:
            waiting.append(Future())
            asked.put((waiting[-1], item))
            if len(waiting) >= AHEAD * threads:
                yield waiting.popleft().result(stall_timeout_s)
        while waiting:
            yield waiting.popleft().result(stall_timeout_s)
    finally:
        for future in waiting:
            future.cancel()
        for _ in range(threads):
            asked.put(None)


def _serve(work: Callable[[A], B], asked: "queue.SimpleQueue[tuple[Future[B], A] | None]") -> None:
    while (job := asked.get()) is not None:
        future, item = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(item))
            except BaseException as error:
                future.set_exception(error)
        del job, future, item  # else an idle thread keeps its last record alive


# ---------------------------------------------------------------- packing


def pack(
    source: Source,
    folder: str | Path,
    options: PackingOptions | None = None,
    threads: int = 2,
    progress: Progress | None = None,
) -> Packing:
    """Pack a source's examples into a folder, in their order.

    If an earlier packing was stopped, this one goes on from there. An image that needs no other size keeps its bytes,
    and is decoded to see that it can be, unless `verify` is `header`.

    Args:
        source: of examples.
        folder: for this split; made if it is not there.
        options: what becomes of the images.
        threads: that read and compress.
        progress: called with how many more examples are done.

    Raises:
        UsageError: the folder holds something else, or the same without examples that are not to be left out; another
            process packs into it, an example cannot be packed, or the disk is full: how many examples are safe.
        CorruptExample: with `on_error` stop.
    """
    options, folder = options or PackingOptions(), Path(folder)
    digest = getattr(source, "digest", None)
    job = {
        "source": source.name,
        "examples": len(source),
        "digest": digest() if digest else "",
        **options.made(),
    }
    with writing(folder, 0, len(source)):
        folder.mkdir(parents=True, exist_ok=True)
        refuse_ways_out(folder, str(folder), "packing writes nothing through those: remove it")
    with claimed(folder, job) as is_new:
        if (folder / MANIFEST).exists():
            packing = finished(folder, job)
            _check_none_left_out(folder, packing.skipped, options)
            return packing
        done = [] if is_new else whole_shards(folder, len(source))
        _check_none_left_out(folder, sum(shard.skipped for shard in done), options)
        with writing(folder, done[-1].next if done else 0, len(source)):
            _forget(folder, len(done))
        if progress and done:
            progress(done[-1].next)
        _Packer(source, folder, options, threads, done, progress).run()
        return _finish(source, folder, job, done)


def _check_none_left_out(folder: Path, skipped: int, options: PackingOptions) -> None:
    check(
        not skipped or options.on_error == "skip",
        f"{folder}: begun with --on-error skip, which has left out {skipped} corrupt examples; give it again, or give "
        "another folder",
    )


@contextlib.contextmanager
def writing(folder: Path, done: int, of: int) -> Iterator[None]:
    """Turn an `OSError` into a `UsageError` with the number of safe examples."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{folder}: {error.strerror or error}; {done} of {of} examples are safe in whole shards. Make room, and "
            "run the same line again: it goes on from there"
        ) from error


@contextlib.contextmanager
def claimed(folder: Path, job: dict[str, Any]) -> Iterator[bool]:
    """Lock the folder; yield True if nothing has been packed in it.

    Raises:
        UsageError: another process is at it, or it has begun to pack something else here.
    """
    with contextlib.ExitStack() as held:
        with writing(folder, 0, job["examples"]):
            file = held.enter_context((folder / JOB).open("a+b", buffering=0))  # closing it writes nothing
            is_new = _begin(file, folder, job)
        yield is_new


def _begin(file: io.FileIO, folder: Path, job: dict[str, Any]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{folder}: another process packs into it; wait for its end") from None
    file.seek(0)
    try:
        begun = json.loads(file.read(MOST_NOTE_BYTES) or "null")
    except (ValueError, RecursionError):
        begun = None  # it was stopped before it had written anything else
    check(
        begun is None or _is_of(begun, job),
        f"{folder}: begun from something else: {_changed(begun, job)}; give another folder, or delete this one",
    )
    if begun is None:
        file.truncate(0)
        write_all(file, json.dumps(job).encode())
    return begun is None


def _is_of(begun: Any, job: dict[str, Any]) -> bool:
    """Return True if `begun` is this job; it may have more fields.

    Earlier versions wrote `on_error` too.
    """
    return isinstance(begun, dict) and begun.items() >= job.items()


def _changed(begun: Any, job: dict[str, Any]) -> str:
    old = begun if isinstance(begun, dict) else {}
    return ", ".join(f"{k}: got {v!r:.80}, expected {old.get(k)!r:.80}" for k, v in job.items() if old.get(k) != v)


def finished(folder: Path, job: dict[str, Any]) -> Packing:
    """Counts of an earlier packing, whose leftovers are removed.

    Raises:
        UsageError: of something else.
    """
    packed = Packed(folder)
    made = packed.manifest.made
    check(_is_of(made, job), f"{folder}: packed from something else: {_changed(made, job)}; give another folder")
    skipped = made.get("skipped")
    check(_is_count(skipped), f"{folder}: got skipped {skipped!r:.80}; expected how many; delete this folder")
    with writing(folder, len(packed), len(packed)):
        _tidy(folder, len(packed.manifest.shard_bytes))
    return Packing(len(packed), sum(packed.manifest.shard_bytes), int(made["skipped"]))


def whole_shards(folder: Path, examples: int) -> list[Shard]:
    """Notes of an earlier packing's shards, until one is missing or damaged.

    Args:
        folder: of the split.
        examples: of the source, of which no note can say more.

    Raises:
        UsageError: one cannot be read.
    """
    done: list[Shard] = []
    while (shard := _whole(folder, len(done), done[-1].next if done else 0, examples)) is not None:
        done.append(shard)
    return done


def _whole(folder: Path, number: int, first: int, examples: int) -> Shard | None:
    """The note of a shard of examples from `first` on."""
    note, rows_file = _note(folder, number), _rows(folder, number)
    try:
        with note.open("rb") as file:
            shard = Shard(**json.loads(file.read(MOST_NOTE_BYTES)))
        bin_bytes = (folder / shard_name(number)).stat().st_size
        if not _is_sound(shard, first, examples) or rows_file.stat().st_size != shard.records * ROW.itemsize:
            return None
        rows = rows_file.read_bytes()
    except (FileNotFoundError, RecursionError, TypeError, ValueError):
        return None
    except OSError as error:  # it may be there again tomorrow: hours of packing are not thrown away for that
        raise UsageError(
            f"{note}, or its shard, cannot be read: {error}; mend it, or delete {folder} and pack again"
        ) from error
    return shard if bin_bytes == shard.size_bytes and zlib.crc32(rows) == shard.rows_crc32 else None


def _is_sound(shard: Shard, first: int, examples: int) -> bool:
    """Return True if a note's numbers can be true.

    Anyone may have written the note, so no number is trusted.
    """
    is_told = all(map(_is_count, shard)) and first < shard.next <= examples
    return is_told and shard.records + shard.skipped == shard.next - first


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _forget(folder: Path, whole: int) -> None:
    """Remove notes behind the whole shards: a later resumption would trust them."""
    stale = set(folder.glob("shard-*.json")) - {_note(folder, number) for number in range(whole)}
    if stale:
        print(
            f"{folder}: packed again from {shard_name(whole)} on: it or what belongs to it is damaged", file=sys.stderr
        )
    for note in stale:
        note.unlink()


def _note(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.json"


def _rows(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.rows"


class _Packer(NamedTuple):
    """Writer of the shards behind those that are done."""

    source: Source
    folder: Path
    options: PackingOptions
    threads: int
    done: list[Shard]
    progress: Progress | None

    def safe(self) -> int:
        """Examples in shards that are whole."""
        return self.done[-1].next if self.done else 0

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Say in errors of the disk how many examples are safe."""
        return writing(self.folder, self.safe(), len(self.source))

    def run(self) -> None:
        """Pack shards until no example is left."""
        indices = range(self.safe(), len(self.source))
        work = functools.partial(record_of, self.source, options=self.options)
        with contextlib.closing(in_order(work, indices, self.threads)) as records:
            numbered = zip(indices, records, strict=True)
            while self.safe() < len(self.source):
                self.done.append(self._shard(numbered))

    def _shard(self, numbered: Iterator[tuple[int, tuple[bytes, int] | CorruptExample]]) -> Shard:
        """The next shard, in place with its rows and its note."""
        number = len(self.done)
        aside = self.folder / f"{shard_name(number)}.tmp"
        try:
            with self.writing():
                file = aside.open("wb", buffering=0)
            with contextlib.closing(file):
                rows, skipped, after = self._fill(file, numbered)
                with self.writing():
                    os.fsync(file.fileno())
            size, raw = sum(length for _, length, _, _ in rows), np.array(rows, ROW).tobytes()
            shard = Shard(after, len(rows), size, skipped, zlib.crc32(raw))
            with self.writing():
                _put(_rows(self.folder, number), raw)
                aside.replace(self.folder / shard_name(number))
                _put(_note(self.folder, number), json.dumps(shard._asdict()).encode())
            return shard
        finally:
            aside.unlink(missing_ok=True)

    def _fill(
        self, file: io.FileIO, numbered: Iterator[tuple[int, tuple[bytes, int] | CorruptExample]]
    ) -> tuple[list[tuple[int, int, int, int]], int, int]:
        """Write records until the shard is full or none are left.

        Return rows, the number of corrupt examples, and the index behind the last example.
        """
        rows, size, skipped, after = [], 0, 0, 0
        for index, record in numbered:
            after = index + 1
            if self.progress:
                self.progress(1)
            if isinstance(record, CorruptExample):
                print(f"skipped: {record.fault}", file=sys.stderr)
                skipped += 1
                continue
            blob, label = record
            with self.writing():
                write_all(file, blob)
            rows.append((0, len(blob), label, zlib.crc32(blob)))
            size += len(blob)
            if size >= self.options.shard_bytes:
                break
        return rows, skipped, after


def _put(path: Path, content: bytes) -> None:
    """A file, whole or not at all."""
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with aside.open("wb", buffering=0) as file:
            write_all(file, content)
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _finish(source: Source, folder: Path, job: dict[str, Any], shards: list[Shard]) -> Packing:
    """Index and manifest; then what is no longer needed goes."""
    skipped = sum(shard.skipped for shard in shards)
    with writing(folder, shards[-1].next if shards else 0, len(source)):
        parts = [np.frombuffer(_rows(folder, number).read_bytes(), ROW) for number in range(len(shards))]
        rows = np.concatenate([np.empty(0, ROW), *parts])
        lengths = rows["length"].astype(np.uint64)
        rows["offset"] = np.cumsum(lengths) - lengths
        _put(folder / INDEX, rows.tobytes())
        manifest = Manifest(
            records=len(rows),
            classes=int(source.classes or 0),
            names=tuple(getattr(source, "names", ())),
            shard_bytes=tuple(shard.size_bytes for shard in shards),
            index_sha256=hashlib.sha256(rows.tobytes()).hexdigest(),
            made={**job, "skipped": skipped},
        )
        write_manifest(folder, manifest)
        _tidy(folder, len(shards))
    return Packing(len(rows), sum(manifest.shard_bytes), skipped)


def _tidy(folder: Path, shards: int) -> None:
    for number in range(shards):
        _note(folder, number).unlink(missing_ok=True)
        _rows(folder, number).unlink(missing_ok=True)
    (folder / JOB).unlink(missing_ok=True)


# ---------------------------------------------------------------- checking


def damaged(packed: Packed, threads: int = 2, progress: Progress | None = None, decode: bool = False) -> list[str]:
    """Damage by record, found by checksums, and with `decode` by decoding."""

    def look(index: int) -> str:
        try:
            packed[index] if decode and isinstance(packed, PackedSource) else packed.encoded(index)
        except CorruptExample as error:
            return error.fault
        except (OSError, UsageError) as error:
            return f"{packed.where(index)} (example {index}) cannot be read: {error}"
        return ""

    found = []
    for text in in_order(look, range(len(packed)), threads):
        if text:
            found.append(text)
        if progress:
            progress(1)
    return found


def splits_in(folder: Path) -> list[Path]:
    """The folder, and those in it, that are packed or begun.

    Raises:
        UsageError: there are none.
    """
    check(folder.is_dir(), f"{folder}: no such folder")
    candidates = [folder, *sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())]
    found = [path for path in candidates if any((path / name).exists() for name in (MANIFEST, INDEX, JOB))]
    check(bool(found), f"{folder}: neither it nor a folder in it has a {MANIFEST}; make one with: jaxmpi data pack")
    return found


# ---------------------------------------------------------------- the command


@contextlib.contextmanager
def bar(text: str, total: int) -> Iterator[Progress]:
    """A progress bar on the terminal."""
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(text, total=total)
        yield lambda n: shown.advance(task, n)


def _threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")


def pack_parser() -> argparse.ArgumentParser:
    """Parser of `jaxmpi data pack`."""
    parser = argparse.ArgumentParser(
        "jaxmpi data pack",
        description="Pack SRC into DST/<split>/; run again to go on.",
        epilog="example: jaxmpi data pack /data/imagenet /data/packed --resize 256",
    )
    parser.add_argument(
        "src", metavar="SRC", help=f"folder of the source; or {', '.join(NEED_NO_FOLDER)}, which need none"
    )
    parser.add_argument("dst", metavar="DST", type=Path, help="folder for the packed splits")
    parser.add_argument("--source", help=f"what SRC holds: {', '.join(SOURCES)} (default: imagefolder)")
    parser.add_argument("--name", default="", help="tfds: data set, such as imagenet2012")
    parser.add_argument(
        "--columns", nargs=2, default=(), metavar=("IMAGE", "LABEL"), help="of tables: names of the two"
    )
    parser.add_argument("--train-split", default="train", help="its name in SRC (default: train)")
    parser.add_argument("--validation-split", default="validation", help="its name in SRC; '' for none")
    parser.add_argument(
        "--resize", type=int, default=PackingOptions.resize, help="px: shorter side; 0 keeps size and bytes"
    )
    parser.add_argument(
        "--quality", type=int, default=PackingOptions.quality, help="JPEG 1 to 100 (default: 90); 0: PNG"
    )
    parser.add_argument("--shard-mb", type=float, default=1024, help="at which a shard ends (default: 1024)")
    parser.add_argument("--on-error", default=PackingOptions.on_error, help="stop | skip: what a corrupt image does")
    parser.add_argument(
        "--verify",
        default=PackingOptions.verify,
        help="decode | header: of images that keep their bytes (default: decode)",
    )
    _threads(parser)
    return parser


NEED_NO_FOLDER = ("digits", "animals", "synthetic")
# What messages of sources call an option, and what `jaxmpi data pack` calls it.
FLAGS = {
    "--data.columns": "--columns",
    "--data.train-split": "--train-split",
    "--data.validation-split": "--validation-split",
    "data.on_error=skip goes on without such examples": (
        "run the same line again with --on-error skip, which leaves such examples out"
    ),
    "set data.dir or JAXMPI_DATA to": "give as SRC",
    "set data.dir to": "give as SRC",
    "set data.name to": "give as --name",
}


@contextlib.contextmanager
def flags_of_pack() -> Iterator[None]:
    """Have errors of sources name this command's options, not the trainer's."""
    try:
        yield
    except (CorruptExample, UsageError) as error:
        text = str(error)
        for trainer, mine in FLAGS.items():
            text = text.replace(trainer, mine)
        raise UsageError(text) from error


def pack_main(argv: list[str]) -> None:
    """`jaxmpi data pack SRC DST`."""
    options = pack_parser().parse_args(argv)
    check(options.threads >= 1, f"--threads: got {options.threads}; expected >= 1")
    needs_none = options.source is None and options.src in NEED_NO_FOLDER
    data = Data(
        source=options.src if needs_none else options.source or "imagefolder",
        dir="" if needs_none else options.src,
        name=options.name,
        columns=tuple(options.columns),
        train_split=options.train_split,
        validation_split=options.validation_split,
    )
    check(0 < options.shard_mb < math.inf, f"--shard-mb: got {options.shard_mb}; expected MiB > 0")
    shard_bytes = max(int(options.shard_mb * 2**20), 1)
    chosen = PackingOptions(options.resize, options.quality, shard_bytes, options.on_error, options.verify)
    for split in ("train", "validation") if options.validation_split else ("train",):
        with flags_of_pack():
            source = open_source(data, split)
            with bar(split, len(source)) as progress:
                done = pack(source, options.dst / split, chosen, options.threads, progress)
        print(f"{options.dst / split}: {done.records} records, {done.size_bytes / 1e6:,.1f} MB, skipped {done.skipped}")


def check_parser() -> argparse.ArgumentParser:
    """Parser of `jaxmpi data check`."""
    parser = argparse.ArgumentParser(
        "jaxmpi data check",
        description="Verify every record of a packed data set.",
        epilog="example: jaxmpi data check /data/packed --decode",
    )
    parser.add_argument("dst", metavar="DST", type=Path, help="what jaxmpi data pack has made")
    parser.add_argument("--decode", action="store_true", help="decode the images too")
    _threads(parser)
    return parser


def check_main(argv: list[str]) -> None:
    """`jaxmpi data check DST`; exit code 1 if a record is damaged."""
    options = check_parser().parse_args(argv)
    check(options.threads >= 1, f"--threads: got {options.threads}; expected >= 1")
    is_whole = True
    for folder in splits_in(options.dst):
        packed = PackedSource(str(folder), channels=3, resize=0)
        with bar(folder.name, len(packed)) as progress:
            wrong = damaged(packed, options.threads, progress, options.decode)
        print("".join(f"{text}\n" for text in wrong[:SHOWN]), end="")
        print(f"{folder}: {len(wrong)} of {len(packed)} records are damaged" if wrong else f"{folder}: all is well")
        is_whole = is_whole and not wrong
    if not is_whole:
        sys.exit(1)


COMMANDS: dict[str, Callable[[list[str]], None]] = {"pack": pack_main, "check": check_main, "words": words_main}


USAGE = """usage: jaxmpi data pack SRC DST [options]
       jaxmpi data check DST [options]
       jaxmpi data words SRC FILE [options]

Pack a source into few files that are read fast, and check them; make a vocabulary of a text. `--help` after the command
lists its options.

example: jaxmpi data pack /data/imagenet /data/packed"""


def main(argv: list[str]) -> None:
    """Run `jaxmpi data pack`, `check` or `words`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    lookup(COMMANDS, argv[0], "command")(argv[1:])
