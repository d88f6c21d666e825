"""Collective operations: mistakes that end with names, programs written for mpi4jax, the table in the docs."""

import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi import collectives as mpi
from jaxmpi.collectives.table import OPERATIONS
from launching import ROOT, mpirun

HEAD = """
import time, jax, jax.numpy as jnp, jaxmpi
from jaxmpi import collectives as mpi
rank = int(jaxmpi.world().rank)
x = jnp.ones(3) * rank
f = jax.jit(lambda x: mpi.allreduce(x, "max"))
g = jax.jit(lambda x: mpi.allreduce(x, "max") + 1)
f(x).block_until_ready(), g(x).block_until_ready()
print("begun", time.time(), flush=True)
"""
LIMIT_S = 5
LIMITS = {f"JAXMPI_{what}_TIMEOUT_S": str(LIMIT_S) for what in ("EXCHANGE", "AGREE", "EXIT")}
ROOTS = (
    "f, g, a = (jax.jit(each) for each in (lambda x: mpi.bcast(x, 0), lambda x: mpi.bcast(x, 1), mpi.allreduce))\n"
    "f(x), g(x), a(x).block_until_ready()\n"
)
AT = r".*; rank {} on \S+ is at <string>:"  # where the rank that is waited for is instead
DIFFER = r"rank 0 to 'exchange \d of the job \(bcast\(float32\[3\], root=0\).*rank 1 to '.*{}"
ENDED = "for rank {}, whose script has ended"
NOT_RECEIVED = r"rank 0: a message of float32\[3\], sent at <string>:\d+: rank 1 has not received it"
ALONE = "\nelse: time.sleep(60)"
MISTAKES: dict[str, tuple] = {  # what ranks run, what the error names, how many ranks if not 2
    "another shape": ("mpi.allreduce(jnp.ones(3 + rank))", r"allreduce differs.*\s+rank 1: shape of argument 0"),
    "another root": ("jax.jit(lambda x: mpi.bcast(x, rank))(x)", "rank 1: root: got 1, expected 0"),
    "a branch that one rank of a part takes": (
        "part = jaxmpi.world().split(0, -rank)\n"
        "a, b = (lambda x, call=call: call(x, comm=part) for call in (mpi.allreduce, mpi.bcast))\n"
        "h = jax.jit(lambda x, taken: b(jax.lax.cond(taken, a, lambda x: x, x)))\n"
        "h(x, True).block_until_ready(), h(x, rank == 0).block_until_ready()",
        r"rank 0 to 'exchange 1 of communicator \d of 2 ranks \(allreduce.*rank 1 to 'exchange 2 of comm.*\(bcast",
    ),
    "one rank is missing": (
        "if rank == 0: f(x).block_until_ready()" + ALONE,
        r"rank 0 waited \d s in exchange 1 of the job \(allreduce.* for rank 1;" + AT.format(1),
    ),
    "one rank alone makes a first call": (
        "if rank == 0: jax.jit(lambda x: mpi.allreduce(x) - 1)(x)" + ALONE,
        r"rank 1 on \S+ did not answer in time" + AT.format(1),
    ),
    "the script of one rank has ended": (
        "if rank == 0: f(x).block_until_ready()",
        r"rank 0 waits in exchange 1 of the job \(allreduce.* " + ENDED.format(1),
    ),
    "the script of one rank has ended before it sends": (
        "if rank == 1: mpi.recv(x, 0)",
        r"rank 1 waits in recv\(float32\[3\], source=0\).* " + ENDED.format(0),
    ),
    "bcasts of two roots before a sum": (ROOTS + "(f, g)[rank](x), a(x).block_until_ready()", DIFFER.format("root=1")),
    "a send without a receive until the script ends": ("if rank == 0: mpi.send(x, 1)", NOT_RECEIVED),
    "a receive without a send": (
        "if rank == 1: mpi.recv(x, 0)" + ALONE,
        r"recv\(float32\[3\], source=0\), .* has waited 5 s;" + AT.format(0),
    ),
    "a message of another shape": (
        "mpi.send(jnp.ones(4), 1) if rank == 0 else mpi.recv(x, 0)",
        r"rank 1 expects float32\[3\], but got a message of rank 0: float32\[4\], sent at <string>:\d+",
    ),
    "one rank alone makes the first call on a communicator of mpi4py": (
        "from mpi4py import MPI\nsub = MPI.COMM_WORLD.Split(rank == 1, -rank)\n"
        "if rank == 0: mpi.allreduce(x, comm=sub)" + ALONE,
        r"the first call on a communicator of 2 ranks has waited 5 s for one of rank \[0, 2\]",
        3,
    ),
    "a started receive without a send": (
        "s = jax.jit(lambda x: jaxmpi.wait(jaxmpi.start(mpi.recv, x, 0)))\n"
        "if rank == 1: s(x).block_until_ready()" + ALONE,
        r"recv\(float32\[3\], source=0\), .* has waited 5 s; no message has come or gone" + AT.format(0),
    ),
    "a sendrecv without a receive": ("mpi.send(x, 0) if rank else mpi.sendrecv(x, x, 1, 1)", NOT_RECEIVED),
    "two receives that wait for each other": (
        "mpi.recv(x, 1 - rank); mpi.send(x, 1 - rank)",
        r"recv\(float32\[3\], source=\d\), .* has waited 5 s",
    ),
}


# Else no rank comes to the next line. A small message is copied, so its sender goes on; a script may be at its end.
GOES_ON = ("the script of one rank", "a send without", "a message of another shape", "a sendrecv")
IN_CI = ("a branch that one rank of a part takes", "a message of another shape", "bcasts of two roots before a sum")
IN_CI = (*IN_CI, "a send without a receive until the script ends")
CASES = [pytest.param(name, marks=pytest.mark.e2e if name in IN_CI else pytest.mark.slow) for name in MISTAKES]


@pytest.mark.parametrize("mistake", CASES)
def test_a_mistake_ends_the_job_with_rank_and_call(mistake):
    script, message, *rest = MISTAKES[mistake]
    ranks = rest[0] if rest else 2
    ended = mpirun(ranks, "-c", f"{HEAD}\n{script}\nprint('went on', flush=True)\n", timeout_s=90, env=LIMITS)
    end_s = time.time()
    assert not ended.timed_out, ended.out[-3000:]
    assert ended.code != 0, ended.out[-3000:]
    assert mistake.startswith(GOES_ON) or "went on" not in ended.out, ended.out[-3000:]
    assert ended.out.count("begun") == ranks, ended.out[-3000:]
    assert re.search(message, ended.out), ended.out[-3000:]
    begun_s = max(float(found) for found in re.findall(r"begun ([\d.]+)", ended.out))
    assert end_s - begun_s < LIMIT_S + 15  # to ask who is late takes up to 10; programs of the mistake, mpirun's end


MPI4JAX = """
from mpi4py import MPI
import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()


@jax.jit
def foo(arr):  # mpi4jax's own first example
    arr = arr + rank
    arr_sum = mpi4jax.allreduce(arr, op=MPI.SUM, comm=comm)
    return arr_sum


@jax.jit
def ring(x):  # positional arguments, as its documentation has them
    if rank == 0:
        mpi4jax.send(x, 1, tag=3, comm=comm)
        x = mpi4jax.recv(x, source=size - 1, tag=3, comm=comm)
    else:
        got = mpi4jax.recv(x, MPI.ANY_SOURCE, tag=MPI.ANY_TAG, comm=comm)
        mpi4jax.send(got + x, (rank + 1) % size, tag=3, comm=comm)
    return x


@jax.jit
def halo(x):  # as the shallow-water model's
    left, right = (rank - 1) if rank else MPI.PROC_NULL, rank + 1 if rank + 1 < size else MPI.PROC_NULL
    return mpi4jax.sendrecv(x[-1], x[0], source=left, dest=right, comm=comm)


@jax.jit
def others(x):
    mpi4jax.barrier(comm=comm)
    return (
        mpi4jax.allgather(x), mpi4jax.alltoall(mpi4jax.allgather(x) + rank), mpi4jax.bcast(x, 0), mpi4jax.gather(x, 0),
        mpi4jax.reduce(x, MPI.PROD, 0), mpi4jax.scan(x, MPI.MAX), mpi4jax.allreduce(x > rank + 1, MPI.LAND),
        mpi4jax.scatter(jnp.stack([x] * size) if rank == 0 else x, 0),
        jax.grad(lambda x: (mpi4jax.allreduce(x, op=MPI.SUM) ** 2).sum())(x),
    )


@jax.jit
def branches(x):
    if rank == 0:
        y = mpi4jax.bcast(x, np.int64(0))
    else:
        y = mpi4jax.bcast(jnp.zeros(3), np.int64(0))
    return y, mpi4jax.reduce(x.astype(jnp.int32), MPI.LAND, np.int64(0))


x = jnp.arange(3.0) + rank + 1
values = jax.tree.map(lambda y: y.tolist(), (foo(jnp.zeros((3, 3))), ring(x), branches(x), halo(x), others(x)))
for r in range(size):
    comm.Barrier()
    if r == rank:
        print("rank", rank, values, flush=True)
"""


@pytest.mark.e2e
def test_programs_for_mpi4jax_run_with_their_import_changed():
    """And print the same. mpi4jax leaves a receive from nobody undefined; that line is taken out."""
    changed = MPI4JAX.replace("import mpi4jax", "import jaxmpi.compat.mpi4jax as mpi4jax")
    ended = [mpirun(2, "-c", script, timeout_s=100) for script in (MPI4JAX, changed)]
    assert [one.code for one in ended] == [0, 0], ended[1].out[-3000:]
    assert "UserWarning" not in ended[1].out
    theirs, ours = (
        [
            re.sub(r", (-?[\d.e+-]+|nan|inf), \(\[\[", ", ([[", line)
            for line in sorted(one.out.splitlines())
            if line[:4] == "rank"
        ]
        for one in ended
    )
    assert len(ours) == 2
    assert ours == theirs


def test_start_takes_operations_alone_and_its_handles_are_waited_for_where_they_started(no_launcher):
    x = jnp.ones(3)
    for other in (jaxmpi.exchange, functools.partial(mpi.allreduce, op="max"), lambda x: mpi.allreduce(x)):
        with pytest.raises(jaxmpi.UsageError, match=r"start: got .*; expected an operation of jaxmpi.collectives, as"):
            jax.jit(lambda x, other=other: jaxmpi.wait(jaxmpi.start(other, x)))(x)
    bodies = (  # a branch not taken, a body that runs twice, a function whose trace is kept
        lambda x, h: jax.lax.cond(x[0] > 0, lambda: jaxmpi.wait(h), lambda: x),
        lambda x, h: jax.lax.scan(lambda c, _: (c + jaxmpi.wait(h), None), x, None, 2)[0],
        lambda x, h: jax.jit(lambda: jaxmpi.wait(h))(),
    )
    for body in bodies:
        with pytest.raises(jaxmpi.UsageError, match=r"wait: the allreduce that started at .* is waited for in another"):
            jax.jit(lambda x, body=body: body(x, jaxmpi.start(mpi.allreduce, x)))(x)
    around = lambda x, h: jax.grad(lambda w: (w * jaxmpi.wait(h)).sum())(x)  # noqa: E731
    assert jax.jit(lambda x: around(x, jaxmpi.start(mpi.allreduce, x)))(x).tolist() == [1, 1, 1]
    waited = jax.jit(jax.value_and_grad(lambda x: jaxmpi.wait(jaxmpi.start(mpi.allreduce, x)).sum()))
    assert float(waited(x)[0]) == 3
    of = jax.checkpoint(lambda w, c: (w * jaxmpi.wait(jaxmpi.start(mpi.allreduce, jax.lax.stop_gradient(c)))).sum())
    assert jax.jit(jax.grad(of))(x, 2 * x).tolist() == [2, 2, 2]


def test_one_worker_gets_what_is_its_own(no_launcher):
    x = jnp.arange(3.0)[None]
    every = [mpi.allreduce(x, "mean"), mpi.reduce(x), mpi.bcast(x), mpi.alltoall(x), mpi.scan(x), mpi.allgatherv(x)]
    every += [mpi.alltoallv(x, [1]), mpi.allgather(x[0]), mpi.gather(x[0]), mpi.sendrecv(x, x, 0, 0)]
    assert all(np.array_equal(y, x) for y in every)
    assert [mpi.reduce_scatter(x).tolist(), mpi.scatter(x).tolist()] == [[0, 1, 2]] * 2
    shape = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert mpi.recv(shape, mpi.NOBODY).tolist() == mpi.sendrecv(x, shape, mpi.NOBODY, 0).tolist() == [0, 0, 0]
    assert mpi.sendrecv(x, jax.ShapeDtypeStruct((1, 3), x.dtype), 0, 0).tolist() == x.tolist()
    assert mpi.exscan(x, "min").tolist() == [[np.inf] * 3]
    assert jax.grad(lambda x: (mpi.allreduce(x) ** 2).sum())(x).tolist() == [[0, 2, 4]]


def test_one_worker_fills_a_status(no_launcher):
    from mpi4py import MPI

    status, x = MPI.Status(), jnp.ones(3)
    jax.block_until_ready(jax.jit(lambda x: mpi.sendrecv(x, x, 0, 0, sendtag=5, status=status))(x))
    assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)) == (0, 5, 12)
    mpi.recv(x, mpi.NOBODY, status=status)
    assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)) == (MPI.PROC_NULL, MPI.ANY_TAG, 0)


REFUSED = [
    (lambda: mpi.allreduce(jnp.ones(3), "plus"), "allreduce: op: got 'plus'"),
    (lambda: mpi.allreduce({"w": jnp.ones(3)}, "xor"), "leaf 'w' is float32"),
    (lambda: mpi.bcast({"w": jnp.ones(3, jnp.int4)}), "leaf 'w' is int4; expected numbers of 8 bits or more"),
    (lambda: mpi.allreduce(1j, "max"), "complex64"),
    (lambda: mpi.scan(1j, dtype=jnp.float32), "imaginary part"),
    (lambda: mpi.allreduce(0.5, "mean", dtype=int), "dtype: got int32 for a mean"),
    (lambda: mpi.allreduce(jnp.ones(3), dtype=jnp.bool_), "dtype: got bool for a sum"),
    (lambda: mpi.allreduce(jnp.ones(3), dtype="foo"), "allreduce: dtype: got 'foo'"),
    (lambda: mpi.bcast(jnp.ones(3), 5), "bcast: root: got 5"),
    (lambda: mpi.reduce_scatter(jnp.int32(3), "mean"), r"has shape \[\]; expected 1 rows"),
    (lambda: mpi.alltoallv(jnp.ones(3), [2]), r"alltoallv: send_counts: got \[2\]"),
    (lambda: mpi.recv(jnp.ones(3), tag=-2), "recv: tag: got -2"),
    (lambda: mpi.recv(jnp.ones(3), -1), "recv: source: got -1"),
    (lambda: mpi.send(jnp.ones(3), 0), "send: got one worker"),
    (lambda: mpi.sendrecv(1, 2, 0, 0, sendtag=1, recvtag=2), "tag 2 from itself, but got int32.. and tag 1"),
    (lambda: mpi.sendrecv([1, 2], [1], 0, 0), "sendrecv: got 2 leaves"),
    (lambda: mpi.sendrecv(jnp.ones(2), jnp.ones(3), 0, 0), r"float32\[3\] .*, but got float32\[2\]"),
    (lambda: mpi.allreduce(jnp.ones(3), comm=jaxmpi.AxisComm("w", 2)), "comm: got AxisComm"),
    (lambda: jaxmpi.exchange(jnp.ones(3), comm="text"), "comm: got 'text'"),  # pyright: ignore[reportArgumentType]
    (lambda: mpi.allreduce({"k": jax.random.key(0)}), "allreduce: got a random key"),
    (lambda: jaxmpi.world().split(-1), "split: color: rank 0: got -1"),
]


@pytest.mark.parametrize(("call", "names"), REFUSED)
def test_what_cannot_be_is_refused(call, names, no_launcher):
    with pytest.raises(jaxmpi.UsageError, match=names):
        call()


def test_every_operation_is_in_the_docs_and_a_function():
    page = (ROOT / "docs" / "collectives.md").read_text()
    assert [name for name in OPERATIONS if f"\n| `{name}` | " not in page] == []
    assert set(OPERATIONS) <= set(dir(mpi))
