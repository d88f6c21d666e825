"""`--comm xla`: XLA's collectives over a jax.distributed job that MPI sets up, here gloo between CPU processes."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmpi.allreduce.algorithms import parse
from launching import PATH, ROOT, Ended, mpirun, train
from tolerances import WIRE, U

sys.path.insert(0, str(ROOT / "scripts"))

ON_CPU = {"JAX_PLATFORMS": "cpu"}
EXPERIMENT = """
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.config.optim import Optim
from jaxmpi.models.cnn import digits_cnn_tiny

experiment = Experiment(
    model=digits_cnn_tiny(),
    data=Data(source="digits", channels=1, mean=(0.305,), std=(0.376,)),
    optim=Optim("momentum", lr=0.05),
    effective_batch=60, train_for="20st", eval_every="20st", checkpoint_every="10st", log_every=1,
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny experiment, and the runs of this module."""
    made = tmp_path_factory.mktemp("xla")
    (made / "tiny.py").write_text(EXPERIMENT)
    return made


def trained(folder: Path, name: str, *args: str) -> Path:
    """The run directory of a run of four processes that went well."""
    ended = train(4, str(folder / "tiny.py"), "--run-dir", str(folder / name), *args, env=ON_CPU)
    assert ended.code == 0, ended.out
    return folder / name


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in record(run_dir, "train")]


def record(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The record's lines of a kind."""
    rows = [json.loads(line) for line in (run_dir / "record.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def params(run_dir: Path) -> np.ndarray:
    """f32[n]: of the last checkpoint, one leaf after another."""
    folder = run_dir / "checkpoints/step_00000020"
    index = json.loads((folder / "manifest.json").read_text())["files"]["common.bin"]
    raw = (folder / "common.bin").read_bytes()
    leaves = [row for row in index if row["path"].startswith("params")]
    return np.concatenate([np.frombuffer(raw, np.float32, int(np.prod(row["shape"])), row["offset"]) for row in leaves])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["asa16", "ar"])
def test_other_strategies_leave_what_they_leave_over_mpi(strategy, folder):
    mpi, xla = (
        trained(folder, f"{strategy}-{comm}", "--comm", comm, "--exchange.strategy", strategy)
        for comm in ("mpi", "xla")
    )
    assert_close(xla, mpi, strategy)


def assert_close(a: Path, b: Path, strategy: str) -> None:
    """Gradients are compiled apart, and so differ by rounding: sums of 60 x 64 terms in f32, and the wire's twice.

    A gradient's entry is below 4 here. The 20 updates of lr 0.05 at momentum 0.9 add at most ten of each to a param.
    """
    r, _ = WIRE[parse(strategy).name.partition(":")[2]]
    apart = 20 * 0.05 * 10 * 4 * (60 * 64 * U + 2 * 2 * r)
    np.testing.assert_allclose(params(a), params(b), rtol=0, atol=apart)
    if not r:
        np.testing.assert_allclose(losses(a), losses(b), rtol=0, atol=U * 60 * 2.3 * 20)  # as in test_train.py


@pytest.mark.slow  # compiles every strategy; over devices of one process they are in test_strategies.py
@pytest.mark.parametrize("which", ["all", "each once"])
def test_strategies_and_compressors_in_a_shard_map_of_ones_own(which):
    env = ON_CPU | {"PYTHONPATH": f"{PATH}:{ROOT / 'tests'}"}
    ended = mpirun(4, "tests/allreduce/over_xla.py", which, timeout_s=240, env=env)
    assert ended.code == 0, ended.out
    assert ended.out.count(" strategies and 2 compressors\n") == 4


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
    "absent": ("if rank == 1: time.sleep(100)", "rank [1] did not answer in time"),
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
def test_one_rank_fails_and_the_job_ends(fault, folder):
    code, message = FAULTS[fault]
    ended = job(folder, fault, "", code, {"JAXMPI_EXIT_TIMEOUT_S": "2"})
    assert message in ended.out, ended.out[-3000:]


@pytest.mark.e2e
@pytest.mark.parametrize("start", ["device_used", *slow("absent", "other_mesh")])
def test_a_start_that_cannot_be_is_named(start, folder):
    code, message = STARTS[start]
    ended = job(folder, start, code, "pass", {"JAXMPI_AGREE_TIMEOUT_S": "3"})
    assert message in ended.out, ended.out[-3000:]
    assert "Traceback" not in ended.out
