"""Cells of Apache Arrow columns as numbers, arrays or image bytes.

No other file knows Arrow's types.
"""

from typing import Any

import numpy as np

from jaxmpi.core.errors import UsageError, check

CELLS = "numbers, lists of them that are equally long, or the bytes of images"


def stored(kind: Any) -> Any:
    """An Arrow type, without what an extension adds."""
    return getattr(kind, "storage_type", kind)


def holds_images(kind: Any) -> bool:
    """Return True if a column has bytes, or structs of `datasets.Image`."""
    import pyarrow.types as types

    kind = stored(kind)
    in_struct = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    return in_struct or types.is_binary(kind) or types.is_large_binary(kind)


def holds_numbers(kind: Any) -> bool:
    """Return True if a column has numbers, or lists of them."""
    import pyarrow.types as types

    kind = stored(kind)
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = stored(kind.value_type)
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def check_types(schema: Any, columns: tuple[str, ...], path: str) -> None:
    """Check the types of the columns that are wanted.

    Raises:
        UsageError: text, dates or what else is neither numbers nor images; images as labels.
    """
    for place, name in enumerate(columns):
        kind, is_label = schema.field(name).type, len(columns) == 2 and place == 1
        expected = "numbers: write a label as its number" if is_label else CELLS
        is_well = holds_numbers(kind) or (holds_images(kind) and not is_label)
        check(is_well, f"{path}: column {name}: got {kind}; expected {expected}")


def whole_numbers(column: Any, path: str, name: str) -> np.ndarray | None:
    """i64[n] of a column of whole numbers; None of another.

    Raises:
        UsageError: some are missing.
    """
    import pyarrow.types as types

    if not types.is_integer(column.type):
        return None
    check(not column.null_count, f"{path}: column {name}: got {column.null_count} rows without a value; leave them out")
    return column.to_numpy().astype(np.int64)


def cell(scalar: Any, where: str, name: str) -> Any:
    """An Arrow scalar as a number, an array, or an image's bytes.

    Raises:
        UsageError: it has no value, or lists inside it are of different lengths.
    """
    scalar = getattr(scalar, "value", scalar) if hasattr(scalar.type, "storage_type") else scalar
    try:
        if holds_images(scalar.type):
            blob = scalar.as_py()
            blob = blob["bytes"] if isinstance(blob, dict) else blob
            check(blob is not None, "got an image without bytes; save the data set with them, not with paths")
            return blob
        check(scalar.is_valid, "got no value; leave such rows out")
        return array_of(scalar.values) if hasattr(scalar, "values") else np.asarray(scalar.as_py())
    except UsageError as error:
        raise UsageError(f"{where}: column {name}: {error}") from error


def array_of(values: Any) -> np.ndarray:
    """An Arrow array of numbers, or lists of them, as [n, ...].

    Raises:
        UsageError: the lists are of different lengths, or some are missing.
    """
    values = getattr(values, "storage", values)
    check(not values.null_count, f"got {values.null_count} missing values in a list; expected numbers")
    if not hasattr(values, "flatten") or not hasattr(values, "value_lengths"):
        return values.to_numpy(zero_copy_only=False)
    inner, lengths = values.flatten(), set(values.value_lengths().to_pylist())
    check(len(lengths) <= 1, f"got lists of lengths {sorted(lengths)}; expected one length: pad them")
    within = array_of(inner)
    return within.reshape(len(values), lengths.pop() if lengths else 0, *within.shape[1:])
