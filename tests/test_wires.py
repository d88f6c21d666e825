import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxmpi.wires import WIRES
from references import round_to_wire

HALF_WIRES = ["16", "bf16"]
SMALLEST_NORMAL = 2.0**-126


def roundtrip(wire: str, x) -> np.ndarray:
    return np.asarray(WIRES[wire].decode(WIRES[wire].encode(jnp.asarray(x, jnp.float32))))


def normals(seed: int, n: int = 1009, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def relative(got: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.abs(got.astype(np.float64) - x) / np.abs(x)


@pytest.mark.parametrize("wire", HALF_WIRES)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1.0, 1e6, 1e30])
def test_buckets_of_any_magnitude_survive(wire, scale):
    x = normals(0, scale=scale)
    x = x[np.abs(x) >= 2.0**-28 * np.abs(x).max()]
    assert (relative(roundtrip(wire, x), x) <= WIRES[wire].rounding).all()


def test_entries_down_to_2_to_minus_28_of_the_largest_keep_their_relative_error():
    x = np.float32(1.999) * np.exp2(-np.arange(29, dtype=np.float32))
    assert (relative(roundtrip("16", x), x) <= 2.0**-11).all()
    assert roundtrip("16", [1, 2.0**-45])[1] == 0  # and far below that they vanish


def test_wire_32_changes_nothing():
    assert roundtrip("32", normals(1)).tobytes() == normals(1).tobytes()


@pytest.mark.parametrize("wire", HALF_WIRES)
def test_half_the_bytes_travel(wire):
    sent = WIRES[wire].encode(jnp.ones((3, 1000)))
    assert jax.tree.leaves(sent)[0].dtype.itemsize == WIRES[wire].bytes_per_element == 2
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(sent)) <= 3 * 1000 * 2 + 3 * 4


ODD = [
    ("zeros", [0, -0.0, 0]),
    ("one", [-3]),
    ("largest f32", [3.4e38, 1, -3.4e38]),
    ("smallest normal", [SMALLEST_NORMAL, -SMALLEST_NORMAL]),
    ("next to overflow of a half", [65519, 65520, 65536]),
    ("infinity", [np.inf, 1, -np.inf]),
    ("nan", [np.nan, 1, 0]),
    ("nan and infinity", [np.nan, np.inf]),
    ("empty", []),
]


@pytest.mark.parametrize("wire", HALF_WIRES)
@pytest.mark.parametrize(("name", "values"), ODD, ids=[name for name, _ in ODD])
def test_odd_values_arrive_as_the_oracle_says(wire, name, values):
    x = np.array(values, np.float32)
    got, expected = roundtrip(wire, x), round_to_wire(x, wire)
    np.testing.assert_array_equal(got, expected)
    assert (np.isfinite(got) == np.isfinite(expected)).all()
    assert got.shape == x.shape


def test_subnormal_numbers_lose_at_most_themselves():
    x = np.array([1e-40, -1e-45, 1e-39], np.float32)
    assert (np.abs(roundtrip("16", x) - x.astype(np.float64)) <= SMALLEST_NORMAL).all()


def test_an_infinity_does_not_drag_its_neighbours_along():
    assert roundtrip("16", [np.inf, 1.5, -2]).tolist() == [np.inf, 1.5, -2]


def test_each_row_has_its_own_scale():
    rows = np.stack([normals(2, 64, 1e-12), normals(3, 64, 1e6)])
    np.testing.assert_array_equal(roundtrip("16", rows), np.stack([roundtrip("16", row) for row in rows]))
    assert WIRES["16"].encode(jnp.asarray(rows))[1].shape == (2, 1)


@pytest.mark.parametrize("wire", WIRES)
def test_jit_and_vmap_give_the_same_bits(wire):
    rows = np.stack([normals(5, 65, scale) for scale in (1e-12, 1e-3, 1.0, 1e6)])
    one = np.stack([roundtrip(wire, row) for row in rows])
    encode, decode = WIRES[wire].encode, WIRES[wire].decode
    for many in (jax.vmap(lambda x: decode(encode(x))), jax.jit(lambda x: decode(encode(x)))):
        assert np.asarray(many(jnp.asarray(rows))).tobytes() == one.tobytes()


@pytest.mark.parametrize("wire", HALF_WIRES)
def test_what_has_been_sent_once_is_sent_exactly_the_second_time(wire):
    once = roundtrip(wire, normals(4))
    assert roundtrip(wire, once).tobytes() == once.tobytes()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


@given(arrays(np.float32, 12, elements=finite), st.sampled_from(HALF_WIRES))
def test_any_finite_vector_arrives_within_half_a_step(x, wire):
    largest = float(np.abs(x).max())
    floor = 2.0**-39 * largest + SMALLEST_NORMAL if wire == "16" else SMALLEST_NORMAL
    x = x[np.abs(x) < 3.38e38]  # bf16 rounds what is above to infinity, as f32 would at its own end
    got = roundtrip(wire, np.resize(x, 12)) if x.size else np.zeros(12, np.float32)
    wanted = np.resize(x, 12).astype(np.float64)
    assert (np.abs(got - wanted) <= WIRES[wire].rounding * np.abs(wanted) + floor).all()
    assert (np.sign(got) * np.sign(wanted) >= 0).all()
