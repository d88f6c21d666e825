"""Arguments of the operations: what one rank can check by itself, and the arrays that enter JAX."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.call_order import joint_call
from jaxmpi.collectives.call import MAY_DIFFER, NOBODY, MpiCall, shape_of
from jaxmpi.collectives.table import OPERATIONS
from jaxmpi.comm.agreement import check_may_send
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm, communicator
from jaxmpi.core.errors import UsageError
from jaxmpi.core.host_arrays import check_holds
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.to_jax import check_on_one_device, to_jax
from jaxmpi.runtime import host_callbacks

LEAST_TAGS = 1 << 15  # that every MPI has


@contextmanager
def joint_operation(operation: str, comm: Any) -> Iterator[Comm]:
    """Make a call on the communicator that is yielded.

    A message is refused on its rank alone, and so is a call by mpi4jax's names, whose programs may catch that there.
    """
    check_may_send(f"jaxmpi.collectives.{operation}")
    comm = communicator(comm)
    with joint_call(comm, operation, is_compared=not (OPERATIONS[operation].is_message or MAY_DIFFER.get())):
        yield comm


# ---------------------------------------------------------------- ranks and tags


def _check_index(operation: str, name: str, value: Any, limit: int, expected: str) -> int:
    """An integer of Python, NumPy or JAX as int, in [0, limit), which ranks compare."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise UsageError(f"{operation}: {name}: got {value!r}; expected a whole number known to Python") from error
    if not 0 <= number < limit:
        raise UsageError(f"{operation}: {name}: got {number}; expected a {expected} below {limit}")
    return number


def check_root(operation: str, root: Any, comm: Comm) -> int:
    """A rank of the communicator as int."""
    return _check_index(operation, "root", root, comm.size, "rank")


def check_partner(operation: str, name: str, rank: Any, comm: Comm) -> Any:
    """A rank that may be `NOBODY`, or None for any source."""
    if (rank is None and name == "source") or (isinstance(rank, int) and rank == NOBODY):
        return rank
    expected = "rank, NOBODY (MPI.PROC_NULL), or None for any (MPI.ANY_SOURCE), or one"
    return _check_index(operation, name, rank, comm.size, expected if name == "source" else "rank, NOBODY, or one")


def check_tag(operation: str, name: str, tag: Any, comm: Comm) -> Any:
    """A tag of a message, or None for any that comes."""
    if tag is None and name != "sendtag" and operation != "send":
        return None
    limit = comm.processes.tags if isinstance(comm, MpiComm) else LEAST_TAGS
    return _check_index(operation, name, tag, limit, "number")


# ---------------------------------------------------------------- arrays

NO_NUMBERS = jax.ShapeDtypeStruct, np.ndarray  # templates of what comes; NumPy's empty arrays hold any numbers


def arrays_of(
    operation: str, x: PyTree, comm: Comm, op: str = "", templates: tuple[type, ...] = (), dtype: Any = None
) -> list[jax.Array]:
    """The leaves as JAX arrays that can be sent; those of the types of templates give shape and dtype alone.

    Args:
        dtype: of the result, in which the numbers of host arrays must fit.
    """
    arrays = []
    for path, leaf in named_leaves(x):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise UsageError(f"{operation}: got a random key; expected numbers: jax.random.key_data of it")
        if isinstance(leaf, templates):
            leaf = np.zeros(leaf.shape, leaf.dtype)
        is_bitwise = op in ("and", "or", "xor")  # in the leaf's own dtype
        array = to_jax(_name(operation, path), leaf, op, comm.size, None if is_bitwise else dtype)
        if is_bitwise and dtype is not None and not isinstance(leaf, jax.Array):
            check_holds(_name(operation, path), np.asarray(leaf), dtype)
        check_on_one_device(_name(operation, path), array)
        if array.dtype not in host_callbacks.DTYPES.values():
            raise UsageError(f"{_name(operation, path)} is {array.dtype}; expected numbers of 8 bits or more: cast it")
        arrays.append(array)
    return arrays


def _name(operation: str, path: str) -> str:
    return f"{operation}: leaf {path or '(the array itself)'!r}"


def given_leaves(operation: str, x: PyTree, comm: Comm, root: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    """The user's leaves by path, before casts, in shapes that ranks share."""
    if not isinstance(comm, MpiComm):
        return {}
    call, shared = MpiCall(operation=operation, comm=comm, root=root), OPERATIONS[operation].shared
    leaf_shapes = {path: jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for path, leaf in named_leaves(x)}
    return {path: shape_of(leaf, shared(call, leaf)) for path, leaf in leaf_shapes.items()}


# ---------------------------------------------------------------- rows and their counts


def check_rows(operation: str, x: PyTree, comm: Comm) -> None:
    """Refuse leaves that do not have a row for each rank."""
    for path, leaf in named_leaves(x):
        if np.shape(leaf)[:1] != (comm.size,):
            raise UsageError(
                f"{_name(operation, path)} has shape {list(np.shape(leaf))}; expected {comm.size} rows, one for each "
                # In the words of mpi4jax, whose programs may look for them.
                f"rank: {operation.capitalize()} input must have shape (nproc, ...)"
            )


def count_rows(operation: str, x: PyTree) -> int:
    """The number of rows that all leaves have."""
    row_counts = {path: np.shape(leaf)[:1] for path, leaf in named_leaves(x)}
    if len(set(row_counts.values())) != 1 or () in row_counts.values():
        raise UsageError(f"{operation}: got leaves of {row_counts} rows; expected as many in each")
    return next(iter(row_counts.values()))[0]


def exchange_counts(operation: str, comm: Comm, counts: Any) -> list[Any]:
    """The counts of all ranks, by rank.

    Calls are compared first, as a rank at another call would take the counts for its own message.
    """
    if not isinstance(comm, MpiComm):
        return [counts]

    comm.processes.assert_same(f"the counts of {operation}", None)
    return comm.processes.allgather_object(counts)


# ---------------------------------------------------------------- dtypes of reductions


def canonical_dtype(operation: str, dtype: Any) -> Any:
    """JAX's dtype for the user's, of numbers or bools; None for None."""
    with suppress(TypeError):
        canonical = None if dtype is None else jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))
        if canonical is None or canonical == jnp.bool_ or jnp.issubdtype(canonical, jnp.number):
            return canonical
    raise UsageError(f"{operation}: dtype: got {dtype!r}; expected one of numbers, as jnp.float32")


def dtypes_of_reduction(operation: str, path: str, leaf: Any, op: str, dtype: Any) -> tuple[Any, Any]:
    """The dtype in which a leaf is reduced, and that of the result.

    Raises:
        UsageError: the operation is not defined for it.
    """
    leaf_dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    is_bool, is_integer = leaf_dtype == jnp.bool_, jnp.issubdtype(leaf_dtype, jnp.integer)
    is_complex = jnp.issubdtype(dtype or leaf_dtype, jnp.complexfloating)
    where = f"{_name(operation, path)} is {leaf_dtype}"
    if op in ("and", "or", "xor"):
        if not is_bool and not is_integer:
            raise UsageError(f"{where}; {op} expects bools or integers")
        return (jnp.uint8 if is_bool else leaf_dtype), dtype or leaf_dtype
    if is_complex and op in ("max", "min"):
        raise UsageError(f"{_name(operation, path)} is {dtype or leaf_dtype}, which has no order; {op} its parts")
    if dtype is not None and jnp.issubdtype(leaf_dtype, jnp.complexfloating) and not is_complex:
        raise UsageError(f"{where}; dtype: got {dtype}, which would drop its imaginary part; {operation} x.real")
    if (
        dtype is not None
        and op == "mean"
        and jnp.issubdtype(dtype, jnp.integer)
        and jnp.issubdtype(leaf_dtype, jnp.inexact)
    ):
        raise UsageError(f"{where}; dtype: got {dtype} for a mean; expected one of floats, as jnp.float32")
    result = dtype or leaf_dtype
    if dtype is None and (is_bool or is_integer) and op == "mean":
        result = jnp.result_type(float)
    elif dtype is None and is_bool and op == "sum":
        result = jnp.int32
    if is_bool and (op in ("max", "min", "prod") or (op == "mean" and dtype is None)):
        return jnp.uint8, result
    wide = dtype or (jnp.int32 if is_bool else leaf_dtype)
    if wide == jnp.bool_:
        raise UsageError(f"{where}; dtype: got bool for a {op}; expected a type of numbers, as jnp.int32")
    if not jnp.issubdtype(wide, jnp.floating) or jnp.finfo(wide).bits >= 32:
        return wide, result
    if jnp.finfo(wide).bits < 16 and op not in ("max", "min"):
        raise UsageError(f"{where}, too short for a {op}; expected a wider type for it, as dtype=jnp.float32")
    return jnp.float32, result
