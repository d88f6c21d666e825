"""Source: data sets of Hugging Face's `datasets`, as `save_to_disk` writes them.

Nothing is downloaded or unpickled. Arrow files are mapped into memory, so rows are read where they lie, in any order.
"""

import os
from collections.abc import Sequence
from typing import Any

from jaxmpi.config.data import Data, data_dir
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError, check
from jaxmpi.data.sources.arrow_cells import cell, check_types, holds_images, whole_numbers
from jaxmpi.data.sources.base import Source, _split_name, check_plain_files
from jaxmpi.data.sources.columns import TableSource, chosen

DATA_SET = "a folder that Dataset.save_to_disk has written"
END = b"\xff\xff\xff\xff\0\0\0\0"  # the last bytes of an Arrow stream


class HuggingFaceSource(TableSource):
    """One split that `datasets` has saved.

    Args:
        config: of the data.
        folder: that `Dataset.save_to_disk` has made.

    Raises:
        UsageError: it is none, or a column is missing or holds neither numbers nor images.
    """

    def __init__(self, config: Data, folder: str) -> None:
        rows = _loaded(folder)
        super().__init__(config, chosen(config, rows.column_names, folder))
        self.config, self.folder = config, folder
        schema = rows.features.arrow_schema
        check_types(schema, self.columns, folder)
        self.is_compressed = holds_images(schema.field(self.columns[0]).type)
        self.rows = rows.select_columns(list(self.columns)).with_format("arrow")
        if self.is_pair:
            label = self.columns[1]
            self.labels = whole_numbers(rows.select_columns([label]).with_format("arrow")[:].column(0), folder, label)
            self.classes = getattr(rows.features[label], "num_classes", 0) or 0

    def __reduce__(self) -> tuple[Any, ...]:
        return HuggingFaceSource, (self.config, self.folder)

    def __len__(self) -> int:
        return len(self.rows)

    def cells(self, index: int) -> Sequence[Any]:
        """Cells of row `index`, in the order of `columns`."""
        row, name = self.rows[int(index)], self.where(index)
        return [cell(row.column(column)[0], name, column) for column in self.columns]

    def where(self, index: int) -> str:
        """The data set's folder, and the row."""
        return f"{self.folder}[{index}]"

    def digest(self) -> str:
        """SHA-256 of the columns, their types, the length, and the labels."""
        return self.sha256([f"{len(self)}", f"{self.rows.features}"])


def _loaded(folder: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(f"huggingface: {error}; install it with {installing('jaxmpi[huggingface]')}") from error
    try:
        check_plain_files(filter(lambda path: not os.path.isdir(path), _entries(folder)), DATA_SET)
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


def _entries(folder: str) -> list[str]:
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder))] if os.path.isdir(folder) else []


def _check_whole(path: str) -> None:
    """Raise `UsageError` unless an Arrow stream is closed, and at the end of its file.

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
    folder, training = os.path.join(base, _split_name(config, split)), os.path.join(base, config.train_split)
    source = HuggingFaceSource(config, folder)
    if not source.classes:
        is_other = split != "train" and source.labels is not None and os.path.isdir(training)
        source.count(HuggingFaceSource(config, training).labels if is_other else None)
    return source
