"""Means of integers over workers, without overflow.

A sum in the integers' own type wraps, and float32 does not hold all integers of 32 bits. JAX outside its x64 mode has
no wider type. So integers travel as two halves of their bits. The sums of halves fit for up to 2^14 workers, and are
divided as integers.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmpi.core.errors import check

MOST = 1 << 14  # workers


def halves(x: jax.Array) -> jax.Array:
    """Integers [...] as their high and low halves, [..., 2].

    Those of fewer than 32 bits stay whole, as i32[...].
    """
    bits = jnp.iinfo(x.dtype).bits
    if bits < 32:
        return x.astype(jnp.int32)
    signed = jnp.int32 if bits == 32 else jnp.int64
    low = x & x.dtype.type(2 ** (bits // 2) - 1)
    return jnp.stack([(x >> (bits // 2)).astype(signed), low.astype(signed)], -1)


def mean_of_halves(total: jax.Array, workers: int, dtype: jax.typing.DTypeLike, is_whole: bool = False) -> jax.Array:
    """The mean of integers from the sum of their `halves`.

    It is a float within 2 ulp or, if `is_whole`, the mean's whole part, an integer. That is exact: it and the rest
    come from divisions of integers.
    """
    real = jnp.result_type(float)
    if jnp.iinfo(dtype).bits < 32:
        return lax.div(total, jnp.full_like(total, workers)) if is_whole else total.astype(real) / workers
    shift = jnp.iinfo(dtype).bits // 2
    check(
        workers <= MOST, f"a mean of {jnp.dtype(dtype)}: got {workers} workers; expected at most {MOST}: cast to floats"
    )
    high, rest = jnp.divmod(total[..., 0], workers)
    low, rest = jnp.divmod((rest << shift) + total[..., 1], workers)
    whole = (high.astype(dtype) << shift) + low.astype(dtype)
    rounds_up = ((whole < 0) & (rest > 0)).astype(dtype)  # towards 0: parts of two signs would cancel
    whole, rest = whole + rounds_up, rest - rounds_up.astype(rest.dtype) * workers
    return whole if is_whole else whole.astype(real) + rest.astype(real) / workers
