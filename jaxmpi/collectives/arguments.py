"""Arguments of the operations: what one rank can check by itself, and the arrays that enter JAX."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.allreduce.call_order import one_thread
from jaxmpi.collectives.call import NOBODY, MpiCall, shape_of
from jaxmpi.collectives.primitive import agree_once
from jaxmpi.collectives.table import OPERATIONS
from jaxmpi.comm.agreement import check_may_send, refuse_together
from jaxmpi.comm.base import Comm
from jaxmpi.comm.mpi import MpiComm, communicator
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.to_jax import check_on_one_device, to_jax

LEAST_TAGS = 1 << 15  # that every MPI has


def communicator_of(operation: str, comm: Any) -> Comm:
    """The communicator of a call, which may send now."""
    check_may_send(f"jaxmpi.collectives.{operation}")
    return communicator(comm)


def rank_in_job(comm: Comm) -> int | jax.Array:
    """This rank's number in the job, for errors."""
    return comm.processes.numbers[comm.rank] if isinstance(comm, MpiComm) else comm.rank


def _check_index(operation: str, name: str, value: Any) -> int:
    """An integer of Python, NumPy or JAX as int, which ranks compare."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise UsageError(f"{operation}: {name}: got {value!r}; expected a whole number known to Python") from error


def check_root(operation: str, root: Any, comm: Comm) -> int | None:
    """A rank of the communicator as int, or None for None."""
    number = None if root is None else _check_index(operation, "root", root)
    is_rank = number is None or 0 <= number < comm.size
    check(is_rank, f"{operation}: root: got {number}; expected a rank below {comm.size}")
    return number


def check_partner(operation: str, name: str, rank: Any, comm: Comm) -> Any:
    """A rank that may be `NOBODY`, or None for any source."""
    number = None if rank is None and name == "source" else _check_index(operation, name, rank)
    check(
        number is None or number == NOBODY or 0 <= number < comm.size,
        f"{operation}: {name}: got {number}; expected a rank below {comm.size}"
        + (", NOBODY, or None for any; MPI.ANY_SOURCE is None here, " if name == "source" else " or NOBODY; ")
        + "MPI.PROC_NULL is jaxmpi.collectives.NOBODY",
    )
    return number


def check_tag(operation: str, name: str, tag: Any, comm: Comm) -> Any:
    """A tag of a message, or None for any that comes."""
    is_sent = name == "sendtag" or operation == "send"
    if tag is None and not is_sent:
        return None
    number, most = _check_index(operation, name, tag), comm.processes.tags if isinstance(comm, MpiComm) else LEAST_TAGS
    is_any = "" if is_sent else ", or None for any"
    check(0 <= number < most, f"{operation}: {name}: got {number}; expected a number from 0 to {most - 1}{is_any}")
    return number


def arrays_of(operation: str, x: PyTree, comm: Comm, op: str = "") -> list[jax.Array]:
    """The leaves as JAX arrays that can be sent."""
    arrays = []
    with _refuse_together(operation, comm):
        for where, leaf in _named(operation, x):
            check_no_key(operation, leaf)
            arrays.append(to_jax(where, leaf, op, comm.size))
            check_on_one_device(where, arrays[-1])
    return arrays


def templates_of(operation: str, x: PyTree, comm: Comm, *, is_returned: bool = False) -> list[jax.Array]:
    """Arrays of the shapes and dtypes of what comes; if nothing comes, x itself is returned."""
    arrays = []
    with _refuse_together(operation, comm):
        for where, leaf in _named(operation, x):
            is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
            if is_shape or (isinstance(leaf, np.ndarray) and not is_returned):  # NumPy's empty arrays hold any numbers
                leaf = np.zeros(leaf.shape, leaf.dtype)
            check_no_key(operation, leaf)
            arrays.append(to_jax(where, leaf))
    return arrays


def _named(operation: str, x: PyTree) -> list[tuple[str, Any]]:
    """Leaves with their names in errors."""
    return [(f"{operation}: leaf {path or '(the array itself)'!r}", leaf) for path, leaf in named_leaves(x)]


@contextmanager
def _refuse_together(operation: str, comm: Comm) -> Iterator[None]:
    """Have all ranks refuse what one of them does; of a message two ranks alone know."""
    together = nullcontext() if OPERATIONS[operation].is_message else refuse_together(comm.assert_same)
    with one_thread(comm, operation), together:
        yield


def check_no_key(operation: str, leaf: Any) -> None:
    """Refuse typed random keys, which are no numbers."""
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    check(not is_key, f"{operation}: got a random key; expected numbers: jax.random.key_data of it")


def given_leaves(operation: str, x: PyTree, comm: Comm, root: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    """The user's leaves by path, before casts, in shapes that ranks share."""
    if not isinstance(comm, MpiComm):
        return {}
    call, shared = MpiCall(operation=operation, comm=comm, root=root), OPERATIONS[operation].shared
    given = {path: jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for path, leaf in named_leaves(x)}
    return {path: shape_of(leaf, shared(call, leaf)) for path, leaf in given.items()}


def exchange_counts(operation: str, comm: Comm, counts: Any) -> list[Any]:
    """The counts of all ranks, by rank.

    Calls are compared first, as a rank at another call would take the counts for its own message.
    """
    if not isinstance(comm, MpiComm):
        return [counts]

    def exchange() -> list[Any]:
        comm.processes.assert_same(f"the counts of {operation}", None)
        return comm.processes.allgather_object(counts)

    return agree_once(exchange)


def count_rows(operation: str, x: PyTree) -> int:
    """The number of rows that all leaves have."""
    found = {path: np.shape(leaf)[:1] for path, leaf in named_leaves(x)}
    check(len(set(found.values())) == 1 and () not in found.values(), f"{operation}: got leaves of {found} rows")
    return next(iter(found.values()))[0]


def check_rows(operation: str, x: PyTree, comm: Comm) -> None:
    """Refuse leaves that do not have a row for each rank."""
    for path, leaf in named_leaves(x):
        check(
            np.shape(leaf)[:1] == (comm.size,),
            f"{operation}: rank {rank_in_job(comm)}: leaf {path or '(the array itself)'!r} has shape "
            f"{list(np.shape(leaf))}; expected {comm.size} rows, one for each rank",
        )
