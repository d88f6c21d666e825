"""NumPy files: rows where they lie, columns by name, what is refused."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import open_source
from jaxmpi.data.sources import numpy_files
from jaxmpi.data.sources.numpy_files import NumpySource

IMAGES = np.random.default_rng(0).integers(0, 256, (10, 4, 5, 3), np.uint8)
LABELS = np.arange(10) % 3


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Ten examples in two .npz files; three of them for validation, in a file of its own."""
    (tmp_path / "train").mkdir()
    for name, rows in {"train/a": slice(6), "train/b": slice(6, 10), "validation": slice(3)}.items():
        np.savez(tmp_path / f"{name}.npz", image=IMAGES[rows], label=LABELS[rows], extra=LABELS[rows] / 2)
    return tmp_path


def opened(folder: Path, split: str = "train", **kwargs) -> NumpySource:
    source = open_source(Data("numpy", dir=str(folder), **kwargs), split)
    assert isinstance(source, NumpySource)
    return source


@pytest.mark.parametrize("array", [IMAGES.astype(">f8"), np.asfortranarray(IMAGES)], ids=["big-endian", "Fortran"])
def test_a_file_a_column(tmp_path, array):
    (tmp_path / "train").mkdir()
    np.save(tmp_path / "train" / "x.npy", array)
    np.save(tmp_path / "train" / "y.npy", LABELS)
    source = opened(tmp_path, columns=("x", "y"))
    np.testing.assert_array_equal(source[4][0], IMAGES[4])
    assert source[4][0].dtype.isnative


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": IMAGES, "label": LABELS}, "expected column image once; there are label, x.*--data.columns x label"),
        ({"image": IMAGES, "label": LABELS[:9]}, "'image': 10, 'label': 9"),
        ({"image": IMAGES, "label": np.array([*"abcdefghij"])}, "label: got <U1"),
        ({"image": IMAGES.astype(object), "label": LABELS}, "image: got object"),
        ({"image": np.float32(1), "label": LABELS}, r"image: got float32\[\]"),
    ],
    ids=["name", "length", "text", "object", "scalar"],
)
def test_what_is_refused(tmp_path, arrays, said):
    np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(UsageError, match=rf"{tmp_path}/train.npz.*{said}"):
        opened(tmp_path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("again", ["label.npy", "label"])
def test_two_arrays_of_one_name_are_refused(tmp_path, again):
    np.savez(tmp_path / "train.npz", image=IMAGES, label=LABELS)
    with zipfile.ZipFile(tmp_path / "train.npz", "a") as file:
        file.writestr(again, file.read("label.npy"))
    with pytest.raises(UsageError, match=r"train.npz: expected column label once"):
        opened(tmp_path)


@pytest.mark.parametrize("shape", [(1 << 42,), (11,), (9,)], ids=str)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_array_that_claims_more_than_its_bytes_is_refused(tmp_path, shape, compression):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "train.npz", "w", compression) as file:
        for name in ("image", "label"):
            file.writestr(f"{name}.npy", head.getvalue() + bytes(10))
    with pytest.raises(UsageError, match=r"train.npz: image: "):
        opened(tmp_path)


def test_files_of_other_rows_and_those_that_are_cut_off_are_named(shards):
    np.savez(shards / "train" / "c.npz", image=IMAGES[:, :2], label=LABELS)
    with pytest.raises(UsageError, match=r"c.npz: image: got rows uint8\[2, 5, 3\]"):
        opened(shards)
    path = shards / "train" / "a.npz"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(UsageError, match=r"a.npz"):
        opened(shards)
    with pytest.raises(UsageError, match=r"found no .npz file for train in .*expected DIR/train/<any>.npz"):
        opened(shards / "train")


def test_a_set_of_numbered_files_is_complete(shards):
    for name, number in (("a", 0), ("b", 2)):
        (shards / "train" / f"{name}.npz").rename(shards / "train" / f"x-{number:05}-of-00003.npz")
    with pytest.raises(UsageError, match=r"x-\*-of-3: got 2 files; expected 3, also number 1"):
        opened(shards)


def test_a_file_that_shrinks_while_it_is_read_is_named(shards):
    source = opened(shards)
    (shards / "train" / "b.npz").write_bytes(b"")
    with pytest.raises(OSError, match=r"b.npz ends 60 bytes before"):
        source[6]


def test_of_compressed_training_only_labels_are_read_for_another_split(tmp_path, monkeypatch):
    for split in ("train", "validation"):
        np.savez_compressed(tmp_path / f"{split}.npz", image=IMAGES, label=LABELS)
    read, whole = [], numpy_files.open_array
    monkeypatch.setattr(
        numpy_files, "open_array", lambda files, name, *rest: read.append(name) or whole(files, name, *rest)
    )
    assert opened(tmp_path, "validation").classes == 3
    assert read == ["image", "label", "label"]


def test_a_folder_of_both_kinds_of_files_is_refused(shards):
    np.save(shards / "train" / "image.npy", IMAGES)
    with pytest.raises(UsageError, match=r"train: got a\.npz and image\.npy"):
        opened(shards)
