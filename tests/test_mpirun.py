"""Real jobs: what works over MPI of 2, 3, 4 and, by hand, 8 ranks, and how a job ends when a rank fails."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxmpi.runtime import job_folder
from launching import PATH, ROOT, Ended, is_job, leaked, mpirun, mpirun_line, run, shared_memory, wait_until

HEAD = "import os, sys, time, threading, signal\nimport numpy as np\nimport jaxmpi\n"
HEAD += "comm = jaxmpi.world()\nx = np.ones(1000, np.float32)\njaxmpi.exchange(x).block_until_ready()\n"
WORK = "for i in range(10**6): jaxmpi.exchange(x).block_until_ready()"


CORE, COLLECTIVES, PARTITION = (
    f"tests/ranks/test_{name}_over_mpi.py" for name in ("exchange", "collectives", "data_in_memory")
)
OF_THREE = "sum_equals or sums_are or between or permute or roots or in_the_order or every_length or subcom"
OF_THREE += " or of_linear or mapped_a"
ALL = ["tests/ranks", "-m", "not slow and not faults"]
MORE_RANKS = [  # by two, a + b = b + a hides the order of ranks
    (3, [CORE, COLLECTIVES, "-k", OF_THREE, *ALL[1:]]),
    (4, [PARTITION, "-k", "conserve"]),  # in groups of two a rank reads some records and is sent others
    *(pytest.param(ranks, ALL, marks=pytest.mark.slow) for ranks in (3, 4, 8)),
]


@pytest.mark.timeout(700)
def test_suite_over_mpi(request):
    """All of it if this run has tests that start processes."""
    is_quick = "not e2e" in request.config.option.markexpr
    passes_over_mpi(2, ["tests/ranks"] if is_quick else ALL)


@pytest.mark.e2e
@pytest.mark.timeout(700)
@pytest.mark.parametrize(("ranks", "suite"), MORE_RANKS)
def test_suite_over_mpi_of_more_ranks(ranks, suite):
    passes_over_mpi(ranks, suite)


def passes_over_mpi(ranks: int, suite: list[str]) -> None:
    limit_s = 600
    ended = mpirun(ranks, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *suite, timeout_s=limit_s)
    assert ended.code == 0, ended.out[-4000:]
    assert ended.out.count(" passed") == ranks


CALLS = """
import jax, jax.numpy as jnp, jaxmpi
from jaxmpi import collectives as mpi
from jaxmpi.comm import mpi_calls
rank, x = jaxmpi.world().rank, jnp.arange(6.0).reshape(2, 3) + jaxmpi.world().rank
for jit in (lambda f: f, jax.jit):
    calls = [
        lambda x: jaxmpi.exchange({"x": x, "b": x.astype(jnp.bfloat16)}, "ring16"),
        *(lambda x, f=f: f(x) for f in (mpi.allgather, mpi.alltoall, mpi.scan, mpi.exscan, mpi.reduce_scatter)),
        *(lambda x, f=f: f(x, root=1) for f in (mpi.bcast, mpi.reduce, mpi.gather)),
        lambda x: mpi.scatter(x if rank == 0 else x[0], root=0),
        lambda x: mpi.allreduce(x > 3, "and"),
        lambda x: mpi.sendrecv(x, x, source=1 - rank, dest=1 - rank),
    ]
    results = [jax.tree.leaves(jit(call)(x)) for call in calls]
    mpi.barrier()
    print("" if rank else [(y.dtype.name, y.tolist()) for leaves in results for y in leaves], flush=True)
part = jaxmpi.world().split(0)
mpi.allreduce(x, comm=part)
part.free()
assert all(x or x is None for x in mpi_calls._objects.values())  # a communicator is false once it is freed
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Ended:
    """What ranks compute with mpi4jax."""
    job = tmp_path_factory.mktemp("calls") / "job.py"
    job.write_text(CALLS)
    return mpirun(2, str(job), timeout_s=60)


@pytest.mark.e2e
@pytest.mark.parametrize("compiler", [{}, {"CC": "false"}], ids=["C", "no C compiler"])
def test_programs_give_the_same_where_mpi4jax_cannot_be_imported(compiler, expected, tmp_path):
    (tmp_path / "job.py").write_text(CALLS)
    (tmp_path / "mpi4jax.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')")
    env = {"PYTHONPATH": f"{tmp_path}:{PATH}", "XDG_CACHE_HOME": str(tmp_path), **compiler}
    ended = mpirun(2, str(tmp_path / "job.py"), timeout_s=100, env=env)
    assert (expected.code, ended.code) == (0, 0), ended.out
    assert ended.out.count("mpi4jax cannot be imported (libmpi.so.40") == 1
    assert ("handlers in C cannot be made" in ended.out) is bool(compiler)
    assert {*expected.out.splitlines()} <= {*ended.out.splitlines()}


FAULTS = {
    "raise": ("raise ValueError('boom')", "ValueError: boom"),
    "raise_in_thread": ("threading.Thread(target=lambda: 1 / 0).start()", "ZeroDivisionError"),
    "exit_0_early": ("sys.exit(0)", "for rank 1, whose script has ended"),
    "hard_exit": ("os._exit(0)", ""),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", ""),
}

IN_SHARED_MEMORY = ("raise", "hard_exit", "killed")  # what ranks do then


SLOW = ("exit_0_early", "raise_in_thread", "killed")  # like another one


@pytest.mark.e2e
@pytest.mark.parametrize("fault", [pytest.param(f, marks=pytest.mark.slow if f in SLOW else ()) for f in FAULTS])
def test_one_rank_fails_and_the_job_ends(fault, tmp_path):
    code, message = FAULTS[fault]
    before, others = "", WORK
    if fault in IN_SHARED_MEMORY:
        others = WORK.replace("(x)", "(x, 'shm')")
        before = "jaxmpi.exchange(x, 'shm').block_until_ready()\n"
    (tmp_path / "job.py").write_text(f"{HEAD}{before}if comm.rank == 1:\n    {code}\n{others}\n")
    begin, segments = time.monotonic(), shared_memory()
    ranks = 3 if fault in ("hard_exit", "killed") else 2
    ended = mpirun(ranks, str(tmp_path / "job.py"), timeout_s=60, env={"JAXMPI_EXIT_TIMEOUT_S": "30"})
    assert not ended.timed_out, ended.out[-3000:]
    assert ended.code != 0
    assert message in ended.out, ended.out[-3000:]
    if message and "early" not in fault:
        assert f"rank 1/{ranks} on " in ended.out
    assert time.monotonic() - begin < 50
    patience_s = (
        0.1 if "--bind-to" in mpirun_line(3) else 3
    )  # MPICH's mpirun ends a moment before the ranks that it kills
    wait_until(lambda: not any(is_job(pid, str(tmp_path)) for pid in os.listdir("/proc") if pid.isdigit()), patience_s)
    assert not [name for name in leaked(segments) if name.startswith("jaxmpi-")]


LATE = "from jaxmpi.comm import control\ncontrol.LATE_S = 1\n"  # which ranks have to say that they are here


NOTICED = """
import os, pathlib, time
from jaxmpi.recover import signals
notice = signals.PreemptionNotice()
print("ready", flush=True)
while not notice.is_given:
    time.sleep(0.01)
notice.say_saved(print if os.environ["OMPI_COMM_WORLD_RANK"] == "0" else str, 7, pathlib.Path("run"))
"""


@pytest.mark.e2e
def test_a_plain_mpirun_that_is_asked_to_end_shows_what_was_saved(tmp_path):
    """Ctrl-C and SIGTERM: it forwards nothing more of its ranks, and kills them a quarter of a second later."""
    (tmp_path / "job.py").write_text(NOTICED)
    line = job_folder.remove_leftovers_first([*mpirun_line(2), sys.executable, str(tmp_path / "job.py")])
    job = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert job.stdout is not None
    with job:
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        job.send_signal(signal.SIGINT)
        out = job.stdout.read()
    assert "asked to leave: saved at step 7; go on with --resume --run-dir run" in out.splitlines()


# When the first of the ranks that come gives up, the second has not waited as long by more than it is given to answer.
@pytest.mark.e2e
def test_a_rank_that_came_late_but_waits_is_not_called_absent(tmp_path):
    (tmp_path / "job.py").write_text(
        f"{HEAD}{LATE}time.sleep((0, 2, 100)[int(comm.rank)])\njaxmpi.exchange(np.ones(7, np.float32))\n"
    )
    ended = mpirun(3, str(tmp_path / "job.py"), timeout_s=60, env={"JAXMPI_AGREE_TIMEOUT_S": "3"})
    assert not ended.timed_out
    assert f"exchange: rank 2 on {socket.gethostname()} did not answer in time" in ended.out, ended.out[-3000:]


@pytest.mark.e2e
def test_launcher_and_mpi_of_different_families_are_named():
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    ended = run([sys.executable, "-c", "import jaxmpi; jaxmpi.world()"], timeout_s=60, env=env, cwd=ROOT)
    assert ended.code != 0
    assert "Open MPI's mpirun" in ended.out
    assert "started 4 ranks" in ended.out
    assert "Open MPI v5" in ended.out


FORKS = """
named = jaxmpi.shared(np.ones(3), name=sys.argv[1])
child = os.fork()
if child == 0 and comm.rank == 0:
    sys.exit(3)
if child == 0:
    raise ValueError("boom")
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert os.path.exists(named.path)
total = jaxmpi.exchange(np.ones(3, np.float32), op="sum")
print(f"child of {comm.rank}: {code}, sum {total[0]}", flush=True)
"""


@pytest.mark.e2e
def test_a_forked_child_ends_without_its_parents_job(tmp_path):
    (tmp_path / "job.py").write_text(HEAD + FORKS)
    ended = mpirun(2, "-W", "ignore", str(tmp_path / "job.py"), tmp_path.name, timeout_s=60)  # JAX warns of forks
    assert ended.code == 0, ended.out[-3000:]
    assert "child of 0: 3, sum 2.0" in ended.out
    assert "child of 1: 1, sum 2.0" in ended.out
    assert "jaxmpi: rank" not in ended.out


@pytest.mark.e2e
@pytest.mark.parametrize(
    "end",
    ["", pytest.param("from mpi4py import MPI\nMPI.Finalize()\n", marks=pytest.mark.slow)],
    ids=["exit", "finalize"],
)
def test_a_script_may_end_with_exchanges_that_nobody_has_waited_for(end, tmp_path):
    """MPI ends after mpi4jax's hook, which waits for them; before it, ranks would end each other."""
    (tmp_path / "job.py").write_text(
        "import jax, jax.numpy as jnp, jaxmpi\n"
        "from jaxmpi.allreduce import overlap\n"
        "jaxmpi.world()\n"
        "x, f = jnp.ones(1 << 22), jax.jit(lambda x: jaxmpi.exchange(x, 'asa32'))\n"
        "beside = jax.jit(lambda x: overlap.exchange(2 * x))\n"
        "f(x).block_until_ready()\nbeside(x).block_until_ready()\n"
        "for _ in range(20):\n    y, z = f(x), beside(x)\n" + end
    )
    ended = mpirun(2, str(tmp_path / "job.py"), timeout_s=60)
    assert (ended.code, ended.timed_out, ended.out) == (0, False, "")
