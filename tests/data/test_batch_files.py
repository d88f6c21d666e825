"""Batch files: what is written comes out, each file is read in one go, damage and strangers' files are named."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmpi.comm.topology import gather_workers
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, FileSampler, Loader, load_mean_image, open_source, write_batch_files
from jaxmpi.data.feed import open_feed
from jaxmpi.models.cnn import digits_cnn_tiny


def numbered(n: int, classes: int = 4) -> ArraySource:
    """Images of 5 x 6 px, image i all i, labelled i % classes."""
    images = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, 5, 6, 3))
    return ArraySource(images, np.arange(n) % classes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images in files of 4; three for validation."""
    for split, n in (("train", 10), ("validation", 3)):
        write_batch_files(numbered(n), tmp_path, split, rows=4, seed=None)
    return tmp_path


def batch_data(folder: Path, **kwargs) -> Data:
    return Data(source="batchfiles", dir=str(folder), **kwargs)


def opened(folder: Path, split: str = "train") -> Any:
    return open_source(batch_data(folder), split)


def npy_head(fields: str) -> bytes:
    """That of a .npy file, with an integer type and C order if the fields do not say."""
    text = "{'descr': '<i8', 'fortran_order': False, " + fields + "}\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


class TestContents:
    def test_files_and_labels(self, folder):
        assert sorted(os.listdir(folder / "train")) == ["00000.npy", "00001.npy", "00002.npy"]
        assert np.load(folder / "train" / "00002.npy").shape == (2, 5, 6, 3)
        source = opened(folder)
        assert (len(source), source.classes) == (10, 4)
        for i in range(10):
            image, label = source[i]
            assert (image.shape, int(image.min()), int(image.max()), int(label)) == ((5, 6, 3), i, i, i % 4)
        assert source.where(9) == f"{folder}/train/00002.npy[1]"


class TestReads:
    def test_the_order_is_taken_up_in_the_middle_of_an_epoch_by_another_number_of_workers(self, folder):
        data, source = batch_data(folder), opened(folder)

        def images(step: int, size: int) -> list[int]:
            samplers = [FileSampler(10, 4, rank, size, seed=3, file_ends=source.file_ends) for rank in range(size)]
            batches = [batch for sampler in samplers for batch in Loader(source, sampler, data, True, step, step + 1)]
            return [int(image[0, 0, 0]) for batch in batches for image in batch.image[batch.weight > 0]]

        assert [images(step, 1) for step in range(6)] == [images(step, 3) for step in range(6)]

    @pytest.mark.parametrize(
        ("shuffle_by", "reads", "is_in_sequence"), [("auto", 5, False), ("files", 5, True), ("examples", 61, False)]
    )
    def test_an_epoch_reads_each_file_in_one_go(self, tmp_path, monkeypatch, shuffle_by, reads, is_in_sequence):
        """The files have 12, 12, 12 and 24 examples, the last in two spans.

        If all are mixed each is read, the first twice.
        """
        write_batch_files(numbered(60, 7), tmp_path, "train", rows=12, seed=None)
        last = [tmp_path / "train" / f"0000{i}.npy" for i in (3, 4)]
        np.save(last[0], np.concatenate([np.load(path) for path in last]))
        last[1].unlink()
        monkeypatch.setattr("jaxmpi.data.sources.numpy_files.SPAN_BYTES", 20 * 90)
        monkeypatch.setattr("jaxmpi.data.sources.numpy_files.KEPT_BYTES", 0)  # then two spans are kept
        data = batch_data(tmp_path, shuffle_by=shuffle_by, loaders=1)
        feed = open_feed(Experiment(model=digits_cnn_tiny(), data=data), "train", 10, gather_workers(1))
        offsets, real = [], os.preadv

        def preadv(file: int, into: Any, offset: int) -> int:
            offsets.append(offset)
            return real(file, into, offset)

        with contextlib.closing(feed.batches(0, 6)) as batches:
            monkeypatch.setattr(os, "preadv", preadv)
            seen = [int(image[0, 0, 0]) for batch in batches for image in np.asarray(batch["image"])]
        assert sorted(seen) == list(range(60))
        assert len(offsets) == reads
        files = [min(i // 12, 3) for i in seen]
        assert (np.count_nonzero(np.diff(files)) <= 4) == (shuffle_by != "examples")
        assert bool(np.all((np.diff(seen) == 1) | (np.diff(files) != 0))) == is_in_sequence

    def test_a_span_that_cannot_be_read_is_no_span_for_any_thread(self, folder):
        source = opened(folder).whole_files()
        path = folder / "train" / "00001.npy"
        whole = path.read_bytes()
        path.write_bytes(whole[:-90])
        with ThreadPoolExecutor(4) as threads:
            errors = [future.exception() for future in [threads.submit(source.__getitem__, 5) for _ in range(8)]]
        assert all("00001.npy ends 90 bytes before byte" in str(error) for error in errors)
        path.write_bytes(whole)
        assert source[5][0][0, 0, 0] == 5


HEADS = {
    "no bytes": b"",
    "no end": npy_head("'shape': (10,), '"),
    "nested": npy_head("-" * 9000 + "1"),
    "objects": npy_head("'descr': '|O', 'shape': (10,)"),
    "petabytes": npy_head(f"'shape': ({10**15},)"),
    "cut off": npy_head("'shape': (10,)") + bytes(79),
}


class TestDamage:
    @pytest.mark.parametrize(
        "array",
        [
            np.array([{}], object),
            np.zeros((2, 5, 6, 3), np.float32),
            np.zeros((5, 6, 3), np.uint8),
            np.asfortranarray(np.zeros((2, 5, 6, 3), np.uint8)),
            np.zeros((2, 5, 7, 3), np.uint8),
        ],
        ids=["object", "float", "axes", "Fortran", "shape"],
    )
    def test_files_of_another_kind(self, folder, array):
        np.save(folder / "train" / "00001.npy", array, allow_pickle=True)
        with pytest.raises(UsageError, match=r"00001\.npy"):
            opened(folder)

    @pytest.mark.parametrize("damage", HEADS)
    def test_damage_is_named_in_every_file(self, folder, damage):
        mean_image = folder / "train_mean.npy"
        for path in (folder / "train" / "00001.npy", folder / "train_labels.npy", mean_image):
            whole = path.read_bytes()
            path.write_bytes(HEADS[damage])
            with pytest.raises(UsageError, match=rf"^{path}: "):
                load_mean_image(Data(mean_image=str(path))) if path == mean_image else opened(folder)
            path.write_bytes(whole)

    @pytest.mark.parametrize(
        "labels",
        [np.arange(9), np.arange(10) - 1, np.zeros(10), np.array([{}], object), None],
        ids=["fewer", "below 0", "floats", "objects", "gone"],
    )
    def test_labels_that_cannot_be(self, folder, labels):
        path = folder / "train_labels.npy"
        path.unlink() if labels is None else np.save(path, labels, allow_pickle=True)
        with pytest.raises(UsageError, match=r"train_labels\.npy: "):
            opened(folder)

    def test_numbers_without_leading_zeros(self, folder):
        files = folder / "train"
        for number in range(3):
            (files / f"{number:05}.npy").rename(files / f"part{number + 8}-a.npy")
        with pytest.raises(UsageError, match=r"part10-a\.npy and part8-a\.npy, .*leading zeros"):
            opened(folder)
        (files / "part10-a.npy").rename(files / "zz1234.npy")  # another name altogether
        assert opened(folder).files == [f"{files}/{name}" for name in ("part8-a.npy", "part9-a.npy", "zz1234.npy")]

    @pytest.mark.parametrize("name", ["train/00000.npy", "train_labels.npy"])
    def test_pipes_are_refused_without_waiting(self, folder, name):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UsageError, match=name):
            opened(folder)

    def test_holes_ask_for_no_memory(self, folder):
        """Some kilobytes on the disk, terabytes by their size."""
        for path in (folder / "train").iterdir():
            path.unlink()
        path = folder / "train" / "00000.npy"
        path.write_bytes(npy_head("'descr': '|u1', 'fortran_order': False, 'shape': (1, 1048576, 1048576, 3)"))
        os.truncate(path, (3 << 40) + 1000)
        np.save(folder / "train_labels.npy", np.zeros(1, int))
        with pytest.raises(UsageError, match=rf"{path}: got {3 << 40} bytes"):
            opened(folder)


class TestWriting:
    def test_an_unfinished_set_over_another_does_not_open(self, folder):
        images = [np.zeros((5, 6, 3), np.uint8)] * 9 + [np.zeros((5, 7, 3), np.uint8)]
        with pytest.raises(UsageError, match=r"array\[9\]"):
            write_batch_files(ArraySource(images, [3] * 10), folder, "train", rows=4, seed=None)
        with pytest.raises(UsageError, match=r"train_labels\.npy"):
            opened(folder)

    @pytest.mark.parametrize("label", [np.int64(2**40), -1, 0.5])
    def test_labels_that_files_cannot_have_are_refused(self, tmp_path, label):
        source = ArraySource(np.zeros((1, 5, 6, 3), np.uint8), [label], classes=3)
        with pytest.raises(UsageError, match="label"):
            write_batch_files(source, tmp_path, "train", seed=None)
        assert not list((tmp_path / "train").glob("*.npy"))
