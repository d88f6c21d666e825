"""Sources with Apache Arrow's columns: Parquet files, and data sets saved by Hugging Face's `datasets`.

A row of Parquet cannot be read alone: its row group is read, decompressed and kept. If all of them are small, all are
kept. Otherwise training takes whole groups, one after another in a new order each epoch, as it takes batch files: with
examples in random order nearly each would cost a row group. A saved data set is mapped into memory instead, and its
rows are read where they lie. Nothing is downloaded or unpickled. No other file knows Arrow's types.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxmpi.config.data import Data, data_dir
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError, check
from jaxmpi.data.sources.base import (
    Source,
    TableSource,
    check_plain_files,
    chosen,
    place_in_parts,
    split_files,
    split_name,
)
from jaxmpi.data.sources.open_files import LastUsed

KEPT_BYTES = 1 << 28  # bytes of row groups kept by each process that reads them; two groups at least
CELLS = "numbers, lists of them that are equally long, or the bytes of images"
DATA_SET = "a folder that Dataset.save_to_disk has written"
END = b"\xff\xff\xff\xff\0\0\0\0"  # the last bytes of an Arrow stream


class ParquetSource(TableSource):
    """One split of Parquet files.

    Attributes:
        file_ends: of each row group, the index behind its last row; None if all are kept.

    Raises:
        UsageError: a file is no Parquet file, or a column is missing or holds neither numbers nor images.
    """

    def __init__(self, config: Data, files: Sequence[str]) -> None:
        with _open_parquet(files[0]) as file:
            super().__init__(config, chosen(config, file.schema_arrow.names, files[0]))
        self.groups: list[tuple[str, int]] = []
        rows, size_bytes, labels = [], [], []
        for path in files:
            with _open_parquet(path) as file:
                odd = [name for name in self.columns if file.schema_arrow.names.count(name) != 1]
                check(not odd, f"{path}: got column {', '.join(odd)} not once; expected the columns of the first file")
                self.is_compressed = _check_types(file.schema_arrow, self.columns, path)
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    chunks = [group.column(i) for i in range(group.num_columns)]
                    wanted = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in self.columns]
                    self.groups.append((path, number))
                    rows.append(group.num_rows)
                    size_bytes.append(sum(chunk.total_uncompressed_size for chunk in wanted))
                if self.is_pair:
                    column, n = file.read([self.columns[1]]).column(0), file.metadata.num_rows
                    check(len(column) == n, f"{path}: got {len(column)} labels for {n} rows; copy it again")
                    labels.append(_whole_numbers(column, path, self.columns[1]))
        self.ends = np.cumsum(rows, dtype=np.int64)
        if labels and all(part is not None for part in labels):
            self.labels = np.concatenate(labels)
        is_small = sum(size_bytes) <= KEPT_BYTES
        self.file_ends = None if is_small else tuple(self.ends.tolist())
        most = len(self.groups) if is_small else max(2, KEPT_BYTES // max(size_bytes))
        # The loaders of a batch need the same row group: one reads it.
        self.tables = LastUsed(partial(_row_group, self.groups, self.columns), most)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def cells(self, index: int) -> Sequence[Any]:
        group, row = place_in_parts(self.ends, index)
        table, name = self.tables[group], self.where(index)
        return [_cell(table.column(column)[row], name, column) for column in self.columns]

    def where(self, index: int) -> str:
        group, row = place_in_parts(self.ends, index)
        path, number = self.groups[group]
        return f"{path}, row group {number}[{row}]"

    def digest(self) -> str:
        names = [f"{os.path.basename(path)}:{number}" for path, number in self.groups]
        return self.sha256([*names, *self.columns], [self.ends.tobytes()])


def _row_group(groups: Sequence[tuple[str, int]], columns: Sequence[str], group: int) -> Any:
    path, number = groups[group]
    try:
        with _open_parquet(path) as file:
            return file.read_row_group(number, columns=list(columns), use_threads=False)
    except UsageError as error:  # the file has changed: it was sound at the start
        raise OSError(f"row group {number} of {path}: {error}") from error


@contextlib.contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UsageError(f"parquet: {error}; install it with {installing('jaxmpi[parquet]')}") from error
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path}: {error}; expected a Parquet file: it is damaged, or another kind of file") from error


def parquet(config: Data, split: str) -> Source:
    """Parquet files in DIR/<split>/, or DIR/<split>-<any>.parquet; classes are counted, training's too."""

    def opened(split: str) -> ParquetSource:
        return ParquetSource(config, split_files(config, split, ".parquet"))

    return opened(split).count_classes(config, split, lambda: opened("train").labels)


class HuggingFaceSource(TableSource):
    """One split that `datasets` has saved in a folder."""

    def __init__(self, config: Data, folder: str) -> None:
        rows = _load_saved(folder)
        super().__init__(config, chosen(config, rows.column_names, folder))
        self.config, self.folder = config, folder
        self.is_compressed = _check_types(rows.features.arrow_schema, self.columns, folder)
        self.rows = rows.select_columns(list(self.columns)).with_format("arrow")
        if self.is_pair:
            label = self.columns[1]
            self.labels = _whole_numbers(rows.select_columns([label]).with_format("arrow")[:].column(0), folder, label)
            self.classes = getattr(rows.features[label], "num_classes", 0) or 0

    def __reduce__(self) -> tuple[Any, ...]:
        return HuggingFaceSource, (self.config, self.folder)

    def __len__(self) -> int:
        return len(self.rows)

    def cells(self, index: int) -> Sequence[Any]:
        row, name = self.rows[int(index)], self.where(index)
        return [_cell(row.column(column)[0], name, column) for column in self.columns]

    def where(self, index: int) -> str:
        return f"{self.folder}[{index}]"

    def digest(self) -> str:
        return self.sha256([f"{len(self)}", f"{self.rows.features}"])


def _load_saved(folder: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(f"huggingface: {error}; install it with {installing('jaxmpi[huggingface]')}") from error
    try:
        names = os.listdir(folder) if os.path.isdir(folder) else []
        files = [path for path in (os.path.join(folder, name) for name in names) if not os.path.isdir(path)]
        check_plain_files(files, DATA_SET)
        found = datasets.load_from_disk(folder)
    except Exception as error:  # errors of JSON, Arrow, files; there is no one error for damage
        raise UsageError(f"{folder}: {error}; expected {DATA_SET}") from error
    if not isinstance(found, datasets.Dataset):
        raise UsageError(
            f"{folder}: got the splits {', '.join(map(str, found))}; expected one split: name it with data.train_split"
        )
    for file in found.cache_files:
        _check_whole(file["filename"])
    return found


def _check_whole(path: str) -> None:
    """Refuse a stream that is not closed, or not at the end of its file.

    To Arrow a cut between two batches of rows is the end of a stream, and so is a hole of zeros.
    """
    import pyarrow

    with pyarrow.memory_map(path) as file:
        for _ in pyarrow.ipc.open_stream(file):
            pass
        end = file.tell()
        is_closed = end >= len(END) and file.read_at(len(END), end - len(END)) == END
        check(
            is_closed and end == file.size(),
            f"{path}: cut off or damaged: got an end at byte {end}; expected the mark of the end at byte "
            f"{file.size()}: save it again",
        )


def huggingface(config: Data, split: str) -> Source:
    """The saved data set in DIR/<split>; classes without names are counted."""
    base = data_dir(config)
    check(bool(base), "huggingface: set data.dir or JAXMPI_DATA to a folder that DatasetDict.save_to_disk has written")

    def opened(split: str) -> HuggingFaceSource:
        return HuggingFaceSource(config, os.path.join(base, split_name(config, split)))

    source = opened(split)
    return source if source.classes else source.count_classes(config, split, lambda: opened("train").labels)


# ---------------------------------------------------------------- types and cells


def _holds_images(kind: Any) -> bool:
    import pyarrow.types as types

    kind = getattr(kind, "storage_type", kind)  # without what an extension adds
    in_struct = types.is_struct(kind) and kind.get_field_index("bytes") >= 0  # as of `datasets.Image`
    return in_struct or types.is_binary(kind) or types.is_large_binary(kind)


def _holds_numbers(kind: Any) -> bool:
    import pyarrow.types as types

    kind = getattr(kind, "storage_type", kind)
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = getattr(kind.value_type, "storage_type", kind.value_type)
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _check_types(schema: Any, columns: tuple[str, ...], path: str) -> bool:
    """Return True if the first column holds images.

    Refuse columns of text, dates or what else is neither numbers nor images, and images as labels.
    """
    for place, name in enumerate(columns):
        kind, is_label = schema.field(name).type, len(columns) == 2 and place == 1
        expected = "numbers: write a label as its number" if is_label else CELLS
        fits = _holds_numbers(kind) or (_holds_images(kind) and not is_label)
        check(fits, f"{path}: column {name}: got {kind}; expected {expected}")
    return _holds_images(schema.field(columns[0]).type)


def _whole_numbers(column: Any, path: str, name: str) -> np.ndarray | None:
    """i64[n] of a column of whole numbers; None of another."""
    import pyarrow.types as types

    if not types.is_integer(column.type):
        return None
    check(not column.null_count, f"{path}: column {name}: got {column.null_count} rows without a value; leave them out")
    return column.to_numpy().astype(np.int64)


def _cell(scalar: Any, where: str, name: str) -> Any:
    """An Arrow scalar as a number, an array, or an image's bytes."""
    scalar = getattr(scalar, "value", scalar) if hasattr(scalar.type, "storage_type") else scalar
    try:
        if _holds_images(scalar.type):
            blob = scalar.as_py()
            blob = blob["bytes"] if isinstance(blob, dict) else blob
            check(blob is not None, "got an image without bytes; save the data set with them, not with paths")
            return blob
        check(scalar.is_valid, "got no value; leave such rows out")
        return _array(scalar.values) if hasattr(scalar, "values") else np.asarray(scalar.as_py())
    except UsageError as error:
        raise UsageError(f"{where}: column {name}: {error}") from error


def _array(values: Any) -> np.ndarray:
    """An Arrow array of numbers, or of lists of them that are equally long, as [n, ...]."""
    values = getattr(values, "storage", values)
    check(not values.null_count, f"got {values.null_count} missing values in a list; expected numbers")
    if not hasattr(values, "flatten") or not hasattr(values, "value_lengths"):
        return values.to_numpy(zero_copy_only=False)
    lengths = set(values.value_lengths().to_pylist())
    check(len(lengths) <= 1, f"got lists of lengths {sorted(lengths)}; expected one length: pad them")
    inner = _array(values.flatten())
    return inner.reshape(len(values), lengths.pop() if lengths else 0, *inner.shape[1:])
