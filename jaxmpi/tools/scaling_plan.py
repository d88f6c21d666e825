"""`jaxmpi plan`: estimates of speed with more workers, as table and plot.

Users want to know the efficiency on more hosts before they ask for them. The cost model predicts the exchange
from link prices, which are probed or given. The step time of one worker is known, so efficiency follows for every
layout of hosts and slots. The best strategy of each layout counts. Overlap hides an exchange behind the rest of the
step, and only the exposed time is added. A probe on one host says nothing about links between hosts, so its layouts end
there.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxmpi.allreduce import cost_model, measuring
from jaxmpi.allreduce.algorithms.spec import Link, Net, wire_format
from jaxmpi.allreduce.measuring import Probe
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.config import experiment_file
from jaxmpi.core.errors import UsageError
from jaxmpi.observe import plots
from jaxmpi.runtime import process

MOST = 4096  # workers
BUCKET_BYTES = 4 << 20


class Question(NamedTuple):
    """Inputs of an estimate."""

    net: Net  # its links and prices count, not its size
    probe: Probe  # probe whose measured strategies count
    source: str  # source of the prices, for the heading
    sizes: tuple[int, ...]  # floats of every leaf
    step_s: float  # seconds of one worker's step, without any exchange
    slots: tuple[int, ...]
    wires: tuple[str, ...]
    first: float | None  # share of the step after which the exchange can overlap it; None: no overlap


class ScalingEstimate(NamedTuple):
    """Estimate for one number of workers."""

    net: Net
    strategy: str
    exchange_s: float
    exposed_s: float
    step_s: float
    efficiency: float  # one worker's step time over this one's
    others: dict[str, float]  # seconds of all strategies


def main(options: argparse.Namespace) -> None:
    """Print the table; under a launcher, probe its ranks first."""
    question = read_question(options)
    if question is None:  # a rank other than 0
        return
    estimates = [estimate(question, net) for net in layouts(question)]
    print("\n".join(table(question, estimates)), flush=True)
    if options.plot:
        plots.save(panels(question, estimates), options.plot)
        print(f"plot: {options.plot}")


def read_question(options: argparse.Namespace) -> Question | None:
    """Build the question from the options; None on ranks other than 0.

    Raises:
        UsageError: no prices are known.
    """
    if options.alpha_s is None and process.launched_workers() > 1:
        process.prepare()  # an experiment starts the device, and later timings depend on this rank's cores
    sizes, wires = leaf_sizes(options), tuple(options.wires)
    for wire in wires:  # now that the experiment file has been read, which may add one
        wire_format(wire)
    comm = None if options.alpha_s is not None else world()
    if options.alpha_s is not None:
        probe, source = given_prices(options), "given prices"
    elif isinstance(comm, MpiComm):
        probe, source = measuring.probe(comm, wires), "probe of these ranks"
    else:
        probe, source = newest_probe()
    if comm is not None and comm.rank != 0:
        return None
    source += "" if probe.net.hosts > 1 else ", on one host: nothing is known of others"
    net = without_gaps(probe.net) if options.alpha_s is None else probe.net
    slots = tuple(options.slots or sorted({1, probe.net.slots}))
    return Question(
        net=net,
        probe=probe,
        source=source,
        sizes=sizes,
        step_s=options.step_s,
        slots=slots,
        wires=wires,
        first=options.overlap,
    )


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
    return Probe(Net(MOST, 1, inside, between, options.gamma_s_per_byte, cores=options.cores), {})


def newest_probe() -> tuple[Probe, str]:
    """The newest saved probe, and its origin.

    Raises:
        UsageError: there is none.
    """
    found = measuring.newest()
    if found is None:
        raise UsageError(
            "no probe is kept on this machine; run it under a launcher, as mpirun -n 8 jaxmpi plan, or give --alpha-s "
            "and --beta-s-per-byte"
        )
    key, probe = found
    return probe, "probe of " + ", ".join(f"{name} x {slots}" for name, slots in key["hosts"].items())


def without_gaps(net: Net) -> Net:
    """Use prices between hosts inside them, if the probe had none there."""
    return net if net.slots > 1 else net._replace(inside=net.between)


def layouts(question: Question) -> list[Net]:
    """Layouts of 2 to 4,096 workers.

    One host has 2, 4, ... up to its slots; then come 2, 4, ... hosts, if their prices are known.

    Raises:
        UsageError: none are left.
    """
    powers = [1 << power for power in range(MOST.bit_length())]
    most_hosts = MOST if question.net.hosts > 1 else 1
    shapes = []
    for slots in question.slots:
        shapes += [(1, ranks) for ranks in powers if ranks < slots]
        shapes += [(hosts, slots) for hosts in powers if hosts <= most_hosts]
    shapes = [(hosts, slots) for hosts, slots in shapes if 2 <= hosts * slots <= MOST]
    if not shapes:
        raise UsageError(f"--slots: got {question.slots}; on one host there is nothing to predict for one rank")
    return [question.net._replace(hosts=hosts, slots=slots, even=True) for hosts, slots in dict.fromkeys(shapes)]


def estimate(question: Question, net: Net) -> ScalingEstimate:
    """The best strategy for one layout, and the resulting step."""
    names = cost_model.candidates(net, question.wires)
    fits = question.probe.fits_of_all(names)
    seconds = {name: cost_model.step_seconds(net, question.sizes, name, BUCKET_BYTES, fits) for name in names}
    best = min(names, key=seconds.__getitem__)
    hidden = 0.0 if question.first is None else (1 - question.first) * question.step_s
    exposed = max(0.0, seconds[best] - hidden)
    step = question.step_s + exposed
    return ScalingEstimate(
        net=net,
        strategy=best,
        exchange_s=seconds[best],
        exposed_s=exposed,
        step_s=step,
        efficiency=question.step_s / step if step else 1.0,
        others=seconds,
    )


def table(question: Question, estimates: Sequence[ScalingEstimate]) -> list[str]:
    """Lines for the terminal."""
    floats = sum(question.sizes)
    lines = [
        f"{4 * floats / 1e6:,.1f} MB of gradients in {len(question.sizes)} leaves, {question.step_s:g} s a step; "
        f"{question.source}",
        describe(question.net),
        "workers  hosts x slots  best             exchange s  exposed s     step s  efficiency",
    ]
    return lines + [
        f"{a.net.workers:7}  {f'{a.net.hosts} x {a.net.slots}':13}  {a.strategy:15} {a.exchange_s:11.4g} "
        f"{a.exposed_s:10.4g} {a.step_s:10.4g} {100 * a.efficiency:9.1f} %"
        for a in estimates
    ]


def describe(net: Net) -> str:
    """A line on the prices."""
    return (
        f"inside a host {1e6 * net.inside.alpha_s:.3g} us + {1e9 * net.inside.beta_s_per_byte:.3g} ns/byte; between "
        f"hosts {1e6 * net.between.alpha_s:.3g} us + {1e9 * net.between.beta_s_per_byte:.3g} ns/byte; additions "
        f"{1e9 * net.gamma_s_per_byte:.3g} ns/byte; {net.cores:g} cores a host"
    )


def panels(question: Question, estimates: Sequence[ScalingEstimate]) -> list[plots.Panel]:
    """Seconds by strategy for the last number of slots, efficiency for all."""
    slots = question.slots[-1]
    last = with_slots(estimates, slots)
    names = dict.fromkeys(name for each in last for name in each.others)
    lines = {n: [(float(e.net.workers), e.others[n]) for e in last if e.others.get(n, 0) > 0] for n in names}
    workers = plots.Quantity("workers", base=2)
    return [
        plots.Lines(
            f"One exchange, {slots} rank{'s' * (slots > 1)} a host",
            workers,
            plots.Quantity("time of one exchange", "s"),
            {name: line for name, line in lines.items() if line},
        ),
        plots.Lines(
            "Step time of one worker over that of all, with the best strategy",
            workers,
            plots.Quantity("efficiency", "%", base=None),
            {
                f"{n} rank{'s' * (n > 1)} a host": [
                    (float(a.net.workers), 100 * a.efficiency) for a in with_slots(estimates, n)
                ]
                for n in question.slots
            },
            bound=[(2.0, 100.0), (float(MOST), 100.0)],
        ),
    ]


def with_slots(estimates: Sequence[ScalingEstimate], slots: int) -> list[ScalingEstimate]:
    """Estimates for hosts of `slots` ranks, or fewer on one host."""
    return [a for a in estimates if a.net.slots == min(slots, a.net.workers)]
