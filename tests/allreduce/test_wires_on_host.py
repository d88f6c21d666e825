"""Wires in C beside those of programs, and the settings of the thread they run on."""

import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi.allreduce import wires
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


def both_ways(wire: str, x: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The bytes sent and what arrives: in C, and in a program."""
    results = []
    for codec in (host_wire(wire), wires.through_program(WIRES[wire])):
        sent, arrived = in_thread(lambda codec=codec: (codec.encode(x), codec.decode(codec.encode(x), x.size)))
        assert sent.size == codec.size_bytes(x.size)
        results.append((sent, arrived))
    return results


@pytest.mark.parametrize("wire", WIRES)
def test_wires_are_those_of_programs_in_every_bit(wire):
    for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 1009, 1000 * BLOCK):
        for scale in (1e-37, 1.0, 1e36):
            (sent, arrived), (expected_sent, expected) = both_ways(wire, normals(n, n, scale))
            assert sent.tobytes() == expected_sent.tobytes()
            assert arrived.tobytes() == expected.tobytes()
    for name, values in ODD:  # NaN may have other bits
        (_, ours), (_, theirs) = both_ways(wire, np.array(values, np.float32))
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
        assert (np.signbit(ours) == np.signbit(theirs))[~np.isnan(ours)].all()


def test_a_thread_adds_what_is_subnormal_as_xla_does():
    tiny = np.float32(SMALLEST_NORMAL) * np.array([1, 1.5, -1, -1.5], np.float32)
    other = -tiny * np.float32(1.25)
    ours = in_thread(lambda: tiny + other)
    assert ours.tobytes() == np.asarray(jax.jit(jnp.add)(tiny, other)).tobytes()
    assert (ours == 0).all()
    assert (tiny + other != 0).all()  # here, in another thread


def test_without_a_compiler_a_wire_is_its_program(monkeypatch):
    monkeypatch.setattr(wires, "codec", lambda: None)
    assert host_wire("16") is wires.through_program(WIRES["16"])
