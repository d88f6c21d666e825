"""The emulated cluster: hosts with names, links and shared memory of their own, gone when it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launching import CLUSTER, NOT_PERMITTED, ROOT, run

SEND = """
import sys, time
import numpy as np
from mpi4py import MPI
world, data = MPI.COMM_WORLD, np.zeros(2_000_000, np.uint8)
for _ in range(2):  # the first opens the connection
    world.Barrier()
    begin = time.perf_counter()
    world.Send(data, 1) if world.rank == 0 else world.Recv(data, 0)
world.Barrier()
if world.rank == 1:
    print("seconds", time.perf_counter() - begin)
"""


def on_cluster(*args: str, timeout_s: float = 60, env: dict[str, str] | None = None):
    """A run of the script; the test is skipped, visibly, if namespaces are not allowed."""
    ended = run([*CLUSTER, *args], timeout_s=timeout_s, cwd=ROOT, env=env)
    if ended.code == NOT_PERMITTED:
        pytest.skip(ended.out.strip())
    assert not ended.timed_out, ended.out
    return ended


def ranks_run(count: int, line: str) -> list[str]:
    """An mpirun line for a shell's line on each rank.

    Ranks on other hosts may be gone before Open MPI's launcher has heard of their start. The launcher may then
    wait for them without end: 8 in 90 of `nproc` on two busy cores, none of 90 that slept. Programs that use MPI live
    longer than that.
    """
    return ["mpirun", "-n", str(count), "sh", "-c", f"{line}; sleep 1"]


@pytest.mark.e2e
def test_hosts_have_names_slots_and_shared_memory_of_their_own():
    line = "echo $(hostname) $OMPI_COMM_WORLD_RANK; touch /dev/shm/$(hostname); ls /dev/shm | grep -c node"
    ended = on_cluster("--hosts", "3", "--slots", "2", "--", *ranks_run(6, line))
    assert ended.code == 0, ended.out
    assert {f"node{rank // 2} {rank}" for rank in range(6)} <= set(ended.out.splitlines())
    assert ended.out.splitlines().count("1") == 6  # nobody sees another host's file


@pytest.mark.e2e
def test_a_link_carries_what_it_was_asked_to(tmp_path):
    """2 MB at 50 Mbit/s: 0.33 s with headers; what the queue and the first burst hide is below 0.1 s of it."""
    (tmp_path / "send.py").write_text(SEND)
    args = ("--hosts", "2", "--rate", "50mbit", "--", "mpirun", "-n", "2", sys.executable, str(tmp_path / "send.py"))
    ended = on_cluster(*args)
    assert ended.code == 0, ended.out
    seconds = float(ended.out.split("seconds")[1].split()[0])
    bound = 2e6 * 8 / 50e6 * 1514 / 1448
    burst = 2 * 131072 * 8 / 50e6  # one at each end
    assert bound - burst < seconds < 3 * bound


CARRIED = """
import jax, numpy as np
import jaxmpi
from jaxmpi.allreduce import comm_thread, host_engine
from jaxmpi.comm.job import processes

comm = jaxmpi.world()
x = np.random.default_rng(comm.rank).standard_normal(60_001).astype(np.float32)
x[:300] = 1e-40 * comm.rank  # a program makes subnormal numbers 0
carried, steps = {}, []
ways = "in the program's thread", "by the communication thread", "as a program"
for way in ways:
    if way.startswith("by"):
        host_engine.program_engine = lambda comm: None
    if way.endswith("program"):
        comm_thread.unavailable_reason = lambda *args: "asked for"
    text = jax.jit(lambda x: jaxmpi.exchange(x, "ring32")).lower(x).as_text()
    steps.append(["host_engine" in text, "jaxmpi_beside" in text])
    for strategy in ("ring32", "ring16", "asa32", "asa8"):
        total = jax.jit(lambda tree: jaxmpi.exchange(tree, strategy))({"a": x, "b": x[:7]})
        bits = b"".join(np.asarray(leaf).tobytes() for leaf in total.values())
        processes().assert_same(strategy, bits.hex())
        assert carried.setdefault(strategy, bits) == bits, strategy
if comm.rank == 0:
    assert steps == [[True, False], [False, True], [False, False]], steps
    print("hosts", comm.hosts, "the same bits")
"""


def test_sums_between_hosts_are_those_of_programs_whoever_makes_them(tmp_path):
    (tmp_path / "carried.py").write_text(CARRIED)
    line = ("mpirun", "-n", "2", sys.executable, str(tmp_path / "carried.py"))
    ended = on_cluster("--hosts", "2", "--", *line, timeout_s=400)
    assert ended.code == 0, ended.out
    assert "hosts (0, 1) the same bits" in ended.out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_it_is_killed(number, tmp_path):
    mark = tmp_path / "started"
    command = f"touch {mark}; sleep 1234.5"
    job = subprocess.Popen([*CLUSTER, "--hosts", "2", "--", "sh", "-c", command], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not mark.exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if job.poll() == NOT_PERMITTED:
        assert job.stderr
        pytest.skip(job.stderr.read().decode())
    assert mark.exists()
    links = os.listdir("/sys/class/net")
    os.kill(job.pid, number)
    job.communicate(timeout=10)
    deadline = time.monotonic() + 10
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleepers()
    assert os.listdir("/sys/class/net") == links  # it never had any of this host's


def sleepers() -> list[str]:
    """Processes that the killed cluster's command has left."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"sleep\x001234.5" in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found
