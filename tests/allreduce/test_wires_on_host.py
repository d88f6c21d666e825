"""Wires in NumPy beside those of programs, and the settings of the thread they run on."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi.allreduce import host_comm, wires
from jaxmpi.allreduce.wires import BLOCK, SMALLEST_NORMAL, WIRES, host_wire
from jaxmpi.core import scheduling
from test_wires import ODD, normals


def in_thread(function: Callable):
    """Return what a function gives in a thread that flushes what is subnormal, as that of exchanges does."""
    results = []

    def work():
        assert scheduling.flush_subnormals()
        with np.errstate(all="ignore"):
            results.append(function())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


def both_ways(wire: str, x: np.ndarray) -> tuple[list[Any], list[Any]]:
    """The arrays sent and what arrives: in NumPy, and in a program."""
    there, back = host_wire(wire).encode, host_wire(wire).decode
    sent, arrived = in_thread(lambda: (there(x), back(there(x))))
    assert sent.size == host_wire(wire).size_bytes(x.size)
    jitted = jax.jit(lambda v: (WIRES[wire].encode(v), WIRES[wire].decode(WIRES[wire].encode(v))))
    encoded, decoded = jax.tree.map(np.asarray, jitted(x))
    return [parts(wire, sent), arrived], [encoded, decoded]


NUMBERS = {"16": np.float16, "8": np.int8}


def parts(wire: str, sent: np.ndarray):
    if wire in NUMBERS:
        return wires.parts(sent, NUMBERS[wire])[::-1]
    return sent.view(np.float32 if wire == "32" else jnp.bfloat16)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("scale", [1e-37, 1e-12, 1.0, 3e5, 1e36])
def test_wires_are_those_of_programs_in_every_bit(wire, scale):
    for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 1009, 1000 * BLOCK):
        ours, theirs = both_ways(wire, normals(n, n, scale))
        for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert mine.dtype == other.dtype
            assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("name", "values"), ODD, ids=[name for name, _ in ODD])
def test_odd_values_arrive_as_in_programs(wire, name, values):
    (_, ours), (_, theirs) = both_ways(wire, np.array(values, np.float32))
    np.testing.assert_array_equal(ours, theirs)
    assert (np.signbit(ours) == np.signbit(theirs))[~np.isnan(ours)].all()


def test_a_thread_adds_what_is_subnormal_as_xla_does():
    tiny = np.float32(SMALLEST_NORMAL) * np.array([1, 1.5, -1, -1.5], np.float32)
    other = -tiny * np.float32(1.25)
    ours = in_thread(lambda: tiny + other)
    assert ours.tobytes() == np.asarray(jax.jit(jnp.add)(tiny, other)).tobytes()
    assert (ours == 0).all()
    assert (tiny + other != 0).all()  # here, in another thread


def test_a_thread_may_ask_for_short_turns():
    granted = []
    thread = threading.Thread(target=lambda: granted.append(scheduling.take_short_turns()))
    thread.start()
    thread.join()
    assert granted == [sys.platform == "linux"]


@pytest.mark.parametrize("wire", WIRES)
def test_columns_are_whole_blocks_and_one_message(wire):
    width = host_comm.columns(host_wire(wire))
    assert width % BLOCK == 0
    size_bytes = host_wire(wire).size_bytes
    assert size_bytes(width) <= host_comm.MESSAGE_BYTES < size_bytes(width + BLOCK)


@pytest.mark.parametrize("wire", WIRES)
def test_a_wire_without_a_numpy_side_gives_the_same_floats_through_its_program(wire):
    given, program = host_wire(wire), wires.through_program(WIRES[wire]._replace(on_host=None))
    for n in (1, BLOCK, BLOCK + 1, 1009):
        x = normals(n, n, 1.0)
        sent = program.encode(x)
        assert (sent.dtype, sent.size) == (np.uint8, program.size_bytes(n))
        np.testing.assert_array_equal(program.decode(sent), given.decode(given.encode(x)))
