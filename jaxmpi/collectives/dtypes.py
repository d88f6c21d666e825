"""Arrays of any dtype in dtypes that MPI has, and back."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

NATIVE = {"bool", "float32", "float64", "complex64", "complex128"}  # dtypes that mpi4jax sends
NATIVE |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def as_sent(x: jax.Array) -> jax.Array:
    """An array in a dtype that MPI has, of the same bits."""
    x = in_bytes(x)
    return x if x.dtype.name in NATIVE else lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}[x.dtype.itemsize])


def in_bytes(x: jax.Array) -> jax.Array:
    """The same numbers in a dtype of at least 8 bits."""
    if x.dtype.name in NATIVE:
        return x
    if jnp.iinfo(x.dtype).bits < 8 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo(x.dtype).bits < 8:
        return x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32)
    return x


def as_was(sent: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_sent` and of `in_bytes`."""
    if sent.dtype == dtype:
        return sent
    bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits
    return sent.astype(dtype) if bits < 8 else lax.bitcast_convert_type(sent, dtype)
