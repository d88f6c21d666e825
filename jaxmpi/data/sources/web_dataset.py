"""Source: tar files of WebDataset, by an index of their members.

WebDataset streams shards, so what a worker sees depends on the number of workers. Here each shard's headers are read
once; then a member is read where it lies, like a row of a table. Members of one example follow each other and have one
key, the name up to the first dot; the rest of the name is the column. The index is kept in the user's cache folder, and
is built again if a shard has been written to.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data.sources.base import TableSource, file_state, place_in_parts, refusing, split_files
from jaxmpi.data.sources.numpy_files import MOST_HEAD_BYTES, parse_header
from jaxmpi.data.sources.packed import MAX_RECORD_BYTES
from jaxmpi.data.sources.reading import OpenFiles

IMAGES = ("jpg", "jpeg", "png", "webp")
DEFAULT = (";".join(IMAGES), "cls")  # the one of these that an example has
MEMBERS = f"{', '.join(IMAGES)}, cls (a whole number) or npy (an array)"
TAR = "a tar file that is not compressed"
VERSION = 6  # version of the index
SETTLED_S = 2.0  # an index is saved of shards that have not changed for so long
RECORDS = (20, *(1 << i for i in range(12)))  # blocks of a record, which a writer fills: 20, or as of `tar -b 128`


# Bytes before a member, its bytes, and which of the column's alternatives it is.
MEMBER = np.dtype([("offset", np.int64), ("size", np.int64), ("ending", np.int64)])


class Index(NamedTuple):
    """Members of all shards."""

    ends: np.ndarray  # i64[shards]: of each shard, the index behind its last example
    members: np.ndarray  # MEMBER[n, columns]
    keys: np.ndarray  # u8[bytes]
    key_ends: np.ndarray  # i64[n]
    labels: np.ndarray  # i64[n] of a second column that is cls, else i64[0]


class WebDatasetSource(TableSource):
    """One split of tar files; `file_ends` is of each shard the index behind its last example, None of a single one.

    Refused: a shard that is damaged, cut off or compressed; an example without a member for a column, with two members
    of one name, or with two images if `data.columns` does not say which comes first.
    """

    def __init__(self, config: Data, split: str) -> None:
        shards, columns = split_files(config, split, ".tar"), config.columns or DEFAULT
        self.alternatives = [tuple(name.split(";")) for name in columns]
        unknown = [name for names in self.alternatives for name in names if name.split(".")[-1] not in DECODERS]
        if unknown:
            raise UsageError(f"data.columns: got {', '.join(unknown)}; {config.source} reads {MEMBERS}")
        super().__init__(config, columns)
        self.shards, self.files, self.parts = OpenFiles(shards), shards, tuple(shards)
        self.index = load_or_build_index(shards, columns)
        self.ends, self.labels = self.index.ends, self.index.labels if len(self.index.labels) else None
        self.is_compressed = all(name.split(".")[-1] in IMAGES for name in self.alternatives[0])
        self.file_ends = tuple(self.ends.tolist()) if len(shards) > 1 else None

    def read(self, part: int, row: int, index: int) -> Sequence[Any]:
        cells = []
        for column, (offset, size, number) in enumerate(self.index.members[index].tolist()):
            if column == 1 and self.labels is not None:
                cells.append(self.labels[index])
                continue
            blob, ending = self.shards.read(part, np.empty(size, np.uint8), offset), self.alternatives[column][number]
            cells.append(DECODERS[ending.split(".")[-1]](blob.tobytes(), f"{self.where(index)}.{ending}"))
        return cells

    def where(self, index: int) -> str:
        shard, _ = place_in_parts(self.ends, index)
        begin = int(self.index.key_ends[index - 1]) if index else 0
        key = self.index.keys[begin : self.index.key_ends[index]].tobytes()
        return f"{self.parts[shard]}: {os.fsdecode(key)}"


_HEAD = threading.Lock()  # Python 3.11 does not read heads of .npy files in several threads at once


def _read_class(blob: bytes, where: str) -> int:
    try:
        if re.fullmatch(rb"\s*[+-]?[0-9]{1,19}\s*", blob):  # `int` takes 1_0 for 10
            return int(np.int32(int(blob)))
    except OverflowError:
        pass
    raise UsageError(f"{where}: got {blob[:40]!r}; expected a whole number of 32 bits as text")


def _read_array(blob: bytes, where: str) -> np.ndarray:
    with _HEAD:
        header = parse_header(where, blob[:MOST_HEAD_BYTES])
    if header.dtype.kind not in "biuf" or header.end != len(blob):
        raise UsageError(f"{where}: got {header}, {header.end} bytes of {len(blob)}; expected numbers of numpy.save")
    order = "F" if header.is_fortran else "C"
    return np.frombuffer(blob[header.offset :], header.dtype).reshape(header.shape, order=order)


DECODERS: dict[str, Callable[[bytes, str], Any]] = {
    **dict.fromkeys(IMAGES, lambda blob, where: blob),
    "cls": _read_class,
    "npy": _read_array,
}


# ---------------------------------------------------------------- the index


def load_or_build_index(shards: Sequence[str], columns: Sequence[str]) -> Index:
    """Load the shards' index, or build and save it; raises as the source."""
    states = []
    for path in shards:
        with refusing(path, TAR):
            states.append((os.path.basename(path), *file_state(path)))
    signature = np.frombuffer(json.dumps([VERSION, list(columns), states]).encode(), np.uint8)
    name = hashlib.sha256(json.dumps([list(columns), list(shards)]).encode()).hexdigest()[:16]
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmpi" / "index" / f"{name}.npz"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # others on this host wait, and read what this process saves
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = stack.enter_context(file.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(Exception):  # errors of files, zip, NumPy; a damaged index is built again
            with file.open("rb") as saved, np.load(saved, allow_pickle=False) as fields:
                if np.array_equal(fields["signature"], signature):
                    return Index(*(fields[field] for field in Index._fields))
        index = build_index(shards, [name.split(";") for name in columns])
        # A write in the same tick of the clock as this one would leave the signature as it is.
        if time.time() - max(changed_ns for *_, changed_ns, _ in states) / 1e9 > SETTLED_S:
            with contextlib.suppress(OSError):
                np.savez(file, signature=signature, **index._asdict())
        return index


def build_index(shards: Sequence[str], alternatives: Sequence[Sequence[str]]) -> Index:
    """Read all headers of the shards; raises as the source."""
    rows: list[list[tuple[int, int, int]]] = []
    ends, keys, labels = [0], [], []
    tails: list[tuple[int, int]] = []  # by shard: byte at which the closing zeros begin, and bytes of the file
    has_labels = len(alternatives) == 2 and list(alternatives[1]) == ["cls"]
    for path in shards:
        with refusing(path, TAR, tarfile.TarError), tarfile.open(path, "r:") as tar:
            for key, members in _group_examples(tar, path):
                rows.append([_find_member(members, names, f"{path}: {key}") for names in alternatives])
                keys.append(os.fsencode(key))
                if has_labels:
                    assert tar.fileobj is not None
                    tar.fileobj.seek(rows[-1][1][0])
                    labels.append(_read_class(tar.fileobj.read(rows[-1][1][1]), f"{path}: {key}.cls"))
            tails.append((tar.offset, os.path.getsize(path)))
        if len(rows) == ends[-1]:
            raise UsageError(f"{path}: got no example; write it again, or take it away")
        ends.append(len(rows))
    # Shards of a split have one writer, and so one size of records: what fits no other shard is a hole.
    fits = [[_fills_record(*tail, blocks) for tail in tails] for blocks in RECORDS]
    for path, tail, is_filled in zip(shards, tails, max(fits, key=sum), strict=True):
        if not is_filled:
            raise _hole_error(path, *tail)
    key_ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
    blob = np.frombuffer(b"".join(keys), np.uint8)
    return Index(np.array(ends[1:], np.int64), np.array(rows, MEMBER), blob, key_ends, np.array(labels, np.int64))


def _find_member(members: dict[str, tarfile.TarInfo], names: Sequence[str], where: str) -> tuple[int, int, int]:
    """Offset and bytes of the first of these members, and which it is."""
    got = [name for name in names if name in members]
    if not got:
        raise UsageError(
            f"{where}: got no member {' or '.join(names)}; there are {', '.join(members)}: choose input and label with "
            "data.columns, such as --data.columns jpg cls"
        )
    if len(got) > 1 and tuple(names) == IMAGES:
        raise UsageError(
            f"{where}: got members {' and '.join(got)}; expected one image: name it, such as --data.columns {got[0]} "
            f'cls, or which comes first, as "{";".join(got)}"'
        )
    member = members[got[0]]
    if member.size > MAX_RECORD_BYTES:
        raise UsageError(f"{where}: got {member.size} bytes; expected <= {MAX_RECORD_BYTES}")
    return member.offset_data, member.size, names.index(got[0])


def _group_examples(tar: tarfile.TarFile, path: str) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yield each example's key, and its members by column."""
    named = ((*_split_name(member.name), member) for member in _list_members(tar, path) if not member.isdir())
    for key, group in itertools.groupby((each for each in named if each[0]), key=lambda member: member[0]):
        members: dict[str, tarfile.TarInfo] = {}
        for _, column, member in group:
            if not member.isreg() or member.issparse():
                raise UsageError(
                    f"{path}: {member.name} is a link, a device or sparse; write the shard with plain files"
                )
            if column in members:
                raise UsageError(f"{path}: {key}: got two members {column}; give each example a name of its own")
            members[column] = member
        yield key, members


def _split_name(name: str) -> tuple[str, str]:
    """A member's key and column; none of a hidden file."""
    folder, _, file = name.rpartition("/")
    stem, _, column = file.partition(".")
    return (f"{folder}/{stem}" if folder else stem) * (not file.startswith(".")), column.lower()


def _list_members(tar: tarfile.TarFile, path: str) -> Iterator[tarfile.TarInfo]:
    """Yield the members up to the zeros that close a tar file, and check that those are its end.

    To `tarfile` itself a damaged header, a hole of zeros and a cut are all the end, as if nothing were missing.
    """
    file, size = tar.fileobj, os.path.getsize(path)
    assert file is not None
    tar.offset = 0
    while True:
        begin = tar.offset
        file.seek(begin)
        block = file.read(tarfile.BLOCKSIZE)
        if len(block) != tarfile.BLOCKSIZE:
            raise UsageError(f"{path}: it is cut off at byte {min(begin, size)}; copy it again")
        if not any(block):
            break
        file.seek(begin)
        try:
            yield tarfile.TarInfo.fromtarfile(tar)
        except (tarfile.TarError, ValueError) as error:
            raise UsageError(f"{path}: damaged at byte {begin}: {error}; copy it again") from error
    if not any(_fills_record(begin, size, blocks) for blocks in RECORDS) or any(file.read(size - file.tell())):
        raise _hole_error(path, begin, size)


def _fills_record(begin: int, size: int, blocks: int) -> bool:
    """Whether zeros from `begin` to the file's end are the two blocks that close it, in records of so many blocks."""
    end, record = begin + 2 * tarfile.BLOCKSIZE, blocks * tarfile.BLOCKSIZE
    return size <= end or size == -(-end // record) * record


def _hole_error(path: str, begin: int, size: int) -> UsageError:
    """The error of more zeros than a writer fills up with, as after a copy that was broken off once it had its size."""
    return UsageError(
        f"{path}: got zeros at byte {begin}, which close a tar file, and {size - begin} bytes from there on; expected "
        "zeros up to the end of a record, as in the split's other shards: it has a hole, or is two shards in one: copy "
        "or write it again"
    )
