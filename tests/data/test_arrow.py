"""Parquet files and data sets of Hugging Face, written by their own libraries: types, damage, what is kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import CorruptExample, command, open_source
from jaxmpi.data.sources import arrow as arrow_source
from test_tables import LABELS, PIXELS, ROWS, table

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")


def written(folder: Path, kind: str, split: str = "train", **columns: Any) -> None:
    """Twelve rows: in two Parquet files of row groups of 4, or in a data set."""
    if kind == "huggingface":
        saved = datasets.Dataset(table(**columns))
        if not columns:
            saved = saved.cast_column("image", datasets.Image()).cast_column(
                "numbers", datasets.Array2D((2, 3), "float32")
            )
            saved = saved.cast_column("label", datasets.ClassLabel(names=["a", "b", "c", "d"]))
        saved.save_to_disk(folder / split)
    else:
        for name, rows in {"0": slice(8), "1": slice(8, 12)}.items():
            some = {key: column[rows] for key, column in columns.items()}
            parquet.write_table(table(rows, **some), folder / f"{split}-{name}.parquet", row_group_size=4)


@pytest.fixture(params=["parquet", "huggingface"])
def kind(request) -> str:
    return request.param


def opened(folder: Path, kind: str, split: str = "train", **kwargs: Any) -> Any:
    return open_source(Data(kind, dir=str(folder), **kwargs), split)


@pytest.fixture
def folder(tmp_path: Path, kind: str) -> Path:
    written(tmp_path, kind)
    return tmp_path


@pytest.mark.parametrize("name", ["../elsewhere.arrow", 3, None, "twice"])
def test_a_saved_data_set_that_names_other_files_is_refused(tmp_path, name):
    written(tmp_path, "huggingface")
    state = tmp_path / "train" / "state.json"
    fields = json.loads(state.read_text())
    there = fields["_data_files"]
    fields["_data_files"] = {None: [], "twice": there * 2}.get(name, [{"filename": name}])
    state.write_text(json.dumps(fields))
    with pytest.raises(UsageError, match=str(tmp_path)):
        opened(tmp_path, "huggingface")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"label": ["a"] * ROWS}, "column label: got string"),
        ({"label": [b"a"] * ROWS}, "column label: got binary"),
        ({"label": [*range(ROWS - 1), None]}, "column label: got 1 rows without a value"),
        ({"image": ["a.png"] * ROWS}, "column image: got string"),
    ],
    ids=["text", "bytes", "missing", "paths"],
)
def test_columns_of_other_types_are_refused(tmp_path, kind, columns, said):
    written(tmp_path, kind, **columns)
    with pytest.raises(UsageError, match=rf"{tmp_path}/train.*{said}"):
        opened(tmp_path, kind)[0]


@pytest.mark.parametrize(
    ("image", "error", "said"),
    [
        ([[[1, 2], [3]]] * ROWS, UsageError, r"train.*\[1\]: column image: got lists of lengths \[1, 2\]"),
        ([b"\x89PNG"] * ROWS, CorruptExample, r"\[1\] \(example 1\) is corrupt"),
        ([{"bytes": None, "path": "a.png"}] * ROWS, UsageError, "column image: got an image without bytes"),
        ([{"left": 1, "right": 2}] * ROWS, UsageError, r"train.*\[1\]: column image: got struct"),
    ],
    ids=["uneven lists", "damaged", "a path", "fields"],
)
def test_cells_that_cannot_be_are_named(tmp_path, kind, image, error, said):
    if isinstance(image[0], dict) and "path" in image[0]:
        image = arrow.array(image, arrow.struct({"bytes": arrow.binary(), "path": arrow.string()}))
    written(tmp_path, kind, image=image)
    with pytest.raises(error, match=said):
        opened(tmp_path, kind)[1]


@pytest.mark.parametrize("first", [["image", "label", "label"], ["image", "label", "more"]])
def test_two_columns_of_one_name_are_refused_in_any_file(tmp_path, first):
    for name, names in {"0": first, "1": ["image", "label", "label"]}.items():
        columns = arrow.Table.from_arrays([arrow.array(LABELS)] * 3, names)
        parquet.write_table(columns, tmp_path / f"train-{name}.parquet")
    with pytest.raises(UsageError, match=rf"train-{int('more' in first)}.parquet: .*label"):
        opened(tmp_path, "parquet")
    assert opened(tmp_path, "parquet", columns=("image",))[3]["image"] == 0


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_a_flipped_byte_of_a_page_names_the_file(tmp_path, compression):
    columns = arrow.table({"image": np.arange(4000) * 7919 % 1000, "label": np.arange(4000) % 1000})
    path = tmp_path / "train.parquet"
    parquet.write_table(columns, path, compression=compression, write_page_checksum=True, use_dictionary=False)
    with parquet.ParquetFile(path) as file:
        chunk = file.metadata.row_group(0).column(1)
    blob = bytearray(path.read_bytes())
    blob[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 255
    path.write_bytes(blob)
    with pytest.raises(UsageError, match=str(path)):
        opened(tmp_path, "parquet")


def test_flipped_bytes_of_pages_and_of_names_name_the_file_whenever_they_are_read(tmp_path):
    path = tmp_path / "train.parquet"
    columns = arrow.table({"image": [[float(i)] * 3 for i in range(8)], "label": np.arange(8) % 3})
    parquet.write_table(columns, path, compression="none", use_dictionary=False, write_page_checksum=True)
    with parquet.ParquetFile(path) as file:
        chunk = file.metadata.row_group(0).column(0)
    blob = path.read_bytes()
    names = [at for at in range(len(blob)) if blob.startswith(b"image", at)]
    for at in [*names, chunk.data_page_offset + chunk.total_compressed_size - 1]:
        path.write_bytes(blob[:at] + bytes([blob[at] ^ 255]) + blob[at + 1 :])
        with pytest.raises((OSError, UsageError), match=str(path)):
            print(opened(tmp_path, "parquet")[0])


@pytest.mark.parametrize("damage", ["cut between batches", "cut inside one", "hole", "no end"])
def test_an_arrow_file_that_is_not_whole_is_refused(tmp_path, damage):
    saved = datasets.Dataset.from_dict({"image": [*range(3000)], "label": [0] * 3000})
    saved.save_to_disk(tmp_path / "train")
    (path,) = (tmp_path / "train").glob("*.arrow")
    assert len(opened(tmp_path, "huggingface")) == 3000
    with arrow.memory_map(str(path)) as file:
        arrow.ipc.open_stream(file).read_next_batch()
        at = file.tell() - 8  # where the next batch begins: Arrow has read its length
    blob = path.read_bytes()
    damaged = {
        "cut between batches": blob[:at],
        "cut inside one": blob[: at + 1000],
        "hole": blob[:at] + bytes(64) + blob[at + 64 :],
        "no end": blob[:-8],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(UsageError, match=str(tmp_path)):
        opened(tmp_path, "huggingface")


@pytest.mark.parametrize("offset", [-5, 1 << 30], ids=["before it", "past its end"])
def test_an_arrow_file_whose_offsets_leave_it_is_named(tmp_path, offset):
    """Arrow ended the process by SIGABRT, or by SIGBUS."""
    texts = [b"x" * (i + 1) for i in range(40)]
    datasets.Dataset.from_dict({"image": texts, "label": [0] * 40}).save_to_disk(tmp_path / "train")
    (path,) = (tmp_path / "train").glob("*.arrow")
    blob, ends = path.read_bytes(), np.cumsum([0, *map(len, texts)]).astype("<i4").tobytes()
    at = blob.index(ends) + 80
    path.write_bytes(blob[:at] + np.int32(offset).tobytes() + blob[at + 4 :])
    source = opened(tmp_path, "huggingface")
    with pytest.raises(UsageError, match=f"{tmp_path}.*damaged"):
        source[20]


def test_row_groups_that_do_not_fit_are_read_whole_one_after_another(tmp_path, monkeypatch):
    written(tmp_path, "parquet")
    assert opened(tmp_path, "parquet").file_ends is None
    monkeypatch.setattr(arrow_source, "KEPT_BYTES", 100)
    read, group = [], arrow_source._read_row_group
    monkeypatch.setattr(arrow_source, "_read_row_group", lambda *args: read.append(args) or group(*args))
    source = opened(tmp_path, "parquet")
    assert source.file_ends == (4, 8, 12)
    for i in range(ROWS):
        np.testing.assert_array_equal(source[i][0], PIXELS[i])
    assert len(read) == 3
    source[0]
    assert len(read) == 4  # two are kept


def test_a_parquet_file_that_is_gone_ends_the_run_and_is_named(tmp_path):
    written(tmp_path, "parquet")
    source = opened(tmp_path, "parquet")
    (tmp_path / "train-1.parquet").unlink()
    with pytest.raises(OSError, match=r"row group 0 of .*train-1.parquet"):
        source[8]


def test_images_of_a_table_can_be_packed(folder, kind, tmp_path, capsys):
    with pytest.raises(UsageError, match=r"expected column picture once; .* such as --columns"):
        command.main(["pack", str(folder), "packed", "--source", kind, "--columns", "picture", "label"])
    line = ["pack", str(folder), str(tmp_path / "packed"), "--source", kind, "--columns", "image", "label"]
    command.main([*line, "--validation-split", ""])
    packed = open_source(Data("packed", dir=str(tmp_path / "packed")), "train")
    for i in range(ROWS):
        np.testing.assert_array_equal(packed[i][0], PIXELS[i])
        assert packed[i][1] == LABELS[i]
