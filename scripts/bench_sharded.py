"""Exchange and update, sharded and not: seconds by turns, and bytes held.

    python scripts/bench_sharded.py --ranks 8 --trees alexnet googlenet
    python scripts/bench_sharded.py --ranks 4 --rate 200mbit --trees googlenet

Each rank has a tree's params and gradients, and the optimizer's state: whole, and a slice, by `--exchange.shard-update
on`. With `--optimizer muon` whole matrices are dealt to ranks, and so are the multiplications of Newton-Schulz. A turn
is the rule's update as the trainer calls it between jits: exchange, update, new params. A round counts as long as its
slowest rank takes. Ratios are round by round, with 95 % intervals. A job has two contenders at a time: four of
AlexNet's tree do not fit into 24 GB on 8 ranks.
"""

import itertools
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import jaxmpi
from jaxmpi.allreduce.api import BUCKET_BYTES, exchange
from jaxmpi.allreduce.zero import make_zero
from jaxmpi.bench.plan import trees
from jaxmpi.comm.job import processes
from jaxmpi.config import Optim
from jaxmpi.core.sharding import assign_tensors
from jaxmpi.optim.optimizers import OPTIMIZERS, optimizer
from jaxmpi.rules import base
from jaxmpi.rules.gradients import gradients

SHARDED = "sharded "


class Contender:
    """A rule with params and state; each turn is an update."""

    def __init__(self, name: str, tx_name: str, shapes: list[tuple[int, ...]], grads: list[jax.Array]) -> None:
        """Make state 0 of `asa32`, `shm`, or one of them behind `sharded`."""
        comm, strategy = jaxmpi.world(), name.rpartition(" ")[2]
        mean = partial(exchange, strategy=strategy, comm=comm)
        self.params: Any = [jnp.ones(shape) for shape in shapes]
        zero, row = None, OPTIMIZERS[tx_name]
        if name.startswith(SHARDED):
            sharding = assign_tensors(self.params, comm.size, row.cost) if row.by == "tensor" else None
            host = processes() if strategy == "shm" else None
            zero = make_zero(strategy, "mean", comm, BUCKET_BYTES, sharding, host=host)
        tx = optimizer(Optim(tx_name), lambda step: 1e-3)
        self.rule = gradients(tx, base.Exchange(mean, mean, comm.jit, zero=zero))
        self.grads, sharding = grads, self.rule.sharding
        if sharding and sharding.zero.shared_params:
            self.params = sharding.zero.shared_params.fill(self.params)
        if sharding:
            self.state = comm.jit(sharding.init)(self.params, np.int32(sharding.zero.shard_indices[int(comm.rank)]))
        else:
            self.state = comm.jit(self.rule.init)(self.params)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state on this rank."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def turn(self) -> None:
        """One exchange and update."""
        self.params, self.state = jax.block_until_ready(self.rule.update(self.grads, self.state, self.params))


def measured(tree: str, tx_name: str, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Be a rank: return each contender's seconds and state bytes.

    Seconds are the slowest rank's, round by round; the last entry is the bytes of this rank's state.
    """
    jaxmpi.world()
    shapes = list(trees([tree])[tree].values())
    grads = [jnp.full(shape, 1e-3) for shape in shapes]
    contenders = {name: Contender(name, tx_name, shapes, grads) for name in names}

    runs = {name: contender.turn for name, contender in contenders.items()}
    slowest = slowest_rank(runs, rounds, warm_up=3)
    return {name: [*seconds, contenders[name].state_bytes()] for name, seconds in slowest.items()}


def slowest_rank(runs: dict[str, harness.Run], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """The slowest rank's seconds of each run's rounds; collective over all ranks."""
    mine = harness.take_turns(runs, rounds, warm_up=warm_up, clock=harness.together, swap=True)
    every = processes().allgather_object(mine)
    return {name: np.max([rank_times[name] for rank_times in every], axis=0).tolist() for name in runs}


def main() -> None:
    """Print a row per tree and contender."""
    parser = harness.parser(__doc__, ranks=8, rate="", rounds=20)
    parser.add_argument("--trees", nargs="+", default=["alexnet", "googlenet"], help="see `jaxmpi models`")
    parser.add_argument("--optimizer", default="adam", choices=[name for name, row in OPTIMIZERS.items() if row.by])
    options = parser.parse_args()
    strategies = ["asa32", *([] if options.rate else ["shm"])]
    where = f" over {options.rate}" * bool(options.rate)
    print(f"{options.ranks} ranks{where}, {options.optimizer}; {options.rounds} rounds\n")
    env = {"JAX_PLATFORMS": "cpu", "OMPI_MCA_mpi_yield_when_idle": "1"}
    print(harness.table(("tree", "strategy", "s whole", "s sharded", "ratio", "MB of state", "of the whole")))
    for tree, strategy in itertools.product(options.trees, strategies):
        names = [strategy, SHARDED + strategy]
        arguments = (tree, options.optimizer, names, options.rounds)
        results = harness.on_ranks(measured, *arguments, ranks=options.ranks, rate=options.rate, env=env)
        (*whole, whole_bytes), (*sharded, shard_bytes) = results.values()
        ratios = [a / b for a, b in zip(sharded, whole, strict=True)]
        times = [harness.interval(seconds, 4) for seconds in (whole, sharded)]
        shares = [f"{shard_bytes / 1e6:.1f}", f"{shard_bytes / whole_bytes:.4f}"]
        print(harness.row([tree, strategy, *times, harness.interval(ratios, 2), *shares]), flush=True)


if __name__ == "__main__":
    main()
