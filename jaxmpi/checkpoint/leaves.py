"""A checkpoint's leaves, read and checked, and a worker's state of them.

No pickle: leaves are raw bytes. They are read only if the manifest and the running model agree on paths, shapes and
dtypes.
"""

import math
import os
import zlib
from io import BufferedReader
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.checkpoint.manifests import COUNT, open_regular, own_file, undamaged
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.train_state import TrainState


def halves(state: TrainState, replicated: bool, same_params: bool = True) -> tuple[PyTree, PyTree]:
    """(fields equal on all workers, this worker's own fields), as dicts."""
    fields, equal = state._asdict(), equal_fields(replicated, same_params)
    return {k: fields[k] for k in equal}, {k: v for k, v in fields.items() if k not in equal}


def equal_fields(replicated: bool, same_params: bool = True) -> tuple[str, ...]:
    """Fields that are equal on all workers, and so are written once."""
    return ("step", *(("params",) if same_params else ()), *(("rule_state",) if replicated else ()))


def is_at(name: str, where: str) -> bool:
    """Return True if a path is this field, or below it."""
    return name == where or name.startswith(f"{where}/")


def worker_of(path: Path, manifest: dict, worker: int, workers: int, common: PyTree, own: PyTree) -> TrainState:
    """Read a worker's `halves` from common.bin and its own file.

    For another number of workers its own half is the mean of all files; its random stream is that of `own`.
    """
    fields = read_file(path, manifest, "common.bin", common)
    if manifest["workers"] == workers:
        return TrainState(**fields | read_file(path, manifest, own_file(worker), own))
    return TrainState(**fields | mean_of_own(path, manifest, own) | {"key": own["key"]})


def mean_of_own(path: Path, manifest: dict, own: PyTree) -> PyTree:
    """Read the mean of workers' own files.

    So batch statistics, moments and the residuals of error feedback keep their means over workers. Leaves that are not
    floats are worker 0's.
    """
    count = manifest["workers"]
    first = read_file(path, manifest, own_file(0), own)
    total = jax.tree.map(lambda x: x.astype(np.float64) if is_float(x) else x, first)
    for other in range(1, count):
        more = read_file(path, manifest, own_file(other), own)
        total = jax.tree.map(lambda x, y: x + y if is_float(y) else x, total, more)
    return jax.tree.map(lambda x, y: (x / count).astype(y.dtype) if is_float(y) else x, total, first)


def is_float(leaf: np.ndarray) -> bool:
    """Return True if a leaf holds floating-point numbers, including those of ml_dtypes."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def read_file(path: Path, manifest: dict, name: str, like: PyTree) -> PyTree:
    """Read one file of a checkpoint, in the structure of `like`."""
    index = manifest["files"].get(name)
    undamaged(index is not None, f"{path}: no {name} in the manifest")
    return read_leaves(path / name, index, like)


def read_leaves(path: Path, index: list[dict[str, Any]], like: PyTree) -> PyTree:
    """Read leaves in the structure of `like`; sizes are checked first."""
    rows = {row["path"]: row for row in index}
    expected = named_leaves(like)
    unknown = sorted(set(rows) - {name for name, _ in expected})
    check(not unknown, f"{path}: got leaves that this model does not have: {', '.join(unknown[:5])}")
    with open_regular(path) as file:
        leaves = [read_leaf(path, file, name, rows.get(name), leaf) for name, leaf in expected]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def described(path: Path, file: BufferedReader, row: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """A leaf's shape and dtype by its index entry, without a model.

    Raises:
        Damaged: a dtype that is not numeric, or more bytes than the file holds.
    """
    try:
        dtype = np.dtype(jnp.dtype(row["dtype"]))
    except (TypeError, ValueError):  # unknown dtype
        dtype = np.dtype(object)
    shape = row["shape"]
    size = math.prod(shape) * dtype.itemsize
    known = (dtype.kind in "biufc" or jnp.issubdtype(dtype, jnp.number)) and str(dtype) == row["dtype"]
    # An empty array may have other axes longer than NumPy allows.
    known = known and len(shape) <= 32 and min(shape, default=0) >= 0 and math.prod(n or 1 for n in shape) < COUNT
    undamaged(known and size <= os.fstat(file.fileno()).st_size, f"{path}: {row['path']:.80}: damaged, no such leaf")
    return jax.ShapeDtypeStruct(tuple(row["shape"]), dtype)


def read_leaf(path: Path, file: BufferedReader, name: str, row: dict[str, Any] | None, like: Any) -> np.ndarray:
    """Read one leaf; raise if its shape, dtype or checksum is wrong."""
    expected = f"{np.dtype(like.dtype)}{list(like.shape)}"
    got = f"{row['dtype']}{row['shape']}" if row else "nothing"
    if row is None or got != expected:
        raise UsageError(
            f"{path}: {name}: got {got:.80}, expected {expected}: it was saved from another model or optimizer"
        )
    size = math.prod(like.shape) * np.dtype(like.dtype).itemsize
    whole = row["offset"] + size <= os.fstat(file.fileno()).st_size
    undamaged(whole, f"{path}: {name}: the file ends before the leaf does")
    array = np.empty(like.shape, like.dtype)
    raw = array.reshape(-1).view(np.uint8).data
    file.seek(row["offset"])
    undamaged(file.readinto(raw) == raw.nbytes, f"{path}: {name}: cannot be read in full")
    undamaged(zlib.crc32(raw) == row["crc32"], f"{path}: {name}: damaged, its checksum does not match")
    return array
