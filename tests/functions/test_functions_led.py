"""A script that leads workers: made by fork, or ranks of mpirun. It runs once; what fails is named; nothing hangs."""

import os
import sys

import pytest

from launching import CLUSTER, NOT_PERMITTED, PATH, ROOT, mpirun, run

ENV = {"PYTHONPATH": f"{PATH}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
NOTHING: dict[str, str] = {}
HEAD = """
import os, resource, signal, sys, threading, time
import numpy as np, jax, jax.numpy as jnp
import jaxmpi
from jaxmpi import functions as jm
"""
ALL_CHECKS = """
import function_checks
if __name__ == "__main__":
    n = jm.fork({n})
    print("script of", n, flush=True)
    for check in function_checks.{which}:
        check()
    with jm.profile() as profile:  # workers end in a profile of no call
        jm.close()
    assert not profile.rows
    print("all checks pass", flush=True)
"""


def lead(tmp_path, text: str, n: int = 2, ranks: int = 0, env=NOTHING, code: int | None = 0, timeout_s: float = 100):
    """Run a script that forks `n` workers, or under mpirun with `ranks`; return what it prints.

    It ends in time, with this exit code; None: any but 0.
    """
    script = write_script(tmp_path, text.replace("{n}", "" if ranks else str(n)))
    if ranks:
        ended = mpirun(ranks, script, timeout_s=timeout_s, env=ENV | env)
    else:
        ended = run([sys.executable, script], timeout_s=timeout_s, env=ENV | env)
    assert not ended.timed_out, ended.out[-4000:]
    assert ended.code == code if code is not None else ended.code != 0, ended.out[-4000:]
    return ended.out


def write_script(tmp_path, text: str) -> str:
    (tmp_path / "script.py").write_text(HEAD + text)
    return str(tmp_path / "script.py")


def run_on_cluster(hosts: int, slots: int, env=NOTHING, *job: str):
    """Run a job on emulated hosts, or skip."""
    line = [*CLUSTER, "--hosts", str(hosts), "--slots", str(slots), "--", "mpirun", "-n", str(hosts * slots)]
    ended = run([*line, sys.executable, *job], timeout_s=200, env=ENV | env)
    if ended.code == NOT_PERMITTED:
        pytest.skip(ended.out.strip())
    assert not ended.timed_out, ended.out[-4000:]
    return ended


QUICK = [(2, 0, "CORE")]
WHOLE = [
    pytest.param(n, r, which, marks=pytest.mark.slow)
    for which, jobs in {"CHECKS": [(1, 0), (3, 0), (0, 3)], "CORE": [(8, 0), (0, 8)]}.items()
    for n, r in jobs
]


@pytest.mark.e2e
@pytest.mark.parametrize(("n", "ranks", "which"), [*QUICK, *WHOLE])
def test_checks_hold_for_a_script_that_leads(n, ranks, which, tmp_path):
    out = lead(tmp_path, ALL_CHECKS.replace("{which}", which), n, ranks, timeout_s=200)
    assert out.count(f"script of {n or ranks}") == 1
    assert out.count("all checks pass") == 1


FAULTS = """
from jax.experimental import io_callback
from jaxmpi.functions.lifecycle import current_group

def says_pid(x):
    assert sys.argv[1:] == ["--rows", "4"]
    return jax.pure_callback(lambda v: np.int32(os.getpid()), jax.ShapeDtypeStruct((), jnp.int32), x.max())

def dies(x):
    def die(v):
        if v == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return v
    return jax.pure_callback(die, jax.ShapeDtypeStruct((), jnp.float32), x.max())

MASTER = os.getpid()

def unreadable(x):
    if os.getpid() != MASTER:
        raise ValueError("cannot read " + os.fsdecode(b"data-\\xff.npy"))  # no UTF-8
    return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), jnp.float32), x.max())

steps = []
def counts(x):
    def step(v):
        steps.append(v)
        return np.int32(len(steps))
    return io_callback(step, jax.ShapeDtypeStruct((), jnp.int32), x.sum(), ordered=True)

def forks(x):
    def fork(v):
        if v == 3:
            jm.fork(2)
        return v
    return jax.pure_callback(fork, jax.ShapeDtypeStruct((), jnp.float32), x.max())

def starves(x):
    def starve(v):
        if v == 3:  # what lies there already is more than this process may still take
            pages = int(open("/proc/self/statm").read().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20),) * 2)
        return v
    return jax.pure_callback(starve, jax.ShapeDtypeStruct((), jnp.float32), x.max())

def tell(call):
    begin = time.monotonic()
    try:
        print("got", call(), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    print("after a while" if time.monotonic() - begin > 20 else "soon", flush=True)

if __name__ == "__main__":
    x = np.arange(4, dtype=np.float32)
    sys.argv += ["--rows", "4"]
    sys.stdout.reconfigure(errors="backslashreplace")
    jm.fork(2)
    tell(lambda: jm.fork(2))
    pids = jm.function(says_pid, jm.scatter, jm.local)(x)
    assert pids.get(0) == os.getpid() != pids.get(1)
    f = jm.function(lambda x: x.sum(), jm.scatter, jm.sum)
    tell(lambda: f(x))
    tell(lambda: jm.function(forks, jm.scatter, jm.max)(x))
    counted = jm.function(counts, jm.scatter, jm.local)
    each = [counted(np.ones(n, np.float32)) for n in (4, 4, 5)]
    tell(lambda: [[int(v.get(rank)) for v in each] for rank in range(2)])
    tell(lambda: jm.function(unreadable, jm.scatter, jm.max)(x))
    shared = jaxmpi.shared(x)
    path, shared.path = shared.path, "/nowhere/array"
    tell(lambda: f(shared))
    shared.path = path
    tell(lambda: f(shared))
    lock = threading.Lock()
    hidden = lambda x: jax.pure_callback(lambda v: (lock, v)[1], jax.ShapeDtypeStruct((), jnp.float32), x.max())
    tell(lambda: jm.function(hidden, jm.scatter, jm.max)(x))
    tell(lambda: jm.function(lambda x: x.sum(), jm.scatter, jm.sum, strategy="ring16")(x))
    tell(lambda: f(x))
    tell(lambda: jm.function(dies, jm.scatter, jm.max)(x))
    tell(lambda: f(x))
    jm.close()
    tell(lambda: f(x))
    print("workers", jm.fork(2), flush=True)
    os.kill(current_group().transport.jobs[1].pid, signal.SIGSTOP)
    os.kill(current_group().transport.jobs[1].pid, signal.SIGKILL)
    tell(lambda: jm.variable(np.float32(1)).all_reduce())
    jm.close()
    jm.fork(2)
    tell(lambda: jm.function(lambda x: x.sum(), jm.scatter, jm.sum)(x))
    big = jm.function(lambda x: jnp.zeros(1 << 25) + x.sum(), jm.scatter, jm.local)(x)
    jm.function(starves, jm.scatter, jm.max)(x)
    tell(lambda: big.all_reduce("max"))
"""
NO_RESERVE = {"JAXMPI_ALLOCATOR": "system"}  # of addresses for the heap, which no later limit takes away
EXPECTED = [
    "UsageError: fork: there are 2 workers already",
    "got 6.0",
    "WorkerFailed: forks: worker 1 of 2 failed:",
    "this process is a worker already",
    "got [[1, 2, 3], [2, 3, 4]]",  # sent after one call; who lacks a program lets nobody else compute twice
    "WorkerFailed: unreadable: worker 1 of 2 failed:",
    r"cannot read data-\udcff.npy",
    "/nowhere/array cannot be opened here",
    "got 6.0",  # what cannot be unpickled is reported as well
    "UsageError: <lambda> calls back into Python",
    "got 6.0",
    "got 6.0",
    "WorkerDied: worker 1 of 2 (process ",
    "has ended: killed by SIGKILL",
    "UsageError: the workers are no longer in step: worker 1 of 2",
    "UsageError: the workers have been closed",
    "workers 2",
    "WorkerDied: worker 1 of 2",
    "got 6.0",
    "MemoryError",  # past its report: the master must not wait
    "has ended: exit code 1",
]


@pytest.mark.e2e
def test_what_goes_wrong_in_forked_workers_is_named_and_nothing_hangs(tmp_path):
    out = lead(tmp_path, FAULTS, env=NO_RESERVE)
    assert "after a while" not in out
    for text in EXPECTED:
        assert text in out, f"{text!r} not in:\n{out}"
        out = out[out.index(text) + len(text) :]
    assert not left_over(str(tmp_path))


COMPUTES = """
from jaxmpi.functions.lifecycle import current_group

def computes(x):
    def compute(v):
        end = time.monotonic() + 3  # beyond the limit
        while time.monotonic() < end:
            pass
        return v
    return jax.pure_callback(compute, jax.ShapeDtypeStruct((), jnp.float32), x.max())

if __name__ == "__main__":
    jm.fork({n})
    x = np.arange(4, dtype=np.float32)
    print("computed", float(jm.function(computes, jm.scatter, jm.max)(x)), flush=True)
"""
STOPPED = """
    os.kill(current_group().transport.jobs[1].pid, signal.SIGSTOP)
    try:
        jm.variable(np.zeros(1 << 22, np.float32))  # more than a socket holds
    except jaxmpi.TrainingError as error:
        print(error, flush=True)
    jm.close()
    jm.fork(2)
    print("again", float(jm.function(lambda x: x.sum(), jm.scatter, jm.sum)(x)), flush=True)
"""


@pytest.mark.e2e
def test_a_stopped_worker_is_named_and_one_that_computes_is_not_late(tmp_path):
    out = lead(tmp_path, COMPUTES + STOPPED, env={"JAXMPI_EXCHANGE_TIMEOUT_S": "1"})
    for text in ("computed 3.0", "killed by SIGKILL, having been stopped for 1 s", "again 6.0"):
        assert text in out
    assert not left_over(str(tmp_path))


def left_over(path: str) -> list[str]:
    """Processes that still run a script of this folder, or wait for one."""
    lines = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read().decode().replace("\0", " ")
        except OSError:
            continue
        if path in line:
            lines.append(line)
    return lines


@pytest.mark.e2e
def test_workers_end_with_a_killed_master(tmp_path):
    script = "jm.fork(2)\njm.function(lambda x: x.sum(), jm.scatter, jm.sum)(np.ones(4, np.float32))\n"
    lead(tmp_path, f"{script}os.kill(os.getpid(), signal.SIGKILL)", code=-9)  # its pipe closes when the last has ended


@pytest.mark.slow
def test_every_process_of_the_user_sees_a_named_array(tmp_path):
    name = f"test-{os.getpid()}"
    other = f"from jaxmpi import functions as jm; a = jm.shared(name={name!r}); print(a[:].tolist()); a[1] = 7"
    script = f"""
import subprocess
a = jm.shared(np.float32([1, 2, 3]), name={name!r})
print(subprocess.run([sys.executable, "-c", {other!r}], capture_output=True, text=True, check=True).stdout)
print(a[:].tolist())
try: jm.shared(np.float32([1]), name={name!r})
except jaxmpi.UsageError as error: print(error)
a.free()
b = jm.shared(np.float32([4]), name={name!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    out = lead(tmp_path, script, code=-9)
    for text in ("[1.0, 2.0, 3.0]", "[1.0, 7.0, 3.0]", f"the name '{name}' is taken"):
        assert text in out
    second_script = f"a = jm.shared(np.float32([5]), name={name!r}); print(a[:], a.path)"  # its maker is dead
    out = lead(tmp_path, second_script)
    assert "[5.]" in out
    assert not os.path.exists(out.split()[-1])


OVER_HOSTS = """
import function_checks
from function_checks import CORE, check_shared
led = sys.argv[1] == "led"
if __name__ == "__main__":
    if led:
        jm.fork()
        f, x = jm.function(lambda x: x.sum(), jm.scatter, jm.sum), jm.shared(np.ones(9, np.float32))
        function_checks.fails(lambda: f(x), "a shared array is seen on one host")
    here = jm.function(lambda x: x.sum(), jm.scatter, jm.sum, strategy="shm")
    function_checks.fails(lambda: here(np.ones(9, np.float32)), "got workers on 2 hosts: use hier-ring or asa")
    for check in CORE:
        if not (led and check is check_shared):
            check()
    print("all checks pass", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["led", "ranks"])
def test_checks_hold_over_several_hosts(mode, tmp_path):
    ended = run_on_cluster(2, 2, NOTHING, write_script(tmp_path, OVER_HOSTS), mode)
    assert ended.code == 0, ended.out[-4000:]
    assert ended.out.count("all checks pass") == (1 if mode == "led" else 4)
