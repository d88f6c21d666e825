import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxmpi.allreduce.wires import BLOCK, WIRES
from references import round_to_wire
from tolerances import TINY, WIRE

HALF_WIRES = ["16", "bf16"]
ROUNDING_WIRES = [*HALF_WIRES, "8"]


@functools.cache
def program(wire: str):
    return jax.jit(lambda x: WIRES[wire].decode(WIRES[wire].encode(x)))


def roundtrip(wire: str, x) -> np.ndarray:
    return np.asarray(program(wire)(jnp.asarray(x, jnp.float32)))


def normals(seed: int, n: int = 1009, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def relative(got: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.abs(got.astype(np.float64) - x) / np.abs(x)


def test_entries_down_to_2_to_minus_28_of_the_largest_keep_their_relative_error():
    x = np.float32(1.999) * np.exp2(-np.arange(29, dtype=np.float32))
    assert (relative(roundtrip("16", x), x) <= 2.0**-11).all()
    assert roundtrip("16", [1, 2.0**-45])[1] == 0  # and far below that they vanish


@pytest.mark.parametrize(("wire", "nbytes"), [("32", 4000), ("16", 2000 + 4 * 4), ("bf16", 2000), ("8", 1000 + 4 * 4)])
def test_bytes_that_travel(wire, nbytes):
    sent = WIRES[wire].encode(jnp.ones((3, 1000)))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(sent)) == 3 * nbytes


ODD = [
    ("zeros", [0, -0.0, 0]),
    ("one", [-3]),
    ("largest f32", [3.4e38, 1, -3.4e38]),
    ("smallest normal", [TINY, -TINY]),
    ("next to overflow of a half", [65519, 65520, 65536]),
    ("infinity", [np.inf, 1, -np.inf]),
    ("nan", [np.nan, 1, 0]),
    ("nan and infinity", [np.nan, np.inf]),
    ("empty", []),
]


@pytest.mark.parametrize("wire", ROUNDING_WIRES)
@pytest.mark.parametrize(("name", "values"), ODD, ids=[name for name, _ in ODD])
def test_odd_values_arrive_as_the_oracle_says(wire, name, values):
    x = np.array(values, np.float32)
    got, expected = roundtrip(wire, x), round_to_wire(x, wire)
    np.testing.assert_array_equal(got, expected)
    assert (np.isfinite(got) == np.isfinite(expected)).all()
    assert got.shape == x.shape


@pytest.mark.parametrize("wire", WIRES)
def test_jit_and_vmap_give_the_same_bits(wire):
    rows = np.stack([normals(5, 65, scale) for scale in (1e-12, 1e-3, 1.0, 1e6)])
    one = np.stack([roundtrip(wire, row) for row in rows])
    encode, decode = WIRES[wire].encode, WIRES[wire].decode
    for many in (jax.vmap(lambda x: decode(encode(x))), program(wire)):
        assert np.asarray(many(jnp.asarray(rows))).tobytes() == one.tobytes()


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 1])
def test_wire_8_is_off_by_a_253rd_of_the_largest_of_its_block(n):
    x = normals(6, n) * np.exp2(np.arange(n) // BLOCK * 20 - 40).astype(np.float32)
    got = roundtrip("8", x)
    for begin in range(0, n, BLOCK):
        block = slice(begin, begin + BLOCK)
        assert (np.abs(got[block] - x[block].astype(np.float64)) <= np.abs(x[block]).max() / 253).all()
    assert n == 1 or (got != x).any()


@pytest.mark.parametrize(("odd", "place"), [(np.nan, BLOCK - 1), (np.inf, BLOCK), (-np.inf, 2 * BLOCK + 40)])
def test_on_wire_8_a_block_with_a_nan_or_an_infinity_is_nan_and_others_are_not(odd, place):
    x = normals(7, 2 * BLOCK + 41)
    x[place] = odd
    expected = np.arange(len(x)) // BLOCK == place // BLOCK
    assert (np.isnan(roundtrip("8", x)) == expected).all()


def test_wire_8_multiplies_exactly():
    """Else a fused multiply and add would give other bits than the two one after the other."""
    multiples, scale = WIRES["8"].encode(jnp.asarray(normals(8, 16 * BLOCK)))
    exact = np.asarray(multiples, np.float64).reshape(-1, BLOCK) * np.asarray(scale, np.float64)[:, None]
    np.testing.assert_array_equal(roundtrip("8", normals(8, 16 * BLOCK)), exact.reshape(-1))


@pytest.mark.parametrize("wire", ROUNDING_WIRES)
def test_what_has_been_sent_once_is_sent_exactly_the_second_time(wire):
    once = roundtrip(wire, normals(4))
    assert roundtrip(wire, once).tobytes() == once.tobytes()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


@given(arrays(np.float32, 12, elements=finite), st.sampled_from(ROUNDING_WIRES))
def test_any_finite_vector_arrives_within_half_a_step(x, wire):
    x = x[np.abs(x) < 3.38e38]  # bf16 and 8 round what is above to infinity, as f32 would at its own end
    x = np.resize(x, 12) if x.size else np.zeros(12, np.float32)
    got, wanted = roundtrip(wire, x), x.astype(np.float64)
    rounding, floor = WIRE[wire]
    assert (np.abs(got - wanted) <= rounding * np.abs(wanted) + floor * np.abs(wanted).max() + TINY).all()
    assert (np.sign(got) * np.sign(wanted) >= 0).all()
