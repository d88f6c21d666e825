"""Wires: f32 to the arrays that workers send, and back. One table."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmpi.core.pytrees import PyTree

BLOCK = 256  # floats that share a scale on wires 16 and 8: 0.8 and 1.6 % on top of the bytes
SMALLEST_NORMAL = 2.0**-126


class Wire(NamedTuple):
    """An encoding of f32[..., n] along its last axis.

    `encode` gives a pytree of arrays that keep the leading axes; `decode` gives f32[..., n] back.
    """

    encode: Callable[[jax.Array], PyTree]
    decode: Callable[[PyTree], jax.Array]


def encode_f16(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Half precision, each block of `BLOCK` entries times the power of two that takes its largest into [2^14, 2^15).

    So a bucket at 1e-12 and one at 1e+6 both survive, and entries down to 2^-28 of their block's largest stay normal
    numbers, with a relative error of at most 2^-11.
    If the largest entry is not finite nothing is scaled: infinities and NaN travel as they are.
    """
    blocks = in_blocks(x)
    largest = largest_magnitude(blocks)
    _, exponent = jnp.frexp(largest)
    usable = jnp.isfinite(largest) & (largest > 0)
    # Beyond 2^126 the power itself would not be a normal number.
    power = jnp.where(usable, jnp.clip(15 - exponent, -126, 126), 0)
    halves = (blocks * power_of_two(power)[..., None]).astype(jnp.float16)
    return of_blocks(halves, x.shape[-1]), power_of_two(-power)


def largest_magnitude(x: jax.Array) -> jax.Array:
    """The largest |x| along the last axis; NaN if there is one.

    Compared as integers, which order NaN above infinity: in some programs XLA:CPU's maximum of floats loses a NaN.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """f32 2^exponent, exact, for i32 exponents in [-126, 127]: the bits are written, not computed."""
    bits = (exponent.astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def decode_blocks(sent: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Halves or multiples times the scales of their blocks, f32[..., ceil(n / BLOCK)]."""
    numbers, scale = sent
    return of_blocks(in_blocks(numbers).astype(jnp.float32) * scale[..., None], numbers.shape[-1])


def encode_i8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eight bits: multiples of a scale, one for each `BLOCK` entries, of which the largest entry is the 127th.

    q = round(x / s), s = max |x| / 127 rounded up to 16 significant bits; so |q s - x| <= max |x| / 253.

    A block that holds a NaN or an infinity arrives as NaN, whole: eight bits have no room for either, and s = NaN says
    it for all. s is at least 2^-126: below half of that entries vanish. The product q s is exact in f32, so that
    nothing depends on whether a compiler fuses it with an addition.
    """
    blocks = in_blocks(x)
    largest = largest_magnitude(blocks)
    scale = jnp.maximum(round_up(largest / 127), SMALLEST_NORMAL)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    multiples = jnp.round(blocks * (1 / scale)[..., None]).astype(jnp.int8)
    return of_blocks(multiples, x.shape[-1]), scale


def round_up(x: jax.Array) -> jax.Array:
    """F32 >= 0 to the next number of 16 significant bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + jnp.uint32(0xFF)) & jnp.uint32(0xFFFFFF00), jnp.float32)


def in_blocks(x: jax.Array) -> jax.Array:
    """[..., n] as [..., ceil(n / BLOCK), BLOCK], the last block filled with zeros."""
    missing = -x.shape[-1] % BLOCK
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
    return padded.reshape(*x.shape[:-1], -1, BLOCK)


def of_blocks(blocks: jax.Array, n: int) -> jax.Array:
    """The inverse: [..., n] without what was filled in."""
    return blocks.reshape(*blocks.shape[:-2], -1)[..., :n]


WIRES: dict[str, Wire] = {
    "32": Wire(lambda x: x, lambda sent: sent),
    "16": Wire(encode_f16, decode_blocks),
    "bf16": Wire(lambda x: x.astype(jnp.bfloat16), lambda sent: sent.astype(jnp.float32)),
    "8": Wire(encode_i8, decode_blocks),
}
