"""`--comm xla`: XLA's collectives over a jax.distributed job that MPI sets up, here gloo between CPU processes."""

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from launching import PATH, ROOT, Ended, mpirun

ON_CPU = {"JAX_PLATFORMS": "cpu"}


@pytest.mark.slow  # compiles every strategy; over devices of one process they are in test_strategies.py
def test_strategies_in_a_shard_map_of_ones_own():
    env = ON_CPU | {"PYTHONPATH": f"{PATH}:{ROOT / 'tests'}"}
    ended = mpirun(4, "tests/allreduce/over_xla.py", timeout_s=240, env=env)
    assert ended.code == 0, ended.out
    assert ended.out.count(" strategies\n") == 4


@pytest.mark.e2e
def test_the_example_in_the_docs(tmp_path):
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/launching.md").read_text(), re.S)
    (tmp_path / "example.py").write_text(example)
    ended = mpirun(2, str(tmp_path / "example.py"), timeout_s=60, env=ON_CPU)
    assert ended.code == 0, ended.out
    assert ended.out.count("[[0.5 0.5 0.5]]") == 2


# ---------------------------------------------------------------- how a job ends

WORK = """
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxmpi
from jaxmpi.comm.xla_mesh import global_mesh
from jaxmpi.comm.job import processes

rank = processes().rank
{before}
mesh, comm = global_mesh()
along = NamedSharding(mesh, P("workers"))
mean = jax.jit(jax.shard_map(
    lambda x: jaxmpi.exchange(x, "ring32", comm=comm), mesh=mesh, in_specs=P("workers"), out_specs=P("workers"),
    check_vma=False))
x = jax.make_array_from_process_local_data(along, np.ones((1, 1000), np.float32))
mean(x).block_until_ready()
if rank == 1:
    {fault}
for i in range(10**6):
    mean(x).block_until_ready()
"""
FAULTS = {
    "raise": ("raise ValueError('boom')", "ValueError: boom"),
    "exit_0_early": ("sys.exit(0)", "others had not"),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(100)", ""),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", ""),
}
STARTS = {
    "absent": ("if rank == 1: time.sleep(100)", f"rank 1 on {socket.gethostname()} did not answer in time"),
    "device_used": ("jnp.zeros(1)", "must be called before any JAX calls"),
    "other_mesh": ("if rank == 1: global_mesh('w')", "rank 1: axis: got w, expected workers (rank 0)"),
}


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def job(folder: Path, name: str, before: str, fault: str, env: dict[str, str]) -> Ended:
    (folder / f"{name}.py").write_text(WORK.format(before=before, fault=fault))
    ended = mpirun(2, str(folder / f"{name}.py"), timeout_s=60, env=ON_CPU | env)
    assert not ended.timed_out, ended.out[-3000:]
    assert ended.code != 0
    return ended


@pytest.mark.e2e
@pytest.mark.parametrize("fault", ["raise", "terminated", *slow("exit_0_early", "killed")])
def test_one_rank_fails_and_the_job_ends(fault, tmp_path):
    code, message = FAULTS[fault]
    ended = job(tmp_path, fault, "", code, {"JAXMPI_EXIT_TIMEOUT_S": "2"})
    assert message in ended.out, ended.out[-3000:]


@pytest.mark.e2e
@pytest.mark.parametrize("start", ["device_used", *slow("absent", "other_mesh")])
def test_a_start_that_cannot_be_is_named(start, tmp_path):
    code, message = STARTS[start]
    ended = job(tmp_path, start, code, "pass", {"JAXMPI_AGREE_TIMEOUT_S": "3"})
    assert message in ended.out, ended.out[-3000:]
    assert "Traceback" not in ended.out
