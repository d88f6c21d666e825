"""What travels: how f32 becomes the arrays that workers send, and comes back. One table."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any


class Wire(NamedTuple):
    """An encoding of f32[..., n] along its last axis.

    `encode` gives a pytree of arrays that keep the leading axes; `decode` gives f32[..., n] back.
    """

    encode: Callable[[jax.Array], PyTree]
    decode: Callable[[PyTree], jax.Array]
    bytes_per_element: float
    rounding: float  # largest relative error of one rounding: half the distance between neighbours


def encode_f16(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Half precision after scaling by the power of two that takes the largest entry into [2^14, 2^15).

    So a bucket at 1e-12 and one at 1e+6 both survive, and entries down to 2^-28 of the largest stay normal numbers,
    with a relative error of at most 2^-11.
    Where the largest entry is not finite nothing is scaled: infinities and NaN travel as they are.
    """
    if x.size == 0:
        return x.astype(jnp.float16), jnp.ones((*x.shape[:-1], 1), jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    _, exponent = jnp.frexp(largest)
    usable = jnp.isfinite(largest) & (largest > 0)
    # Beyond 2^126 the power itself would not be a normal number.
    power = jnp.where(usable, jnp.clip(15 - exponent, -126, 126), 0)
    return (x * power_of_two(power)).astype(jnp.float16), power_of_two(-power)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """f32 2^exponent, exact, for i32 exponents in [-126, 127]: the bits are written, not computed."""
    bits = (exponent.astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def decode_f16(sent: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The scaled halves times the inverse of their sender's scale."""
    values, unscale = sent
    return values.astype(jnp.float32) * unscale


WIRES: dict[str, Wire] = {
    "32": Wire(lambda x: x, lambda sent: sent, 4, 0.0),
    "16": Wire(encode_f16, decode_f16, 2, 2.0**-11),
    "bf16": Wire(lambda x: x.astype(jnp.bfloat16), lambda sent: sent.astype(jnp.float32), 2, 2.0**-8),
}
