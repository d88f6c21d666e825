"""Sources of tables, whatever the format: the same rows, labels, classes and order."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import Loader, Sampler, open_source

ROWS = 12
PIXELS = np.random.default_rng(0).integers(0, 256, (ROWS, 4, 5, 3), np.uint8)
LABELS = np.arange(ROWS) % 3
NUMBERS = np.random.default_rng(0).standard_normal((ROWS, 2, 3)).astype(np.float32)
SPLITS = {"train": [range(8), range(8, 12)], "validation": [range(1)]}


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_npz(folder: Path) -> None:
    for split, files in SPLITS.items():
        (folder / split).mkdir()
        for i, rows in enumerate(files):
            arrays = {"image": PIXELS[rows], "label": LABELS[rows], "numbers": NUMBERS[rows]}
            np.savez(folder / split / f"{i}.npz", **arrays)


def write_npy(folder: Path) -> None:
    for split, files in SPLITS.items():
        (folder / split).mkdir()
        rows = [i for file in files for i in file]
        for name, array in {"image": PIXELS, "label": LABELS, "numbers": NUMBERS}.items():
            np.save(folder / split / f"{name}.npy", array[rows])


def table(rows: range | slice = slice(None), **columns: Any) -> Any:
    arrow = pytest.importorskip("pyarrow")
    images = [{"bytes": png(pixels), "path": "any.png"} for pixels in PIXELS[rows]]
    return arrow.table({"image": images, "label": LABELS[rows], "numbers": NUMBERS[rows].tolist(), **columns})


def write_parquet(folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for split, files in SPLITS.items():
        for i, rows in enumerate(files):
            parquet.write_table(table(rows), folder / f"{split}-{i}.parquet", row_group_size=4)


def write_saved(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for split, files in SPLITS.items():
        saved = datasets.concatenate_datasets([datasets.Dataset(table(rows)) for rows in files])
        saved = saved.cast_column("image", datasets.Image())
        saved.cast_column("numbers", datasets.Array2D((2, 3), "float32")).save_to_disk(folder / split)


def write_shards(folder: Path) -> None:
    wds = pytest.importorskip("webdataset")
    for split, files in SPLITS.items():
        for i, rows in enumerate(files):
            with wds.TarWriter(str(folder / f"{split}-{i}.tar")) as shard:
                for row in rows:
                    example = {"png": PIXELS[row], "cls": int(LABELS[row]), "npy": NUMBERS[row]}
                    shard.write({"__key__": f"a/{row:03}", **example})


FORMATS: dict[str, tuple[str, Callable[[Path], None], tuple[str, str, str]]] = {
    "npz": ("numpy", write_npz, ("image", "label", "numbers")),
    "npy": ("numpy", write_npy, ("image", "label", "numbers")),
    "parquet": ("parquet", write_parquet, ("image", "label", "numbers")),
    "huggingface": ("huggingface", write_saved, ("image", "label", "numbers")),
    "webdataset": ("webdataset", write_shards, ("png", "cls", "npy")),
}


@pytest.fixture(params=FORMATS)
def written(request, tmp_path: Path) -> tuple[Data, tuple[str, str, str]]:
    """Twelve rows in two files, and one for validation; the data, and the names of image, label and numbers."""
    source, write, names = FORMATS[request.param]
    write(tmp_path)
    return Data(source, dir=str(tmp_path), columns=names[:2], loader="threads"), names


def with_columns(data: Data, *names: str) -> Data:
    return Data(data.source, dir=data.dir, columns=names)


def test_rows_are_those_that_were_written_here_and_where_a_pickle_is_opened(written):
    source: Any = open_source(written[0], "train")
    for each in (source, pickle.loads(pickle.dumps(source))):
        assert len(each) == ROWS
        for i in range(ROWS):
            image, label = each[i]
            np.testing.assert_array_equal(image, PIXELS[i], strict=True)
            assert label == LABELS[i]
            if each.encoded:
                blob, label = each.encoded(i)
                np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(blob))), PIXELS[i])
                assert label == LABELS[i]


def test_classes_of_a_split_are_those_of_training_too(written):
    assert [open_source(written[0], split).classes for split in SPLITS] == [3, 3]


def test_numbers_are_an_input_as_they_are(written):
    data, (_, label, numbers) = written
    source: Any = open_source(with_columns(data, numbers, label), "train")
    assert source.encoded is None
    for i in range(ROWS):
        np.testing.assert_array_equal(source[i][0], NUMBERS[i])


def test_three_columns_are_a_dict(written):
    data, names = written
    row = open_source(with_columns(data, *names), "train")[9]
    np.testing.assert_array_equal(row[names[0]], PIXELS[9])
    np.testing.assert_array_equal(row[names[2]], NUMBERS[9])
    assert row[names[1]] == LABELS[9]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_workers_sees_the_examples_of_one(written, size):
    """Resumed at step 4, in the second epoch."""
    seen = []
    for rank in range(size):
        sampler, source = Sampler(ROWS, 5, rank, size, seed=1), open_source(written[0], "train")
        with Loader(source, sampler, written[0], train=True, start_step=4, stop_step=5) as loader:
            batch = next(loader)
            seen += [image.tobytes() for image in batch.image[batch.weight > 0]]
    assert sorted(seen) == sorted(PIXELS[i].tobytes() for i in Sampler(ROWS, 5, seed=1).indices(4).indices)


def test_a_column_that_is_not_there_is_named_with_those_there_are(written):
    data, names = written
    if data.source != "webdataset":  # whose columns may differ by example
        with pytest.raises(UsageError, match=r"picture.*image, label, numbers.*--data\.columns"):
            open_source(with_columns(data, "picture", names[1]), "train")
