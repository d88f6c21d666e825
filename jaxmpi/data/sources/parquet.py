"""Source: Apache Parquet files, by row group.

A row of Parquet cannot be read alone: its row group is read, decompressed and kept. If all of them are small, all are
kept. Else training takes them whole, one after another in a new order each epoch, as it takes batch files: with
examples in random order nearly each would cost a row group.
"""

import collections
import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError, check
from jaxmpi.data.sources.arrow_cells import cell, check_types, holds_images, whole_numbers
from jaxmpi.data.sources.base import Source, place_in_parts
from jaxmpi.data.sources.columns import TableSource, chosen, split_files

KEPT_BYTES = 1 << 28  # bytes of row groups kept by each process that reads them; two groups at least


class ParquetSource(TableSource):
    """One split of Parquet files.

    Args:
        config: of the data.
        files: paths.

    Attributes:
        file_ends: of each row group, the index behind its last row; None if all are kept.

    Raises:
        UsageError: a file is no Parquet file, or a column is missing or holds neither numbers nor images.
    """

    def __init__(self, config: Data, files: Sequence[str]) -> None:
        with _opening(files[0]) as file:
            super().__init__(config, chosen(config, file.schema_arrow.names, files[0]))
            self.is_compressed = holds_images(file.schema_arrow.field(self.columns[0]).type)
        self.groups: list[tuple[str, int]] = []
        rows, size_bytes, labels = [], [], []
        for path in files:
            with _opening(path) as file:
                self._check(file.schema_arrow, path)
                for number in range(file.num_row_groups):
                    found = file.metadata.row_group(number)
                    self.groups.append((path, number))
                    rows.append(found.num_rows)
                    size_bytes.append(_size_bytes(found, self.columns))
                if self.is_pair:
                    column = file.read([self.columns[1]]).column(0)
                    check(
                        len(column) == file.metadata.num_rows,
                        f"{path}: got {len(column)} labels for {file.metadata.num_rows} rows; copy it again",
                    )
                    labels.append(whole_numbers(column, path, self.columns[1]))
        self.ends = np.cumsum(rows, dtype=np.int64)
        if labels and all(part is not None for part in labels):
            self.labels = np.concatenate(labels)
        is_small = sum(size_bytes) <= KEPT_BYTES
        self.file_ends = None if is_small else tuple(self.ends.tolist())
        self.kept = len(self.groups) if is_small else max(2, KEPT_BYTES // max(size_bytes))
        self._begin()

    def _check(self, schema: Any, path: str) -> None:
        missing = [name for name in self.columns if schema.names.count(name) != 1]
        check(not missing, f"{path}: got column {', '.join(missing)} not once; expected the columns of the first file")
        check_types(schema, self.columns, path)

    def _begin(self) -> None:
        self._tables: collections.OrderedDict[int, Any] = collections.OrderedDict()  # row groups, last used last
        self._lock = threading.Lock()  # the loaders of a batch need the same row group: one reads it

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_tables", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def cells(self, index: int) -> Sequence[Any]:
        """Cells of row `index`, in the order of `columns`."""
        group, row = place_in_parts(self.ends, index)
        table, name = self._table(group), self.where(index)
        return [cell(table.column(column)[row], name, column) for column in self.columns]

    def _table(self, group: int) -> Any:
        with self._lock:
            if group not in self._tables:
                self._tables[group] = _row_group(*self.groups[group], self.columns)
                if len(self._tables) > self.kept:
                    self._tables.popitem(last=False)
            self._tables.move_to_end(group)
            return self._tables[group]

    def where(self, index: int) -> str:
        """The file of row `index`, its row group and its place there."""
        group, row = place_in_parts(self.ends, index)
        path, number = self.groups[group]
        return f"{path}, row group {number}[{row}]"

    def digest(self) -> str:
        """SHA-256 of file names, columns, lengths of row groups, and labels."""
        names = [f"{os.path.basename(path)}:{number}" for path, number in self.groups]
        return self.sha256([*names, *self.columns], [self.ends.tobytes()])


def _size_bytes(group: Any, columns: Sequence[str]) -> int:
    """Bytes of some columns of a row group, once they are decompressed."""
    found = [group.column(i) for i in range(group.num_columns)]
    return sum(part.total_uncompressed_size for part in found if part.path_in_schema.split(".")[0] in columns)


def _row_group(path: str, number: int, columns: Sequence[str]) -> Any:
    import pyarrow

    try:
        with _opening(path) as file:
            return file.read_row_group(number, columns=list(columns), use_threads=False)
    except (UsageError, pyarrow.ArrowException) as error:  # the file has changed: it was sound at the start
        raise OSError(f"row group {number} of {path}: {error}") from error


@contextlib.contextmanager
def _opening(path: str) -> Iterator[Any]:
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
    source = ParquetSource(config, split_files(config, split, ".parquet"))
    return source.counted(config, split, lambda: ParquetSource(config, split_files(config, "train", ".parquet")).labels)
