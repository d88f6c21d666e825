"""`jaxmpi doctor`: report machine, MPI and JAX, test exchanges, suggest changes.

A slow or broken job often has its cause in the machine or in the launcher's settings. Each rank collects facts about
its process and host, and an allgather joins them. The ranks then time messages between pairs, and exchanges by two
strategies. The exchanges have a known mean, with which every result is compared bit for bit. `suggest_changes` looks at
the facts of all ranks.

jaxmpi doctor                 this process
jaxmpi doctor -n 4            four ranks, through the launcher that `jaxmpi train` would use
mpirun -n 4 jaxmpi doctor     under any launcher, over hosts too
"""

import collections
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.allreduce.api import exchange
from jaxmpi.allreduce.host_engine import SOURCE
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes, processes
from jaxmpi.comm.mpi import is_cuda_aware, world
from jaxmpi.comm.mpi_info import mpi_facts
from jaxmpi.comm.polling import wait
from jaxmpi.core.errors import UsageError
from jaxmpi.recover.watchdog import watching
from jaxmpi.runtime import failures, process, provenance

LENGTHS = {1 << 10: 100, 1 << 20: 10}  # floats of an exchange: rounds
PAIR_FLOATS = 1 << 17  # f64, to another rank and back
TRIPS = 2  # round trips between two ranks whose link is timed
TURNS = 16  # in which pairs of ranks meet; of more ranks not all pairs do
LINK = 4  # tag
SLOW = 4  # times slower than the median of pairs: reported
START_S = 60.0  # for MPI to start in one process
STALL_S = 30.0  # for ranks that never come
SHM_BYTES = 64 << 20  # Docker's default, and less than sums over a host need
SHOWN = 64  # ranks listed one by one


class ExchangeTime(NamedTuple):
    """Exchanges of one length."""

    strategy: str
    floats: int
    seconds: float  # median of the slowest rank's
    gb_per_s: float  # 2 (w - 1) / w x bytes / seconds, as of a ring
    is_right: bool


# ---------------------------------------------------------------- facts of a rank


def collect_facts() -> dict[str, Any]:
    """Facts of this process and its host."""
    job = process.launched()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "host": socket.gethostname(),
        "launcher": job.launcher if job else "none",
        "cores": os.cpu_count() or 1,
        "may use": process.core_mask(),
        "whole cores": process.cores(),
        "shm free": shm.free if shm else 0,
        "interfaces": interfaces(),
        "backend": jax.default_backend(),
        "devices": [f"{device.device_kind}" for device in jax.local_devices()],
        "gpus": process.visible_gpus(),
        "versions": provenance.versions(),
    }


def interfaces(folder: Path = Path("/sys/class/net")) -> dict[str, str]:
    """State and speed of this host's network interfaces, the loopback left out."""

    def word(path: Path) -> str:
        try:
            return path.read_text().strip()
        except OSError:  # a virtual interface has no speed
            return ""

    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    links = {name: (word(folder / name / "operstate"), word(folder / name / "speed")) for name in names if name != "lo"}
    return {n: state + (f", {speed} Mbit/s" if speed.isdigit() else "") for n, (state, speed) in links.items()}


# ---------------------------------------------------------------- test of exchanges


def time_exchanges(control: Processes) -> list[ExchangeTime]:
    """Time short and long exchanges by a portable and the best strategy; all ranks call it together."""
    comm = world()
    if comm.size == 1:
        return []
    rows = []
    for strategy in ("asa32", "shm" if len(set(comm.hosts)) == 1 else "ring32"):
        try:
            rows += [time_exchange(control, strategy, floats, rounds) for floats, rounds in LENGTHS.items()]
        except UsageError as error:  # on all ranks alike: no room in memory; the page is to say how much there is
            if control.rank == 0:
                print(f"jaxmpi doctor: {strategy} is not timed: {error}", file=sys.stderr, flush=True)
    return rows


def time_exchange(control: Processes, strategy: str, floats: int, rounds: int) -> ExchangeTime:
    """Time exchanges with a known mean, with which each result is compared bit for bit."""
    failures.set_phase(f"self-test: {strategy}, {floats} floats")
    x = np.arange(floats, dtype=np.float32) % 1024 + control.rank
    expected = np.arange(floats, dtype=np.float32) % 1024 + np.float32((control.size - 1) / 2)
    took, is_right = [], True
    for _ in range(1 + rounds):  # the first compiles
        begin = time.perf_counter()
        mean = np.asarray(exchange(x, strategy))
        took.append(time.perf_counter() - begin)
        is_right = is_right and bool((mean == expected).all())
    rows = control.allgather_array(np.array([*took[1:], float(is_right)]))
    seconds = float(np.median(rows[:, :-1].max(axis=0)))
    carried = 2 * (control.size - 1) / control.size * 4 * floats
    return ExchangeTime(strategy, floats, seconds, carried / seconds / 1e9, bool(rows[:, -1].all()))


def time_trips(control: Processes, floats: int) -> np.ndarray:
    """f64[size, size]: quickest round trips of f64[floats], s; NaN if none.

    In turn t ranks i and j with i + j = t modulo size exchange, so a rank has one partner a turn, and each pair meets
    once in `size` turns. Turns are not kept in step.
    """
    trip_times = np.full(control.size, np.nan)
    if not isinstance(control, MpiProcesses):
        return trip_times[None]
    for turn in range(min(control.size, TURNS)):
        if (partner := (turn - control.rank) % control.size) != control.rank:
            trip_times[partner] = _trip(control.world, control.rank < partner, partner, np.zeros(floats))
    return control.allgather_array(trip_times)


def _trip(world: Any, is_first: bool, partner: int, message: np.ndarray) -> float:
    times = []
    for _ in range(1 + TRIPS):
        begin_s = time.perf_counter()
        for begin in (world.Isend, world.Irecv) if is_first else (world.Irecv, world.Isend):
            wait(begin(message, partner, tag=LINK).Test, float("inf"))
        times.append(time.perf_counter() - begin_s)
    return min(times[1:])  # the other may come late to the first


class RankPairSpeed(NamedTuple):
    """Two ranks, and the speed of messages between them."""

    a: int
    b: int
    is_far: bool  # on two hosts
    gb_per_s: float


def pair_speeds(trips_s: np.ndarray, hosts: Sequence[str]) -> list[RankPairSpeed]:
    """Pairs, slowest first, from seconds f64[w, w] for PAIR_FLOATS there and back."""
    quicker = np.fmin(trips_s, trips_s.T)
    pairs = [(a, b) for a in range(len(hosts)) for b in range(a + 1, len(hosts)) if not np.isnan(quicker[a, b])]
    speeds = [(a, b, hosts[a] != hosts[b], 2 * 8 * PAIR_FLOATS / float(quicker[a, b]) / 1e9) for a, b in pairs]
    return sorted((RankPairSpeed(*row) for row in speeds), key=lambda pair: pair.gb_per_s)


def slow_pairs(pairs: Sequence[RankPairSpeed], hosts: Sequence[str]) -> list[str]:
    """Links between hosts that are much slower than others."""
    speeds = [pair.gb_per_s for pair in pairs if pair.is_far]
    median = float(np.median(speeds)) if speeds else 0.0
    return [
        f"rank {a} on {hosts[a]} and rank {b} on {hosts[b]} exchange {speed:.3g} GB/s, pairs on two hosts {median:.3g} "
        "in the median: look at the network between them"
        for a, b, is_far, speed in pairs
        if is_far and speed * SLOW < median
    ][:4]


def format_pairs(pairs: Sequence[RankPairSpeed], hosts: Sequence[str]) -> list[str]:
    """A line for pairs on one host, one for pairs on two."""
    lines = []
    for where, is_far in (("one host", False), ("two hosts", True)):
        if some := [pair for pair in pairs if pair.is_far == is_far]:
            a, b, _, slowest = some[0]
            ends = f"rank {a} on {hosts[a]} and rank {b} on {hosts[b]}"
            lines.append(f"pairs     on {where}: {slowest:.3g} to {some[-1].gb_per_s:.3g} GB/s; slowest {ends}")
    return lines


# ---------------------------------------------------------------- suggested changes

Ranks = Sequence[dict[str, Any]]


def suggest_changes(ranks: Ranks, mpi: dict[str, str]) -> Iterator[str]:
    """Lines on what to change, from the facts of all ranks."""
    first = ranks[0]
    for r, rank in enumerate(ranks):
        for package, version in first["versions"].items():
            if (other := rank["versions"].get(package)) != version:
                yield (
                    f"{package} is {other} on {rank['host']} (rank {r}), {version} on {first['host']} (rank 0): give "
                    "all hosts one environment"
                )
    if (level := mpi.get("threads", "MPI_THREAD_MULTIPLE")) != "MPI_THREAD_MULTIPLE":
        yield f"MPI gives {level}: no overlap and no watchdog; use an MPI built for MPI_THREAD_MULTIPLE"
    for host, local in by_host(ranks).items():
        yield from suggest_for_host(host, local, is_alone=len(ranks) == 1)


def suggest_for_host(host: str, ranks: Ranks, *, is_alone: bool) -> Iterator[str]:
    """Lines on one host; `is_alone`: the job has one rank."""
    first, masks = ranks[0], {tuple(rank["may use"]) for rank in ranks}
    used = len({core for mask in masks for core in mask}) or first["cores"]
    usable = max(rank["whole cores"] for rank in ranks) if len(masks) == 1 else used
    if len(ranks) > usable:
        yield (
            f"{host} has {len(ranks)} ranks on {usable} cores: they wait for each other; start {usable} there at most"
        )
    if not is_alone and used < first["cores"] and used <= len(ranks):
        yield (
            f"{host}: {len(ranks)} ranks are bound to {used} of {first['cores']} cores; to use all of them: mpirun "
            "--bind-to none, or srun --cpus-per-task"
        )
    if len(ranks) > 1 and first["shm free"] < SHM_BYTES:
        yield (
            f"{host}: /dev/shm has {first['shm free'] >> 20} MiB free, expected {SHM_BYTES >> 20} or more for MPI's "
            "own memory; in containers: docker run --shm-size 1g"
        )
    if first["gpus"] and first["backend"] == "cpu" and os.environ.get("JAX_PLATFORMS", "") != "cpu":
        yield f"{host} has {len(first['gpus'])} GPUs, but JAX runs on its CPU: install jaxmpi[cuda]"
    if first["backend"] == "cpu" and first["c trouble"]:
        yield (
            f"{host}: {first['c trouble']}: a small call in a program takes 90 us more, through Python, and exchanges "
            "between hosts are mpi4jax's, without overlap; install gcc, name one by CC, or run once on a host with one "
            "and the same ~/.cache"
        )


def by_host(ranks: Ranks) -> dict[str, list[dict[str, Any]]]:
    """Ranks' facts by host, in order of appearance."""
    hosts: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for rank in ranks:
        hosts[rank["host"]].append(rank)
    return hosts


# ---------------------------------------------------------------- the page


def format_report(
    ranks: Ranks,
    mpi: dict[str, str],
    results: Sequence[ExchangeTime],
    trips_s: Sequence[float],
    pairs: Sequence[RankPairSpeed] = (),
    trouble: str = "",
) -> list[str]:
    """All lines; `trouble` is why one process alone could start no others."""
    hosts = [rank["host"] for rank in ranks]
    lines = [
        f"ranks     {len(ranks)} on {len(by_host(ranks))} hosts, launcher {ranks[0]['launcher']}",
        "MPI       " + (", ".join(f"{name} {value}" for name, value in mpi.items()) or "not used"),
        "versions  " + ", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items()),
    ]
    for host, local in by_host(ranks).items():
        net = ", ".join(f"{name} {state}" for name, state in local[0]["interfaces"].items()) or "no interfaces"
        lines += [f"host      {host}: {local[0]['cores']} cores, /dev/shm {local[0]['shm free'] >> 20} MiB free; {net}"]
    lines += [
        f"rank {r:<4} {rank['host']}: cores {format_cores(rank['may use'])}; {rank['backend']}, "
        f"{', '.join(rank['devices'])}"
        for r, rank in enumerate(ranks[:SHOWN])
    ]
    if len(trips_s) > 1:
        lines += [f"ping      rank 0 to others and back: {1e6 * min(trips_s[1:]):.0f} to {1e6 * max(trips_s):.0f} us"]
    lines += format_pairs(pairs, hosts)
    lines += [
        f"exchange  {t.strategy:7} {4 * t.floats:>10,} bytes  {1e3 * t.seconds:9.3f} ms  {t.gb_per_s:7.3f} GB/s  "
        f"{'right' if t.is_right else 'WRONG'}"
        for t in results
    ]
    wrong = [t for t in results if not t.is_right]
    advice = [*suggest_changes(ranks, mpi)]
    advice += [f"{t.strategy} gave a wrong mean of {t.floats} floats: do not train here" for t in wrong]
    advice += slow_pairs(pairs, hosts) + ([f"one worker runs, but not several: {trouble}"] if trouble else [])
    return lines + (["", "to change:", *(f"- {line}" for line in advice)] if advice else ["", "nothing to change"])


def format_cores(cores: Sequence[int]) -> str:
    """Write cores as ranges: `0-3,8` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs) or "unknown"


def start_trouble() -> str:
    """Return why a child process cannot start MPI; empty if it can."""
    child = [sys.executable, "-c", "from jaxmpi.comm.job import start_mpi; start_mpi()"]
    try:
        ended = subprocess.run(child, capture_output=True, text=True, errors="replace", timeout=START_S)
    except subprocess.TimeoutExpired:
        return f"MPI has not started within {START_S:.0f} s"
    last = (ended.stderr.splitlines() or [f"exit code {ended.returncode}"])[-1]
    return last.removeprefix(f"{UsageError.__module__}.{UsageError.__name__}: ") if ended.returncode else ""


def examine() -> None:
    """Examine this job; all ranks call it, rank 0 prints."""
    failures.set_phase("facts")
    control = processes()
    mpi = mpi_facts()
    if control.size > 1:
        mpi["device pointers"] = "handed to MPI" if is_cuda_aware() else "copied through the host"
    trouble = start_trouble() if control.size == 1 else ""
    ranks = control.allgather_object(collect_facts() | {"c trouble": SOURCE.trouble() if control.size > 1 else ""})
    trips_s = [trip_s for trip_s, _ in control.pings()]
    with watching(control, STALL_S if isinstance(control, MpiProcesses) else 0, "abort"):
        failures.set_phase("self-test: messages between pairs of ranks")
        pairs = pair_speeds(time_trips(control, PAIR_FLOATS), [rank["host"] for rank in ranks])
        results = time_exchanges(control)
    if control.rank == 0:
        print("\n".join(format_report(ranks, mpi, results, trips_s, pairs, trouble)), flush=True)
    control.barrier()


def main(options: None) -> None:
    """`jaxmpi doctor`, alone or as a rank; it has no options left."""
    failures.install_excepthooks()
    process.prepare()
    with failures.at_work():
        examine()
