"""The collective operations against NumPy. Every rank knows what every rank holds."""

import gc
import time
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi import collectives as mpi
from jaxmpi.allreduce import host_engine
from jaxmpi.collectives import messages, nonblocking
from jaxmpi.comm.call_comparison import SLOT_BYTES
from jaxmpi.comm.diagnosis import watch
from jaxmpi.comm.mpi import open_comms
from jaxmpi.runtime import host_callbacks

COMM: Any = jaxmpi.world()
SIZE, RANK = int(COMM.size), int(COMM.rank)
NUMPY = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
NUMPY |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
EAGER: Any = lambda function: function  # noqa: E731
FLOATS = ("float32", "float16", "bfloat16")
ORDERED = ("bool", "int8", "uint16", "int32", *FLOATS)
# All reductions look dtypes up alike, which are a kind of one of these.
WITH_ALL_REDUCTIONS = ("int32", "bfloat16", "complex64")
OF_64_BITS = ("int64", "uint64", "float64", "complex128")


def in_jit(*dtypes: str) -> list[tuple[str, Any]]:
    return [(dtype, jax.jit) for dtype in dtypes]


def arrays_of_all_ranks(dtype: str, shape: tuple[int, ...] = (SIZE, 3), seed: int = 0) -> list[jax.Array]:
    """Arrays of all ranks: integers, of which all sums are exact; so are products where they are small."""
    drawn = np.random.default_rng(seed).integers(0, 3, (SIZE, *shape)) * (2**40 + 1 if dtype in OF_64_BITS else 1)
    return [jnp.asarray(x % 2 == 0 if dtype == "bool" else x, dtype) for x in drawn]


def assert_same(got: Any, expected: Any) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert np.array_equal(np.asarray(got), np.asarray(expected))


def reduce_by_numpy(rows: list[jax.Array], op: str) -> np.ndarray:
    wide = [np.asarray(x).astype(np.float64 if x.dtype.name in FLOATS else x.dtype) for x in rows]
    if op == "sum" and rows[0].dtype == bool:
        return np.sum(wide, 0).astype(np.int32)
    total = wide[0]
    for row in wide[1:]:
        total = NUMPY[op](total, row)
    return total.astype(rows[0].dtype)


@pytest.mark.parametrize(("dtype", "way"), [("float16", EAGER), *in_jit(*ORDERED, "complex64", *OF_64_BITS)])
def test_reductions_of_every_dtype_equal_numpys(dtype, way):
    kind, is_long = jnp.dtype(dtype).kind, dtype in OF_64_BITS
    ops = ["sum"] + ["prod"] * (not is_long or kind in "iu")  # products of long floats round
    ops += ["max", "min"] * (kind != "c") + ["and", "or", "xor"] * (kind in "biu")
    with jax.enable_x64(is_long):
        check_reductions(ops, arrays_of_all_ranks(dtype), way, only_two=dtype not in WITH_ALL_REDUCTIONS)


def check_reductions(ops: list[str], rows: list[jax.Array], way: Any, *, only_two: bool) -> None:
    def every(x: jax.Array) -> dict[str, list]:
        two = {op: [mpi.allreduce(x, op), mpi.exscan(x, op)] for op in ops}
        if only_two:
            return two
        at_end = SIZE - 1
        more = {op: [mpi.reduce(x, op, at_end), mpi.reduce_scatter(x, op), mpi.scan(x, op)] for op in ops}
        return {op: [*two[op], *more[op]] for op in ops}

    for op, (everywhere, before, *more) in way(every)(rows[RANK]).items():
        total = reduce_by_numpy(rows, op)
        assert_same(everywhere, total)
        if RANK:
            assert_same(before, reduce_by_numpy(rows[:RANK], op))
        else:
            assert_same(jnp.asarray(NUMPY[op](before, rows[0])).astype(rows[0].dtype), rows[0])  # it changes nothing
        if more:
            at_root, part, through = more
            assert_same(at_root, total if RANK == SIZE - 1 else rows[RANK].astype(total.dtype))
            assert_same(part, total[RANK])
            assert_same(through, reduce_by_numpy(rows[: RANK + 1], op))


@pytest.mark.parametrize(
    ("dtype", "way"), [("bool", EAGER), *in_jit("bool", "bfloat16", "float8_e4m3fn", "complex128")]
)
def test_collectives_move_every_dtype_unchanged(dtype, way):
    with jax.enable_x64(dtype in OF_64_BITS):
        check_moves(dtype, way)


def check_moves(dtype: str, way: Any) -> None:
    rows = arrays_of_all_ranks(dtype)
    ragged = [arrays_of_all_ranks(dtype, (rank + 1, 2), seed=rank)[0] for rank in range(SIZE)]
    counts = [[(i + j) % 3 for j in range(SIZE)] for i in range(SIZE)]
    parcels = [arrays_of_all_ranks(dtype, (sum(counts[i]), 2), seed=9)[i] for i in range(SIZE)]

    def every(x: jax.Array, some: jax.Array, parcel: jax.Array) -> list:
        return [
            mpi.bcast(x, SIZE - 1),
            mpi.allgather(x),
            mpi.gather(x, 0),
            mpi.scatter(x if RANK == 0 else x[0], 0),
            mpi.alltoall(x),
            mpi.allgatherv(some),
            mpi.alltoallv(parcel, counts[RANK]),
            mpi.sendrecv(x, x, (RANK - 1) % SIZE, (RANK + 1) % SIZE),
        ]

    got = way(every)(rows[RANK], ragged[RANK], parcels[RANK])
    starts = [np.cumsum([0, *counts[i]]) for i in range(SIZE)]
    came = [np.asarray(parcels[i])[starts[i][RANK] : starts[i][RANK + 1]] for i in range(SIZE)]
    expected = [
        rows[-1],
        np.stack(rows),
        np.stack(rows) if RANK == 0 else rows[RANK],
        rows[0][RANK],
        np.stack([rows[i][RANK] for i in range(SIZE)]),
        np.concatenate(ragged),
        np.concatenate(came),
        rows[RANK - 1],
    ]
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


# ---------------------------------------------------------------- through shared memory

# Floats around those at which another way is taken: behind the number of the call, in a slot, by parts, in chunks.
SLOT_FLOATS = SLOT_BYTES // 4
LENGTHS = (0, 142, 143, 2049, SLOT_FLOATS + 1, 3 * SLOT_FLOATS - 5)


@pytest.mark.parametrize("length", LENGTHS)
def test_collectives_move_every_length_unchanged(length):
    rows = [np.random.default_rng(rank).integers(-99, 99, (SIZE, length)).astype(np.float32) for rank in range(SIZE)]
    firsts, at_end = np.stack([x[0] for x in rows]), SIZE - 1

    @jax.jit
    def every(x: jax.Array) -> list:
        return [
            *(mpi.allreduce(x[0]), mpi.reduce(x[0], "max", at_end), mpi.scan(x[0], "min"), mpi.bcast(x[0], at_end)),
            *(mpi.allgather(x[0]), mpi.gather(x[0], at_end), mpi.alltoall(x)),
            mpi.scatter(x if RANK == at_end else x[0], at_end),
        ]

    mine, is_root = firsts[RANK], RANK == at_end
    expected = [
        *(firsts.sum(0), firsts.max(0) if is_root else mine, firsts[: RANK + 1].min(0), firsts[at_end]),
        *(firsts, firsts if is_root else mine, np.stack([x[RANK] for x in rows]), rows[at_end][RANK]),
    ]
    for got, numpys in zip(every(jnp.asarray(rows[RANK])), expected, strict=True):
        assert_same(got, numpys)


@pytest.mark.skipif(SIZE == 1, reason="nothing is sent")
def test_consecutive_calls_do_not_read_values_of_previous_ones():
    """Places are written again two calls later, while a rank may be slow."""
    long = jnp.arange(2.0 * SLOT_FLOATS)

    def body(i: int, carry: tuple) -> tuple:
        short, long = carry
        return mpi.bcast(short + 1, SIZE - 1), mpi.allreduce(mpi.allreduce(short, "max")[0] + long, "min") + 1

    short, long_after = jax.jit(lambda carry: jax.lax.fori_loop(0, 50, body, carry))((jnp.zeros(3), long))
    assert_same(short, np.full(3, 50, np.float32))
    assert_same(long_after, np.arange(2 * SLOT_FLOATS, dtype=np.float32) + sum(range(50)) + 50)


@pytest.mark.parametrize("length", [7, 4000])
def test_sums_are_added_in_rank_order(length):
    rows = [np.random.default_rng(rank).normal(size=length).astype(np.float32) for rank in range(SIZE)]
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    assert_same(jax.jit(mpi.allreduce)(jnp.asarray(rows[RANK])), total)


# ---------------------------------------------------------------- many communicators


def use_communicator(comm) -> None:
    """Use a communicator in every way that makes something for it."""
    x = jnp.full(3, float(comm.rank))
    total = comm.size * (comm.size - 1) / 2
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

    @jax.jit
    def program(x: jax.Array) -> list[jax.Array]:
        started = mpi.wait(mpi.start(mpi.allreduce, x, comm=comm))
        summed = mpi.allreduce(x, comm=comm), jaxmpi.exchange(x, "shm", "sum", comm=comm)
        return [started, *summed, mpi.sendrecv(x, x, left, right, comm=comm)]

    *sums, came = program(x)
    sums += [mpi.allreduce(x, comm=comm), jaxmpi.exchange(x, "asa32", "sum", comm=comm)]
    assert [each.tolist() for each in sums] == [[total] * 3] * 5
    assert came.tolist() == [left] * 3
    tx = jaxmpi.sharded(optax.sgd(1.0), "element", comm=comm)
    assert np.asarray(tx.update(x, tx.init(x), x)[0]).tolist() == [-total / comm.size] * 3


@pytest.mark.skipif(SIZE == 1, reason="nothing is sent")
def test_more_communicators_than_mpi4py_has_error_handlers_can_be_used_in_jit():
    parts = [COMM.split(0) for _ in range(34)]
    sums = jax.jit(lambda x: [mpi.allreduce(x, comm=part) for part in parts])(jnp.ones(2))
    assert [each.tolist() for each in sums] == [[SIZE] * 2] * 34
    for part in parts:
        part.free()


@pytest.mark.skipif(SIZE == 1, reason="nothing is sent")
def test_a_freed_communicator_releases_everything_and_is_refused():
    def counts() -> tuple[int, ...]:
        programs = len(messages._opened), len(nonblocking._started)
        return len(open_comms), len(COMM.processes.comms), len(watch()._registries), len(mappings()), *programs

    use_communicator(COMM.split(0))
    before = []
    for turn in range(4):
        part = COMM.split(RANK % 2, -RANK) if turn % 2 else COMM.split(0)
        use_communicator(part) if part.size > 1 else None
        part.free()
        part.free()
        before.append(counts())
        with pytest.raises(jaxmpi.UsageError, match="freed"):
            jaxmpi.exchange(jnp.ones(2), comm=part)
        with pytest.raises(jaxmpi.UsageError, match="freed"):
            mpi.allreduce(jnp.ones(2), comm=part)
        with pytest.raises(jaxmpi.UsageError, match="freed"):
            part.split(0)
    assert len(set(before[2:])) == 1, before
    with pytest.raises(jaxmpi.UsageError, match="world"):
        COMM.free()


@pytest.mark.skipif(SIZE == 1, reason="nothing is sent")
def test_nothing_keeps_a_freed_communicator():
    """Not even a cache of programs, which would have its compiled ones for good."""
    x, freed = jnp.ones(3), []
    for _ in range(3):
        part = COMM.split(0)
        tx = jaxmpi.sharded(optax.sgd(1.0), "element", comm=part)
        jaxmpi.exchange(x, "asa16", comm=part)
        tx.update(x, tx.init(x), x)
        part.free()
        freed.append(weakref.ref(part))
        del part, tx
    assert not any(engine.comm.is_freed for engine in host_engine._engines.values())
    deadline_s = time.monotonic() + 20
    while any(each() for each in freed) and time.monotonic() < deadline_s:  # the monitor may look at one now
        gc.collect()
        time.sleep(0.1)
    assert [each() for each in freed] == [None] * 3


@pytest.mark.skipif(SIZE == 1, reason="nothing is sent")
def test_freeing_a_communicator_of_mpi4py_frees_what_was_made_for_it():
    from mpi4py import MPI

    kept = []
    for turn in range(8):
        theirs = MPI.COMM_WORLD.Split(0, -RANK) if turn % 2 else MPI.COMM_WORLD.Dup()
        assert jax.jit(lambda x, comm=theirs: mpi.allreduce(x, comm=comm))(jnp.ones(2)).tolist() == [SIZE] * 2
        theirs.Free()
        with pytest.raises(jaxmpi.UsageError, match="has no part, or that was freed"):
            mpi.allreduce(jnp.ones(2), comm=theirs)
        kept.append((len(open_comms), len(COMM.processes.comms)))
    assert len(set(kept[2:])) == 1, kept


def mappings() -> list[str]:
    """This process's shared mappings."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "jaxmpi-" in line or "memfd:jaxmpi" in line]


# ---------------------------------------------------------------- trees


def test_trees_keep_their_structure_and_wider_sums_their_dtype():
    tree = {
        "a": jnp.full((2, 3), RANK, jnp.float16),
        "b": [jnp.int32(RANK), 1.5],
        "c": jnp.full(3, 0.5, "float8_e4m3fn"),
    }
    with pytest.raises(jaxmpi.UsageError, match=r"leaf 'c' is float8_e4m3fn, too short for a sum.*dtype=jnp.float32"):
        mpi.allreduce(tree)
    hits = {"hits": jnp.array([True, RANK == 0]), "n": 3}
    means = jax.jit(lambda tree, hits: (mpi.allreduce(tree, "mean", dtype=jnp.float32), mpi.allreduce(hits, "mean")))
    mean, counts = means(tree, hits)
    assert jax.tree.structure(mean) == jax.tree.structure(tree)
    assert {leaf.dtype for leaf in jax.tree.leaves(mean)} == {jnp.dtype("float32")}
    assert_same(mean["a"], np.full((2, 3), (SIZE - 1) / 2, np.float32))
    assert_same(mean["c"], np.full(3, 0.5, np.float32))
    assert [float(x) for x in (*counts["hits"], counts["n"])] == [1.0, pytest.approx(1 / SIZE), 3.0]


def test_the_first_rank_of_an_exscan_gets_the_identity_element_of_the_dtype():
    limits = {"int8": (-128, 127), "float8_e4m3fn": (-448, 448), "bool": (False, True)}
    all_bits = {"int8": -1, "uint8": 255, "bool": True}

    @jax.jit
    def program() -> tuple[list, list]:
        extremes = [[mpi.exscan(jnp.ones((), dtype), op) for op in ("max", "min")] for dtype in limits]
        return extremes, [mpi.exscan(jnp.zeros((), dtype), "and") for dtype in all_bits]

    extremes, conjunctions = program()
    for got, expected in zip(extremes, limits.values(), strict=True):
        assert [float(x) for x in got] == ([1, 1] if RANK else [*expected])
    assert [int(x) for x in conjunctions] == [0 if RANK else bits for bits in all_bits.values()]


def test_means_of_integers_do_not_wrap():
    """Also where the sum needs more than the leaf's bits, or more than float32 holds, and in `exchange`."""
    x = {"uint8": jnp.uint8([200, 201 + RANK]), "int32": jnp.int32([2**31 - 1, -(2**31), 2**30 + 1, -RANK])}
    x["uint32"] = jnp.uint32([2**32 - 1, 2**24 * (RANK + 1)])
    middle = (SIZE - 1) / 2
    expected = {"uint8": [200, 201 + middle], "int32": [2.0**31 - 1, -(2.0**31), 2.0**30 + 1, -middle]}
    expected["uint32"] = [2.0**32 - 1, 2.0**24 * (1 + middle)]
    for call in (mpi.allreduce, jax.jit(mpi.allreduce, static_argnums=1)):
        for dtype, got in call(x, "mean").items():
            assert got.dtype == jnp.float32
            assert np.allclose(got, np.asarray(expected[dtype], np.float32), rtol=2.0**-22, atol=0)
    assert mpi.reduce(x["int32"], "mean")[-1] == (-RANK if RANK else -middle)
    wholes = [jnp.uint8(200), jnp.uint16(65535), jnp.int32([2**24 + 1, -(2**24) - 1])]
    exact = jax.jit(lambda wholes: [mpi.allreduce(x, "mean", dtype=x.dtype) for x in wholes])
    jax.tree.map(assert_same, exact(wholes), wholes)  # a mean in float32 could not say these
    assert jaxmpi.exchange({"seen": np.uint8(200), "n": 2**31 - 1}) == {"seen": 200, "n": np.float32(2**31 - 1)}


def test_errors_of_a_subcommunicator_name_world_ranks():
    part = COMM.split(0 if RANK else None)
    if SIZE < 3 or not part:
        return
    for call in (lambda f: f, jax.jit):  # outside jit, and while tracing
        with pytest.raises(jaxmpi.UsageError, match=r"rank 2: shape.*: got \[2\], expected \[1\] \(rank 1\)"):
            call(lambda x: mpi.allreduce(x, comm=part))(jnp.zeros(RANK))
        with pytest.raises(jaxmpi.UsageError, match=r"rank 1 to 'allreduce.*, rank 2 to 'allgather"):
            call(lambda x: (mpi.allreduce if RANK == 1 else mpi.allgather)(x, comm=part))(jnp.zeros(1))


@pytest.mark.skipif(SIZE == 1, reason="one rank is alone")
def test_ranks_compare_arguments_before_they_are_cast_and_packed():
    a, b = jnp.ones((2, 3)), jnp.ones(3)
    mine = min(RANK, 1)
    pairs: list[tuple[Any, str]] = [  # as the even ranks give it, as the others do
        (
            ({"a": a, "b": b}, {"a": b, "b": a}),
            r"rank 1: leaf.a: got float32\[3\], expected float32\[2, 3\] \(rank 0\)",
        ),
        (({"a": b}, {"b": b}), r"rank 1: leaf.a: got nothing, expected float32\[3\]"),
        ((b.astype(jnp.bfloat16), b), r"rank 1: dtypes: got \['float32'\], expected \['bfloat16', 'sent as float32'\]"),
    ]
    for ranks_own, message in pairs:
        for way in (EAGER, jax.jit):
            with pytest.raises(jaxmpi.UsageError, match=message):
                way(mpi.allreduce)(ranks_own[mine])


def test_subcommunicators_work_like_the_world():
    part = COMM.split(np.int64(RANK % 2), key=-RANK)
    mine = [rank for rank in reversed(range(SIZE)) if rank % 2 == RANK % 2]
    assert part
    assert (part.size, part.rank) == (len(mine), mine.index(RANK))
    x = jnp.float32(RANK)
    for call in (lambda f: f, jax.jit):
        assert float(call(lambda x: mpi.allreduce(x, comm=part))(x)) == sum(mine)
        assert np.array_equal(call(lambda x: mpi.allgather(x, comm=part))(x), mine)
        mean = call(lambda x: jaxmpi.exchange(x, "ring32", comm=part))(x[None])
        assert float(mean[0]) == pytest.approx(sum(mine) / len(mine))
    on_host = COMM.split("host")
    assert on_host
    assert float(mpi.allreduce(x, comm=on_host)) == sum(range(SIZE))


def test_calls_on_a_null_communicator_are_refused():
    nobody: list[Any] = [COMM.split(0 if RANK else None)]
    if SIZE > 1:
        from mpi4py import MPI

        nobody.append(MPI.COMM_WORLD.Split(0 if RANK else MPI.UNDEFINED))
    if RANK:
        return
    assert (bool(nobody[0]), nobody[0].size) == (False, 0)
    x, every = jnp.ones(3), (mpi.allreduce, mpi.bcast, jaxmpi.exchange)
    for call in [lambda comm, f=f: f(x, comm=comm) for f in every] + [lambda comm: mpi.barrier(comm=comm)]:
        for comm in nobody:
            with pytest.raises(jaxmpi.UsageError, match=r"rank 0: got a communicator .* no part.*; expected the call"):
                call(comm)


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
def test_messages_between_two_ranks():
    """Both send before they receive; tags, any source, and statuses; 4 MB."""
    from mpi4py import MPI

    x, other = jnp.arange(1e6, dtype=jnp.float32) + RANK, RANK ^ 1
    status = MPI.Status()

    @jax.jit
    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if other >= SIZE:
            return x, x[:3]
        mpi.send(x[:3].astype(jnp.bfloat16), other, tag=7)
        small = mpi.recv(jax.ShapeDtypeStruct((3,), jnp.bfloat16), tag=7, status=status)
        if RANK % 2:
            mpi.send(x, other)
            return mpi.recv(x, other), small
        return (mpi.recv(x, other), mpi.send(x, other))[0], small

    big, small = step(x)
    if other < SIZE:
        assert np.array_equal(big, np.arange(1e6, dtype=np.float32) + other)
        assert small.tolist() == [other, other + 1, other + 2]
        assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.INT16_T)) == (other, 7, 3)
    before, after = RANK - 1 if RANK else mpi.NOBODY, RANK + 1 if RANK + 1 < SIZE else mpi.NOBODY
    shifted = jax.jit(lambda x: mpi.sendrecv(x, x, before, after, status=status))(x[:3].astype(jnp.int8))
    assert shifted.tolist() == [n + max(RANK - 1, 0) for n in range(3)]
    assert (status.Get_source(), status.Get_count(MPI.BYTE)) == ((before, 3) if RANK else (MPI.PROC_NULL, 0))
    mpi.recv(x, mpi.NOBODY, status=status)
    assert (status.Get_source(), status.Get_tag()) == (MPI.PROC_NULL, MPI.ANY_TAG)
    mpi.barrier()


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
@pytest.mark.parametrize("size", [3, 100_000])
def test_messages_sent_from_c_and_from_python_are_compatible(size, monkeypatch):
    """Odd ranks' go through Python; arrays are in the header's message, or behind it."""
    x, left, right = jnp.arange(float(size)) + RANK, (RANK - 1) % SIZE, (RANK + 1) % SIZE
    if RANK % 2:
        monkeypatch.setenv("JAXMPI_FFI", "python")
    for _ in range(2):
        assert np.array_equal(jax.jit(lambda x: mpi.sendrecv(x, x, left, right))(x), x - RANK + left)
        if (other := RANK ^ 1) < SIZE:
            if RANK % 2 == 0:
                mpi.send(x, other, tag=2)
            assert np.array_equal(mpi.recv(x, tag=2), x - RANK + other)
            if RANK % 2:
                mpi.send(x, other, tag=2)
    mpi.barrier()


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
def test_messages_print_the_lines_of_mpi4jax_while_its_debug_output_is_on(capfd):
    from mpi4jax._src.xla_bridge import set_logging

    left, right = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    set_logging(True)
    try:
        jax.jit(lambda x: mpi.sendrecv(x, x, left, right, sendtag=3))(jnp.ones(5)).block_until_ready()
    finally:
        set_logging(False)
    assert rf"| MPI_Sendrecv <- {left} (tag -1, 5 items) / -> {right} (tag 3, 5 items)" in capfd.readouterr().out


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
def test_messages_and_collectives_without_jit():
    left, right = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    with jax.disable_jit():
        assert mpi.sendrecv(jnp.full(3, float(RANK)), jnp.ones(3), left, right).tolist() == [left] * 3
        assert mpi.allreduce(jnp.ones(3)).tolist() == [SIZE] * 3
    mpi.barrier()


@pytest.mark.skipif(SIZE == 1, reason="MPI is not started")
def test_send_of_mpi4jax_requires_a_destination():
    from mpi4py import MPI

    from jaxmpi.compat import mpi4jax

    x = jnp.ones(3)
    none: tuple[Any, ...] = (None, MPI.ANY_SOURCE, 0.5)
    for dest in none:
        with pytest.raises(jaxmpi.UsageError, match=rf"^send: dest: got {dest}; expected a"):
            mpi4jax.send(x, dest)
        with pytest.raises(jaxmpi.UsageError, match=rf"^sendrecv: dest: got {dest}; expected a"):
            mpi4jax.sendrecv(x, x, MPI.PROC_NULL, dest)
    mpi4jax.send(x, MPI.PROC_NULL)
    assert mpi4jax.sendrecv(x, 2 * x, MPI.PROC_NULL, MPI.PROC_NULL).tolist() == [2, 2, 2]


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
def test_messages_by_mpi4jax_have_statuses_and_every_dtype(monkeypatch):
    """Messages go as where programs have no handlers."""
    from mpi4py import MPI

    status, left, right = MPI.Status(), (RANK - 1) % SIZE, (RANK + 1) % SIZE
    monkeypatch.setattr(messages, "unavailable_reason", lambda: "as without a C compiler")
    try:
        for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
            x = jnp.arange(3).astype(dtype) + RANK
            around = lambda x: mpi.sendrecv(x, x, left, right, sendtag=5, status=status)  # noqa: E731
            assert_same(jax.jit(around)(x), jnp.arange(3).astype(dtype) + left)
            assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)) == (left, 5, x.nbytes)
        status = MPI.Status()
        x = jnp.ones(2, jnp.bfloat16)
        one_way: Any = lambda x: mpi.recv(x, status=status) if RANK else mpi.send(x, 1, tag=6)  # noqa: E731
        if RANK < 2:
            jax.block_until_ready(jax.jit(one_way)(x))
        assert RANK != 1 or (status.Get_source(), status.Get_tag()) == (0, 6)
        jax.effects_barrier()
    finally:
        monkeypatch.undo()


# ---------------------------------------------------------------- transformations

COUNTS = [[(i + j) % 3 for j in range(SIZE)] for i in range(SIZE)]
ROWS: dict[str, int] = {"allgatherv": RANK + 1, "alltoallv": sum(COUNTS[RANK])}
LINEAR: dict[str, Any] = {
    "reduce": lambda x: mpi.reduce(x, "sum", SIZE - 1),
    "mean of 16 bits": lambda x: mpi.reduce(x.astype(jnp.bfloat16), "mean").astype(jnp.float32),
    "bcast": lambda x: mpi.bcast(x, SIZE - 1),
    "allgather": mpi.allgather,
    "gather": mpi.gather,
    "scatter": lambda x: mpi.scatter(x if RANK == 0 else x[0]),
    "alltoall": mpi.alltoall,
    "allgatherv": lambda x: mpi.allgatherv(x, counts=[rank + 1 for rank in range(SIZE)]),
    "alltoallv": lambda x: mpi.alltoallv(x, COUNTS[RANK]),
    "reduce_scatter": mpi.reduce_scatter,
    "scan": mpi.scan,
    "exscan": mpi.exscan,
    "sendrecv": lambda x: mpi.sendrecv(x, x, (RANK - 1) % SIZE, (RANK + 1) % SIZE),
    "sendrecv from nobody": lambda x: mpi.sendrecv(
        x, 2 * x, RANK - 1 if RANK else mpi.NOBODY, RANK + 1 if RANK + 1 < SIZE else mpi.NOBODY
    ),
}
TRANSPOSED = ("bcast", "allgather", "scan", "sendrecv")


def numbers(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Small integers of this rank."""
    return jnp.asarray(np.random.default_rng((seed, RANK)).integers(-4, 5, shape), jnp.float32)


def over_ranks(value: Any) -> float:
    return float(np.sum(np.asarray(mpi.allgather(value), np.float64)))


@pytest.mark.parametrize("name", LINEAR)
def test_derivatives_and_mappings_of_linear_operations(name):
    """<c, A x> = <A' c, x> summed over ranks; the derivative along t is A t; mapped calls are calls of the parts."""
    f, shape = LINEAR[name], (ROWS.get(name, SIZE), 2)

    @jax.jit
    def every(x: jax.Array, t: jax.Array) -> list:
        y, back = jax.vjp(f, x)
        c = jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape) * 3 % 5 + RANK
        [backwards] = back(c)
        transposed = jax.linear_transpose(f, x)(c)[0] if name in TRANSPOSED else backwards
        mapped = jnp.moveaxis(jax.vmap(f, 1, 1)(jnp.stack([x, t], 1)), 1, 0)
        return [y, c, backwards, transposed, *jax.jvp(f, (x,), (t,)), *mapped]

    x, t = numbers(shape, 1), numbers(shape, 2)
    y, c, backwards, transposed, again, forward, first, second = every(x, t)
    size = over_ranks(jnp.abs(backwards * x).sum())
    off = 2.0**-7 * size if "16 bits" in name else 0.0  # each side is rounded to 8 bits once or twice
    assert over_ranks((c * y).sum()) == pytest.approx(over_ranks((backwards * x).sum()), abs=off)
    assert_same(transposed, backwards)
    for result, expected in ((again, y), (first, y), (second, forward)):
        assert_same(result, expected)


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
@pytest.mark.parametrize("mapped", [0, 1, RANK % 2], ids=["first", "second", "each its own"])
def test_a_mapped_axis_has_one_position_in_every_message_and_sum(mapped):
    """An open chain; as many are mapped as each has numbers, so that shapes do not tell."""
    n = 3
    by_rank = [np.arange(n * n, dtype=np.float32).reshape(n, n) + 100 * rank for rank in range(SIZE)]  # rows: mapped

    def chain(x: jax.Array) -> jax.Array:
        if RANK == 0:
            mpi.send(x, 1)
            return x
        if RANK == SIZE - 1:
            return mpi.recv(x, RANK - 1)
        return mpi.sendrecv(x, jnp.zeros(n), RANK - 1, RANK + 1)

    mine = jnp.asarray(by_rank[RANK] if mapped == 0 else by_rank[RANK].T)
    for f, expected in ((chain, by_rank[max(RANK - 1, 0)]), (mpi.allreduce, sum(by_rank)), (mpi.scan, None)):
        got = jax.jit(jax.vmap(f, in_axes=mapped))(mine)
        assert_same(got, sum(by_rank[: RANK + 1]) if expected is None else expected)


@pytest.mark.parametrize("name", ["reduce", "bcast", "allgatherv", "reduce_scatter", "scan", "sendrecv"])
def test_cotangents_of_short_floats_are_summed_in_32_bits(name):
    """They come as those of float32, rounded once; 2 / eps + 1 + 1 has 2 / eps in the short type."""
    f, x = LINEAR[name], jax.ShapeDtypeStruct((ROWS.get(name, SIZE), 2), jnp.float32)
    dtypes = [jnp.bfloat16, jnp.float16] + [jnp.float8_e4m3fn] * (name in ("bcast", "allgatherv"))

    @jax.jit
    def both() -> list[tuple[jax.Array, jax.Array]]:
        pairs = []
        for dtype in dtypes:
            c, short = 1.0 if RANK else 2.0 / float(jnp.finfo(dtype).eps), x.update(dtype=dtype)
            got, expected = (
                jax.linear_transpose(f, like)(jnp.full(y.shape, c, y.dtype))[0]
                for like, y in ((short, jax.eval_shape(f, short)), (x, jax.eval_shape(f, x)))
            )
            pairs.append((got, expected.astype(dtype)))
        return pairs

    for got, expected in both():
        assert_same(got, expected)


def test_the_transpose_of_an_allreduce_is_the_identity_and_its_own_an_allreduce():
    x, f = jnp.arange(3.0) + RANK, lambda x: mpi.allreduce(x)
    total = np.arange(3.0) * SIZE + sum(range(SIZE))
    transposed = lambda c: jax.linear_transpose(f, x)(c)[0]  # noqa: E731
    for call in (lambda function: function, jax.jit):
        assert call(jax.grad(lambda x: (f(x) ** 2).sum()))(x).tolist() == (2 * total).tolist()
        assert call(transposed)(x).tolist() == x.tolist()
        assert call(lambda c: jax.linear_transpose(transposed, x)(c)[0])(x).tolist() == total.tolist()
        assert call(lambda x: jax.jvp(f, (x,), (x,))[1])(x).tolist() == total.tolist()
    hessian = jax.jit(jax.hessian(lambda x: (f(x) ** 3).sum()))(x)
    assert np.allclose(hessian, np.diag(6 * total) * (SIZE if SIZE > 1 else 1))


@pytest.mark.skipif(SIZE == 1, reason="one rank is alone")
@pytest.mark.parametrize("name", ["scatter", "allgather"])
def test_a_derivative_that_one_rank_does_not_take_is_refused(name):
    """Else the others would wait for the transposed call, which that rank's program has not."""
    f, shape = getattr(mpi, name), (SIZE, 2)

    def loss(w: jax.Array, template: Any) -> jax.Array:
        mine = w if RANK == 0 else template(w[0] if name == "scatter" else w)
        return (f(mine) ** 2).sum()

    for way in (EAGER, jax.jit):
        grad = way(jax.grad(lambda w: loss(w, lambda x: jnp.zeros(x.shape))))
        with pytest.raises(jaxmpi.UsageError, match=r"rank 1: differentiated: got no: .* as 0 \* x.*expected yes"):
            grad(jnp.ones(shape))
        tied = way(jax.grad(lambda w: loss(w, lambda x: 0 * x)))(jnp.ones(shape))
        at_root = 2 * SIZE if name == "allgather" else 2
        assert tied.tolist() == np.full(shape, 0 if RANK else at_root).tolist()


def test_operations_in_loops_branches_checkpoints_and_custom_derivatives():
    @jax.custom_vjp
    def halved(x: jax.Array) -> jax.Array:
        return mpi.allreduce(x, "mean")

    halved.defvjp(lambda x: (halved(x), None), lambda _, c: (mpi.allreduce(c, "mean") / 2,))

    def loss(x: jax.Array, mean: Any, bcast: Any, halved: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, _: (jnp.sin(mean(x)), None), x, None, 3)
        x = jax.lax.cond(x[0] > -2, bcast, jnp.cos, x)
        x = jax.lax.fori_loop(0, 2, lambda i, x: x + mean(x), x)
        return halved(jax.checkpoint(lambda x: jnp.sin(mean(jnp.cos(x))))(x)).sum()

    def count(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: mpi.allreduce(x, "max")[0] < 10, lambda x: x + mpi.allreduce(x, "max"), x)

    def derivative(factor: float) -> Any:  # of a function that leaves equal arrays as they are
        return lambda x: factor * x + jax.lax.stop_gradient(x - factor * x)

    x = jnp.ones(3)
    mean: Any = lambda x: mpi.allreduce(x, "mean")  # noqa: E731
    got = jax.jit(jax.grad(lambda x: loss(x, mean, mpi.bcast, halved)), donate_argnums=0)
    expected = jax.grad(lambda x: loss(x, derivative(1 / SIZE), derivative(SIZE * (RANK == 0)), derivative(0.5)))(x)
    assert np.allclose(got(x + 0), expected, atol=1e-6)
    assert jax.jit(count)(x).tolist() == [16.0] * 3


@pytest.mark.skipif(SIZE == 1, reason="nothing is sent")
@pytest.mark.parametrize("call", [lambda x: mpi.allreduce(x, "max"), lambda x: mpi.recv(x, RANK)])
def test_derivatives_of_nonlinear_operations_are_refused(call):
    with pytest.raises(jaxmpi.UsageError, match=r"\(float32\[2\].* has no derivative; expected a linear"):
        jax.eval_shape(jax.grad(lambda x: call(x).sum()), jnp.ones(2))
    with pytest.raises(jaxmpi.UsageError, match=r"\(float32\[2\].* has no derivative; expected a linear"):
        jax.linear_transpose(call, jnp.ones(2))(jnp.ones(2))


# ---------------------------------------------------------------- started operations


def test_started_operations_equal_blocking_ones():
    """All of them under way at once; those of trees and of 16-bit floats, too."""
    x, next_one, before = numbers((SIZE, 2), 1), (RANK + 1) % SIZE, (RANK - 1) % SIZE
    part = COMM.split(0)
    every: list[tuple] = [
        (mpi.allreduce, {"a": x, "b": x.astype(jnp.bfloat16), "n": jnp.uint8(200)}, "mean"),
        (mpi.reduce, x, "max"),
    ]
    every += [(mpi.bcast, x, SIZE - 1), (mpi.allgather, x > 0), (mpi.gather, x), (mpi.alltoall, x), (mpi.barrier,)]
    every += [
        (mpi.scatter, x if RANK == 0 else x[0]),
        (mpi.alltoallv, numbers((ROWS["alltoallv"], 2), 2), COUNTS[RANK]),
    ]
    every += [(mpi.allgatherv, x[: RANK + 1]), (mpi.reduce_scatter, x), (mpi.scan, x), (mpi.exscan, x, "min")]
    every += [(mpi.sendrecv, x, x, before, next_one)] * (SIZE > 1)

    def both() -> tuple[list, list]:
        handles = [jaxmpi.start(*row) for row in every]
        handles.append(jaxmpi.start(mpi.allreduce, x, comm=part))
        computed = jnp.sin(x)
        started = [jaxmpi.wait(handle, after=computed) for handle in handles]
        return started, [function(*arguments) for function, *arguments in every]

    compiled = jax.jit(both)
    for _ in range(2):
        started, now = compiled()
        jax.tree.map(assert_same, started[:-1], now)
        assert_same(started[-1], mpi.allreduce(x))


def test_started_operations_in_a_scan_and_a_branch_equal_blocking_ones():
    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        handle = jaxmpi.start(mpi.allreduce, x)
        carry = jnp.sin(carry)
        total = jaxmpi.wait(handle, after=carry)
        return carry + total, total

    def plain(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = mpi.allreduce(x)
        return jnp.sin(carry) + total, total

    xs = numbers((5, 3), RANK)
    run = jax.jit(lambda body, xs: jax.lax.scan(body, xs[0], xs), static_argnums=0)
    jax.tree.map(assert_same, run(body, xs), run(plain, xs))
    branch = jax.jit(lambda x, b: jax.lax.cond(b, lambda x: body(x, x)[1], lambda x: x, x))
    assert_same(branch(xs[0], True), mpi.allreduce(xs[0]))
    assert_same(branch(xs[0], False), xs[0])


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
@pytest.mark.parametrize("after", [jnp.ones((3, 2)), np.ones((0, 2)), 0.5], ids=["2", "none", "float"])
def test_a_wait_may_follow_differentiated_values_of_any_shape(after, monkeypatch):
    monkeypatch.setattr(host_callbacks, "sees_copies", lambda: True)

    @jax.jit
    def slope(w: jax.Array) -> jax.Array:
        handle = jaxmpi.start(mpi.allreduce, jnp.ones(3))

        def loss(w: jax.Array) -> jax.Array:
            y = w**2
            return (y * jaxmpi.wait(handle, after=[y, jax.tree.map(lambda x: x * 2, after)])).sum()

        return jax.grad(loss)(w)

    assert_same(slope(jnp.arange(3.0)), 2 * SIZE * jnp.arange(3.0))


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
def test_started_messages_of_one_tag_come_in_the_order_of_the_program():
    """Messages of a tree, in both directions, among blocking ones: 12 B and 160 kB. With 2 ranks all have one pair."""
    before, after = (RANK - 1) % SIZE, (RANK + 1) % SIZE

    def tree_of_rank(rank: int) -> dict[str, jax.Array]:
        return {"small": jnp.arange(3.0) + rank, "large": jnp.arange(40_000.0) - rank}

    @jax.jit
    def program(tree: dict[str, jax.Array]) -> list[Any]:
        twice = jax.tree.map(lambda leaf: 2 * leaf, tree)
        right = jaxmpi.start(mpi.sendrecv, tree, tree, before, after)
        left = jaxmpi.start(mpi.sendrecv, twice, twice, after, before)
        blocking = mpi.sendrecv(3 * tree["small"], tree["small"], before, after)
        mpi.send(4 * tree["small"], after)
        sent = jaxmpi.start(mpi.send, 5 * tree["small"], after)
        first = jaxmpi.start(mpi.recv, tree["small"], before)
        second = mpi.recv(tree["small"], before)
        short = jaxmpi.start(mpi.send, tree["small"].astype(jnp.bfloat16), after, tag=1)
        third = mpi.recv(tree["small"].astype(jnp.bfloat16), before, tag=1)
        jaxmpi.wait(sent)
        jaxmpi.wait(short)
        return [jaxmpi.wait(right), jaxmpi.wait(left), blocking, jaxmpi.wait(first), second, third]

    theirs, small = tree_of_rank(before), tree_of_rank(before)["small"]
    expected = [theirs, jax.tree.map(lambda leaf: 2 * leaf, tree_of_rank(after)), 3 * small, 4 * small, 5 * small]
    expected.append(small.astype(jnp.bfloat16))
    for _ in range(3):
        jax.tree.map(assert_same, program(tree_of_rank(RANK)), expected)


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
def test_a_started_message_involves_only_its_two_ranks():
    """Along an open chain: the first rank starts a send alone, the last a receive alone."""

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        sent = jaxmpi.start(mpi.send, x, RANK + 1 if RANK + 1 < SIZE else mpi.NOBODY)
        came = jaxmpi.start(mpi.recv, -x, RANK - 1 if RANK else mpi.NOBODY)
        jaxmpi.wait(sent)
        return jaxmpi.wait(came)

    assert float(program(jnp.float32(RANK))) == max(RANK - 1, 0)


@pytest.mark.skipif(SIZE == 1, reason="one worker starts nothing")
def test_ranks_outside_a_subcommunicator_do_not_join_what_it_starts():
    part = COMM.split(RANK % 2)
    if RANK % 2 == 0:
        started = jax.jit(lambda x: jaxmpi.wait(jaxmpi.start(mpi.allreduce, x, comm=part)))
        assert float(started(jnp.float32(RANK))) == sum(range(0, SIZE, 2))


@pytest.mark.skipif(SIZE == 1, reason="one worker starts nothing")
def test_a_handle_is_waited_for_once():
    x = jnp.ones(3)

    def twice(x: jax.Array) -> jax.Array:
        handle = jaxmpi.start(mpi.allreduce, x)
        return jaxmpi.wait(handle) + jaxmpi.wait(handle)

    def dropped(x: jax.Array) -> jax.Array:
        jaxmpi.start(mpi.allreduce, x, "max")
        return x

    with pytest.raises(jaxmpi.UsageError, match=r"allreduce that started at .* is waited for twice"):
        jax.jit(twice)(x)
    with pytest.raises(jaxmpi.UsageError, match=r"allreduce\(float32\[3\], op=max\).* is never waited for"):
        jax.jit(dropped)(x)
    with pytest.raises(
        jaxmpi.UsageError, match=r"rank 1: dtypes: got \['float16'\], expected \['bfloat16'\] \(rank 0\)"
    ):
        jax.jit(lambda x: jaxmpi.wait(jaxmpi.start(mpi.bcast, x)))(x.astype(jnp.float16 if RANK else jnp.bfloat16))
    with pytest.raises(jaxmpi.UsageError, match=r"start: got a call outside jax.jit"):
        jaxmpi.start(mpi.allreduce, x)
    with pytest.raises(jaxmpi.UsageError, match=r"has neither derivative nor mapping"):
        jax.jit(jax.grad(lambda x: jaxmpi.wait(jaxmpi.start(mpi.allreduce, x)).sum()))(x)


# ---------------------------------------------------------------- what the user's arrays lose on their way into JAX


def by_mpi4jax(name: str, x: Any) -> Any:
    from mpi4py import MPI

    from jaxmpi.compat import mpi4jax

    return getattr(mpi4jax, name)(x, {"allreduce": MPI.LAND, "send": NEXT}[name])


NEXT = (RANK + 1) % SIZE
ROWS_OF = lambda x: (np.ma if isinstance(x, np.ma.MaskedArray) else np).stack([x] * SIZE)  # noqa: E731
CALLS: dict[str, Any] = {  # with a leaf that must be refused by its path
    **{call.__name__: lambda x, call=call: call({"ids": x}) for call in (mpi.allreduce, mpi.allgather, mpi.bcast)},
    **{call.__name__: lambda x, call=call: call({"ids": x}) for call in (mpi.gather, mpi.reduce, mpi.scan, mpi.exscan)},
    **{call.__name__: lambda x, call=call: call({"ids": ROWS_OF(x)}) for call in (mpi.alltoall, mpi.reduce_scatter)},
    "scatter": lambda x: mpi.scatter({"ids": ROWS_OF(x) if RANK == 0 else x}),
    "allgatherv": lambda x: mpi.allgatherv({"ids": x[None]}),
    "alltoallv": lambda x: mpi.alltoallv({"ids": ROWS_OF(x)}, [1] * SIZE),
    "max": lambda x: mpi.allreduce({"ids": x}, "max"),
    "mean": lambda x: mpi.allreduce({"ids": x}, "mean"),
    "LAND": lambda x: by_mpi4jax("allreduce", {"ids": x}),
    "mpi4jax's send": lambda x: by_mpi4jax("send", {"ids": x}),
    "send": lambda x: mpi.send({"ids": x}, NEXT),
    "sendrecv": lambda x: mpi.sendrecv({"ids": x}, {"ids": jnp.zeros(2)}, NEXT, NEXT),
    "start": lambda x: jax.jit(lambda: jaxmpi.wait(jaxmpi.start(mpi.allgather, {"ids": x})))(),
    "exchange": lambda x: jaxmpi.exchange({"ids": x}),
    "exchange in jit": lambda x: jax.jit(lambda: jaxmpi.exchange({"ids": x}))(),
    "average_statistics": lambda x: jaxmpi.average_statistics({"ids": x}),
}
UNREPRESENTABLE = {
    "int64": np.array([1, 2**40 + 1]),
    "negative": np.array([1, -(2**31) - 1]),
    "uint64": np.array([2**32], np.uint64),
    "float64": np.array([1.0, -1e300]),
    "complex128": np.array([1.0, 1e300j]),
    "masked": np.ma.masked_array([1.0, 2.0], [False, True], dtype=np.float32),
    "float0": np.zeros(2, jax.dtypes.float0),
    "texts": np.array(["a"]),
}


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="nothing is lost")  # pyright: ignore[reportAttributeAccessIssue]
@pytest.mark.parametrize("name", CALLS)
def test_values_that_jax_would_change_are_refused_by_path(name):
    for kind, x in UNREPRESENTABLE.items():
        if "statistics" in name and kind not in ("float64", "masked"):
            continue  # other leaves stay each rank's own
        with pytest.raises(jaxmpi.UsageError, match="leaf 'ids"):  # also a template, whose numbers nobody takes
            CALLS[name](x)


@pytest.mark.parametrize(
    ("number", "dtype"), [(300, jnp.int8), (3e9, jnp.int32), (-1, jnp.uint8), (np.float32(1e10), jnp.float16)]
)
def test_host_arrays_must_fit_the_dtype_of_the_result(number, dtype):
    with pytest.raises(jaxmpi.UsageError, match="cannot hold"):
        mpi.allreduce(np.array([number]), dtype=dtype)
    for x in (2**40, np.array([2**40])):  # JAX's own dtype for it could not hold it
        assert (
            np.asarray(mpi.allreduce(x, dtype=jnp.float32)).tolist()
            == np.float64(SIZE * 2**40 * np.ones_like(x)).tolist()
        )


def test_64_bit_values_and_their_sums_must_fit_into_32_bits():
    most = 2**31 - 1
    assert mpi.allreduce(np.array([most, -(2**31)]), "max").tolist() == [most, -(2**31)]
    assert mpi.allreduce(np.array([most]), "mean").tolist() == [np.float32(most)]
    assert mpi.allgather(np.array([np.inf, -np.inf]))[0].tolist() == [np.inf, -np.inf]
    assert mpi.allreduce(np.array([most // SIZE]), "sum").tolist() == [most // SIZE * SIZE]
    if SIZE > 1:
        for x in (np.array([most]), most, np.int64(most)):
            for call in (mpi.allreduce, mpi.scan, mpi.reduce, mpi.exscan):
                with pytest.raises(jaxmpi.UsageError, match=f"{call.__name__}: leaf"):
                    call(x)
        with pytest.raises(jaxmpi.UsageError, match="allreduce: leaf"):
            mpi.allreduce(np.array([2**16, 2]), "prod")


@pytest.mark.skipif(SIZE == 1, reason="one worker sends nothing")
@pytest.mark.parametrize("call", [mpi.allreduce, jaxmpi.exchange, lambda x: mpi.send(x, (RANK + 1) % SIZE)])
def test_an_array_on_several_devices_of_a_rank_is_refused_by_name(call):
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2,), ("x",), devices=jax.local_devices()[:2])
    for spec in (PartitionSpec("x"), PartitionSpec()):
        x = jax.device_put(jnp.ones(4), NamedSharding(mesh, spec))
        with pytest.raises(jaxmpi.UsageError, match="leaf 'w': got an array on 2 devices"):
            call({"w": x})
        with pytest.raises(ValueError, match=r"more than 1 device: \[jaxmpi's calls.*device_put"):
            jax.jit(call)({"w": x})


@pytest.mark.skipif(SIZE == 1, reason="nothing is sent")
@pytest.mark.parametrize("name", ["reduce", "allgather", "alltoallv", "scan", "sendrecv"])
def test_jacobians_in_forward_mode_are_refused(name):
    """Each rank's basis vectors would meet those of the others. In reverse mode they are right."""
    f, x = LINEAR[name], numbers((ROWS.get(name, SIZE), 2), 1)
    outside = jax.jacfwd, lambda f: jax.jacfwd(jax.jit(f))
    for derivative in (*outside, lambda f: jax.jit(jax.jacfwd(f)), lambda f: jax.jit(jax.hessian(f))):
        with pytest.raises(jaxmpi.UsageError, match="forward-mode") as error:
            derivative(lambda x: (f(x) ** 2).sum())(x)
        assert isinstance(error.value, RuntimeError)  # as in mpi4jax
    jax.jit(jax.vmap(jax.grad(lambda x: (f(x) ** 2).sum()), -1))(jnp.stack([x, x], -1))
