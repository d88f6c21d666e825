"""Data-parallel functions over devices of one process, and their arithmetic; other workers: test_functions_led."""

import itertools
import os
from pathlib import Path
from typing import Any, cast

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import function_checks
import jaxmpi
from jaxmpi import functions as jm
from jaxmpi.comm.base import SoloComm
from jaxmpi.functions import shared_array
from jaxmpi.functions.commands import perform
from jaxmpi.functions.groups import RankGroup
from jaxmpi.functions.lifecycle import current_group
from jaxmpi.functions.rows import select_rows, shard_bounds, take_rows, worker_pieces
from jaxmpi.functions.transport import decode_message
from jaxmpi.functions.worker import Command

QUICK = [(check, 2) for check in function_checks.CHECKS if check is not function_checks.check_strategies]
SLOW = [pytest.param(c, w, marks=pytest.mark.slow) for c in function_checks.CHECKS for w in (1, 3)]


@pytest.fixture(autouse=True)
def end():
    yield
    jm.close()


def sum_function() -> Any:
    return jm.function(lambda x: x.sum(), jm.scatter, jm.sum)


@pytest.mark.e2e
@pytest.mark.parametrize(("check", "workers"), [*QUICK, *SLOW], ids=lambda v: getattr(v, "__name__", v))
def test_over_devices(check, workers):
    assert jm.fork(workers) == workers
    check()


# ---------------------------------------------------------------- rows


@hypothesis.given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 20))
def test_slices_partition_the_rows_of_each_worker_and_have_at_most_two_lengths(n, workers, slices):
    edges = shard_bounds(n, workers)
    shares = [b - a for a, b in itertools.pairwise(edges)]
    assert max(shares) - min(shares) <= 1
    every = [worker_pieces(n, workers, rank, slices) for rank in range(workers)]
    assert [row for pieces in every for a, b in pieces for row in range(a, b)] == list(range(n))
    assert [sum(b - a for a, b in pieces) for pieces in every] == shares
    assert all(len(pieces) <= slices for pieces in every)
    assert len({b - a for pieces in every for a, b in pieces}) <= 2
    assert worker_pieces(n, workers, 0, 10**12) == worker_pieces(n, workers, 0, n)  # no more pieces than rows


@hypothesis.given(
    st.integers(1, 50), st.one_of(st.slices(50), st.lists(st.integers(-50, 49)), st.integers(0, 50)), st.data()
)
def test_chosen_rows_are_numpys(length, batch, data):
    x = np.arange(length)
    if isinstance(batch, list):
        batch = [i for i in batch if -length <= i < length]
    elif isinstance(batch, int):
        batch = min(batch, length)
    expected = x[slice(batch) if isinstance(batch, int) else np.asarray(batch, int) if batch == [] else batch]
    rows = select_rows(batch, length)
    begin = data.draw(st.integers(0, len(expected)))
    end = data.draw(st.integers(begin, len(expected)))
    assert take_rows(x, rows).tolist() == expected.tolist()
    assert take_rows(x, rows[begin:end]).tolist() == expected[begin:end].tolist()


# ---------------------------------------------------------------- fork and close


def test_use_after_close_is_refused():
    jm.fork(2)
    v, f, x = jm.variable(np.float32(1)), sum_function(), np.ones(4, np.float32)
    f(x)
    jm.close()
    for call in (lambda: f(x), lambda: v.get(0), lambda: v.value, lambda: v.all_reduce()):
        with pytest.raises(jaxmpi.UsageError, match="closed"):
            call()
    jm.fork(3)
    for late in (jm.function(lambda v: v, v, jm.local), jm.function(lambda: np.float32(2), (), (), v)):
        with pytest.raises(jaxmpi.UsageError, match="workers that were closed"):
            late()
    assert float(sum_function()(x)) == 4
    jm.close()
    jm.close()


def test_fork_refuses():
    numbers: list[Any] = [0, 2.5, 9]
    for n in numbers:
        with pytest.raises(jaxmpi.UsageError, match=f"fork: got {n} workers"):
            jm.fork(n, kind="devices")
    with pytest.raises(jaxmpi.UsageError, match="kind: got 'threads'"):
        jm.fork(3, kind="threads")
    jm.fork(2)
    jm.variable(np.float32(1))
    with pytest.raises(jaxmpi.UsageError, match="2 workers already"):
        jm.fork(3)


def test_a_call_inside_of_a_call_is_refused():
    jm.fork(2)
    inner, x = sum_function(), np.ones(4, np.float32)
    like = jax.ShapeDtypeStruct((), np.float32)
    outer = jm.function(lambda x: jax.pure_callback(lambda v: np.float32(inner(x)), like, x.sum()), jm.scatter, jm.sum)
    with pytest.raises(Exception, match="called while another call is under way"):
        outer(x)
    assert float(inner(x)) == 4


class FailingTransport:
    """Rank 0 of three, whose messages to one rank fail."""

    rank, size = 0, 3

    def __init__(self):
        self.messages = []

    def send(self, rank, message):
        if rank == 2:
            raise ValueError(f"cannot send to worker {rank}")
        _, inputs, *_ = decode_message(message)
        self.messages.append((rank, [array.tolist() for array in decode_message(inputs)]))


def test_no_command_follows_one_that_not_all_workers_received():
    transport = FailingTransport()
    group = RankGroup(cast(Any, transport), cast(Any, SoloComm()), is_serial=True)
    with pytest.raises(ValueError, match="cannot send to worker 2"):
        perform(group, "put", lambda: Command("put", "put", {}, lambda rank: [np.full(2, rank)]))
    assert transport.messages == [(1, [[1, 1]])]
    with pytest.raises(jaxmpi.UsageError, match="no longer in step: cannot send to worker 2"):
        group.check_usable()


# ---------------------------------------------------------------- copies


def test_an_unchanged_broadcast_argument_moves_no_bytes(monkeypatch):
    jm.fork(2)
    moved = []
    for worker in current_group().workers:
        put = worker.put
        monkeypatch.setattr(worker, "put", lambda array, put=put: (moved.append(np.size(array)), put(array))[1])
    f = jm.function(lambda x, p, q: (x @ p).sum() + q.sum(), (jm.scatter, jm.broadcast, jm.broadcast), jm.sum)
    x, p, q = np.ones((2, 50), np.float32), np.ones((50, 50), np.float32), jnp.ones(700)
    f(x, p, q)
    assert moved.count(2500) == moved.count(700) == 2
    moved.clear()
    f(x, p, q)
    assert not {2500, 700} & set(moved)


def test_results_do_not_alias_what_the_caller_may_overwrite():
    jm.fork(1)
    x = np.zeros((1 << 12, 16), np.float32)
    variable = jm.variable(np.float32(0))
    rows, local = jm.function(lambda x: (x, x, x), jm.scatter, (jm.gather, jm.local), ((variable, jm.mean),))(x)
    x[:] = 1
    for got in (np.asarray(rows), local.get(0), variable.get(0)):
        assert not got.any()


# ---------------------------------------------------------------- optimizers and reductions


def quadratic(p, x):
    return jnp.mean((x - p) ** 2)


@pytest.mark.e2e
@jax.numpy_dtype_promotion("standard")  # Optax divides by whole numbers
def test_optimizers_that_want_the_value_get_it_and_line_searches_are_refused():
    jm.fork(2)
    x = np.arange(4, dtype=np.float32)
    tx = optax.chain(optax.sgd(0.25), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0))
    lbfgs, params = optax.lbfgs(0.1, linesearch=None), jnp.float32(10)
    params_alone: Any
    for opt in (tx, lbfgs, optax.polyak_sgd(1.0)):
        step, params_alone, state = jm.optimizer(quadratic, params, opt, (jm.scatter,)), params, opt.init(params)
        for _ in range(4):
            value, grad = jax.value_and_grad(quadratic)(params_alone, x)
            extra = {"value": value, "grad": grad} if opt is not lbfgs else {}
            updates, state = opt.update(grad, state, params_alone, **extra)
            params_alone = optax.apply_updates(params_alone, updates)
            assert abs(float(step(x)) - float(value)) <= 1e-5 * float(value)
        assert abs(float(step.params.get(1)) - float(params_alone)) <= 1e-4 * abs(float(params_alone))
    with pytest.raises(TypeError, match="value_fn"):
        jm.optimizer(quadratic, params, optax.lbfgs(), (jm.scatter,))(x)


# ---------------------------------------------------------------- profiles


def test_a_profile_is_a_table():
    jm.fork(2)
    x, v = np.arange(4, dtype=np.float32), jm.variable(np.float32(1))
    f, g = sum_function(), jm.function(lambda x: x.max(), jm.scatter, jm.max)
    with jm.profile() as first:
        f(x)
    with jm.profile() as profile:
        f(x)
        g(x)
        with pytest.raises(jaxmpi.UsageError, match="slices: got 0"):
            f(x, slices=0)
        v.get(0)
    rows = profile.rows
    calls = [(row["function"], row["calls"]) for row in rows]
    assert calls == [("<lambda> #1", 2), ("<lambda> #2", 1), ("variable.get", 1)]
    assert first.rows[0]["compile_s"] > rows[0]["compile_s"] == 0
    assert str(profile).splitlines()[-1].split()[:2] == ["all", "4"]


# ---------------------------------------------------------------- shared arrays


def test_shared_reads_writes_and_calculates_as_numpy():
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = same = jm.shared(plain)
    assert (x.shape, x.dtype, x.ndim, len(x), x.nbytes) == ((2, 3), np.float32, 2, 2, 24)
    for got, expected in ((x / 2, plain / 2), (2 - x, 2 - plain), (x > 1, plain > 1), (np.add(x, 1), plain + 1)):
        assert type(got) is np.ndarray
        assert got.tolist() == expected.tolist()
    assert (x.mean(), x.sum(0).tolist(), x.T.shape, [row.sum() for row in x]) == (2.5, [3, 5, 7], (3, 2), [3, 12])
    assert np.asarray(x).base is not None  # no copy
    x *= 2
    np.add(x, 1, out=x)
    assert x is same
    assert x[:].tolist() == (2 * plain + 1).tolist()
    x[1, :2] = 9
    x[0] = np.array([1, 2, 3], np.float16)
    x.reshape((3, 2))
    assert x[:].tolist() == [[1, 2], [3, 9], [9, 11]]
    with pytest.raises(AttributeError, match="no attribute 'average'"):
        x.average()
    x.free()
    x.free()
    with pytest.raises(jaxmpi.UsageError, match="has been freed"):
        x[0]


def test_shared_grows_and_keeps_its_rows():
    x = jm.shared(np.ones((10, 4), np.float32))
    view = x.array
    for length in (20, 100):
        x.resize(length)
        assert len(x) == length
        assert (x[:10] == 1).all()
    view[0] = 5  # an older view is the same memory
    assert x[0, 0] == 5
    x.resize(0)
    assert len(x) == 0


MASKED = np.ma.masked_greater(np.arange(4, dtype=np.float32), 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jm.shared(np.array([object()])), "array of object"),
        (lambda: jm.shared(np.zeros(4, np.float32)).__setitem__(slice(None), np.zeros(4)), "may lose digits"),
        (lambda: jm.shared(np.zeros(4, np.float32)).__setitem__(slice(None), MASKED), "masked array"),
        (lambda: jm.shared(np.zeros(3)).resize(2 * 10**12), "bytes of shared memory"),
        (lambda: jm.shared(np.zeros(3), name="../etc"), "name: got"),
        (lambda: jm.shared(name="there-is-none"), "no array named"),
    ],
)
def test_shared_refuses(make, message):
    with pytest.raises(jaxmpi.UsageError, match=message):
        make()


def test_a_dead_makers_name_is_free_and_a_live_ones_stays():
    name = f"test-dead-{os.getpid()}"
    path = Path(shared_array._array_path(name))
    path.write_bytes(shared_array._header_page("float32", [1]) + bytes(4))  # nobody holds its lock
    x = jm.shared(function_checks.f32([5]), name=name)
    shared_array._unlink_if_orphaned(x.path)
    assert jm.shared(name=name)[0] == 5
    with pytest.raises(jaxmpi.UsageError, match="is taken"):
        jm.shared(function_checks.f32([6]), name=name)
    x.free()
    assert not path.exists()


# ---------------------------------------------------------------- numbers that JAX would change without a word


REINTERPRETED = [MASKED, np.ones(4, ">f4"), np.ones(4, np.longdouble), np.zeros(4, "V8")]


@pytest.mark.parametrize("array", REINTERPRETED, ids=["masked", "big-endian", "longdouble", "void"])
def test_arrays_that_jax_would_reinterpret_are_refused_by_name(array):
    jm.fork(2)
    f = jm.function(lambda x, p: x["a"].sum() + p.sum(), (jm.scatter, jm.broadcast), jm.sum)
    variable = jm.variable({"a": np.ones(4, np.float32)})
    good = np.ones(4, np.float32)
    for call, label in (
        (lambda: f({"a": array}, good, batch=[0, 1]), "argument 0 leaf 'a'"),
        (lambda: f({"a": good}, array), "argument 1"),
        (lambda: jm.variable({"a": array}), "variable: leaf 'a'"),
        (lambda: variable.scatter({"a": array}), "scatter: leaf 'a'"),
        (lambda: jm.shared(array), "shared"),
        (lambda: jm.shared(lambda: array), "shared"),
    ):
        with pytest.raises(jaxmpi.UsageError, match=f"{label}: got"):
            call()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("number", [2**40, np.uint64(2**64 - 1)])
def test_arrays_that_jax_would_truncate_are_refused_without_64_bits(number, is_shared):
    """The rows that a call takes from scattered arrays count."""
    jm.fork(2)
    f = jm.function(lambda x, p: (x["a"], p), (jm.scatter, jm.broadcast), (jm.gather, jm.max))
    v, good = jm.variable({"a": np.zeros(2, np.int64)}), np.arange(4)
    bad = np.array([1, 2, 3, number], np.asarray(number).dtype)
    rows = jm.shared(bad) if is_shared else bad
    calls = [
        (lambda: f({"a": rows}, good), "argument 0 leaf 'a'"),
        (lambda: f({"a": good}, rows), "argument 1"),
        (lambda: v.scatter({"a": rows}), "scatter: leaf 'a'"),
    ]
    if not is_shared:
        calls += [(lambda: v.set(1, {"a": bad}), "variable: leaf 'a'"), (lambda: jm.variable(bad), "variable: leaf ''")]
    for call, label in calls:
        with pytest.raises(
            (jaxmpi.UsageError, jaxmpi.TrainingError), match=f"{label}: got {number}"
        ):  # of all, or of one
            call()
    assert f({"a": rows}, good, batch=3)[0].tolist() == [1, 2, 3]
    with jax.enable_x64(True):
        jm.close()
        jm.fork(2)
        wide, wide_v = jm.function(lambda x: x, jm.scatter, jm.gather), jm.variable(bad)
        assert np.asarray(wide(rows)).tolist() == bad.tolist() == wide_v.get(1).tolist()
