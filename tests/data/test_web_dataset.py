"""Shards that WebDataset has written: an index, then any member where it lies."""

import io
import os
import pickle
import tarfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import open_source
from jaxmpi.data.sources import web_dataset
from jaxmpi.data.sources.web_dataset import WebDatasetSource
from test_tables import NUMBERS, PIXELS, png

wds = pytest.importorskip("webdataset")

ROWS = 10


def written(path: Path, rows: range, **fields: Any) -> None:
    with wds.TarWriter(str(path)) as shard:
        for i in rows:
            example = {"png": PIXELS[i], "cls": i % 3, "npy": NUMBERS[i], **fields}
            shard.write({"__key__": f"a/{i:03}", **{key: value for key, value in example.items() if value is not None}})


def shard(path: Path, members: Sequence[tuple[str, bytes]], **kwargs: Any) -> None:
    with tarfile.open(path, "w", **kwargs) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def grey(value: int) -> bytes:
    return png(np.full((4, 4), value, np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in {"train-000": range(6), "train-001": range(6, 10), "validation": range(1)}.items():
        written(tmp_path / f"{name}.tar", rows)
    return tmp_path


def opened(folder: Path, split: str = "train", **kwargs: Any) -> WebDatasetSource:
    source = open_source(Data("webdataset", dir=str(folder), **kwargs), split)
    assert isinstance(source, WebDatasetSource)
    return source


@pytest.fixture
def settled(monkeypatch, tmp_path) -> None:
    """Shards that have just been written count as old; their index goes to a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(web_dataset, "SETTLED_S", 0.0)


@pytest.mark.usefixtures("settled")
def test_the_index_is_built_once_until_a_shard_changes(folder, monkeypatch):
    source = opened(folder)
    assert (source.where(7), source.file_ends) == (f"{folder}/train-001.tar: a/007", (6, 10))
    built, build = [], web_dataset.build_index
    monkeypatch.setattr(web_dataset, "build_index", lambda *args: built.append(args) or build(*args))
    assert pickle.loads(pickle.dumps(opened(folder)))[9][1] == 0
    assert not built
    written(folder / "train-001.tar", range(6, 9))
    assert len(opened(folder)) == 9
    assert len(built) == 1


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_shard_that_is_relabelled_with_size_and_time_kept_gives_its_new_labels(tmp_path, monkeypatch, is_settled):
    monkeypatch.setattr(web_dataset, "SETTLED_S", 0.0 if is_settled else web_dataset.SETTLED_S)
    for label in (0, 1):
        written(tmp_path / "train.tar", range(2), cls=label)
        os.utime(tmp_path / "train.tar", (1, 1))
        assert [opened(tmp_path)[i][1] for i in range(2)] == [label] * 2
        time.sleep(0.02)  # more than a tick of the file system's clock


@pytest.mark.usefixtures("settled")
def test_ranks_that_start_together_build_one_index(folder, monkeypatch):
    built, build = [], web_dataset.build_index

    def slow(*args: Any) -> web_dataset.Index:
        built.append(args)
        time.sleep(0.2)
        return build(*args)

    monkeypatch.setattr(web_dataset, "build_index", slow)
    with ThreadPoolExecutor(4) as pool:
        assert [len(source) for source in pool.map(opened, [folder] * 4)] == [ROWS] * 4
    assert len(built) == 1


@pytest.mark.usefixtures("settled")
def test_an_index_that_is_damaged_is_built_again(folder):
    opened(folder)
    (index,) = folder.glob("cache/jaxmpi/index/*.npz")  # and not beside the shards, which may be read-only
    index.write_bytes(index.read_bytes()[:100])
    assert len(opened(folder)) == ROWS


@pytest.mark.usefixtures("settled")
def test_without_a_cache_that_can_be_written_each_process_builds_its_index(folder):
    (folder / "cache").write_text("no folder")
    for _ in range(2):
        assert len(opened(folder)) == ROWS


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ([("a/000.cls", b"1"), ("a/000.npy", b"")], r"a/000: got no member jpg .* cls, npy: .*--data.columns jpg cls"),
        ([("a/000.png", b""), ("a/000.cls", b"cat")], r"a/000.cls: got b'cat'"),
        ([("a/000.png", b""), ("a/000.cls", b"1_0")], r"a/000.cls: got b'1_0'"),
        ([("0.png", b""), ("0.cls", b"0"), ("0.png", b""), ("0.cls", b"1")], "0: got two members png"),
        ([("0.png", b""), ("0.PNG", b""), ("0.cls", b"1")], "0: got two members png"),
        ([("0.jpg", b""), ("0.png", b""), ("0.cls", b"1")], "0: got members jpg and png; .*--data.columns jpg cls"),
    ],
    ids=["no image", "text", "underscore", "same name", "other case", "two images"],
)
def test_examples_that_lack_a_column_or_have_it_twice_are_named(tmp_path, members, named):
    shard(tmp_path / "train.tar", members)
    with pytest.raises(UsageError, match=rf"{tmp_path}/train.tar: {named}"):
        opened(tmp_path)


@pytest.mark.parametrize(("column", "value"), [("jpg", 1), ("png;jpg", 2)])
def test_of_two_images_the_one_that_columns_name_first_is_read(tmp_path, column, value):
    shard(tmp_path / "train.tar", [("0.jpg", grey(1)), ("0.png", grey(2)), ("0.cls", b"1")])
    assert opened(tmp_path, columns=(column, "cls"))[0][0].max() == value


@pytest.mark.parametrize("form", ["gz", "bz2", "xz"])
def test_a_compressed_shard_is_refused(folder, form):
    with tarfile.open(folder / "train-002.tar", f"w:{form}") as compressed:  # pyright: ignore[reportCallIssue, reportArgumentType]
        compressed.add(folder / "validation.tar")
    with pytest.raises(UsageError, match=r"train-002\.tar"):
        opened(folder)


def test_an_array_that_claims_more_than_its_bytes_is_refused(tmp_path):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (1 << 42,)})
    shard(tmp_path / "train.tar", [("0.npy", head.getvalue() + bytes(10)), ("0.cls", b"0")])
    with pytest.raises(UsageError, match=r"train.tar: 0.npy: "):
        opened(tmp_path, columns=("npy", "cls"))[0]


def test_a_shard_that_shrinks_while_it_is_read_is_named(folder):
    source = opened(folder)
    (folder / "train-001.tar").write_bytes(b"")
    with pytest.raises(OSError, match=r"train-001.tar ends \d+ bytes before"):
        source[6]


SIX = [(f"{i}.{column}", blob) for i in range(6) for column, blob in (("png", grey(i)), ("cls", b"0"))]
HEADER = tarfile.BLOCKSIZE


@pytest.mark.parametrize(
    "damage",
    [
        lambda blob, at: blob[:at] + b"\xff" * HEADER + blob[at + HEADER :],
        lambda blob, at: blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :],
        lambda blob, at: blob[:at] + bytes(2 * HEADER) + blob[at + 2 * HEADER :],
        lambda blob, at: blob[:at] + bytes(len(blob) - at),
        lambda blob, at: blob[:at],
        lambda blob, at: blob[: at + 100],
        lambda blob, at: blob[: at + HEADER + 10],
        lambda blob, at: blob + blob,
        lambda blob, at: bytes(len(blob)),
    ],
    ids=["header", "bit", "hole", "no tail", "cut", "cut in header", "cut in member", "two in one", "zeros"],
)
def test_a_shard_that_is_damaged_is_refused_by_name(tmp_path, damage: Callable[[bytes, int], bytes]):
    path = tmp_path / "train.tar"
    shard(path, SIX)
    assert len(opened(tmp_path)) == 6
    with tarfile.open(path) as tar:
        at = tar.getmembers()[6].offset
    path.write_bytes(damage(path.read_bytes(), at))
    with pytest.raises(UsageError, match=str(path)):
        opened(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_every_format_and_ending_of_a_tar_file_is_read_whole(tmp_path, kind):
    shard(tmp_path / "train.tar", SIX, format=kind)
    blob = (tmp_path / "train.tar").read_bytes()
    for end in (len(blob), 12 * 2 * HEADER + 2 * HEADER, 12 * 2 * HEADER + HEADER):  # without padding, half an end
        (tmp_path / "train.tar").write_bytes(blob[:end])
        assert [opened(tmp_path)[i][0].max() for i in range(6)] == [*range(6)]


@pytest.mark.parametrize("factor", [1, 20, 128, 2048])  # of `tar -b`
def test_a_shard_of_any_usual_record_size_is_read_whole(tmp_path, factor):
    shard(tmp_path / "train.tar", SIX)
    blob = (tmp_path / "train.tar").read_bytes()[: 14 * 2 * HEADER - 2 * HEADER]
    (tmp_path / "train.tar").write_bytes(blob + bytes(-len(blob) % (factor * HEADER)))
    assert len(opened(tmp_path)) == 6


def test_zeros_up_to_an_end_that_the_other_shards_do_not_have_are_a_hole(tmp_path):
    """A shard alone might have records of 64 blocks; the other shards say that they are of 20."""
    many = [(f"{i:02}.{column}", blob) for i in range(79) for column, blob in (("png", grey(i)), ("cls", b"0"))]
    for name, members in {"train-0": many, "train-1": SIX, "train-2": SIX}.items():
        shard(tmp_path / f"{name}.tar", members)
    assert len(opened(tmp_path)) == 79 + 6 + 6
    blob = (tmp_path / "train-0.tar").read_bytes()
    (tmp_path / "train-0.tar").write_bytes(blob[: 276 * HEADER] + bytes(len(blob) - 276 * HEADER))
    with pytest.raises(UsageError, match=f"train-0.tar: got zeros at byte {276 * HEADER}"):
        opened(tmp_path)


def test_a_link_among_the_members_is_refused(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        for name in ("0.png", "1.png"):
            (tmp_path / "one").write_bytes(grey(0))
            info = tar.gettarinfo(tmp_path / "one", name)
            info.type, info.linkname = (tarfile.LNKTYPE, "0.png") if name == "1.png" else (tarfile.REGTYPE, "")
            tar.addfile(info, io.BytesIO(grey(0)) if info.isreg() else None)
    with pytest.raises(UsageError, match=r"train.tar: 1.png is a link"):
        opened(tmp_path, columns=("png",))
