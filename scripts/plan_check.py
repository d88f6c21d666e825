"""Predictions of the cost model beside measurements, on emulated hosts.

    python scripts/plan_check.py [--hosts 2 4 8] [--slots 1] [--rate 200mbit] [--floats 6000000] [--rounds 5]

For each number of hosts one job runs on a cluster of its own (scripts/cluster.py). The job probes, as `auto` does with
more time. Then it times the exchange of one vector, in jit, mean in and mean out. The script prints medians, and
predictions from every probe: that on the same hosts, which saw shorter vectors, and those on other numbers of hosts.
Emulated hosts share this machine's cores, and the model takes that into account.
"""

import argparse
import os
import statistics
from typing import Any

import harness
import jax
import jax.numpy as jnp

import jaxmpi
from jaxmpi.allreduce import cost_model, measuring
from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.measuring import Probe, as_json, from_json
from jaxmpi.comm.mpi import MpiComm

STRATEGIES = ["asa32", "ring32", "asa16", "ring16", "tree:32"]
PROBE_S = "25"  # seconds, so that vectors are longer than what a rate-limited link lets pass at once


# ---------------------------------------------------------------- inside a job


def probe_and_measure(strategies: list[str], floats: int, rounds: int) -> dict[str, Any]:
    """Be a rank: probe, then measure; return both."""
    comm = jaxmpi.world()
    assert isinstance(comm, MpiComm)
    probe = Probe(measuring.measure_net(comm), {})
    wires = {parse(name).name.partition(":")[2] for name in strategies}
    codecs = {wire: measuring.codec_seconds(comm, probe.net, wire) for wire in sorted(wires)}
    probe = probe._replace(net=probe.net._replace(codec_s_per_float=codecs))
    measured = {}
    for name in (parse(spelling).name for spelling in strategies):
        long = measuring.lengths_for(probe.net, name)[1]
        short = long // 4 - long // 4 % comm.size  # longer than what a link lets pass at once, unlike the probe's own
        probe.seconds[name] = {n: measuring.time_strategy(comm, name, n) for n in (short, long)}
        measured[name] = times_of_exchange(comm, name, floats, rounds)
    return {"probe": as_json(probe), "measured": measured}


def times_of_exchange(comm: MpiComm, name: str, floats: int, rounds: int) -> list[float]:
    """The slowest rank's seconds of exchanges, without the first, which compiles."""
    step, x = jax.jit(lambda x: jaxmpi.exchange(x, name)), jax.block_until_ready(jnp.ones(floats, jnp.float32))
    return [measuring.slowest(comm.processes, lambda: jax.block_until_ready(step(x))) for _ in range(1 + rounds)][1:]


# ---------------------------------------------------------------- outside


def predicted(probe: Probe, hosts: int, options: argparse.Namespace, name: str) -> float:
    """Seconds predicted by a probe for hosts that share this machine's cores."""
    cores = len(os.sched_getaffinity(0))
    at_probe = probe.net._replace(cores=cores / probe.net.hosts)
    fits = {name: cost_model.fit(at_probe, name, probe.seconds[name])}
    net = at_probe._replace(hosts=hosts, cores=cores / hosts)
    return cost_model.step_seconds(net, [options.floats], name, None, fits)


def show(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a row per number of hosts and strategy."""
    saved = {hosts: from_json(result["probe"]) for hosts, result in results.items()}
    rows = []
    print(f"\n{options.floats:,} floats, {options.slots} ranks a host, {options.rate}, {options.rounds} rounds")
    head = [heading for hosts in saved for heading in (f"from {hosts}", "ratio")]
    print(harness.table(["hosts", "strategy", "measured s", *head]))
    for hosts, result in results.items():
        for name, times in result["measured"].items():
            median = statistics.median(times)
            seconds = {at: predicted(probe, hosts, options, name) for at, probe in saved.items()}
            cells = [cell for s in seconds.values() for cell in (f"{s:.3f}", f"{s / median:.2f}")]
            print(harness.row([hosts, name, f"{median:.3f}", *cells]))
            rows.append({"hosts": hosts, "strategy": name, "measured_s": times, "predicted_s_from": seconds})
    return rows


def main() -> None:
    """Start one cluster after the other, then print the table."""
    parser = harness.parser(__doc__, hosts=[2, 4, 8], slots=1, rate="200mbit", rounds=5, json=None)
    parser.add_argument("--floats", type=int, default=6_000_000)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    options = parser.parse_args()
    arguments, env = (options.strategies, options.floats, options.rounds), {"JAXMPI_PROBE_S": PROBE_S}
    cluster = {"slots": options.slots, "rate": options.rate, "env": env}
    results = {
        hosts: harness.on_ranks(probe_and_measure, *arguments, ranks=hosts * options.slots, **cluster)
        for hosts in sorted(options.hosts)
    }
    harness.save(options.json, {"rows": show(results, options), "results": results})


if __name__ == "__main__":
    main()
