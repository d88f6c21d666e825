"""Sources with Apache Arrow's columns: Parquet files, and data sets saved by Hugging Face's `datasets`.

A row of Parquet cannot be read alone: its row group is read, decompressed and kept. If all of them are small, all are
kept. Otherwise training takes whole groups, one after another in a new order each epoch, as it takes batch files: with
examples in random order nearly each would cost a row group. A saved data set is mapped into memory instead, and its
rows are read where they lie. Nothing is downloaded or unpickled.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.core.json_tree import read_json
from jaxmpi.data.sources import base
from jaxmpi.data.sources.reading import LastUsed

KEPT_BYTES = 1 << 28  # bytes of row groups kept by each process that reads them; two groups at least
DATA_SET = "a folder that Dataset.save_to_disk has written"
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
MOST_JSON_BYTES = 64 << 20  # names of a million classes


class ArrowSource(base.TableSource):
    """Rows of Arrow tables: row groups of Parquet files, or batches of a saved data set.

    Refused: a file that is damaged or of another kind, or a column that is missing; as they are read, cells that hold
    neither numbers, nor lists of them that are equally long, nor the bytes of images.
    """

    tables: Any  # by number

    def add_schema(self, config: Data, schema: Any, path: str) -> None:
        """Find the columns in a file."""
        super().__init__(config, base.choose_columns(config, schema.names, path))
        self.is_compressed = _holds_images(schema.field(self.columns[0]).type)

    def set_labels(self, columns: Sequence[Any], path: str) -> None:
        """Note labels, a column a part, if all are whole numbers."""
        import pyarrow.types as types

        for column in columns:
            if _holds_images(column.type):
                raise UsageError(f"{path}: column {self.columns[1]}: got {column.type}; expected numbers")
        if missing := sum(column.null_count for column in columns):
            raise UsageError(f"{path}: column {self.columns[1]}: got {missing} rows without a value; leave them out")
        if columns and all(types.is_integer(column.type) for column in columns):
            self.labels = np.concatenate([column.to_numpy(zero_copy_only=False) for column in columns], dtype=np.int64)

    def read(self, part: int, row: int, index: int) -> Sequence[Any]:
        table = self.tables[part]
        return [_read_cell(table.column(name)[row], f"{self.where(index)}: column {name}") for name in self.columns]


# ---------------------------------------------------------------- Parquet


class ParquetSource(ArrowSource):
    """One split of Parquet files."""

    def __init__(self, config: Data, split: str) -> None:
        self.files = files = base.split_files(config, split, ".parquet")
        self.groups: list[tuple[str, int]] = []
        rows, size_bytes, labels = [], [], []
        for path in files:
            with _open_parquet(path) as file:
                self.add_schema(config, file.schema_arrow, path)
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    chunks = [group.column(i) for i in range(group.num_columns)]
                    wanted = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in self.columns]
                    self.groups.append((path, number))
                    rows.append(group.num_rows)
                    size_bytes.append(sum(chunk.total_uncompressed_size for chunk in wanted))
                if self.is_pair:
                    labels.append(file.read([self.columns[1]]).column(0))
                    if len(labels[-1]) != file.metadata.num_rows:
                        raise UsageError(f"{path}: got {len(labels[-1])} labels for {file.metadata.num_rows} rows")
        self.set_labels(labels, files[0])
        self.set_parts([f"{path}, row group {number}" for path, number in self.groups], rows)
        is_small = sum(size_bytes) <= KEPT_BYTES
        self.file_ends = None if is_small else tuple(self.ends.tolist())
        limit = len(self.groups) if is_small else max(2, KEPT_BYTES // max(size_bytes))
        # The loaders of a batch need the same row group: one reads it.
        self.tables = LastUsed(partial(_read_row_group, self.groups, self.columns), limit)


def _read_row_group(groups: Sequence[tuple[str, int]], columns: Sequence[str], number: int) -> Any:
    path, group = groups[number]
    try:
        with _open_parquet(path) as file:
            return file.read_row_group(group, columns=list(columns), use_threads=False)
    except UsageError as error:  # the file has changed: it was sound at the start
        raise OSError(f"row group {group} of {path}: {error}") from error


@contextlib.contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    pyarrow = base.import_package("parquet", "parquet", "pyarrow", "pyarrow.parquet")
    with base.refusing(path, "a Parquet file", pyarrow.ArrowException, UnicodeDecodeError):  # of a column's name
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file


# ---------------------------------------------------------------- saved data sets


class HuggingFaceSource(ArrowSource):
    """One split that `datasets` has saved in a folder, read without `datasets`."""

    def __init__(self, config: Data, split: str) -> None:
        root = base.data_root(config, "DIR/<split>/, as DatasetDict.save_to_disk writes it")
        folder = f"{root}/{base.split_name(config, split)}"
        self.config, self.split, batches = config, split, []
        pyarrow = base.import_package("huggingface", "huggingface", "pyarrow")
        self.files, features = _read_saved(Path(folder))
        for path in self.files:
            with base.refusing(path, DATA_SET, pyarrow.ArrowException, UnicodeDecodeError):
                schema, mapped = _map_batches(pyarrow, path)
            self.add_schema(config, schema, path)
            batches += mapped
        self.set_parts((f"{folder}, batch {number}" for number in range(len(batches))), [*map(len, batches)])
        self.tables = LastUsed(partial(_validated, batches, self.parts), len(batches))
        if self.is_pair:
            self.set_labels([batch.column(self.columns[1]) for batch in batches], folder)
            label = features.get(self.columns[1])
            if isinstance(label, dict) and label.get("_type") == "ClassLabel":
                self.classes = len(label["names"])

    def __reduce__(self) -> tuple[Any, ...]:
        return HuggingFaceSource, (self.config, self.split)


def _read_saved(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Paths of the Arrow files of a saved data set, and its features."""
    if (folder / "dataset_dict.json").is_file():
        raise UsageError(f"{folder}: got several splits; expected one split: name it with data.train_split")
    state, info = (read_json(folder / name, MOST_JSON_BYTES, DATA_SET) for name in ("state.json", "dataset_info.json"))
    with base.refusing(str(folder), DATA_SET, KeyError, TypeError, ValueError):
        names = [file["filename"] for file in state["_data_files"]]
        features = dict(info["features"])
    odd = [name for name in names if not isinstance(name, str) or os.path.basename(name) != name]
    odd += [name for name in names if names.count(name) > 1]
    if odd or not names or state.get("_indices_data_files"):
        raise UsageError(f"{folder}: got the files {odd or names}, or indices; expected {DATA_SET}: save it again")
    paths = [str(folder / name) for name in names]
    base.check_plain_files(paths, DATA_SET)
    return paths, features


def _map_batches(pyarrow: Any, path: str) -> tuple[Any, list[Any]]:
    """Schema and batches of an Arrow stream, mapped into memory.

    To Arrow a cut between two batches is the end of a stream, and so is a hole of zeros; here the mark of the end must
    be the file's last bytes.
    """
    with pyarrow.memory_map(path) as file:
        reader = pyarrow.ipc.open_stream(file)
        batches = [*reader]
        end = file.tell()
        is_closed = end >= len(STREAM_END) and file.read_at(len(STREAM_END), end - len(STREAM_END)) == STREAM_END
        if not is_closed or end != file.size():
            raise UsageError(
                f"{path}: cut off or damaged: got an end at byte {end}; expected the mark of the end at byte "
                f"{file.size()}: save it again"
            )
        return reader.schema, batches


def _validated(batches: Sequence[Any], names: Sequence[str], number: int) -> Any:
    """A batch whose offsets point into it: others have Arrow read anywhere, or end the process."""
    try:
        batches[number].validate(full=True)
    except ValueError as error:
        raise UsageError(f"{names[number]}: damaged: {error}; save it again") from error
    return batches[number]


# ---------------------------------------------------------------- types and cells


def _holds_images(kind: Any) -> bool:
    import pyarrow.types as types

    kind = getattr(kind, "storage_type", kind)  # without what an extension adds
    in_struct = types.is_struct(kind) and kind.get_field_index("bytes") >= 0  # as of `datasets.Image`
    return in_struct or types.is_binary(kind) or types.is_large_binary(kind)


def _read_cell(scalar: Any, where: str) -> Any:
    """An Arrow scalar as a number, an array, or an image's bytes."""
    scalar = getattr(scalar, "value", scalar) if hasattr(scalar.type, "storage_type") else scalar
    if _holds_images(scalar.type):
        blob = scalar.as_py()
        blob = blob["bytes"] if isinstance(blob, dict) else blob
        if blob is None:
            raise UsageError(f"{where}: got an image without bytes; save the data set with them, not with paths")
        return blob
    if not scalar.is_valid:
        raise UsageError(f"{where}: got no value; leave such rows out")
    values = getattr(scalar, "values", None)  # of a list; a struct has a method of this name
    cell = np.asarray(scalar.as_py()) if values is None or callable(values) else _to_array(values, where)
    if cell.dtype.kind not in "biuf":
        raise UsageError(f"{where}: got {scalar.type}; expected numbers, or lists of them: write a label as its number")
    return cell


def _to_array(values: Any, where: str) -> np.ndarray:
    """An Arrow array of numbers, or of lists of them that are equally long, as [n, ...]."""
    values = getattr(values, "storage", values)
    if values.null_count:
        raise UsageError(f"{where}: got {values.null_count} missing values in a list; expected numbers")
    if not hasattr(values, "flatten") or not hasattr(values, "value_lengths"):
        return values.to_numpy(zero_copy_only=False)
    lengths = set(values.value_lengths().to_pylist())
    if len(lengths) > 1:
        raise UsageError(f"{where}: got lists of lengths {sorted(lengths)}; expected one length: pad them")
    inner = _to_array(values.flatten(), where)
    return inner.reshape(len(values), lengths.pop() if lengths else 0, *inner.shape[1:])
