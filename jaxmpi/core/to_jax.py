"""The door by which the user's host arrays and numbers enter JAX.

Without `jax_enable_x64` JAX keeps the low 32 bits of a 64-bit integer, makes an infinity of 1e300, and drops the mask
of a masked array, all without a word. Here such leaves are refused by name.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmpi.core.errors import check
from jaxmpi.core.host_arrays import check_holds, check_unmasked


def to_jax(where: str, leaf: Any, op: str = "", workers: int = 1, dtype: Any = None) -> jax.Array:
    """A leaf as a JAX array of the same numbers; `where` names it in errors.

    Args:
        op: sum, mean or prod over as many workers, whose result must fit as well.
        dtype: in which numbers of the host must fit; whole ones get it. Default: JAX's own.

    Raises:
        UsageError: it is masked, holds no numbers, or holds some that JAX's dtype does not.
    """
    check_not_float0(where, leaf)
    if isinstance(leaf, jax.Array) or hasattr(leaf, "__jax_array__"):
        return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    check_unmasked(where, leaf)
    array = np.asarray(leaf)
    is_huge = array.dtype == object and isinstance(leaf, int)
    check(not is_huge, f"{where}: got {leaf}, which int64 cannot hold; give a float")
    is_number = array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)
    is_known = is_number and array.dtype.isnative and array.dtype.itemsize <= (16 if array.dtype.kind == "c" else 8)
    got = type(leaf).__name__ if array.dtype == object else array.dtype
    check(is_known, f"{where}: got {got}; expected a number or an array of numbers, of at most 64 bits")
    is_scalar = isinstance(leaf, (int, float, complex, np.generic))  # whose sum no dtype of the user's limits
    if dtype is not None:
        check_holds(where, array, dtype, op, workers)
        if array.dtype.kind in "iu":
            return jnp.asarray(array.astype(dtype))
    in_jax_dtype(where, array, op, workers, always=is_scalar and op != "")
    return jnp.asarray(leaf)


def in_jax_dtype(where: str, array: Any, op: str = "", workers: int = 1, *, always: bool = False) -> Any:
    """The array in the dtype that JAX gives it; arguments as of `to_jax`.

    Args:
        always: check it even if it has that dtype.
    """
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype == dtype and not always:
        return array
    check_holds(where, np.asarray(array), dtype, op, workers)
    return array.astype(dtype)


def check_not_float0(where: str, leaf: Any) -> None:
    """Refuse the gradient of integers, which `jax.grad(..., allow_int=True)` gives as float0."""
    check(
        getattr(leaf, "dtype", None) != jax.dtypes.float0,
        f"{where} is float0, the gradient of integers, which holds no numbers; leave it out, or differentiate with "
        "respect to floats alone",
    )


def check_on_one_device(where: str, array: jax.Array) -> None:
    """Refuse an array on several of this rank's devices: programs that call MPI run on one."""
    if isinstance(array, Tracer):
        return
    devices = sorted(array.sharding.device_set, key=lambda device: device.id)
    check(
        len(devices) == 1,
        f"{where}: got an array on {len(devices)} devices of this rank, {devices[0]} to {devices[-1]}; expected one: "
        "jax.device_put(x, jax.local_devices()[0])",
    )
