"""`jaxmpi plan`: estimates of speed with more workers.

Users want to know the efficiency on more hosts before they ask for them. The cost model predicts the exchange
from link prices, which are probed or given. The step time of one worker is known, so efficiency follows for every
layout of hosts and slots. The best strategy of each layout counts. Overlap hides an exchange behind the rest of the
step, and only the exposed time is added. A probe on one host says nothing about links between hosts, so its layouts end
there.
"""

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxmpi.allreduce import cost_model, measuring
from jaxmpi.allreduce.algorithms.spec import Link, Net, wire_format
from jaxmpi.allreduce.measuring import Probe
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.config import experiment_file
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import process

MOST = 4096  # workers
BUCKET_BYTES = 4 << 20


class ScalingEstimate(NamedTuple):
    """Estimate for one number of workers."""

    net: Net
    strategy: str
    exchange_s: float
    exposed_s: float  # of it, beside what hides behind the step


def main(options: argparse.Namespace) -> None:
    """Print the table; under a launcher, probe its ranks first.

    Raises:
        UsageError: no prices are known.
    """
    if options.alpha_s is None and process.launched_workers() > 1:
        process.prepare()  # an experiment starts the device, and later timings depend on this rank's cores
    sizes = leaf_sizes(options)
    for wire in options.wires:  # now that the experiment file has been read, which may add one
        wire_format(wire)
    comm = None if options.alpha_s is not None else world()
    if comm is None:
        probe, source = given_prices(options), "given prices"
    elif isinstance(comm, MpiComm):
        probe, source = measuring.probe(comm, tuple(options.wires)), "probe of these ranks"
    else:
        probe, source = newest_probe()
    if comm is not None and comm.rank != 0:
        return
    if options.alpha_s is None and probe.net.slots == 1:  # it has no prices inside a host
        probe = probe._replace(net=probe.net._replace(inside=probe.net.between))
    source += "" if probe.net.hosts > 1 else ", on one host: nothing is known of others"
    slots = tuple(options.slots or sorted({1, probe.net.slots}))
    estimates = [estimate(probe, net, sizes, options) for net in layouts(probe.net, slots)]
    print("\n".join(table(estimates, sizes, options.step_s, source)), flush=True)


def leaf_sizes(options: argparse.Namespace) -> tuple[int, ...]:
    """Floats of every leaf: one, or those of a model's params."""
    if options.experiment is None:
        return (int(options.bytes) // 4,)
    model = experiment_file.load(experiment_file.locate(options.experiment)).model
    params, _ = jax.eval_shape(model.init, jax.random.key(0), model.example())
    return tuple(leaf.size for leaf in jax.tree.leaves(params))


def given_prices(options: argparse.Namespace) -> Probe:
    """Prices given as options; inside a host, by default those between hosts."""
    between = Link(options.alpha_s, options.beta_s_per_byte)
    alpha, beta = options.alpha_inside_s, options.beta_inside_s_per_byte
    inside = Link(between.alpha_s if alpha is None else alpha, between.beta_s_per_byte if beta is None else beta)
    return Probe(Net(MOST, 1, inside, between, options.gamma_s_per_byte or 0.0, cores=options.cores or math.inf), {})


def newest_probe() -> tuple[Probe, str]:
    """The newest saved probe, and its origin.

    Raises:
        UsageError: there is none.
    """
    if (newest := measuring.newest()) is None:
        raise UsageError(
            "no probe is kept on this machine; run it under a launcher, as mpirun -n 8 jaxmpi plan, or give --alpha-s "
            "and --beta-s-per-byte"
        )
    key, probe = newest
    return probe, "probe of " + ", ".join(f"{name} x {slots}" for name, slots in key["hosts"].items())


def layouts(net: Net, slots: Sequence[int]) -> list[Net]:
    """Layouts of 2 to 4,096 workers, with these numbers of them on a host.

    One host has 2, 4, ... up to its slots; then come 2, 4, ... hosts, if their prices are known.

    Raises:
        UsageError: none are left.
    """
    powers = [1 << power for power in range(MOST.bit_length())]
    most_hosts = MOST if net.hosts > 1 else 1
    shapes: list[tuple[int, int]] = []
    for slot_count in slots:
        shapes += [(1, ranks) for ranks in powers if ranks < slot_count]
        shapes += [(hosts, slot_count) for hosts in powers if hosts <= most_hosts]
    shapes = [(hosts, slot_count) for hosts, slot_count in shapes if 2 <= hosts * slot_count <= MOST]
    if not shapes:
        raise UsageError(f"--slots: got {slots}; on one host there is nothing to predict for one rank")
    return [net._replace(hosts=hosts, slots=slot_count, even=True) for hosts, slot_count in dict.fromkeys(shapes)]


def estimate(probe: Probe, net: Net, sizes: Sequence[int], options: argparse.Namespace) -> ScalingEstimate:
    """The best strategy for one layout."""
    names = cost_model.candidates(net, tuple(options.wires))
    fits = probe.fits_of_all(names)
    seconds = {name: cost_model.step_seconds(net, sizes, name, BUCKET_BYTES, fits) for name in names}
    best = min(names, key=seconds.__getitem__)
    hidden = 0.0 if options.overlap is None else (1 - options.overlap) * options.step_s
    return ScalingEstimate(net, best, seconds[best], max(0.0, seconds[best] - hidden))


def table(estimates: Sequence[ScalingEstimate], sizes: Sequence[int], alone_s: float, source: str) -> list[str]:
    """Lines for the terminal; `alone_s` are seconds of one worker's step."""
    net = estimates[0].net
    lines = [
        f"{4 * sum(sizes) / 1e6:,.1f} MB of gradients in {len(sizes)} leaves, {alone_s:g} s a step; {source}",
        f"inside a host {1e6 * net.inside.alpha_s:.3g} us + {1e9 * net.inside.beta_s_per_byte:.3g} ns/byte; between "
        f"hosts {1e6 * net.between.alpha_s:.3g} us + {1e9 * net.between.beta_s_per_byte:.3g} ns/byte; additions "
        f"{1e9 * net.gamma_s_per_byte:.3g} ns/byte; {net.cores:g} cores a host",
        "workers  hosts x slots  best             exchange s  exposed s     step s  efficiency",
    ]
    for net, strategy, exchange_s, exposed_s in estimates:
        step_s = alone_s + exposed_s
        efficiency = alone_s / step_s if step_s else 1.0
        lines.append(
            f"{net.workers:7}  {f'{net.hosts} x {net.slots}':13}  {strategy:15} {exchange_s:11.4g} "
            f"{exposed_s:10.4g} {step_s:10.4g} {100 * efficiency:9.1f} %"
        )
    return lines
