"""Exchange and update, sharded and not: seconds by turns, and bytes held.

    python scripts/bench_sharded.py --ranks 8 --trees alexnet googlenet
    python scripts/bench_sharded.py --ranks 4 --rate 200mbit --trees googlenet

Each rank has a tree's params and gradients, and Adam's moments: whole, and a slice, by `--exchange.shard-update on`. A
turn is the rule's update as the trainer calls it between jits: exchange, Adam, new params. A round counts as long as
its slowest rank takes. Ratios are round by round, with 95 % intervals. A job has two contenders at a time: four of
AlexNet's tree do not fit into 24 GB on 8 ranks.

    python scripts/bench_sharded.py --ranks 4 --rate 200mbit --step --rounds 10

Instead the trainer's whole step of GoogLeNet, asa32: updates whole and sharded, each with overlap and without, and new
params that travel behind the next forward pass. A turn is ten steps, from whole params to whole params. With `--slots 2
--strategy hier-asa` two ranks a host have another strategy.

    python scripts/bench_sharded.py --update

The optimizer's program alone, in this process: of whole trees, without an exchange.
"""

import argparse
import dataclasses
import itertools
import math
import time
from functools import partial
from typing import Any

import bench_step
import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmpi
from jaxmpi.allreduce.api import BUCKET_BYTES, exchange
from jaxmpi.allreduce.shards import shards_of
from jaxmpi.bench.options import trees
from jaxmpi.comm.job import processes
from jaxmpi.config import Optim
from jaxmpi.optim.optimizers import optimizer
from jaxmpi.rules import base
from jaxmpi.rules.gradients import gradients
from jaxmpi.runtime import prepare
from jaxmpi.runtime.allocator import keep_freed_memory

SHARDED = "sharded "
STEPS = 10  # of a turn with --step
WAYS = {  # of the exchange, in the trainer's step
    "whole, overlap off": {"overlap": "off"},
    "whole, overlap on": {"overlap": "on"},
    "sharded, overlap off": {"overlap": "off", "shard_update": "on"},
    "sharded, overlap on": {"overlap": "on", "shard_update": "on"},
    "sharded, overlap on, gather late": {"overlap": "on", "shard_update": "on", "gather": "late"},
}
STATE_BYTES = 4 * 2  # a parameter's, of Adam


class Contender:
    """A rule with params and state; each turn is an update."""

    def __init__(self, name: str, shapes: list[tuple[int, ...]], grads: list[jax.Array]) -> None:
        """Make state 0 of `asa32`, `shm`, or one of them behind `sharded`."""
        comm, strategy = jaxmpi.world(), name.rpartition(" ")[2]
        mean = partial(exchange, strategy=strategy, comm=comm)
        host = processes() if strategy == "shm" else None
        shards = shards_of(strategy, "mean", comm, BUCKET_BYTES, host=host) if name.startswith(SHARDED) else None
        self.rule = gradients(optax.adam(1e-3), base.Exchange(mean, mean, comm.jit, shards=shards))
        self.params: Any = [jnp.ones(shape) for shape in shapes]
        self.grads, sharding = grads, self.rule.sharding
        if sharding and sharding.shards.shared_params:
            self.params = sharding.shards.shared_params.filled(self.params)
        if sharding:
            self.state = comm.jit(sharding.init)(self.params, np.int32(sharding.chunks[int(comm.rank)]))
        else:
            self.state = comm.jit(self.rule.init)(self.params)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state on this rank."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def turn(self) -> None:
        """One exchange and update."""
        self.params, self.state = jax.block_until_ready(self.rule.update(self.grads, self.state, self.params))


def measured(tree: str, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Be a rank: return each contender's seconds and state bytes.

    Seconds are the slowest rank's, round by round; the last entry is the bytes of this rank's state.
    """
    jaxmpi.world()
    shapes = list(trees([tree])[tree].values())
    grads = [jnp.full(shape, 1e-3) for shape in shapes]
    contenders = {name: Contender(name, shapes, grads) for name in names}

    runs = {name: contender.turn for name, contender in contenders.items()}
    slowest = slowest_rank(runs, rounds, warm_up=3)
    return {name: [*seconds, contenders[name].state_bytes()] for name, seconds in slowest.items()}


def slowest_rank(runs: dict[str, harness.Run], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """The slowest rank's seconds of each run's rounds; collective over all ranks."""
    mine = harness.take_turns(runs, rounds, warm_up=warm_up, clock=harness.together, swap=True)
    every = processes().allgather_object(mine)
    return {name: np.max([each[name] for each in every], axis=0).tolist() for name in runs}


def measured_steps(model: str, strategy: str, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Be a rank: seconds of a step, by way of the exchange."""
    prepare.prepare()
    given = bench_step.experiment(model)
    with jax.numpy_dtype_promotion("standard"):
        exchanges = {name: dataclasses.replace(given.exchange, strategy=strategy, **WAYS[name]) for name in names}
        loops = {k: bench_step.trainer(dataclasses.replace(given, exchange=each)) for k, each in exchanges.items()}
        found = slowest_rank({name: partial(loop, STEPS) for name, loop in loops.items()}, rounds, warm_up=1)
    return {name: [turn_s / STEPS for turn_s in seconds] for name, seconds in found.items()}


def print_steps(options: argparse.Namespace, env: dict[str, str]) -> None:
    """Print a row per way of the exchange."""
    arguments = (options.model, options.strategy, list(WAYS), options.rounds)
    where = {"ranks": options.ranks, "rate": options.rate, "slots": options.slots}
    found = harness.on_ranks(measured_steps, *arguments, **where, env=env)
    print(harness.table(("exchange", "s a step", "/ whole, overlap on")))
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(seconds, found["whole, overlap on"], strict=True)]
        print(harness.row([name, harness.interval(seconds, 3), harness.interval(ratios, 2)]), flush=True)


def print_updates(names: list[str], rounds: int) -> None:
    """Print a row per tree and optimizer."""
    prepare.prepare()
    keep_freed_memory()
    print(harness.table(("tree", "optimizer", "ms an update")))
    for tree, (name, clip_norm) in itertools.product(names, (("adam", 0.0), ("adam", 1.0), ("momentum", 0.0))):
        params: Any = [jnp.ones(shape) for shape in trees([tree])[tree].values()]
        tx = optimizer(Optim(name, clip_norm=clip_norm), lambda step: 1e-3)
        step, grads, state = base.descend(tx, jax.jit), jax.tree.map(jnp.copy, params), tx.init(params)
        times = []
        for _ in range(rounds + 2):
            begin = time.perf_counter()
            params, state = jax.block_until_ready(step(grads, state, params))
            times.append(1e3 * (time.perf_counter() - begin))
        cells = [tree, name + ", clip_norm" * bool(clip_norm), harness.interval(times[2:], 1)]
        print(harness.row(cells), flush=True)


def main() -> None:
    """Print a row per tree and contender."""
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rate", default="", help="of each emulated host's link, as 200mbit; default: one host")
    parser.add_argument("--slots", type=int, default=1, help="ranks of an emulated host, with --step")
    parser.add_argument("--trees", nargs="+", default=["alexnet", "googlenet"], help="see `jaxmpi models`")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--step", action="store_true", help="the trainer's whole step, in place of trees")
    parser.add_argument("--strategy", default="asa32", help="with --step")
    parser.add_argument("--update", action="store_true", help="the optimizer's program alone")
    parser.add_argument("--model", default="googlenet", choices=("googlenet", "digits_cnn"), help="with --step")
    options = parser.parse_args()
    if options.update:
        return print_updates(options.trees, options.rounds)
    if options.slots > 1 and not (options.step and options.rate):
        parser.error("--slots: expected --step and --rate beside it")
    strategies = ["asa32", *([] if options.rate else ["shm"])]
    where = f" over {options.rate}, {options.slots} a host" * bool(options.rate)
    strategy = f", {options.strategy}" * options.step
    print(f"{options.ranks} ranks{where}{strategy}, Adam; {options.rounds} rounds\n")
    env = {"JAX_PLATFORMS": "cpu", "OMPI_MCA_mpi_yield_when_idle": "1"}
    if options.step:
        return print_steps(options, env)
    print(harness.table(("tree", "strategy", "s whole", "s sharded", "ratio", "MB of moments", "of the whole")))
    for tree, strategy in itertools.product(options.trees, strategies):
        names = [strategy, SHARDED + strategy]
        arguments = (tree, names, options.rounds)
        found = harness.on_ranks(measured, *arguments, ranks=options.ranks, rate=options.rate, env=env)
        (*whole, _), (*own, held_bytes) = found.values()
        whole_bytes = STATE_BYTES * sum(map(math.prod, trees([tree])[tree].values()))
        ratios = [a / b for a, b in zip(own, whole, strict=True)]
        times = [harness.interval(seconds, 4) for seconds in (whole, own)]
        shares = [f"{held_bytes / 1e6:.1f}", f"{held_bytes / whole_bytes:.4f}"]
        print(harness.row([tree, strategy, *times, harness.interval(ratios, 2), *shares]), flush=True)


if __name__ == "__main__":
    main()
