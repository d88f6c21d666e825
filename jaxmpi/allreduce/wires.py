"""Wires: encodings of f32 for sending, in a program and in C.

Fewer bits make an exchange faster if bytes are its bottleneck. But MPI cannot add 16-bit floats, and 16-bit sums would
lose bits with every worker. So encoded values travel through collectives that do not add, and the receiver decodes and
adds in f32 (docs/decisions.md, 5). Wires 16 and 8 scale each block of 256 floats by its largest, so gradients of 1e-12
and of 1e+6 both survive. One scale for a whole message was dropped: with blocks a segment can travel while the next one
is encoded. The forms in C (`compiled_wires.h`) give the same bits; sums outside XLA and asynchronous servers use them.
"""

import ctypes
import functools
import subprocess
from collections.abc import Callable
from ctypes import c_int64
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import lookup
from jaxmpi.core.pytrees import PyTree
from jaxmpi.runtime import compile_cache

BLOCK = 256  # floats that share a scale on wires 16 and 8: 0.8 and 1.6 % on top of the bytes
SMALLEST_NORMAL = 2.0**-126
FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1}  # by name in C, of which WIRES makes `enum wire`
WIRE_CONSTANTS = {"WIRES": ",".join(FLOAT_BYTES), "BLOCK": BLOCK}


class HostWire(NamedTuple):
    """A wire outside programs, to and from the bytes of one message."""

    size_bytes: Callable[[int], int]  # bytes of n floats
    encode: Callable[[np.ndarray], np.ndarray]  # f32[n] -> u8[size_bytes(n)]; a view if nothing changes
    decode: Callable[[np.ndarray, int], np.ndarray]  # u8[size_bytes(n)], n -> f32[n]; a view if nothing changes
    is_exact: bool = False


class Wire(NamedTuple):
    """An encoding of f32[..., n] along its last axis.

    `encode` gives a pytree of arrays that keep the leading axes; `decode` gives f32[..., n] back.
    """

    encode: Callable[[jax.Array], PyTree]
    decode: Callable[[PyTree], jax.Array]
    block: int = 1  # floats that share a scale: leaves that are sent together begin at multiples of it
    code: str = ""  # its name in C, which gives the same bits; a row of jaxmpi's own has one

    @property
    def number(self) -> int:
        """Its number in C."""
        return list(FLOAT_BYTES).index(self.code)

    def size_bytes(self, n: int) -> int:
        """Bytes of n encoded floats in C: first a scale for each block, then the numbers."""
        return FLOAT_BYTES[self.code] * n + (4 * -(-n // self.block) if self.block > 1 else 0)


# ---------------------------------------------------------------- in a program


def encode_f16(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Half precision, each block scaled by a power of two.

    The power takes the largest of `BLOCK` entries into [2^14, 2^15). So a bucket at 1e-12 and one at 1e+6 both survive.
    Entries down to 2^-28 of their block's largest stay normal numbers, with a relative error of at most 2^-11. If the
    largest entry is not finite nothing is scaled: infinities and NaN travel as they are.
    """
    blocks = in_blocks(x)
    largest = largest_magnitude(blocks)
    _, exponent = jnp.frexp(largest)
    usable = jnp.isfinite(largest) & (largest > 0)
    # Beyond 2^126 the power itself would not be a normal number.
    power = jnp.where(usable, jnp.clip(15 - exponent, -126, 126), 0)
    # A power of two changes no bit of the mantissa, so the one rounding is that of the conversion to 11 bits.
    halves = (blocks * power_of_two(power)[..., None]).astype(jnp.float16)
    return join_blocks(halves, x.shape[-1]), power_of_two(-power)


def largest_magnitude(x: jax.Array) -> jax.Array:
    """The largest |x| along the last axis; NaN if there is one.

    Compared as integers, which order NaN above infinity: in some programs XLA:CPU's maximum of floats loses a NaN.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """f32 2^exponent, exact by its bits, for i32 exponents in [-126, 127]."""
    bits = (exponent.astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def decode_blocks(message: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Halves or multiples times their blocks' scales, f32[..., ceil(n / BLOCK)]."""
    numbers, scale = message
    return join_blocks(in_blocks(numbers).astype(jnp.float32) * scale[..., None], numbers.shape[-1])


def encode_i8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eight bits: multiples of a scale for each `BLOCK` entries.

    q = round(x / s), s = max |x| / 127 rounded up to 16 significant bits; so |q s - x| <= max |x| / 253.

    A block that holds a NaN or an infinity arrives as NaN, whole: eight bits have no room for either, and s = NaN says
    it for all. s is at least 2^-126: below half of that entries vanish. The product q s is exact in f32. So nothing
    depends on whether a compiler fuses it with an addition.
    """
    blocks = in_blocks(x)
    largest = largest_magnitude(blocks)
    scale = jnp.maximum(round_up(largest / 127), SMALLEST_NORMAL)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    multiples = jnp.round(blocks * (1 / scale)[..., None]).astype(jnp.int8)
    return join_blocks(multiples, x.shape[-1]), scale


def round_up(x: jax.Array) -> jax.Array:
    """F32 >= 0 to the next number of 16 significant bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + jnp.uint32(0xFF)) & jnp.uint32(0xFFFFFF00), jnp.float32)


def in_blocks(x: jax.Array) -> jax.Array:
    """[..., n] as [..., ceil(n / BLOCK), BLOCK], filled up with zeros."""
    missing = -x.shape[-1] % BLOCK
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
    return padded.reshape(*x.shape[:-1], -1, BLOCK)


def join_blocks(blocks: jax.Array, n: int) -> jax.Array:
    """The inverse: [..., n] without what was filled in."""
    return blocks.reshape(*blocks.shape[:-2], -1)[..., :n]


# ---------------------------------------------------------------- outside programs


def host_wire(name: str) -> HostWire:
    """A wire to and from bytes: in C, or else by its program.

    Raises:
        UsageError: the wire is unknown.
    """
    wire = lookup(WIRES, name, "wire")
    if wire is PACKAGED_WIRES["32"]:
        return HostWire(wire.size_bytes, lambda x: x.view(np.uint8), lambda message, n: message.view(np.float32), True)
    return in_c(wire) if is_packaged(wire) and codec() else through_program(wire)


def is_packaged(wire: Wire) -> bool:
    """Whether it is one of jaxmpi's own rows, which C has as well, and not what a user has put in its place."""
    return any(wire is packaged for packaged in PACKAGED_WIRES.values())


def is_coarse(name: str) -> bool:
    """Return True if a wire, tried out, is off by more than 2^-10 of the largest number.

    Raises:
        UsageError: the wire is unknown.
    """
    x, wire = np.random.default_rng(0).standard_normal(BLOCK).astype(np.float32), host_wire(name)
    largest_error = np.abs(wire.decode(wire.encode(x), BLOCK) - x).max()
    return bool(largest_error > 2.0**-10 * np.abs(x).max())  # 16 has 2^-11, bf16 2^-9


@functools.cache
def codec() -> ctypes.CDLL | None:
    """Encoding and decoding in C; None without a compiler."""
    header = Path(__file__).with_name("compiled_wires.h")
    try:
        return compile_cache.load_c(header.with_suffix(".c"), [header], WIRE_CONSTANTS)
    except (OSError, subprocess.SubprocessError):
        return None


def in_c(wire: Wire) -> HostWire:
    """A wire as C has it."""
    library = codec()
    assert library

    def encode(x: np.ndarray) -> np.ndarray:
        x, message = np.ascontiguousarray(x, np.float32), np.empty(wire.size_bytes(x.size), np.uint8)
        library.jaxmpi_encode(wire.number, message.ctypes, x.ctypes, c_int64(x.size))
        return message

    def decode(message: np.ndarray, n: int) -> np.ndarray:
        message, x = np.ascontiguousarray(message), np.empty(n, np.float32)
        library.jaxmpi_decode(wire.number, x.ctypes, message.ctypes, c_int64(n))
        return x

    return HostWire(wire.size_bytes, encode, decode)


@functools.cache
def through_program(wire: Wire) -> HostWire:
    """A wire's program as a HostWire: its arrays as bytes, the last first, as C has scales before numbers.

    Not for a thread that a program waits for: this starts a program, which would wait for the first.
    """
    encode, decode = jax.jit(wire.encode), jax.jit(wire.decode)

    @functools.cache
    def encoded_shapes(n: int) -> tuple[list[jax.ShapeDtypeStruct], Any]:
        return jax.tree.flatten(jax.eval_shape(wire.encode, jax.ShapeDtypeStruct((n,), jnp.float32)))

    def to_bytes(x: np.ndarray) -> np.ndarray:
        leaves = reversed(jax.tree.leaves(encode(x)))
        return np.concatenate([np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in leaves])

    def to_floats(message: np.ndarray, n: int) -> np.ndarray:
        leaves, structure = encoded_shapes(n)
        cuts = np.cumsum([leaf.size * leaf.dtype.itemsize for leaf in reversed(leaves)])[:-1]
        parts = np.split(message, cuts)[::-1]
        arrays = [part.view(leaf.dtype).reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
        return np.asarray(decode(jax.tree.unflatten(structure, arrays)))

    return HostWire(lambda n: sum(x.size * x.dtype.itemsize for x in encoded_shapes(n)[0]), to_bytes, to_floats)


# ---------------------------------------------------------------- the table


WIRES: dict[str, Wire] = {
    "32": Wire(lambda x: x, lambda x: x, code="F32"),
    "16": Wire(encode_f16, decode_blocks, BLOCK, "F16"),
    "bf16": Wire(lambda x: x.astype(jnp.bfloat16), lambda message: message.astype(jnp.float32), code="BF16"),
    "8": Wire(encode_i8, decode_blocks, BLOCK, "I8"),
}
PACKAGED_WIRES = dict(WIRES)  # before a user adds or replaces rows
