"""Sources of tables, whatever the format: the same rows, labels, classes and order, also without JAX."""

import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import jaxmpi
from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import open_source

ROWS = 12
PIXELS = np.random.default_rng(0).integers(0, 256, (ROWS, 4, 5, 3), np.uint8)
LABELS = np.arange(ROWS) % 3
NUMBERS = np.random.default_rng(0).standard_normal((ROWS, 2, 3)).astype(np.float32)
SPLITS = {"train": [range(8), range(8, 12)], "validation": [range(1)]}
COLUMNS = ("image", "label", "numbers")


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_npz(folder: Path) -> None:
    for split, files in SPLITS.items():
        (folder / split).mkdir()
        for i, rows in enumerate(files):
            np.savez(folder / split / f"{i}.npz", image=PIXELS[rows], label=LABELS[rows], numbers=NUMBERS[rows])


def write_npy(folder: Path) -> None:
    for split, files in SPLITS.items():
        (folder / split).mkdir()
        rows = [i for file in files for i in file]
        for name, array in zip(COLUMNS, (PIXELS, LABELS, NUMBERS), strict=True):
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
        saved.cast_column("numbers", datasets.Array2D((2, 3), "float32")).save_to_disk(folder / split, num_shards=1)


def write_shards(folder: Path) -> None:
    wds = pytest.importorskip("webdataset")
    for split, files in SPLITS.items():
        for i, rows in enumerate(files):
            with wds.TarWriter(str(folder / f"{split}-{i}.tar")) as shard:
                for row in rows:
                    example = {"png": PIXELS[row], "cls": int(LABELS[row]), "npy": NUMBERS[row]}
                    shard.write({"__key__": f"a/{row:03}", **example})


FORMATS: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "npz": ("numpy", write_npz, COLUMNS),
    "npy": ("numpy", write_npy, COLUMNS),
    "parquet": ("parquet", write_parquet, COLUMNS),
    "huggingface": ("huggingface", write_saved, COLUMNS),
    "webdataset": ("webdataset", write_shards, ("png", "cls", "npy")),
}


@pytest.fixture(params=FORMATS, scope="module")
def written(request, tmp_path_factory) -> tuple[Data, tuple[str, ...]]:
    """Twelve rows in two files, and one for validation; the data, and the names of image, label and numbers."""
    source, write, names = FORMATS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    write(folder)
    return Data(source, dir=str(folder), columns=names[:2], loader="threads"), names


def with_columns(data: Data, *names: str) -> Any:
    return open_source(Data(data.source, dir=data.dir, columns=names), "train")


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


def test_numbers_are_an_input_as_they_are_and_three_columns_a_dict(written):
    data, names = written
    source, rows = with_columns(data, names[2], names[1]), with_columns(data, *names)
    assert source.encoded is None
    for i in range(ROWS):
        np.testing.assert_array_equal(source[i][0], NUMBERS[i])
    np.testing.assert_array_equal(rows[9][names[0]], PIXELS[9])
    np.testing.assert_array_equal(rows[9][names[2]], NUMBERS[9])
    assert rows[9][names[1]] == LABELS[9]


def test_a_column_that_is_not_there_is_named_with_those_there_are(written):
    data, names = written
    if data.source != "webdataset":  # whose columns may differ by example
        with pytest.raises(UsageError, match=r"picture.*image, label, numbers.*--data\.columns"):
            with_columns(data, "picture", names[1])


def test_a_loader_process_reads_it_without_jax(written):
    """Which would cost each of them seconds and memory."""
    opened = pickle.dumps(open_source(written[0], "train"))
    code = (
        "import pickle, sys, types; bare = types.ModuleType('jaxmpi'); bare.__path__ = sys.argv[1:]; "
        "sys.modules['jaxmpi'] = bare; "  # as a loader process starts
        "source = pickle.load(sys.stdin.buffer); "
        "print(source[0][0].sum(), [name for name in ('jax', 'datasets', 'tensorflow') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(Path(jaxmpi.__file__).parent)]
    ended = subprocess.run(command, input=opened, capture_output=True, check=True)
    assert ended.stdout.decode().strip() == f"{PIXELS[0].sum()} []"


@pytest.mark.parametrize("name", ["npz", "parquet", "webdataset"])
@pytest.mark.parametrize("beside", ["train", "train-1"])
def test_two_layouts_of_a_split_are_refused(tmp_path, name, beside):
    source, write, columns = FORMATS[name]
    write(tmp_path)
    [first, *_] = sorted(tmp_path.rglob("*train*/*" if name == "npz" else "train*"))
    inner = tmp_path / "train" / f"0{first.suffix}"
    outer = tmp_path / f"{beside}{first.suffix}"
    inner.parent.mkdir(exist_ok=True)
    inner.write_bytes(blob := first.read_bytes())
    for path in tmp_path.glob(f"train*{first.suffix}"):
        path.unlink()
    outer.write_bytes(blob)
    with pytest.raises(UsageError, match=f"got {inner} and {outer}"):
        open_source(Data(source, dir=str(tmp_path), columns=columns[:2]), "train")
    outer.unlink()
    assert len(open_source(Data(source, dir=str(tmp_path), columns=columns[:2]), "train")) > 0
