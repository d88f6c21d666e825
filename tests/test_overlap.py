"""What of the overlapped exchange needs no other rank; and jobs in which it starts early, fails, or ends."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmpi import hostcomm, overlap
from jaxmpi.comm import AxisComm, SoloComm
from jaxmpi.config import UsageError
from jaxmpi.hostcomm import HOST_WIRES
from jaxmpi.wires import BLOCK, SMALLEST_NORMAL, WIRES
from launching import ROOT, mpirun, run, session_of
from test_wires import ODD, normals

# ---------------------------------------------------------------- wires in NumPy


def in_thread(function: Callable):
    """What a function gives in a thread that flushes what is subnormal, as that of exchanges does."""
    results = []

    def work():
        assert hostcomm.flush_subnormals()
        with np.errstate(all="ignore"):
            results.append(function())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


def both_ways(wire: str, x: np.ndarray) -> tuple[list[Any], list[Any]]:
    """The arrays sent and what arrives: in NumPy, and in a program."""
    there, back = HOST_WIRES[wire].encode, HOST_WIRES[wire].decode
    sent, arrived = in_thread(lambda: (there(x), back(there(x))))
    assert sent.size == HOST_WIRES[wire].size_bytes(x.size)
    jitted = jax.jit(lambda v: (WIRES[wire].encode(v), WIRES[wire].decode(WIRES[wire].encode(v))))
    encoded, decoded = jax.tree.map(np.asarray, jitted(x))
    return [parts(wire, sent), arrived], [encoded, decoded]


def parts(wire: str, sent: np.ndarray):
    if wire == "16":
        return sent[4:].view(np.float16), sent[:4].view(np.float32)
    if wire == "8":
        return hostcomm.parts_i8(sent)[::-1]
    return sent.view(np.float32 if wire == "32" else jnp.bfloat16)


@pytest.mark.parametrize("wire", HOST_WIRES)
@pytest.mark.parametrize("scale", [1e-37, 1e-12, 1.0, 3e5, 1e36])
def test_wires_are_those_of_programs_in_every_bit(wire, scale):
    for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 1009, 1000 * BLOCK):
        ours, theirs = both_ways(wire, normals(n, n, scale))
        for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert mine.dtype == other.dtype
            assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("wire", HOST_WIRES)
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
    thread = threading.Thread(target=lambda: granted.append(hostcomm.take_short_turns()))
    thread.start()
    thread.join()
    assert granted == [sys.platform == "linux"]


@pytest.mark.parametrize("wire", HOST_WIRES)
def test_columns_are_whole_blocks_and_one_message(wire):
    width = hostcomm.columns(HOST_WIRES[wire])
    assert width % BLOCK == 0
    size_bytes = HOST_WIRES[wire].size_bytes
    assert size_bytes(width) <= hostcomm.MESSAGE_BYTES < size_bytes(width + BLOCK)


# ---------------------------------------------------------------- what travels when

sizes = st.lists(st.integers(0, 3000), max_size=20)


@given(sizes, st.sampled_from([None, 4, 400, 4000, 10**6]), st.randoms())
def test_every_leaf_that_holds_something_travels_once_and_in_order(sizes, bucket_bytes, random):
    ready = list(range(len(sizes)))
    random.shuffle(ready)
    buckets = overlap.plan(sizes, bucket_bytes, ready)
    assert sorted(i for bucket in buckets for i in bucket) == [i for i, n in enumerate(sizes) if n]
    place = {leaf: i for i, leaf in enumerate(ready)}
    for bucket in buckets:
        assert [place[i] for i in bucket] == sorted(place[i] for i in bucket)
    firsts = [place[bucket[0]] for bucket in buckets]
    assert firsts == sorted(firsts)
    if bucket_bytes is None:
        assert len(buckets) <= 1
    else:
        # The first is closed by the leaf with which it holds a quarter; the others hold one leaf, or no more than all.
        assert all(4 * sum(sizes[i] for i in bucket[:-1]) <= bucket_bytes for bucket in buckets)
        assert not buckets or 16 * sum(sizes[i] for i in buckets[0][:-1]) < bucket_bytes


def test_the_first_bucket_holds_about_a_quarter():
    fours = [list(range(i, i + 4)) for i in range(1, 37, 4)]
    assert overlap.plan([25] * 40, 400, list(range(40))) == [[0], *fours, [37, 38, 39]]
    assert overlap.plan([1, 100, 1], 400, [0, 1, 2]) == [[0], [1], [2]]  # a big leaf is alone and not copied


def backward(params, x):
    """Gradients of three layers, whose names say nothing of their order."""

    def loss(params):
        y = x
        for name in "mza":
            y = jnp.tanh(y @ params[name])
        return y.sum()

    return jax.grad(loss)(params), x.sum()


def test_the_order_of_gradients_is_found_and_results_stay():
    params = {name: jnp.full((3, 3), 0.1 * (i + 1)) for i, name in enumerate("amz")}  # leaves: a, m, z
    order, x = overlap.Order(), jnp.ones((2, 3))
    assert order.leaves(3) == [2, 1, 0]  # nothing is known: from the last
    noted = jax.jit(order.of(backward))
    got, expected = noted(params, x), jax.jit(backward)(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert order.leaves(3) == [0, 2, 1]  # a, the last layer, then z, then m
    assert order.leaves(2) == [1, 0]  # another tree


def test_gradients_of_one_equation_go_from_the_last_leaf():
    order = overlap.Order()
    whole = order.of(lambda p: (jax.jit(lambda p: [2 * v for v in p])(p), 0.0))
    jax.eval_shape(whole, [jnp.ones(2)] * 3)
    assert order.leaves(3) == [2, 1, 0]


def test_a_gradient_that_is_known_beforehand_is_first():
    order = overlap.Order()
    jax.eval_shape(order.of(lambda p: ([p[0] * 2, p[1], jnp.float32(0)], 0.0)), [jnp.ones(2)] * 2)
    assert order.leaves(3)[-1] == 0


# ---------------------------------------------------------------- whether


@pytest.mark.parametrize(
    ("asked", "strategy", "comm", "line"),
    [
        ("auto", "ring32", SoloComm(), "no overlap: there is one worker"),
        ("on", "ring32", SoloComm(), "no overlap: there is one worker"),
        ("off", "ring32", AxisComm("w", 2), "no overlap: exchange.overlap is off"),
        ("auto", "ring32", AxisComm("w", 2), "no overlap: workers are not MPI ranks"),
    ],
)
def test_where_there_is_no_overlap_a_line_says_why(asked, strategy, comm, line):
    assert overlap.chosen(asked, strategy, comm) == (False, line)


def test_on_where_it_cannot_be_is_refused():
    with pytest.raises(UsageError, match="got on, but workers are not MPI ranks"):
        overlap.chosen("on", "ring32", AxisComm("w", 2))
    with pytest.raises(UsageError, match=r"exchange\.overlap"):
        overlap.chosen("perhaps", "ring32", SoloComm())


def test_one_worker_exchanges_nothing():
    tree = {"a": jnp.arange(3.0), "b": jnp.ones((), jnp.bfloat16)}
    same = jax.jit(lambda t: overlap.exchange(t, comm=SoloComm()))(tree)
    assert jax.tree.map(np.asarray, same) == pytest.approx(jax.tree.map(np.asarray, tree))


def test_one_worker_may_be_late_too():
    late = overlap.delayed_gradients(comm=SoloComm())
    step, state = jax.jit(late.update), late.init(jnp.zeros(2))
    seen = []
    for g in (1.0, 2.0, 3.0):
        mean, state = step(jnp.full(2, g), state)
        seen.append(float(mean[0]))
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: overlap.exchange(jnp.ones(2), comm=SoloComm()), "for use inside jax.jit"),
        (lambda: jax.jit(lambda x: overlap.exchange({"n": x}, comm=SoloComm()))(jnp.arange(3)), "leaf 'n' is int32"),
        (lambda: jax.jit(lambda x: overlap.exchange(x, "ring64", comm=SoloComm()))(jnp.ones(3)), "ring64"),
        (lambda: jax.jit(lambda x: overlap.exchange(x, op="max", comm=SoloComm()))(jnp.ones(3)), "op"),  # type: ignore[arg-type]
    ],
)
def test_wrong_use(call, message):
    with pytest.raises(UsageError, match=message):
        call()


# ---------------------------------------------------------------- jobs

HEAD = """
import os, sys, time
CORES = {cores}
if CORES:
    os.sched_setaffinity(0, {{0}})
import numpy as np, jax, jax.numpy as jnp
import jaxmpi
from jaxmpi import overlap
comm = jaxmpi.world()
courier = overlap.courier()
"""

EARLY = """
LAYERS, WIDTH = 8, 384

def loss(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer)
    return (x * x).sum(), 0.0

@jax.jit
def step(params, x):
    grads, _ = jax.grad(loss, has_aux=True)(params, x)
    mean = overlap.exchange(grads, bucket_bytes=4)
    return [p - 1e-3 * g for p, g in zip(params, mean)]

params = [jnp.eye(WIDTH) * 1.1 for _ in range(LAYERS)]
x = jnp.ones((4 * WIDTH, WIDTH)) * (comm.rank + 1)
shares = []
for _ in range(6):
    courier.events.clear()
    params = jax.block_until_ready(step(params, x))
    times = {what: [e.time_s for e in courier.events if e.what == what] for what in ("open", "start", "wait", "summed")}
    begin, ready = times["open"][0], max(times["start"])
    shares.append([(t - begin) / (ready - begin) for t in sorted(times["start"])])
    assert min(times["wait"]) > ready, "a wait came before a start"
if comm.rank == 0:
    print("shares", [round(float(s), 3) for s in np.median(shares[1:], axis=0)])
"""


@pytest.mark.parametrize("cores", [1, 0])
def test_buckets_leave_while_the_backward_pass_goes_on(cores, tmp_path):
    """Forward and backward of 8 equal layers are 23 products, and from the 10th on two give one more gradient.

    So the first is ready after 9/23 of the time, the 4th after 15/23. Two threads of XLA may do a gradient's product
    later than the next layer's; one layer late is allowed, and a tenth for what else there is.
    """
    (tmp_path / "job.py").write_text(HEAD.format(cores=cores) + EARLY)
    ended = mpirun(2, str(tmp_path / "job.py"), timeout_s=120)
    assert ended.code == 0, ended.out[-3000:]
    shares = json.loads(ended.out.split("shares")[1].splitlines()[0])
    assert shares[0] < 11 / 23 + 0.1
    assert shares[3] < 17 / 23 + 0.1
    assert shares == sorted(shares)


FAULTS = {
    "another size on rank 1": (
        "n = 1000 + 30000 * comm.rank\n"
        "step = jax.jit(lambda x: overlap.exchange({'conv1': x * 2}, portable=True))\n"
        "step(jnp.ones(n)).block_until_ready(); time.sleep(60)",
        "in the exchange of bucket 1 of 1 (conv1)",
    ),
    "rank 1 does not come": (
        "step = jax.jit(lambda x: overlap.exchange({'conv1': x * 2, 'conv2': x}, portable=True))\n"
        "if comm.rank != 1: step(jnp.ones(9)).block_until_ready()\n"
        "time.sleep(60)",
        "bucket 1 of 1 (conv2 and 1 more) has waited 3 s for rank 1",
    ),
    "rank 1 is killed": (
        "step = jax.jit(lambda x: overlap.exchange(x * 2))\n"
        "while True:\n"
        "    step(jnp.ones(300_000)).block_until_ready()\n"
        "    if comm.rank == 1: os.kill(os.getpid(), 9)",
        "",
    ),
    "rank 1 leaves": (
        "step = jax.jit(lambda x: overlap.exchange(x * 2))\n"
        "for i in range(10**6):\n"
        "    step(jnp.ones(300_000)).block_until_ready()\n"
        "    if comm.rank == 1: sys.exit(0)",
        "others had not",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_job(fault, tmp_path):
    code, message = FAULTS[fault]
    (tmp_path / "job.py").write_text(HEAD.format(cores=0) + code)
    env = {"JAXMPI_EXIT_TIMEOUT_S": "3", "JAXMPI_EXCHANGE_TIMEOUT_S": "3"}
    begin = time.monotonic()
    ended = mpirun(3, str(tmp_path / "job.py"), timeout_s=90, env=env)
    assert not ended.timed_out, ended.out[-3000:]
    assert ended.code != 0
    assert message in ended.out, ended.out[-3000:]
    assert time.monotonic() - begin < 60
    assert not survivors(str(tmp_path))


def survivors(path: str) -> list[str]:
    """Processes that still run a script of this folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if path.encode() in file.read() and session_of(int(pid)) != os.getsid(0):
                    found.append(pid)
        except OSError:
            continue
    return found


def test_a_job_ends_in_peace_with_an_exchange_under_way(tmp_path):
    """What is sent late in the last step is never asked for."""
    code = (
        "late = overlap.delayed_gradients('ring32')\n"
        "state = late.init(jnp.zeros(2_000_000))\n"
        "_, state = jax.jit(late.update)(jnp.ones(2_000_000), state)\n"
        "jax.block_until_ready(state)\n"
        "assert courier.jobs\n"
        "import atexit; atexit.register(lambda: print('alive', courier._thread.is_alive()))\n"
        "atexit.unregister(courier.stop); atexit.register(courier.stop)\n"
    )
    (tmp_path / "job.py").write_text(HEAD.format(cores=0) + code)
    ended = mpirun(2, str(tmp_path / "job.py"), timeout_s=60)
    assert ended.code == 0, ended.out[-3000:]
    assert ended.out.count("alive False") == 2


def test_where_mpi_allows_one_thread_a_line_says_so(tmp_path):
    code = (
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'\n"
        "import jaxmpi\nfrom jaxmpi import overlap\n"
        "print(overlap.chosen('auto', 'ring32', jaxmpi.world()))\n"
    )
    (tmp_path / "job.py").write_text(code)
    ended = mpirun(2, str(tmp_path / "job.py"), timeout_s=60)
    assert "MPI_THREAD_MULTIPLE" in ended.out, ended.out[-3000:]


ON_A_CLUSTER = """
n = 500_000
parts = [jnp.full(n, (comm.rank + 1.0) * (i + 1)) for i in range(3)]

@jax.jit
def step(parts):
    work = parts[0][:250_000].reshape(500, 500) * 1e-9
    late = jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), work)
    return overlap.exchange([parts[0] + 0 * late.sum(), parts[1] * 1, parts[2] * 1], "ring32", "sum")

for _ in range(3):
    courier.events.clear()
    sums = [np.asarray(total) for total in step(parts)]
for i, total in enumerate(sums):
    assert (total == comm.size * (comm.size + 1) / 2 * (i + 1)).all()
last = max(e.time_s for e in courier.events if e.what == "start")
assert len(set(comm.hosts)) == comm.size
print("summed before the last start:", sum(e.what == "summed" and e.time_s < last for e in courier.events))
"""


def test_between_hosts_with_slow_links_buckets_arrive_while_others_are_computed(tmp_path):
    (tmp_path / "job.py").write_text(HEAD.format(cores=0) + ON_A_CLUSTER)
    cluster = [sys.executable, "scripts/cluster.py", "--hosts", "3", "--rate", "500mbit", "--"]
    line = ["mpirun", "-n", "3", sys.executable, str(tmp_path / "job.py")]
    ended = run([*cluster, *line], timeout_s=120, cwd=ROOT, env={"TMPDIR": str(tmp_path)})
    if ended.code == 77:
        pytest.skip(ended.out.strip())
    assert ended.code == 0, ended.out[-3000:]
    assert ended.out.count("summed before the last start:") == 3
    assert "summed before the last start: 0" not in ended.out
