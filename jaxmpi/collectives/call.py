"""One call of an operation, its arguments except the arrays; and arrays in dtypes that MPI has."""

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmpi.comm.mpi import MpiComm

# As source or destination: nothing is received from there, nothing is sent there. It is none of the negative numbers by
# which MPI libraries have ANY_SOURCE and PROC_NULL, each its own: those are refused.
NOBODY = -(1 << 30)
TRANSPOSED = " (transposed)"


@dataclass(frozen=True, kw_only=True)
class MpiCall:
    """An MPI call; ranks may vary shapes, source, dest, tags and status."""

    operation: str
    comm: MpiComm
    op: str = ""
    root: int | None = None
    counts: tuple[tuple[int, ...], ...] = ()  # rows that rank i sends to rank j
    source: int | None = None  # rank that a message comes from; None: any
    dest: int = NOBODY
    sendtag: int = 0
    recvtag: int | None = None  # None: any
    status: int = 0  # number of what is to be filled with source and tag; 0: nothing
    is_identity: bool = False  # the transpose of an allreduce
    is_differentiated: bool = False  # there is a call of its tangents, or a transposed one, as well
    is_of_tangents: bool = False  # in forward mode
    handle: Any = None  # of `nonblocking.start`, under this number: it begins the call, and has no result
    number: int = 0
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the user's leaves, at a tree's first call
    may_differ: bool = False  # in its line, from rank to rank
    line: str = ""  # line of the user's code
    lines: tuple[str, ...] = ()  # from the traced function to the call, for ranks to compare

    @property
    def sends(self) -> bool:  # a message, this rank
        return self.operation in ("send", "sendrecv") and self.dest != NOBODY

    @property
    def receives(self) -> bool:
        return self.operation in ("recv", "sendrecv") and self.source != NOBODY

    @property
    def is_root(self) -> bool:
        return self.comm.rank == self.root

    def describe(self, *operands: Any) -> str:
        """Describe the call with these arrays, for messages."""
        options: dict[str, Any] = {"op": self.op or None, "root": self.root}
        if self.operation in ("send", "sendrecv"):
            options |= {"dest": "nobody" if self.dest == NOBODY else self.dest, "tag": self.sendtag}
        if self.operation in ("recv", "sendrecv"):
            options |= {"source": "nobody" if self.source == NOBODY else self.source, "recvtag": self.recvtag}
        named = [f"{name}={value}" for name, value in options.items() if value is not None]
        text = f"{self.operation}({', '.join([*map(type_of, operands[:1]), *named])})"
        return f"{text}, {self.line}" if self.line else text

    def derive(self, operation: str, **changes: Any) -> "MpiCall":
        """The call that the transpose of this one makes."""
        line = self.line if self.line.endswith(TRANSPOSED) else f"{self.line}{TRANSPOSED}"
        return dataclasses.replace(self, operation=operation, line=line, is_of_tangents=False, **changes)


def type_of(x: Any) -> str:
    """Dtype and shape, as `float32[3,4]`."""
    return _type_text(x.dtype, x.shape)


@functools.lru_cache(1024)  # NumPy takes 10 microseconds to name a dtype, in each message
def _type_text(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype.name}[{','.join(map(str, shape))}]"


def shape_of(x: Any, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array; another shape if one is given."""
    return jax.ShapeDtypeStruct(x.shape if shape is None else tuple(shape), x.dtype)


# Whether ranks leave source lines out of the comparison of a call.
MAY_DIFFER: ContextVar[bool] = ContextVar("MAY_DIFFER", default=False)


def is_logged() -> bool:
    """Return True while mpi4jax's debug output is on (`MPI4JAX_DEBUG`, `set_logging`)."""
    bridge = sys.modules.get("mpi4jax._src.xla_bridge")
    return bridge is not None and bridge.get_logging()


# ---------------------------------------------------------------- dtypes of MPI

NATIVE = {"bool", "float32", "float64", "complex64", "complex128"}  # dtypes that mpi4jax sends
NATIVE |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def to_mpi_dtype(x: jax.Array) -> jax.Array:
    """An array in a dtype that MPI has, of the same bits."""
    return x if x.dtype.name in NATIVE else lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}[x.dtype.itemsize])


def from_mpi_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `to_mpi_dtype`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
