"""The packed format: what was packed comes out, damage is named, and strangers' files do no harm."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import resource
import shutil
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, CorruptExample, command, open_source, packing
from jaxmpi.data.decode import encoded
from jaxmpi.data.packing import PackingOptions
from jaxmpi.data.sources.packed import INDEX, MANIFEST, ROW, PackedSource, shard_name
from jaxmpi.data.sources.registry import SPLITS
from launching import on_small_disk

RNG = np.random.default_rng(0)
PNG = PackingOptions(quality=0, shard_bytes=400)


def noise(n: int, px: int = 6, classes: int = 0) -> ArraySource:
    images = RNG.integers(0, 256, (n, px, px + 2, 3), np.uint8)
    return ArraySource(images, np.arange(n) % max(classes, 5), classes)


@pytest.fixture
def packed(tmp_path: Path) -> tuple[ArraySource, Path]:
    source = noise(20)
    packing.pack(source, tmp_path / "train", PNG)
    return source, tmp_path / "train"


def forge(folder: Path, rows: np.ndarray | None = None, **fields) -> None:
    """Other rows and fields of the manifest, with a checksum that fits."""
    manifest = json.loads((folder / MANIFEST).read_text())
    if rows is not None:
        (folder / INDEX).write_bytes(rows.tobytes())
        manifest |= {"index_sha256": hashlib.sha256(rows.tobytes()).hexdigest(), "records": len(rows)}
    (folder / MANIFEST).write_text(json.dumps(manifest | fields))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("shard-*.bin")}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[50] ^= 4
    path.write_bytes(raw)


# ---------------------------------------------------------------- what comes out


def test_what_was_packed_comes_out(packed):
    source, folder = packed
    got = PackedSource(folder)
    assert (len(got), got.classes, len(got.manifest.shard_bytes)) == (20, 5, 10)
    for i in range(20):
        assert np.array_equal(got[i][0], source[i][0])
        assert got[i][1] == source[i][1]
    assert got.where(19) == f"{folder}/shard-00009.bin[1]"
    assert sorted(path.name for path in folder.iterdir()) == [INDEX, MANIFEST, *map(shard_name, range(10))]
    assert packing.find_damage(got, decode=True) == []
    copy = pickle.loads(pickle.dumps(got))  # which opens its files anew
    del got
    assert np.array_equal(copy[3][0], source[3][0])


def jpeg(size: tuple[int, int], mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (*size[::-1], 3), np.uint8)).convert(mode).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Class folders with files of several sizes."""
    for name in ("cat", "dog"):
        (tmp_path / "src" / "train" / name).mkdir(parents=True)
        for i, blob in enumerate([jpeg((20, 30)), jpeg((16, 24)), jpeg((40, 17), "L"), jpeg((19, 19), "CMYK")]):
            (tmp_path / "src" / "train" / name / f"{i}.jpg").write_bytes(blob)
    return tmp_path / "src"


def opened(folder: Path) -> Any:
    return open_source(Data(source="imagefolder", dir=str(folder)), "train")


def test_files_keep_their_bytes_unless_another_size_is_asked_for(folder, tmp_path):
    source = opened(folder)
    packing.pack(source, tmp_path / "as is")
    same = PackedSource(tmp_path / "as is")
    assert [same.encoded(i) for i in range(8)] == [source.encoded(i) for i in range(8)]
    assert same.names == ("cat", "dog")
    packing.pack(source, tmp_path / "small", PackingOptions(resize=16))
    small = PackedSource(tmp_path / "small")
    images = [Image.open(io.BytesIO(small.encoded(i)[0])) for i in range(4)]
    assert [image.size for image in images] == [(16, 24), (16, 24), (38, 16), (16, 16)]
    assert [image.mode for image in images] == ["RGB", "RGB", "L", "RGB"]
    assert small.encoded(1) == source.encoded(1)  # it has that size: its very bytes
    low = PackingOptions(resize=16, quality=10)
    assert packing.pack(source, tmp_path / "low", low).size_bytes < sum(small.manifest.shard_bytes)


def test_files_that_have_changed_under_their_names_are_not_taken_for_those_that_were_packed(folder, tmp_path):
    packing.pack(opened(folder), tmp_path / "packed")
    packing.pack(opened(folder), tmp_path / "packed")
    path = folder / "train" / "cat" / "0.jpg"
    was = path.stat()
    raw = path.read_bytes()
    path.write_bytes(raw[:-2] + bytes([raw[-2] ^ 1, raw[-1]]))  # another file of the same size and, as by `cp -p`, time
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    with pytest.raises(UsageError, match="files: got"):
        packing.pack(opened(folder), tmp_path / "packed")


# ---------------------------------------------------------------- the command


def test_pack_and_check_digits(tmp_path, capsys):
    command.main(["pack", "digits", str(tmp_path), "--quality", "0", "--shard-mb", "0.05"])
    digits = open_source(Data(), "train")
    got = open_source(Data(source="packed", dir=str(tmp_path), channels=1), "train")
    assert all(np.array_equal(got[i][0], digits[i][0]) and got[i][1] == digits[i][1] for i in range(0, len(digits), 50))
    command.main(["check", str(tmp_path)])
    assert capsys.readouterr().out.count("all is well") == 2
    command.main(["pack", "digits", str(tmp_path / "held"), "--quality", "0", "--holdout", "0.25"])
    parts = [open_source(Data("packed", dir=str(tmp_path / "held"), channels=1), split) for split in SPLITS]
    expected = [open_source(Data(holdout=0.25), split) for split in SPLITS]
    assert [len(part) for part in parts] == [len(part) for part in expected]
    assert all(part[3][1] == other[3][1] for part, other in zip(parts, expected, strict=True))
    shard = tmp_path / "train" / shard_name(1)
    flip(shard)
    with pytest.raises(SystemExit) as ended:
        command.main(["check", str(tmp_path / "train")])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert f"{shard}[" in printed
    assert "1 of 1437 records are damaged" in printed


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (["check", "/nowhere"], "/nowhere"),
        (["check", "."], "jaxmpi data pack"),
        (["pack", "digits", "{}", "--quality", "101"], "--quality"),
        (["pack", "digits", "{}", "--threads", "0"], "--threads"),
        *((["pack", "digits", "{}", "--shard-mb", mb], "--shard-mb") for mb in ("nan", "inf", "0")),
        (["pack", "{}/none", "{}"], "no folder .*none.* DIR as SRC"),
        (["pack", "{}", "{}", "--source", "tfds"], "--name"),
    ],
)
def test_what_cannot_be_asked_for(line, named, tmp_path):
    with pytest.raises(UsageError, match=named):
        command.main([word.format(tmp_path) for word in line])


def test_a_split_that_is_missing_is_refused_before_the_other_is_packed(folder, tmp_path):
    """A pack of training alone would be in the way of the advice, --holdout."""
    shutil.rmtree(folder / "validation", ignore_errors=True)
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="--holdout"):
        command.main(["pack", str(folder), str(out)])
    assert not out.exists()
    command.main(["pack", str(folder), str(out), "--holdout", "0.5"])
    assert (out / "validation").is_dir()


# ---------------------------------------------------------------- stopped, and continued


class Breaks(ArraySource):
    """Stops at an example, as a kill would."""

    at = 10

    def __getitem__(self, index):
        if index == self.at:
            raise KeyboardInterrupt
        return super().__getitem__(index)


def half_packed(folder: Path, n: int = 12, at: int = 10) -> ArraySource:
    whole = noise(n)
    source = Breaks(whole.images, whole.labels)
    source.at = at
    with pytest.raises(KeyboardInterrupt):
        packing.pack(source, folder, PNG, threads=1)
    return whole


@pytest.mark.parametrize("job", ["[1]", '"x"', "3", "[" * 100_000])
def test_a_strangers_half_packed_folder_is_refused_or_packed_anew(job, tmp_path):
    half_packed(tmp_path)
    (tmp_path / packing.JOB).write_text(job)
    with contextlib.suppress(UsageError):
        assert packing.pack(noise(12), tmp_path, PNG).records == 12


def test_a_packing_that_was_stopped_continues(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    whole = half_packed(a, 40)
    kept = inodes(a)
    assert len(kept) >= 2
    with pytest.raises(UsageError, match="resize: got 9, expected 0"):
        packing.pack(whole, a, PackingOptions(resize=9, quality=0, shard_bytes=400))
    steps: list[int] = []
    packing.pack(whole, a, PNG, progress=steps.append)
    assert steps[0] > 1  # those that were done, at once
    assert sum(steps) == 40
    assert kept.items() <= inodes(a).items()
    packing.pack(whole, b, PNG)
    assert contents(a) == contents(b)
    assert packing.pack(whole, a, PNG).records == 40  # done already
    with pytest.raises(UsageError, match="examples: got 39, expected 40"):
        packing.pack(noise(39), a, PNG)
    assert packing.pack(whole, a, PNG).records == 40  # the refused job has left nothing here


@pytest.mark.parametrize(
    ("name", "damage", "kept"),
    [
        *((shard_name(1), damage, 1) for damage in (Path.unlink, cut)),
        (INDEX, lambda path: os.truncate(path, 3 * ROW.itemsize - 3), 1),
        (INDEX, Path.unlink, 0),
        (packing.JOB, lambda path: path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[:2]) + b"\n[4, "), 1),
        (packing.JOB, lambda path: path.write_bytes(b"\xff"), 0),
    ],
)
def test_shards_are_made_again_from_the_first_that_is_damaged(tmp_path, name, damage, kept):
    """Also if this is stopped once more: what lies behind is never counted on."""
    folder = tmp_path / "a"
    whole = half_packed(folder, 7, at=6)
    assert len((folder / packing.JOB).read_text().splitlines()) == 4  # the job, and three shards
    first = inodes(folder)[shard_name(0)]
    damage(folder / name)
    source = Breaks(whole.images, whole.labels)
    source.at = 3
    with pytest.raises(KeyboardInterrupt):
        packing.pack(source, folder, PNG, threads=1)
    assert len((folder / packing.JOB).read_text().splitlines()) == 2
    assert (inodes(folder)[shard_name(0)] == first) == bool(kept)
    packing.pack(whole, folder, PNG)
    packing.pack(whole, tmp_path / "b", PNG)
    assert contents(folder) == contents(tmp_path / "b")


def test_two_at_once_are_refused(tmp_path):
    class Nested(ArraySource):
        def __getitem__(self, index):
            with pytest.raises(UsageError, match="another process"):
                packing.pack(noise(3), tmp_path, PNG)
            return super().__getitem__(index)

    source = noise(3)
    assert packing.pack(Nested(source.images, source.labels), tmp_path, PNG).records == 3


COMMAND_ON_FULL_DISK = """
import os, shutil, subprocess, sys
from pathlib import Path
folder = Path(sys.argv[1])
full = folder / "full"
full.write_bytes(b"x" * shutil.disk_usage(folder).free)
pack = [sys.executable, "-m", "jaxmpi.tools.cli", "data", "pack", "digits", str(folder / "out"), "--shard-mb", "0.05"]
for room_bytes in (0, 4096, 65536, 1 << 20):  # for no folder, no note, not all shards, and all
    if room_bytes == 1 << 20:
        subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True)
    os.truncate(full, full.stat().st_size - room_bytes if room_bytes < 1 << 20 else 0)
    ended = subprocess.run(pack, capture_output=True, text=True)
    errors = [line for line in ended.stderr.splitlines() if line and not line.startswith(("train", "validation"))]
    print(ended.returncode, "Traceback" in ended.stderr, len(errors), *errors)
"""


@pytest.mark.e2e
def test_the_command_on_a_full_disk_says_one_sentence_and_continues_when_there_is_room(tmp_path):
    ended = on_small_disk(tmp_path, COMMAND_ON_FULL_DISK)
    assert ended.code == 0, ended.out
    *refused, done = ended.out.splitlines()
    assert len(refused) == 3
    for line in refused:
        assert re.fullmatch(r"[12] False 1 jaxmpi: error: .*No space left on device; \d+ of 1437 .*", line)
    assert done == "0 False 0"


# ---------------------------------------------------------------- examples that cannot be packed


class Bad(ArraySource):
    """One example is corrupt."""

    def __getitem__(self, index):
        if index == 7:
            raise CorruptExample("file7.jpg", 7, "truncated")
        return super().__getitem__(index)


def test_corrupt_examples_stop_or_are_skipped_and_counted(tmp_path, capsys):
    source = noise(20)
    bad = Bad(source.images, source.labels)
    with pytest.raises(CorruptExample, match=r"file7\.jpg"):
        packing.pack(bad, tmp_path / "stop", PNG)
    skip = PackingOptions(quality=0, shard_bytes=400, on_error="skip")
    for _ in range(2):  # the second reads what was done
        assert packing.pack(bad, tmp_path / "skip", skip)[::2] == (19, 1)
    got = PackedSource(tmp_path / "skip")
    assert np.array_equal(got[7][0], source[8][0])
    assert got.manifest.made["skipped"] == 1
    assert "skipped: file7.jpg" in capsys.readouterr().err


def half_of(blob: bytes) -> bytes:
    return blob[: len(blob) // 2]


TRUNCATED = [half_of(jpeg((40, 40))), half_of(encoded(RNG.integers(0, 256, (40, 40, 3), np.uint8), quality=0))]


@pytest.mark.parametrize("blob", [b"no image at all" * 9, *TRUNCATED], ids=["text", "JPEG", "PNG"])
def test_the_command_refuses_what_no_training_could_decode_and_continues_without_it(folder, tmp_path, capsys, blob):
    (folder / "train" / "dog" / "1.jpg").write_bytes(blob)
    line = ["pack", str(folder), str(tmp_path / "out"), "--validation-split", "", "--shard-mb", "0.0001"]
    with pytest.raises(UsageError, match=r"dog/1\.jpg \(example 5\).* --on-error skip"):
        command.main(line)
    kept = inodes(tmp_path / "out" / "train")
    assert len(kept) == 5
    command.main([*line, "--on-error", "skip"])
    printed = capsys.readouterr()
    assert "skipped: " in printed.err
    assert "data.on_error" not in printed.err
    assert "7 records" in printed.out
    assert kept.items() <= inodes(tmp_path / "out" / "train").items()
    command.main(["check", str(tmp_path / "out"), "--decode"])
    assert "all is well" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("images", "label", "named"),
    [
        *((np.zeros((1, 4, 4, 3), np.uint8), label, rf"array\[0\]: got label {label}") for label in (-1, 5, 1.5)),
        (np.zeros((1, 4, 4, 3), np.float32), 0, "expected u8"),
        (np.zeros((1, 4), np.uint8), 0, "expected u8"),
    ],
)
def test_labels_out_of_range_and_what_is_no_image_are_refused(tmp_path, images, label, named):
    with pytest.raises(UsageError, match=named):
        packing.pack(ArraySource(images, [label], classes=5), tmp_path / "x", PNG)


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("name", [MANIFEST, INDEX, shard_name(1)])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_no_path_leaves_the_folder_and_none_is_special(packed, tmp_path, name, kind):
    _, folder = packed
    moved = tmp_path / "elsewhere"
    (folder / name).rename(moved)
    {"link": lambda p: p.symlink_to(moved), "folder": Path.mkdir, "pipe": os.mkfifo}[kind](folder / name)
    with pytest.raises(UsageError, match=name):
        PackedSource(folder)


def test_an_index_with_holes_larger_than_memory(packed):
    _, folder = packed
    forge(folder, records=1 << 32)
    os.truncate(folder / INDEX, 20 << 32)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, before[1]))
    try:
        with pytest.raises(UsageError, match="holes"):
            PackedSource(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---------------------------------------------------------------- strangers' files


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> tuple[Path, list[tuple[bytes, int]]]:
    folder = tmp_path_factory.mktemp("pristine")
    packing.pack(noise(12), folder, PackingOptions(quality=0, shard_bytes=600))
    source = PackedSource(folder)
    return folder, [source.encoded(i) for i in range(12)]


def outcome(folder: Path) -> list[tuple[bytes, int] | None] | None:
    """Return what can be read; None if refused. Nothing else is raised, and no more memory taken than is there."""
    most = 40 * sum(path.stat().st_size for path in folder.iterdir()) + 200_000
    tracemalloc.start()
    try:
        got = read_all(folder)
        if tracemalloc.get_traced_memory()[1] >= most:  # once in 10^4 times a table of all of Python grows
            tracemalloc.clear_traces()
            read_all(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most
    return got


def read_all(folder: Path) -> list[tuple[bytes, int] | None] | None:
    """Every record, None for one that is refused; None if the folder is."""
    try:
        source = PackedSource(folder)
    except UsageError:
        return None
    got = []
    for i in range(len(source)):
        try:
            got.append(source.encoded(i))
        except (CorruptExample, OSError):
            got.append(None)
    return got


FILES = st.sampled_from([MANIFEST, INDEX, shard_name(0), shard_name(1)])
FLIPS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4)


@given(FILES, FLIPS, st.integers(0, 9))
def test_damaged_bytes_never_pass_for_good_ones(pristine, name, flips, missing):
    folder, expected = pristine
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(folder, Path(place) / "copy"))
        raw = bytearray((copy / name).read_bytes())
        for at, bits in flips:
            raw[at % len(raw)] ^= bits
        (copy / name).write_bytes(raw[: len(raw) - missing])
        got = outcome(copy)
    if got is not None and name != MANIFEST:
        assert all(a in (None, b) for a, b in zip(got, expected, strict=True))


ROWS = st.lists(
    st.tuples(
        st.integers(0, 2**64 - 1) | st.integers(0, 3000),
        st.integers(0, 2**32 - 1) | st.integers(0, 400),
        st.integers(-(2**31), 2**31 - 1) | st.integers(0, 4),
        st.integers(0, 2**32 - 1),
    ),
    max_size=12,
)


@given(ROWS, st.booleans())
def test_a_forged_index_reads_nothing_but_the_shards(pristine, rows, is_tight):
    folder, _ = pristine
    table = np.array(rows, ROW)
    if is_tight:  # what most checks let pass
        table["length"] = np.maximum(table["length"] % 400, 1)
        lengths = table["length"].astype(np.uint64)
        table["offset"] = np.cumsum(lengths) - lengths
        table["label"] %= 5
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(folder, Path(place) / "copy"))
        whole = b"".join((copy / shard_name(i)).read_bytes() for i in range(len(list(copy.glob("shard-*")))))
        forge(copy, table)
        got = outcome(copy)
    for row, record in zip(table, got or [], strict=False):
        if record is not None:
            assert record[0] == whole[row["offset"] : row["offset"] + row["length"]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["records", "classes", "names", "shard_bytes", "index_sha256", "made", "format"]), JSON)
def test_a_forged_manifest_is_refused_or_harmless(pristine, field, value):
    folder, expected = pristine
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(folder, Path(place) / "copy"))
        forge(copy, **{field: value})
        got = outcome(copy)
    assert got in (None, expected)


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", [packing.JOB, INDEX, "shard-00004.bin.tmp", f"{MANIFEST}.tmp"])
def test_packing_writes_through_no_link_and_waits_for_no_pipe(tmp_path, name, kind):
    source, precious = half_packed(tmp_path / "a"), tmp_path / "precious"
    precious.write_text("precious")
    odd = tmp_path / "a" / name
    odd.unlink(missing_ok=True)
    odd.symlink_to(precious) if kind == "link" else os.mkfifo(odd)
    with pytest.raises(UsageError, match=name):
        packing.pack(source, tmp_path / "a", PNG)
    assert precious.read_text() == "precious"
