"""Data-parallel functions over devices of one process, and their arithmetic; other workers: test_functions_led."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import function_checks
import jaxmpi as jm
from jaxmpi.function import names, split
from jaxmpi.function.drive import how_many, team

QUICK = [(check, 2) for check in function_checks.CHECKS if check is not function_checks.check_strategies]
SLOW = [pytest.param(c, w, marks=pytest.mark.slow) for c in function_checks.CHECKS for w in (1, 3, 8)]


@pytest.fixture(autouse=True)
def end():
    yield
    jm.close()


@pytest.mark.parametrize(("check", "workers"), [*QUICK, *SLOW], ids=lambda v: getattr(v, "__name__", v))
def test_over_devices(check, workers):
    assert jm.fork(workers) == workers
    check()


# ---------------------------------------------------------------- shares and pieces


@hypothesis.given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 20))
def test_pieces_are_the_shares_and_have_two_lengths_at_most(n, workers, slices):
    edges = split.bounds(n, workers)
    shares = [b - a for a, b in itertools.pairwise(edges)]
    assert max(shares) - min(shares) <= 1
    every = [split.pieces(n, workers, rank, slices) for rank in range(workers)]
    rows = [row for pieces in every for a, b in pieces for row in range(a, b)]
    assert rows == list(range(n))
    assert [sum(b - a for a, b in pieces) for pieces in every] == shares
    assert all(len(pieces) <= slices for pieces in every)
    assert len({b - a for pieces in every for a, b in pieces}) <= 2


@hypothesis.given(
    st.integers(1, 50),
    st.one_of(st.slices(50), st.lists(st.integers(-50, 49)), st.integers(0, 50)),
    st.data(),
)
def test_chosen_rows_are_numpys(length, batch, data):
    x = np.arange(length)
    inside = (
        batch
        if isinstance(batch, slice)
        else [i for i in batch if -length <= i < length]
        if isinstance(batch, list)
        else min(batch, length)
    )
    expected = x[
        slice(inside) if isinstance(inside, int) else np.asarray(inside, int) if isinstance(inside, list) else inside
    ]
    rows = split.choose(inside, length)
    assert rows.count == len(expected)
    begin = data.draw(st.integers(0, rows.count))
    end = data.draw(st.integers(begin, rows.count))
    if begin < end:
        assert (x[rows.of(begin, end)] == expected[begin:end]).all()


# ---------------------------------------------------------------- fork and close


def test_all_devices_are_the_default():
    assert jm.fork() == 8
    assert float(jm.function(lambda x: x.sum(), jm.scatter, jm.sum)(np.ones(9, np.float32))) == 9


def test_no_fork_is_all_devices():
    assert team().size == 8


def test_use_after_close():
    jm.fork(2)
    v, f = jm.variable(np.float32(1)), jm.function(lambda x: x.sum(), jm.scatter, jm.sum)
    x = np.ones(4, np.float32)
    f(x)
    jm.close()
    for call in (lambda: f(x), lambda: v.get(0), lambda: v.value, lambda: v.all_reduce()):
        with pytest.raises(jm.UsageError, match="closed"):
            call()
    jm.fork(3)
    for late in (jm.function(lambda v: v, v, jm.local), jm.function(lambda: np.float32(2), (), (), v)):
        with pytest.raises(jm.UsageError, match="workers that were closed"):
            late()
    assert float(jm.function(lambda x: x.sum(), jm.scatter, jm.sum)(x)) == 4
    jm.close()
    jm.close()


@pytest.mark.parametrize(
    ("kind", "devices", "has_gpus", "workers"),
    [
        *(("auto", 1, False, 6), ("auto", 1, True, 1), ("auto", 4, True, 4), ("auto", 8, False, 8)),
        *(("devices", 1, False, 1), ("processes", 1, False, 6)),
    ],
)
def test_workers_where_no_number_is_named(kind, devices, has_gpus, workers):
    assert how_many(kind, devices, has_gpus, cores=6) == workers


@pytest.mark.parametrize(("n", "message"), [(0, "got 0 workers"), (2.5, "whole number"), (9, "8 devices")])
def test_other_numbers_of_workers(n, message):
    with pytest.raises(jm.UsageError, match=message):
        jm.fork(n, kind="devices")


def test_fork_comes_first():
    jm.fork(2)
    jm.variable(np.float32(1))
    with pytest.raises(jm.UsageError, match="2 workers already"):
        jm.fork(3)
    with pytest.raises(jm.UsageError, match="kind: got 'threads'"):
        jm.fork(3, kind="threads")


def test_a_call_inside_of_a_call_is_refused():
    jm.fork(2)
    inner, x = jm.function(lambda x: x.sum(), jm.scatter, jm.sum), np.ones(4, np.float32)
    like = jax.ShapeDtypeStruct((), np.float32)
    outer = jm.function(lambda x: jax.pure_callback(lambda v: np.float32(inner(x)), like, x.sum()), jm.scatter, jm.sum)
    with pytest.raises(Exception, match="called while another call is under way"):
        outer(x)
    assert float(inner(x)) == 4


# ---------------------------------------------------------------- functions by name


def doubled(f):
    @functools.wraps(f)
    def twice(x):
        return 2 * f(x)

    return twice


@doubled
def once(x):
    return x


def test_a_function_is_found_by_its_name():
    jitted = jax.jit(once)
    assert names.find(names.name_of(once))(3) == 6
    assert names.find(names.name_of(jitted)) is once
    assert names.find(names.name_of(once.__wrapped__))(3) == 3
    for hidden in (lambda x: x, [].append, functools.partial(once)):
        with pytest.raises(jm.UsageError, match="cannot find it by name"):
            names.name_of(hidden)


# ---------------------------------------------------------------- no more copies than needed


def test_an_unchanged_broadcast_argument_moves_no_bytes(monkeypatch):
    jm.fork(2)
    moved = []
    for station in team().stations:
        put = station.put
        monkeypatch.setattr(station, "put", lambda array, put=put: (moved.append(np.size(array)), put(array))[1])
    f = jm.function(lambda x, p, q: (x @ p).sum() + q.sum(), (jm.scatter, jm.broadcast, jm.broadcast), jm.sum)
    x, p, q = np.ones((2, 50), np.float32), np.ones((50, 50), np.float32), jax.numpy.ones(700)
    f(x, p, q)
    assert moved.count(2500) == moved.count(700) == 2
    moved.clear()
    f(x, p, q)
    assert set(moved) == {50}


@jax.tree_util.register_pytree_node_class
class Mute(list):
    """Arrays that must not be written down, which takes longer than a call."""

    def tree_flatten(self):
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, data, leaves):
        return cls(leaves)

    def __repr__(self):
        raise AssertionError("a call that is well writes no message")


def test_a_call_writes_down_no_argument():
    jm.fork(2)
    f = jm.function(lambda x, p: x[0].sum() + p[0].sum(), (jm.scatter, jm.broadcast), jm.sum)
    assert float(f(Mute([np.ones(4, np.float32)]), Mute([np.ones(3, np.float32)]))) == 10


def test_results_do_not_alias_what_the_caller_may_overwrite():
    jm.fork(1)
    x = np.zeros((1 << 12, 16), np.float32)
    kept = jm.variable(np.float32(0))
    f = jm.function(lambda x: (x, x, x), jm.scatter, (jm.gather, jm.local), ((kept, jm.mean),))
    rows, local = f(x)
    x[:] = 1
    for got in (np.asarray(rows), local.get(0), kept.get(0)):
        assert not got.any()


def test_shuffled_rows_are_fetched_by_their_share_only(monkeypatch):
    from jaxmpi.function import compute

    jm.fork(2)
    taken = []
    take = np.take
    monkeypatch.setattr(compute.np, "take", lambda a, i, **how: (taken.append(len(i)), take(a, i, **how))[1])
    x = jm.shared(np.arange(4000, dtype=np.float32).reshape(1000, 4))
    order = np.random.default_rng(0).permutation(1000)[:100]
    got = jm.function(lambda x: x, jm.scatter, jm.gather)(x, batch=order, slices=5)
    assert (np.asarray(got) == x[order]).all()
    assert taken == [10] * 10
    x.free()


# ---------------------------------------------------------------- shared arrays


def test_shared_reads_and_writes_as_numpy():
    x = jm.shared(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert (x.shape, x.dtype, x.ndim, len(x), x.nbytes) == ((2, 3), np.float32, 2, 2, 24)
    x[1, :2] = 9
    x[0] = np.array([1, 2, 3], np.float16)
    assert x[:, 0].tolist() == [1, 9]
    assert np.asarray(x).base is not None
    assert (np.add(x, 1) == x.array + 1).all()
    x.reshape((3, 2))
    assert x[2].tolist() == [9, 5]
    assert "float32[3, 2]" in repr(x)
    x.free()
    x.free()
    with pytest.raises(jm.UsageError, match="has been freed"):
        x[0]


def test_shared_calculates_as_numpy():
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = jm.shared(plain)
    for got, expected in ((x / 2, plain / 2), (2 - x, 2 - plain), (x > 1, plain > 1), (x == x, plain == plain)):
        assert type(got) is np.ndarray
        assert got.tolist() == expected.tolist()
    assert (x.mean(), x.sum(0).tolist(), x.T.shape) == (2.5, [3, 5, 7], (3, 2))
    assert [row.sum() for row in x] == [3, 12]
    same = x
    x *= 2
    np.add(x, 1, out=x)
    assert x is same
    assert x[:].tolist() == (2 * plain + 1).tolist()
    with pytest.raises(AttributeError, match="no attribute 'average'"):
        x.average()


def test_shared_grows_in_its_room_and_beyond():
    x = jm.shared(np.ones((10, 4), np.float32), oversize=2)
    room, view = x.capacity_bytes, x.array
    assert room >= 320
    x.resize(20)
    assert x.capacity_bytes == room
    assert (x[:10] == 1).all()
    x.resize(100)
    assert x.capacity_bytes >= 1600
    assert (x[:10] == 1).all()
    view[0] = 5  # an older view is the same memory
    assert x[0, 0] == 5
    x.resize(0)
    assert len(x) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jm.shared(np.array([object()])), "array of object"),
        (lambda: jm.shared(np.zeros(3, [("a", "f4")])), "expected numbers"),
        (lambda: jm.shared(np.zeros(3), dtype=np.float32), "may lose digits"),
        (lambda: jm.shared(np.zeros(3, np.float32)).__setitem__(0, np.array([1.0])), "may lose digits"),
        (lambda: jm.shared(np.zeros(3, np.int32)).__setitem__(0, 1.5), "may lose digits"),
        (lambda: jm.shared(np.zeros(3, np.float32), oversize=0.5), "oversize: got 0.5"),
        (lambda: jm.shared(np.zeros(3), name="../etc"), "expected letters"),
        (lambda: jm.shared(name="there-is-none"), "no array named"),
        (lambda: jm.shared(), "give an array"),
        (lambda: jm.shared(np.zeros(3)).resize(-1), "length >= 0"),
        (lambda: jm.shared(np.float32(3)).resize(2), "without axes"),
    ],
)
def test_shared_refuses(make, message):
    with pytest.raises(jm.UsageError, match=message):
        make()


def test_shared_casts_where_told_to():
    x = jm.shared(np.array([1.5, 2.5]), dtype=np.float32, force=True)
    assert (x.dtype, x[:].tolist()) == (np.float32, [1.5, 2.5])
    assert jm.shared(np.array([1], np.float16), dtype=np.float32).dtype == np.float32
