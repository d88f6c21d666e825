"""Low-rank and top-k: what is sent, what is kept, and that in the end everything arrives."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi.allreduce.api import exchange, exchange_gradients
from jaxmpi.allreduce.compression import largest, transposed_dot
from jaxmpi.comm.axis import AxisComm
from jaxmpi.core.errors import UsageError
from jaxmpi.models.__main__ import tree
from tolerances import U

WORKERS = 3
SHAPES = {"conv": (3, 3, 4, 16), "dense": (40, 24), "bias": (24,), "small": (3, 2), "empty": (0, 5), "scalar": ()}


def axis(workers: int = WORKERS) -> AxisComm:
    return AxisComm("w", workers)


def gradients(seed: int, shapes=SHAPES, workers: int = WORKERS, dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((workers, *shape)).astype(dtype) for name, shape in shapes.items()}


@functools.cache
def over_workers(spelling: str, workers: int = WORKERS, op: str = "mean"):
    """`init` and `update` of exchange_gradients, over trees with a leading axis of workers."""
    tx = exchange_gradients(spelling, op, axis(workers))  # pyright: ignore[reportArgumentType]
    vmap = functools.partial(jax.vmap, axis_name="w", axis_size=workers)
    return jax.jit(vmap(tx.init)), jax.jit(vmap(lambda grads, state: tx.update(grads, state)))


def same_on_all_workers(tree) -> bool:
    return all(row.tobytes() == rows[0].tobytes() for rows in map(np.asarray, jax.tree.leaves(tree)) for row in rows)


# ---------------------------------------------------------------- what arrives


def owed(state, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """f64[w, ...]: what each worker keeps of a leaf; none if the leaf travels whole."""
    error = state.error[name]
    return np.zeros((WORKERS, *shape)) if error is None else np.asarray(error, np.float64).reshape(WORKERS, *shape)


def one_step_off(spelling: str, meant: np.ndarray) -> np.ndarray:
    """The largest |sent + mean error kept - mean of what was meant| of one step, from |g + e| of all workers.

    Both begin with an addition, g + e, and end with a mean over workers: w + 1 roundings of at most mean |m|.
    topk adds the values sent and takes them from m: as many again.
    lowrank: P has entries of at most 1 (columns of length 1). A column of M^T P is at most as long as that of M. So an
    entry of P Q^T is a sum of r products of at most |M[:, l]|. There are two such products of matrices, one of the mean
    Q (w roundings) and one of each worker's. Each has at most 2 r + w + 2 roundings, and is taken from M.
    """
    mean, workers = np.abs(meant).mean(0), len(meant)
    if spelling.startswith("topk"):
        return (2 * workers + 4) * U * mean
    rank, columns = int(spelling.removeprefix("lowrank").partition("/")[0]), meant.reshape(workers, -1, meant.shape[-1])
    length = np.linalg.norm(columns, axis=1).mean(0)  # of each column
    return (workers + 4) * U * mean + 2 * (2 * rank + workers + 2) * U * rank * length


@pytest.mark.parametrize(("spelling", "dtype"), [("lowrank1", np.float32), ("topk5", np.float16)])
def test_one_worker_that_goes_on_applies_what_the_others_and_it_owe(spelling, dtype):
    """As a resume gives it: the mean of what all owe. float16 rounds, and what it rounds off is owed on."""
    init, update = over_workers(spelling)
    state, sent, meant = init(gradients(0)), np.zeros((40, 24)), np.zeros((40, 24))
    for step in range(4):
        grads = gradients(step)
        out, state = update(grads, state)
        sent += np.asarray(out["dense"], np.float64)[0]
        meant += grads["dense"].astype(np.float64).mean(0)
    resumed = jax.tree.map(lambda x: x.mean(0), state)
    alone = exchange_gradients(spelling, comm=axis(1))
    own = jax.tree.map(lambda x: x[0], gradients(9, dtype=dtype))
    out, state = jax.jit(alone.update)(own, resumed)
    assert all(out[name].dtype == own[name].dtype for name in SHAPES)
    left = sent + np.asarray(out["dense"], np.float64) + np.asarray(state.error["dense"], np.float64).reshape(40, 24)
    # Five additions of numbers below 64, of which four are bounded as in the test below.
    assert np.abs(left - meant - own["dense"].astype(np.float64)).max() <= 5 * 64 * (2 * WORKERS + 8) * 2.0**-24
    assert np.abs(np.asarray(state.error["dense"])).max() <= (0 if dtype == np.float32 else 64 * 2.0**-11)
    assert out["scalar"].tobytes() == own["scalar"].tobytes()  # travels whole, and is owed nothing


@pytest.mark.parametrize("spelling", ["lowrank1", "lowrank3/ring32", "topk1/tree", "topk5/asa8"])
def test_what_was_sent_and_what_is_owed_is_what_was_meant(spelling):
    """Over 12 steps. The wire's roundings are owed as well by topk, whose values go over it."""
    init, update = over_workers(spelling)
    shapes = {name: SHAPES[name] for name in ("conv", "dense")}
    state = init(gradients(0, shapes))
    sent, meant, error = ({name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(3))
    for step in range(12):
        grads = gradients(step, shapes)
        before = {name: owed(state, name, shape) for name, shape in shapes.items()}
        mean, state = update(grads, state)
        for name in shapes:
            sent[name] += np.asarray(mean[name][0], np.float64)
            meant[name] += grads[name].astype(np.float64).mean(0)
            error[name] += one_step_off(spelling, np.abs(grads[name]) + np.abs(before[name]))
    for name, shape in shapes.items():
        kept = owed(state, name, shape)
        assert (np.abs(sent[name] + kept.mean(0) - meant[name]) <= error[name]).all()
        assert np.abs(kept).max() > 0.1
        assert np.abs(sent[name] - meant[name]).max() > 0.1


COMBINED = ["lowrank2/color4:8", "topk5/ring16"]


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [*((spelling, jnp.float32) for spelling in COMBINED), ("lowrank2", jnp.bfloat16), ("topk5", jnp.float16)],
)
def test_structure_shapes_dtypes_and_bits_are_the_same_on_all_workers(spelling, dtype):
    init, update = over_workers(spelling)
    grads = gradients(0, dtype=dtype) | {"none": None}
    state = init(grads)
    for _ in range(2):
        mean, after = update(grads, state)
        assert same_on_all_workers(mean)
        like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
        assert like(mean) == like(grads)
        assert like(after) == like(state)
        state = after
    assert not same_on_all_workers(state.error)
    if hasattr(state, "q"):
        assert same_on_all_workers(state.q)


@pytest.mark.parametrize("spelling", ["lowrank2", "topk5"])
def test_nan_of_one_worker_is_nan_on_all(spelling):
    init, update = over_workers(spelling)
    grads = gradients(0)
    odd = [name for name, rows in grads.items() if rows.size]
    for name in odd:
        grads[name].reshape(WORKERS, -1)[-1, 0] = np.nan
    mean, _ = update(grads, init(grads))
    for name in odd:
        assert np.isnan(np.asarray(mean[name]).reshape(WORKERS, -1)[:, 0]).all(), name


# ---------------------------------------------------------------- low rank


def test_a_matrix_of_rank_r_arrives_up_to_rounding():
    """M = (1/w) sum_i M_i = B A with r columns in B; P = M Q + d with |d| <= (m + w + 2) u (mean |M_i|) |Q|.

    The part of M that P misses is at most d (A Q)^-1 A; QR and the products of matrices add a few times n r u |M|.
    """
    rank, (n, m) = 3, SHAPES["dense"]
    rng = np.random.default_rng(0)
    basis, factors = rng.standard_normal((n, rank)), rng.standard_normal((WORKERS, rank, m))
    grads = {"dense": (basis @ factors).astype(np.float32)}
    init, update = over_workers(f"lowrank{rank}")
    state = init(grads)
    mean, _ = update(grads, state)
    exact = grads["dense"].astype(np.float64).mean(0)
    q, a = np.asarray(state.q["dense"][0], np.float64), factors.mean(0)
    d = (m + WORKERS + 2) * U * np.linalg.norm(np.abs(grads["dense"]).mean(0) @ np.abs(q))
    d += U * np.linalg.norm(np.abs(grads["dense"]).mean(0)) * np.linalg.norm(q)  # M_i are B A_i rounded
    error = d * np.linalg.norm(np.linalg.inv(a @ q) @ a) + 8 * n * rank * U * np.linalg.norm(
        np.abs(grads["dense"]).mean(0)
    )
    assert np.linalg.norm(np.asarray(mean["dense"][0]) - exact) <= error
    assert error < 1e-2 * np.linalg.norm(exact)


def test_the_warm_start_finds_the_best_approximation():
    """If a matrix stays as it is, with nothing owed, this is power iteration: each step is closer by (s_3 / s_2)^2."""
    rank, (n, m) = 2, SHAPES["dense"]
    rng = np.random.default_rng(1)
    left, right = (np.linalg.qr(rng.standard_normal((size, size)))[0] for size in (n, m))
    values = np.concatenate([[3.0, 2.0], np.full(m - 2, 1.0)])
    grads = {"dense": np.stack([(left[:, :m] * values @ right).astype(np.float32)] * WORKERS)}
    init, update = over_workers(f"lowrank{rank}")
    state, best, errors = init(grads), math.sqrt(m - 2), []
    for _ in range(12):
        mean, after = update(grads, state)
        state = after._replace(error=state.error)
        errors.append(np.linalg.norm(np.asarray(mean["dense"][0]) - grads["dense"][0]))
    assert errors[0] > 1.1 * best
    assert errors[-1] <= best * (1 + 1e-4)


@pytest.mark.parametrize("n", [1, 512, 1300])
def test_a_product_by_blocks_of_rows_is_the_product(n):
    rng = np.random.default_rng(n)
    m, basis = (rng.standard_normal((n, k)).astype(np.float32) for k in (5, 3))
    error = (n + 1) * U * np.abs(m.T).astype(np.float64) @ np.abs(basis)
    got = np.asarray(transposed_dot(jnp.asarray(m), jnp.asarray(basis)))
    assert (np.abs(got - m.T.astype(np.float64) @ basis) <= error).all()


# ---------------------------------------------------------------- top k


@pytest.mark.parametrize("name", ["conv", "bias"])
def test_the_largest_are_sent_and_added_in_rank_order(name):
    workers = 4  # by which division is exact
    init, update = over_workers("topk5", workers)
    grads = gradients(0, workers=workers)
    mean, state = update(grads, init(grads))
    rows = grads[name].reshape(workers, -1)
    count = math.ceil(0.05 * rows.shape[1])
    sent = np.zeros_like(rows)
    for row, kept in zip(rows, sent, strict=True):
        largest = np.argsort(np.abs(row))[-count:]
        kept[largest] = row[largest]
    expected = functools.reduce(np.add, sent) / np.float32(workers)
    assert np.asarray(mean[name][0]).tobytes() == expected.tobytes()
    np.testing.assert_array_equal(np.asarray(state.error[name]), rows - sent)


@pytest.mark.parametrize(("n", "k"), [(3, 1), (100, 49), (4096, 41)])
def test_the_largest_in_pieces_are_those_of_top_k_equals_and_nan_included(n, k):
    m = np.round(3 * np.random.default_rng(n).standard_normal(n)).astype(np.float32)
    m[n // 2] = np.nan
    np.testing.assert_array_equal(jax.jit(largest, static_argnums=1)(m, k), jax.lax.top_k(np.abs(m), k)[1])


# ---------------------------------------------------------------- bytes


class Counting(AxisComm):
    """Counts the bytes of what is handed to the collectives that asa and topk use."""

    def __init__(self, workers: int) -> None:
        super().__init__("w", workers)
        self.summed = self.gathered = 0

    def alltoall(self, x):
        self.summed += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))
        return super().alltoall(x)

    def allgather(self, x):
        self.gathered += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))
        return super().allgather(x)


ALEXNET = tree("alexnet")


def bytes_of(spelling: str) -> Counting:
    comm = Counting(8)
    tx = exchange_gradients(spelling, comm=comm)
    grads = {name: jax.ShapeDtypeStruct((8, *shape), jnp.float32) for name, shape in ALEXNET.items()}
    jax.eval_shape(jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="w"), grads)
    return comm


def test_low_rank_sends_two_thin_factors():
    floats = sum(4 * (math.prod(s[:-1]) + s[-1]) if len(s) > 1 else s[0] for s in ALEXNET.values())
    sent = bytes_of("lowrank4").summed
    assert 4 * floats <= sent <= 4 * (floats + 7 * 40)  # at most 7 floats fill up each bucket, of which there are few
    assert sent <= 0.01 * bytes_of("asa32").summed


def test_top_k_sends_eight_bytes_an_entry():
    counts = [math.ceil(0.01 * math.prod(shape)) for shape in ALEXNET.values()]
    entries, blocks = sum(counts), sum(math.ceil(count / 256) for count in counts)  # a block has one leaf's
    assert bytes_of("topk1").gathered == 8 * entries
    assert bytes_of("topk1").summed == 0
    assert bytes_of("topk1/asa16").gathered == 4 * entries + (2 * 256 + 4) * blocks  # with scales


# ---------------------------------------------------------------- learning


def least_squares(spelling: str, steps: int, forget: bool = False) -> list[float]:
    """Excess loss of SGD on |X_i W - Y_i|^2, as a part of the first; forget: nothing is owed from step to step."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((WORKERS, 64, 12)).astype(np.float32)
    y = (x @ rng.standard_normal((12, 8)) + rng.standard_normal((WORKERS, 64, 8))).astype(np.float32)
    best = np.linalg.lstsq(x.reshape(-1, 12), y.reshape(-1, 8))[0]
    tx, rates = exchange_gradients(spelling, comm=axis()), jnp.asarray(0.1 / (1 + np.arange(steps) / 20), jnp.float32)

    def loss(w, x, y):
        return jnp.mean(jnp.sum((x @ w - y) ** 2, -1))

    def step(carry, rate):
        w, state = carry
        mean, after = tx.update(jax.grad(loss)(w, x_i, y_i), state)
        return (w - rate * mean, state if forget else after), w

    def run(x_here, y_here):
        nonlocal x_i, y_i
        x_i, y_i = x_here, y_here
        w = jnp.zeros((12, 8))
        return jax.lax.scan(step, (w, tx.init(w)), rates)[1]

    x_i = y_i = None
    path = np.asarray(jax.jit(jax.vmap(run, axis_name="w"))(x, y))[0].astype(np.float64)
    losses = [np.sum((x.reshape(-1, 12) @ (w - best)) ** 2) for w in path]
    return [value / losses[0] for value in losses]


@pytest.mark.parametrize("spelling", ["lowrank1", "topk5"])
def test_sgd_on_least_squares_comes_to_the_same_point(spelling):
    assert least_squares(spelling, 300)[-1] < 1e-4
    assert least_squares(spelling, 300, forget=True)[-1] > 1e-2  # what is not sent must be owed


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("lowrank0", "got compressor 'lowrank0'; expected a rank from 1 on, as in lowrank4"),
        ("lowrank2.5", "expected a rank"),
        ("topk50", "expected a percentage"),
        ("lowrnk4/ring32", r"unknown compressor 'lowrnk4'; did you mean 'lowrank<r>'\? there are: lowrank<r>, topk<p>"),
        ("topk1/rings", r"unknown strategy 'rings'; did you mean 'ring'\?"),
        ("topk1/auto:16", "got 'topk1/auto:16'; after the / name a strategy, as in topk1/ring16"),
        ("topk1/none", "got 'topk1/none'; strategy none exchanges nothing"),
    ],
)
def test_unknown_spellings_name_what_exists(spelling, message):
    with pytest.raises(UsageError, match=message):
        exchange_gradients(spelling)


@pytest.mark.parametrize("spelling", ["lowrank4", "topk1/ring32"])
def test_exchange_refuses_compressors_and_names_what_takes_them(spelling):
    with pytest.raises(UsageError, match=rf"use exchange_gradients\('{spelling}'\), which holds it in its state"):
        exchange(jnp.ones(3), spelling)
