"""Predictions of the cost model beside measurements, on emulated hosts.

    python scripts/plan_check.py [--hosts 2 4 8] [--slots 1] [--rate 200mbit] [--floats 6000000] [--rounds 5]

For each number of hosts one job runs on a cluster of its own (scripts/cluster.py): it probes, as `auto` does with more
time, and then times the exchange of one vector, in jit, mean in and mean out. It prints medians, and predictions from
every probe: that on the same hosts, which saw shorter vectors, and those on other numbers of hosts. Emulated hosts
share this machine's cores, and the model takes that into account.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxmpi
from jaxmpi.allreduce import autotune, cost_model
from jaxmpi.allreduce.algorithms import parse
from jaxmpi.comm.mpi import MpiComm

HERE = Path(__file__).parent
STRATEGIES = ["asa32", "ring32", "asa16", "ring16", "tree:32"]
PROBE_S = 25.0  # so that vectors are longer than what a rate-limited link lets pass at once


# ---------------------------------------------------------------- inside a job


def run_job(options: argparse.Namespace) -> None:
    """Probe, then measure; rank 0 writes both."""
    comm = jaxmpi.world()
    assert isinstance(comm, MpiComm)
    probe = autotune.Probe(autotune.measure_net(comm), {})
    wires = {parse(name).name.partition(":")[2] for name in options.strategies}
    codecs = {wire: autotune.codec_seconds(comm, probe.net, wire) for wire in sorted(wires)}
    probe = probe._replace(net=probe.net._replace(codec_s_per_float=codecs))
    measured = {}
    for spelling in options.strategies:
        name = parse(spelling).name
        long = autotune.lengths_for(probe.net, name)[1]
        # The shorter one too is longer than what a link of the cluster lets pass at once, unlike the probe's own.
        probe.seconds[name] = {n: autotune.time_strategy(comm, name, n) for n in (whole(long // 4, comm), long)}
        measured[name] = [time_exchange(comm, name, options.floats) for _ in range(options.rounds + 1)][1:]
    if comm.rank == 0:
        options.job.write_text(json.dumps({"probe": autotune.as_json(probe), "measured": measured}))


def whole(n: int, comm: MpiComm) -> int:
    """Round to a multiple of the workers."""
    return n - n % comm.size


def time_exchange(comm: MpiComm, name: str, floats: int) -> float:
    """Seconds of one exchange, of the slowest rank; the program is compiled by the first call."""
    if name not in _programs:
        _programs[name] = jax.jit(lambda x: jaxmpi.exchange(x, name))
    x = jax.block_until_ready(jnp.ones(floats, jnp.float32))
    return autotune.slowest(comm.processes, lambda: jax.block_until_ready(_programs[name](x)))


_programs: dict[str, Any] = {}


# ---------------------------------------------------------------- outside


def on_cluster(hosts: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a job on so many hosts."""
    out = folder / f"{hosts}.json"
    ranks = hosts * options.slots
    job = ["--job", str(out), "--floats", str(options.floats), "--rounds", str(options.rounds)]
    line = [
        *(sys.executable, str(HERE / "cluster.py"), "--hosts", str(hosts), "--slots", str(options.slots)),
        *("--rate", options.rate, "--", "mpirun", "--bind-to", "none", "-n", str(ranks)),
        *(sys.executable, __file__, *job, "--strategies", *options.strategies),
    ]
    done = subprocess.run(line, env=os.environ | {"JAXMPI_PROBE_S": str(PROBE_S)})
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(out.read_text())


def predicted(probe: autotune.Probe, hosts: int, options: argparse.Namespace, name: str) -> float:
    """Seconds on so many hosts by a probe on some number of them, which share this machine's cores."""
    cores = len(os.sched_getaffinity(0))
    at_probe = probe.net._replace(cores=cores / probe.net.hosts)
    fits = {name: cost_model.fit(at_probe, name, probe.seconds[name])}
    net = at_probe._replace(hosts=hosts, cores=cores / hosts)
    return autotune.step_seconds(net, [options.floats], name, None, fits)


def show(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a row per number of hosts and strategy."""
    probes = {hosts: autotune.from_json(result["probe"]) for hosts, result in results.items()}
    rows = []
    print(f"\n{options.floats:,} floats, {options.slots} ranks a host, {options.rate}, {options.rounds} rounds")
    print("| hosts | strategy | measured s |" + "".join(f" from {hosts} | ratio |" for hosts in probes))
    print("|---|---|---|" + "---|---|" * len(probes))
    for hosts, result in results.items():
        for name, times in result["measured"].items():
            median = statistics.median(times)
            seconds = {at: predicted(probe, hosts, options, name) for at, probe in probes.items()}
            cells = "".join(f" {s:.3f} | {s / median:.2f} |" for s in seconds.values())
            print(f"| {hosts} | {name} | {median:.3f} |{cells}")
            rows.append({"hosts": hosts, "strategy": name, "measured_s": times, "predicted_s_from": seconds})
    return rows


def main() -> None:
    """Without --job: start one cluster after the other, then print the table. With it: be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--slots", type=int, default=1, help="ranks a host")
    parser.add_argument("--rate", default="200mbit", help="of each host's card")
    parser.add_argument("--floats", type=int, default=6_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return run_job(options)
    with tempfile.TemporaryDirectory() as folder:
        results = {hosts: on_cluster(hosts, options, Path(folder)) for hosts in sorted(options.hosts)}
    rows = show(results, options)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
