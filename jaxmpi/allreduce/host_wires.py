"""Encodings of values on the wire, in NumPy, for the communication thread."""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxmpi.allreduce.wires import BLOCK, SMALLEST_NORMAL


class HostWire(NamedTuple):
    """`Wire` in NumPy, to and from the bytes of one message."""

    size_bytes: Callable[[int], int]  # of n floats
    encode: Callable[[np.ndarray], np.ndarray]  # f32[n] -> u8[size_bytes(n)]; a view if nothing changes
    decode: Callable[[np.ndarray], np.ndarray]  # u8[size_bytes(n)] -> f32[n]; a view if nothing changes
    is_exact: bool = False


def encode_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint8)


def decode_bf16(sent: np.ndarray) -> np.ndarray:
    """The upper halves of floats."""
    return sent.view(ml_dtypes.bfloat16).astype(np.float32)


def encode_f16(x: np.ndarray) -> np.ndarray:
    """Inverses of the powers of two, f32[ceil(n / BLOCK)], then halves, f16[n]; see `wires.encode_f16`."""
    sent = np.empty(size_f16(x.size), np.uint8)
    inverses, halves = parts(sent, np.float16)
    blocks = in_blocks(x)
    largest = np.maximum(blocks.max(1), -blocks.min(1))
    usable = np.isfinite(largest) & (largest > 0)
    power = np.where(usable, np.clip(15 - np.frexp(largest)[1], -126, 126), 0)
    inverses[:] = np.ldexp(np.float32(1), -power)
    scaled = np.ldexp(np.float32(1), power)[:, None]
    if x.size % BLOCK:
        halves[:] = (blocks * scaled).reshape(-1)[: x.size]
    else:
        np.multiply(blocks, scaled, out=halves.reshape(blocks.shape), casting="same_kind")
    return sent


def decode_f16(sent: np.ndarray) -> np.ndarray:
    """The scaled halves times the inverses of their blocks."""
    return decode_blocks(*parts(sent, np.float16))


def size_f16(n: int) -> int:
    """Two bytes a float, and a scale a block."""
    return 2 * n + 4 * -(-n // BLOCK)


def encode_i8(x: np.ndarray) -> np.ndarray:
    """Scales, f32[ceil(n / BLOCK)], then multiples, i8[n]; see `wires.encode_i8`."""
    sent = np.empty(size_i8(x.size), np.uint8)
    scales, multiples = parts(sent, np.int8)
    blocks = in_blocks(x)
    largest = np.abs(blocks).max(1)
    over_127 = largest * np.float32(1 / 127)  # XLA makes the division this product
    rounded_up = (over_127.view(np.uint32) + np.uint32(0xFF)) & np.uint32(0xFFFFFF00)
    scales[:] = np.where(np.isfinite(largest), np.maximum(rounded_up.view(np.float32), SMALLEST_NORMAL), np.nan)
    quotients = blocks * (1 / scales)[:, None]
    multiples[:] = np.rint(quotients, out=quotients).reshape(-1)[: x.size].astype(np.int8)
    return sent


def decode_i8(sent: np.ndarray) -> np.ndarray:
    """The multiples times their blocks' scales."""
    return decode_blocks(*parts(sent, np.int8))


def size_i8(n: int) -> int:
    """A byte a float, and a scale a block."""
    return n + 4 * -(-n // BLOCK)


def parts(sent: np.ndarray, dtype: type[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    """Views of a message: scales, f32[ceil(n / BLOCK)], and numbers, dtype[n]."""
    blocks = -(-sent.size // (BLOCK * np.dtype(dtype).itemsize + 4))
    return sent[: 4 * blocks].view(np.float32), sent[4 * blocks :].view(dtype)


def decode_blocks(scales: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Numbers times the scales of their blocks, f32[n]."""
    products = np.multiply(in_blocks(numbers), scales[:, None], dtype=np.float32)
    return products.reshape(-1)[: numbers.size]


def in_blocks(x: np.ndarray) -> np.ndarray:
    """[n] as [ceil(n / BLOCK), BLOCK], the last block filled with zeros."""
    missing = -x.size % BLOCK
    return (np.pad(x, (0, missing)) if missing else x).reshape(-1, BLOCK)


HOST_WIRES: dict[str, HostWire] = {
    "32": HostWire(lambda n: 4 * n, lambda x: x.view(np.uint8), lambda sent: sent.view(np.float32), is_exact=True),
    "16": HostWire(size_f16, encode_f16, decode_f16),
    "bf16": HostWire(lambda n: 2 * n, encode_bf16, decode_bf16),
    "8": HostWire(size_i8, encode_i8, decode_i8),
}
