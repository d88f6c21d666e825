"""Real jobs for tests: mpirun with a hard time limit, killed by session so that no rank outlives a test."""

import contextlib
import fcntl
import functools
import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from jaxmpi.config import experiment_file
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.launch import command
from jaxmpi.launch.options import Options
from jaxmpi.runtime import failures, job_folder, provenance
from jaxmpi.trainer import main

ROOT = Path(__file__).parent.parent
PATH = f"{ROOT / 'tests' / 'at_start'}:{ROOT}"  # for Python in jobs
CLUSTER = [sys.executable, "scripts/cluster.py"]  # emulated hosts
NOT_PERMITTED = 77  # its exit code if namespaces are not allowed
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "PYTEST_XDIST_")


class Ended(NamedTuple):
    """How a job ended."""

    code: int
    out: str  # stdout and stderr together
    timed_out: bool


def run(line: list[str], *, timeout_s: float, env: dict[str, str] | None = None, cwd: Path = ROOT) -> Ended:
    """Run a command line in a session of its own; everything in it is killed when time is up."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    job = subprocess.Popen(
        job_folder.remove_leftovers_first(line),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=clean | {"PYTHONPATH": PATH} | (env or {}),
        start_new_session=True,
    )
    try:
        out, _ = job.communicate(timeout=timeout_s)
        return Ended(job.returncode, out, False)
    except subprocess.TimeoutExpired:
        kill_session(job.pid)
        out, _ = job.communicate()
        return Ended(-9, out, True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "200k", inodes: int = 0) -> Iterator[Path]:
    """A file system of so many bytes, and of so many names if there is a number; skips the test without the right."""
    folder.mkdir(exist_ok=True)
    options = f"size={size}" + f",nr_inodes={inodes}" * bool(inodes)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True, timeout=20
    )
    if mounted.returncode:
        pytest.skip(f"a small disk takes the right to mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def kill_session(leader: int) -> None:
    """SIGKILL every process of a session; ranks have process groups of their own."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and session_of(int(entry.name)) == leader:
            try:
                os.kill(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:
                continue


def session_of(pid: int) -> int:
    """The session a process belongs to; 0 where it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@functools.cache  # asks mpirun for its version
def mpirun_line(ranks: int) -> list[str]:
    """The launcher's part of the line that `jaxmpi train -n ranks` uses on this machine."""
    return command.mpirun(Options(ranks, "mpirun", (), ()), len(os.sched_getaffinity(0)), os.geteuid() == 0)


def mpirun(ranks: int, *args: str, timeout_s: float, env: dict[str, str] | None = None, cwd: Path = ROOT) -> Ended:
    """`mpirun -n ranks python args`."""
    return run([*mpirun_line(ranks), sys.executable, *args], timeout_s=timeout_s, env=env, cwd=cwd)


def train(ranks: int, *args: str, timeout_s: float = 120, env: dict[str, str] | None = None, cwd: Path = ROOT) -> Ended:
    """`python -m jaxmpi.train args`, under mpirun if there are several ranks."""
    line = mpirun_line(ranks) if ranks > 1 else []
    on_cpu = {"JAX_PLATFORMS": "cpu"} if "--devices" in args else {}  # a machine has fewer GPUs than a test wants
    env = on_cpu | (env or {})
    return run([*line, sys.executable, "-m", "jaxmpi.train", *args], timeout_s=timeout_s, env=env, cwd=cwd)


def train_here(*args: str) -> Ended:
    """`python -m jaxmpi.train args` in this process, which has loaded JAX: what it prints, and how it would end.

    Types are promoted as users have it.
    """
    printed, promotion = io.StringIO(), (jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"))
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), promotion[0], promotion[1]:
        try:
            experiment, path = experiment_file.parse(list(args), main.TABLES)
            main.train(
                experiment,
                path.stem,
                provenance.project_root(path),
                digest=hashlib.sha256(path.read_bytes()).hexdigest(),
            )
            code = 0
        except (UsageError, TrainingError) as error:
            code = failures.exit_code(error)
            print(f"error: {error}")
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
    return Ended(code, printed.getvalue(), False)


def on_small_disk(folder: Path, script: str) -> Ended:
    """Run a Python script, given `folder`, on a real file system of 96 KB mounted there."""
    with small_disk(folder, "96k"):
        return run([sys.executable, "-c", script, str(folder)], timeout_s=60)


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for what other threads or processes bring about."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def leaked(before: set[str], processes: Callable[[], list[int]] = list, patience_s: float = 5) -> set[str]:
    """Shared memory that nobody maps and that was not there before, some seconds after a job has ended.

    Args:
        processes: some of every other host that the job was on.
    """
    deadline = time.monotonic() + patience_s
    while (more := shared_memory(processes()) - before) and time.monotonic() < deadline:
        time.sleep(0.2)  # of other jobs that begin or end
    return more


def shared_memory(processes: Sequence[int] = ()) -> set[str]:
    """Files in /dev/shm, as this process and these see it, that nobody has mapped: leaked, once their job has ended."""
    hosts: dict[str, int] = {}
    for pid in {os.getpid(), *processes}:
        with contextlib.suppress(OSError):
            hosts[os.readlink(f"/proc/{pid}/ns/mnt")] = pid
    roots = [Path(f"/proc/{pid}/root/dev/shm") for pid in hosts.values()]
    tops = [(root, top) for root in roots for top in root.iterdir() if not (top.is_dir() and is_locked(top))]
    paths = [(root, path) for root, top in tops for path in (top, *top.rglob("*")) if not path.is_dir()]
    names = {str(path.relative_to(root)) for root, path in paths}
    mapped: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            mapped |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return names - mapped


def is_locked(folder: Path) -> bool:
    """Return True if a job has locked a folder, as `jaxmpi train` does its own."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False  # gone
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def is_job(pid: str, path: str) -> bool:
    """Return True if a process still runs a script of this folder."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return path.encode() in file.read() and session_of(int(pid)) != os.getsid(0)
    except OSError:
        return False
