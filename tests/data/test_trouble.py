"""File systems that fail, stall, fill up or change under a run: one outcome for every kind of source, by name."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxmpi.config.data import Data
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.data import ArraySource, Loader, Sampler, open_source, packing, write_batch_files
from jaxmpi.data.memory_source import MemorySource
from jaxmpi.data.sources.packed import PackedSource, shard_name
from launching import on_small_disk

N, BAD = 6, 4
SOURCES = ("imagefolder", "packed", "batchfiles")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six images of 4 x 5 px, image i all 10 i, in each of the formats; the packed ones two a shard."""
    images = np.broadcast_to(10 * np.arange(N, dtype=np.uint8)[:, None, None, None], (N, 4, 5, 3))
    place = tmp_path / "imagefolder" / "train" / "one"
    place.mkdir(parents=True)
    for i, image in enumerate(images):
        Image.fromarray(np.ascontiguousarray(image)).save(place / f"{i}.png")
    write_batch_files(ArraySource(images, [0] * N), tmp_path / "batchfiles", "train", rows=2, seed=None)
    source = open_source(data(tmp_path, "imagefolder"), "train")
    packing.pack(source, tmp_path / "packed" / "train", packing.PackingOptions(shard_bytes=100))
    return tmp_path


def data(folder: Path, kind: str, **options) -> Data:
    return Data(source=kind, dir=str(folder / kind), loader="threads", **options)


def file_of(folder: Path, kind: str, index: int) -> Path:
    """Where image `index` lies."""
    names = {"imagefolder": f"one/{index}.png", "packed": shard_name(index // 2), "batchfiles": f"{index // 2:05}.npy"}
    return folder / kind / "train" / names[kind]


def read(source: Any, options: Data, **kwargs) -> list[int]:
    """An epoch's images, each as its value / 10."""
    with Loader(source, Sampler(N, 3, shuffle=False), options, train=False, **kwargs) as batches:
        return [int(image[0, 0, 0]) // 10 for batch in batches for image in batch.image]


def load(source: Any, options: Data) -> list[int]:
    """All records into memory, and an epoch from there."""
    inside = MemorySource(source, options)
    inside.load(np.arange(N))
    return read(inside, options)


WAYS: dict[str, Callable[[Any, Data], list[int]]] = {"as it is": read, "in memory": load}


def break_disk(source: Any, path: Path) -> None:
    """From now on reading this file gives EIO, by the kernel's own word."""
    if isinstance(source, PackedSource):  # it takes plain files only, and keeps them open
        bad = os.open("/proc/self/mem", os.O_RDONLY)
        source.encoded(BAD)
        os.dup2(bad, source._files[BAD // 2].number)
        os.close(bad)
    else:
        path.unlink()
        path.symlink_to("/proc/self/mem")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_file_system_that_answers_eio_ends_the_run_by_name(folder, kind, way, on_error):
    options = data(folder, kind, on_error=on_error)
    source, path = open_source(options, "train"), file_of(folder, kind, BAD)
    break_disk(source, path)
    with pytest.raises(TrainingError, match=rf"{path}.* \(example {BAD}\) cannot be read: .*Input/output error"):
        WAYS[way](source, options)


def test_checking_on_a_file_system_that_answers_eio_names_the_file_and_goes_on(folder):
    source, path = PackedSource(folder / "packed" / "train"), file_of(folder, "packed", BAD)
    break_disk(source, path)
    wrong = packing.find_damage(source)
    assert [f"(example {index}) cannot be read" in text for index, text in enumerate(wrong, BAD)] == [True] * 2
    assert all(str(path) in text for text in wrong)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("numpy", "train.npz"),
        ("parquet", "train.parquet"),
        ("webdataset", "train-0.tar"),
        ("huggingface", "train/state.json"),
        ("text", "tokens.json"),
    ],
)
def test_a_pipe_or_a_folder_in_place_of_a_file_is_named_and_not_waited_for(tmp_path, kind, name):
    for make in (os.mkfifo, Path.mkdir):
        place = tmp_path / make.__name__ / name
        place.parent.mkdir(parents=True)
        if kind == "text":
            (place.parent / "train").mkdir()
            (place.parent / "train" / "a").write_text("a")
        make(place)
        options: dict = {"tokenizer": str(place)} if kind == "text" else {}
        with pytest.raises(UsageError, match=str(place) if make is os.mkfifo else "expected"):
            open_source(Data(kind, dir=str(tmp_path / make.__name__), **options), "train")


class Late(PackedSource):
    """Its file system takes its time."""

    gate = threading.Event()

    def cells(self, index: int) -> Any:
        if index == BAD:
            self.gate.wait(20)
        time.sleep(0.01)
        return super().cells(index)


@pytest.mark.parametrize("way", WAYS)
def test_a_slow_file_system_is_waited_for_up_to_stall_s(folder, way, monkeypatch):
    monkeypatch.setattr("jaxmpi.data.loader_pool.ThreadLoader.JOIN_S", 0.1)
    patient, hasty = (data(folder, "packed", stall_timeout_s=stall_timeout_s) for stall_timeout_s in (20, 1))
    source = Late(folder / "packed" / "train")
    source.gate.set()
    assert WAYS[way](source, patient) == list(range(N))
    source.gate.clear()
    said = {"as it is": r"loader \d of \d+ has been at ", "in memory": ""}[way]
    name = rf"{file_of(folder, 'packed', BAD)}\[0\] \(example {BAD}\) (for \d|has not been read for 1 s)"
    begin = time.monotonic()
    with pytest.raises(TrainingError, match=rf"{said}{name}.*data\.stall_timeout_s sets how long it may"):
        WAYS[way](source, hasty)
    assert time.monotonic() - begin < 10
    source.gate.set()  # lets the threads go


class TestFilesThatChangeUnderTheRun:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("kind", ["imagefolder", "batchfiles"])
    def test_gone(self, folder, kind, way):
        options = data(folder, kind, on_error="skip")
        source, path = open_source(options, "train"), file_of(folder, kind, BAD)
        path.unlink()
        with pytest.raises(TrainingError, match=rf"{path}.* cannot be read: .*No such file"):
            WAYS[way](source, options)

    @pytest.mark.parametrize("way", WAYS)
    def test_a_shard_that_is_gone(self, folder, way):
        """One that has been read from is kept open: then it is read to its end, as the system has it."""
        options = data(folder, "packed", on_error="skip")
        path = file_of(folder, "packed", BAD)
        source, other = (open_source(options, "train") for _ in range(2))
        other.encoded(BAD)  # pyright: ignore[reportAttributeAccessIssue]
        path.unlink()
        assert WAYS[way](other, options) == list(range(N))
        with pytest.raises(TrainingError, match=rf"{path}.* cannot be read: .*No such file or directory"):
            WAYS[way](source, options)

    @pytest.mark.parametrize("way", WAYS)
    def test_a_shard_that_is_replaced_fails_its_checksums(self, folder, way):
        options = data(folder, "packed", on_error="skip")
        source = open_source(options, "train")
        path = file_of(folder, "packed", BAD)
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(TrainingError, match=r"example 4\) is corrupt: its checksum"):
            source.encoded(BAD)  # pyright: ignore[reportAttributeAccessIssue]
        assert WAYS[way](source, options)[:4] == [0, 1, 2, 3]


FULL = """
import os, sys
import numpy as np
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource
from jaxmpi.data import write_batch_files
source = ArraySource(np.zeros((60, 30, 30, 3), np.uint8), np.zeros(60, int))
try:
    write_batch_files(source, sys.argv[1], "train", rows=10)
except UsageError as error:
    print(error)
print(*sorted(os.listdir(sys.argv[1])), *sorted(os.listdir(sys.argv[1] + "/train")))
for name in os.listdir(sys.argv[1] + "/train"):
    assert np.load(sys.argv[1] + "/train/" + name).shape == (10, 30, 30, 3)
"""


def test_a_disk_that_is_full_while_batch_files_are_written(tmp_path):
    ended = on_small_disk(tmp_path, FULL)
    assert ended.code == 0, ended.out
    said, left = ended.out.splitlines()
    assert said.startswith(f"{tmp_path}/train/00003.npy: No space left on device; the files before it are whole. ")
    assert left == "train 00000.npy 00001.npy 00002.npy"
