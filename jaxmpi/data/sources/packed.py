"""The packed format, after IBM's DIMD: a blob of compressed images, in shards, and an index.

    manifest.json        what is here: JSON, written last
    index.bin            a row of ROW for each record: offset in the blob, length, label, CRC-32
    shard-00000.bin ...  the blob, cut between records

Records lie side by side in the blob, in the order of the index. A folder may come from a stranger. So every number is
checked against the sizes of the files before memory is taken for it. File names follow from their number, links are
not followed, and nothing is unpickled. Checksums find damage, not malice.
"""

import hashlib
import os
import re
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import open_plain
from jaxmpi.core.json_tree import read_json
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.sources.base import Source, TableSource, data_root, sha256, split_name
from jaxmpi.data.sources.reading import Descriptor, LastUsed

FORMAT = "jaxmpi packed 1"
MANIFEST, INDEX = "manifest.json", "index.bin"
ROW = np.dtype([("offset", "<u8"), ("length", "<u4"), ("label", "<i4"), ("crc32", "<u4")])  # 20 bytes
MAX_RECORD_BYTES = 1 << 30  # counts of MPI messages are C ints
MAX_MANIFEST_BYTES = 4 << 20  # as objects of Python perhaps thirty times as much
MAX_SHARDS = 100_000
PLAIN = "a plain file of a packed data set, no link; copy it again, or pack again"
# Halves of surrogate pairs, but for those in which Python has the bytes of a folder's name that is not UTF-8.
NO_TEXT = re.compile("[\ud800-\udc7f\udd00-\udfff]")


class Manifest(NamedTuple):
    """Contents of manifest.json."""

    records: int
    classes: int  # 0 if it is not known
    names: tuple[str, ...]  # names of the classes; may be empty
    shard_bytes: tuple[int, ...]
    index_sha256: str
    made: dict[str, Any]  # from what and how; for people


def shard_name(number: int) -> str:
    """Name of a shard's file."""
    return f"shard-{number:05d}.bin"


def check_record(blob: Any, label: Any, classes: int, where: str) -> tuple[Any, int]:
    """Return a compressed image and its label; refuse a label that is not in [0, classes), or an image too long."""
    top = classes or 2**31
    if np.ndim(label) or np.asarray(label).dtype.kind not in "iu" or not 0 <= int(label) < top:
        raise UsageError(f"{where}: got label {label!r:.80}; expected a whole number, 0 <= label < {top}")
    if len(blob) > MAX_RECORD_BYTES:
        raise UsageError(f"{where}: got {len(blob)} bytes; expected at most {MAX_RECORD_BYTES}")
    return blob, int(label)


class PackedSource(TableSource):
    """Records of one split of a packed data set, for several threads; `rows` are ROW[n], the index.

    Raises:
        UsageError: a file is missing, damaged or of the wrong size: which.
    """

    is_compressed = True

    def __init__(self, folder: str | Path, config: Data | None = None) -> None:
        super().__init__(config or Data("packed"))
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.rows = _read_index(self.folder, self.manifest)
        self.names, self.classes = self.manifest.names, self.manifest.classes
        shard_ends = np.cumsum(self.manifest.shard_bytes, dtype=np.uint64)
        self._begins = shard_ends - np.array(self.manifest.shard_bytes, np.uint64)  # of shards, in the blob
        self.files = [str(self.folder / shard_name(number)) for number in range(len(shard_ends))]
        self.set_parts(self.files, np.diff(np.searchsorted(self.rows["offset"], shard_ends), prepend=0).tolist())
        self._files = LastUsed(partial(_open_shard, self.folder), MAX_SHARDS)
        for path, size in zip(self.files, self.manifest.shard_bytes, strict=True):
            descriptor = open_plain(path, PLAIN)
            got = os.fstat(descriptor).st_size
            os.close(descriptor)
            if got != size:
                raise UsageError(f"{path}: got {got} bytes; expected {size}: copy it again")

    def read(self, part: int, row: int, index: int) -> tuple[bytes, int]:
        """A record's compressed image and label; `OSError` if its shard cannot be opened or has become shorter."""
        offset, length, label, checksum = self.rows[index].tolist()
        blob = os.pread(self._files[part].number, length, offset - int(self._begins[part]))
        if len(blob) != length:
            raise OSError(f"got {len(blob)} bytes; expected {length}: its file became shorter")
        if zlib.crc32(blob) != checksum:
            raise CorruptExample(self.where(index), index, "its checksum is not that of the index")
        return blob, label

    def digest(self) -> str:
        return f"{self.manifest.index_sha256} {sha256(self.names)}"


def packed(config: Data, split: str) -> Source:
    """Source of shards that `jaxmpi data pack` made in DIR/<split>/."""
    base = data_root(config, "<split>/, as jaxmpi data pack makes it")
    return PackedSource(os.path.join(base, split_name(config, split)), config)


def _open_shard(folder: Path, shard: int) -> Descriptor:
    try:
        return Descriptor(open_plain(folder / shard_name(shard), PLAIN))
    except UsageError as error:  # it was there when the run began: no mistake of the user's
        raise OSError(str(error)) from error


# ---------------------------------------------------------------- reading what a stranger may have written


def read_manifest(folder: Path) -> Manifest:
    """The manifest, each of its fields checked; raise `UsageError` with the field that is wrong."""
    path = folder / MANIFEST
    if not path.exists():
        raise UsageError(
            f"{folder}: no {MANIFEST}, so no packed data set, or one not finished; make it with: jaxmpi data pack"
        )
    fields = read_json(path, MAX_MANIFEST_BYTES, PLAIN)
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise UsageError(f"{path}: damaged, or of another version; expected an object of format {FORMAT!r}")
    if set(fields) != set(FIELDS):
        raise UsageError(f"{path}: damaged: fields {[name[:80] for name in sorted(fields)[:10]]}")
    return check_manifest(Manifest(**fields), path)


def check_manifest(manifest: Manifest, path: Path) -> Manifest:
    """Return the manifest, of JSON's or Python's values; raise `UsageError` with the fields that are wrong."""
    wrong = [name for name, fits in FIELDS.items() if not fits(getattr(manifest, name))]
    if wrong:
        raise UsageError(f"{path}: got damaged or odd fields {', '.join(wrong)}; pack again, from sound data")
    return manifest._replace(names=tuple(manifest.names), shard_bytes=tuple(manifest.shard_bytes))


def _is_whole(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


FIELDS = {
    "records": lambda value: _is_whole(value, 1 << 32),
    "classes": lambda value: _is_whole(value, 2**31 - 1),
    "names": lambda value: (
        isinstance(value, list | tuple) and all(isinstance(name, str) and not NO_TEXT.search(name) for name in value)
    ),
    "shard_bytes": lambda value: (
        isinstance(value, list | tuple) and len(value) <= MAX_SHARDS and all(_is_whole(n, 1 << 48) for n in value)
    ),
    "index_sha256": lambda value: isinstance(value, str),
    "made": lambda value: isinstance(value, dict) and all(isinstance(part, str | int) for part in value.values()),
}


def _read_index(folder: Path, manifest: Manifest) -> np.ndarray:
    """ROW[n], which covers every byte of the shards once; raise `UsageError` with the first record that is wrong."""
    path, n = folder / INDEX, manifest.records
    with open(open_plain(path, PLAIN), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != n * ROW.itemsize:
            raise UsageError(f"{path}: got {size} bytes; expected {n * ROW.itemsize}, {n} records")
        # A row is never all zeros, so no index has a hole; one with holes takes memory that it took no disk for.
        if n and os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size:
            raise UsageError(f"{path}: damaged: got {size} bytes with holes, which no index has; copy it again")
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        rows = np.fromfile(file, ROW, n)
    if len(rows) != n or hashlib.sha256(rows.view(np.uint8).data).hexdigest() != manifest.index_sha256:
        raise UsageError(f"{path}: damaged: its SHA-256 is not that of {MANIFEST}; copy it again")
    check_rows(rows, manifest, path)
    return rows


def check_rows(rows: np.ndarray, manifest: Manifest, path: Path) -> None:
    """Refuse rows that do not cover every byte of the shards once, or whose labels are out of range."""
    lengths = rows["length"].astype(np.uint64)
    ends = np.cumsum(lengths)  # cannot overflow: at most 2^32 rows of less than 2^32 bytes
    top = manifest.classes or 2**31
    expected = {
        "length": ((lengths >= 1) & (lengths <= MAX_RECORD_BYTES), f"1 to {MAX_RECORD_BYTES}"),
        "offset": (rows["offset"] == ends - lengths, "the end of the record before"),
        "label": ((rows["label"] >= 0) & (rows["label"] < top), f"0 <= label < {top}"),
    }
    for field, (holds, words) in expected.items():
        if not holds.all():
            first = int(np.argmin(holds))
            raise UsageError(f"{path}: damaged: record {first}: got {rows[field][first]} as {field}; expected {words}")
    shard_ends = np.cumsum(np.array([0, *manifest.shard_bytes], np.uint64))
    record_ends = np.concatenate([np.zeros(1, np.uint64), ends])
    if shard_ends[-1] != record_ends[-1] or not np.isin(shard_ends, record_ends).all():
        raise UsageError(
            f"{path}: damaged: its records have {record_ends[-1]} bytes, the shards {shard_ends[-1]}, or a record goes "
            "from one shard into the next"
        )
