"""Parts of the overlapped exchange that need no other rank; and jobs in which it starts early, fails, or ends."""

import os
import re
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jaxmpi.allreduce import overlap
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.models.cnn import digits_cnn
from jaxmpi.trainer.build import overlap_obstacle
from jaxmpi.trainer.plan import make_plan
from launching import CLUSTER, NOT_PERMITTED, ROOT, is_job, mpirun, run
from runs import TINY


@pytest.mark.parametrize(
    ("asked", "comm", "unfit", "line"),
    [
        ("auto", SoloComm(), "", "overlap off: no other worker takes part in a step"),
        ("on", SoloComm(), "the step is split", "overlap off: the step is split"),
        ("off", AxisComm("w", 2), "", "overlap off: as set"),
        ("auto", AxisComm("w", 2), "", "overlap off: workers are not MPI ranks"),
    ],
)
def test_where_there_is_no_overlap_a_line_says_why(asked, comm, unfit, line):
    assert overlap.resolve(asked, "ring32", comm, unfit) == (False, line)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="got on, but workers are not MPI ranks; use off or auto"):
        overlap.resolve("on", "ring32", AxisComm("w", 2))


def test_one_worker_exchanges_nothing():
    tree = {"a": jnp.arange(3.0), "b": jnp.ones((), jnp.bfloat16)}
    same = jax.jit(lambda t: overlap.exchange(t, comm=SoloComm()))(tree)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), same, tree))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: overlap.exchange(jnp.ones(2), comm=SoloComm()), "for use inside jax.jit"),
        (lambda: jax.jit(lambda x: overlap.exchange({"n": x}, comm=SoloComm()))(jnp.arange(3)), "leaf 'n' is int32"),
        (lambda: jax.jit(lambda x: overlap.exchange(x, "topk1", comm=SoloComm()))(jnp.ones(3)), "exchange_gradients"),
    ],
)
def test_wrong_use(call, message):
    with pytest.raises(UsageError, match=message):
        call()


# ---------------------------------------------------------------- jobs

HEAD = """
import os, sys, time
import numpy as np, jax, jax.numpy as jnp
import jaxmpi
from jaxmpi.allreduce import overlap
from jaxmpi.allreduce.comm_thread import exchange_handlers
from jaxmpi.runtime import progress
comm = jaxmpi.world()
"""


STEP = "step = jax.jit(lambda x: overlap.exchange({'conv1': x * 2, 'conv2': x * 3}))\n"
ON_AND_ON = "for i in range(10**6):\n    step(jnp.ones(300_000)).popitem()[1].block_until_ready()\n"
FAULTS = {  # what ranks do, what is said (a pattern), and the one time limit in it, by name and seconds
    "rank 1 comes once": (
        STEP + "for i in range(2 - comm.rank % 2): step(jnp.ones(9))\ntime.sleep(60)",
        r"waited \d+ s (in exchange 1 of the job \(beside its program: .*\) for rank 1|for rank 1 on )",
        {"EXCHANGE": "2"},
    ),
    "rank 1 raises": (
        STEP + ON_AND_ON + "    if comm.rank == 1 and i: raise ValueError('boom')",
        "ValueError: boom",
        {},
    ),
}


@pytest.mark.e2e
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_job(fault, tmp_path):
    code, message, limits_s = FAULTS[fault]
    env = {f"JAXMPI_{limit}_TIMEOUT_S": seconds for limit, seconds in limits_s.items()}
    begin = time.monotonic()
    ended = job(tmp_path, HEAD + code, env=env)
    assert not ended.timed_out, ended.out[-3000:]
    assert ended.code != 0
    assert re.search(message, ended.out), ended.out[-3000:]
    assert "jaxmpi: rank " in ended.out
    assert time.monotonic() - begin < 60
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and is_job(pid, str(tmp_path))]


def job(folder, code: str, **options):
    (folder / "job.py").write_text(code)
    return mpirun(2, str(folder / "job.py"), timeout_s=90, **options)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"micro_batch": 8}, "with gradient accumulation"),
        ({"micro_batch": 16}, ""),  # the local batch
    ],
)
def test_steps_that_cannot_hide_an_exchange(fields, reason):
    workers = Workers(SoloComm(), SoloProcesses(), (0,), None)
    experiment = Experiment(digits_cnn(), effective_batch=16, data=Data("digits", channels=1), **fields)
    obstacle = overlap_obstacle(make_plan(experiment, workers))
    assert obstacle.startswith(reason) if reason else not obstacle


# ---------------------------------------------------------------- between hosts

ON_A_CLUSTER = """
n = 500_000
parts = [jnp.full(n, (comm.rank + 1.0) * (i + 1)) for i in range(3)]

@jax.jit
def step(parts):
    work = parts[0][:250_000].reshape(500, 500) * 1e-9
    late = jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), work)
    return overlap.exchange([parts[0] + 0 * late.sum(), parts[1] * 1, parts[2] * 1], "ring32", "sum")

for _ in range(3):
    progress.drain()
    sums = [np.asarray(total) for total in step(parts)]
for i, total in enumerate(sums):
    assert (total == comm.size * (comm.size + 1) / 2 * (i + 1)).all()
travels = [span for span in progress.drain() if span.track == "travel"]
last = max(span.begin_s for span in travels)
assert len(set(comm.hosts)) == comm.size
print("summed before the last start:", sum(span.end_s < last for span in travels))
"""


def on_a_cluster(tmp_path, hosts: int, *command: str) -> str:
    """What a job with a rank on each of some emulated hosts prints."""
    line = [*CLUSTER, "--hosts", str(hosts), "--rate", "500mbit", "--", "mpirun", "-n", str(hosts), sys.executable]
    ended = run([*line, *command], timeout_s=120, cwd=ROOT, env={"TMPDIR": str(tmp_path)})
    if ended.code == NOT_PERMITTED:
        pytest.skip(ended.out.strip())
    assert ended.code == 0, ended.out[-3000:]
    return ended.out


@pytest.mark.e2e
@pytest.mark.slow  # of times
def test_between_hosts_with_slow_links_buckets_arrive_while_others_are_computed(tmp_path):
    (tmp_path / "job.py").write_text(HEAD + ON_A_CLUSTER)
    out = on_a_cluster(tmp_path, 3, str(tmp_path / "job.py"))
    assert out.count("summed before the last start:") == 3
    assert "summed before the last start: 0" not in out


@pytest.mark.e2e
def test_between_hosts_a_run_overlaps_by_itself(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    options = "--exchange.strategy", "ring16", "--train-for", "3st", "--run-dir", str(tmp_path / "run")
    out = on_a_cluster(tmp_path, 2, "-m", "jaxmpi.train", str(tmp_path / "tiny.py"), *options)
    assert "fused form: one jit; overlap on: ranks are on 2 hosts" in out
