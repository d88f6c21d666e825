"""Memory of an exchange beyond K bytes of gradients; goal: 3 K.

python scripts/exchange_memory.py --ranks 4 --tree alexnet
python scripts/cluster.py --hosts 4 -- python scripts/exchange_memory.py --ranks 4 --strategies ring32 lowrank4
python scripts/exchange_memory.py --ranks 4 --strategies "sharded asa32" "sharded ring32"
python scripts/exchange_memory.py --ranks 2 --devices 2 --strategies asa32 "sharded asa32"

Each strategy has a job of its own. A rank holds the gradients and a compressor's residual, and exchanges them in one
jit. The kernel counts the peak growth of its memory: means, copies, MPI's buffers. Calls under `used` begin with a heap
that has returned freed memory; `kept` is after as many calls without that, with holes in the heap. Compiling and a
first exchange of single numbers (connections, code) do not count. The figure is that of the rank that grows most.
`sharded <strategy>` is an update by sgd with `--exchange.shard-update on`, beside gradients and params; `whole
<strategy>` the same of whole tensors, of which each worker has some. With `--devices K` a rank drives K workers, and
figures are a worker's.
"""

import ctypes
import math
import re
from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import optax

import jaxmpi
from jaxmpi.allreduce import algorithms, compression
from jaxmpi.allreduce.api import BUCKET_BYTES, Choice, exchange, exchange_gradients
from jaxmpi.allreduce.local_devices import over_local_devices
from jaxmpi.allreduce.sharded_local_devices import ShardsOfDevices
from jaxmpi.allreduce.shards import shards_of
from jaxmpi.bench.plan import trees
from jaxmpi.comm.job import processes
from jaxmpi.comm.topology import AXIS, shard_rows
from jaxmpi.comm.xla_mesh import local_mesh
from jaxmpi.core.deals import deal
from jaxmpi.rules import base
from jaxmpi.rules.gradients import gradients
from jaxmpi.trainer import step as steps

STRATEGIES = (
    *("shm", "ar", "asa32", "asa16", "asa8", "ring32", "ring16", "ring:8", "tree:32", "hier-ring32", "hier-ring16"),
    *("root:32", "pipering:32", "color4:32", "lowrank4", "topk1"),
)
GOAL = 3.0
CALLS = 3


def held_bytes(field: str) -> int:
    """This process's memory: VmRSS now, or VmHWM, the peak since a reset."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) << 10


def count_anew() -> int:
    """Bytes held now, with freed memory returned; resets VmHWM."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return held_bytes("VmRSS")


def on_devices(tree: list[jax.Array], mesh: jax.sharding.Mesh | None) -> list[jax.Array]:
    """A tree, or a copy for each device of a mesh."""
    return shard_rows([tree] * mesh.size, mesh) if mesh else tree


def grown(name: str, shapes: list[tuple[int, ...]], devices: int) -> tuple[int, int]:
    """Peak growth of this rank's memory, in bytes: used, and kept."""
    mesh = local_mesh(AXIS, devices) if devices > 1 else None
    way, _, strategy = name.rpartition(" ")
    if way:
        return grown_sharded(strategy, shapes, mesh, takes_whole=way == "whole")
    tx = exchange_gradients(name) if compression.is_compressor(name) else None
    step = jax.jit(tx.update if tx else lambda grads, state: (exchange(grads, name), state))
    if mesh:
        mean = over_local_devices(Choice(algorithms.parse(name).name, "mean", jaxmpi.world(), BUCKET_BYTES), mesh)
        step = lambda grads, state: (mean(grads), state)  # noqa: E731
    used = kept = 0
    for exchanged in ([(1,)] * 2, shapes):
        grads = on_devices([jnp.ones(shape) for shape in exchanged], mesh)
        state = jax.block_until_ready(tx.init(grads)) if tx else ()
        before, peaks = count_anew(), []
        for call in range(1 + 2 * CALLS):
            state = jax.block_until_ready(step(grads, state))[1]  # releases the means
            peaks.append(held_bytes("VmHWM") - before)
            if call < CALLS:
                count_anew()
        used, kept = min(peaks[1 : 1 + CALLS]), peaks[-1]  # at times JAX releases the means too late
    return used, kept


def grown_sharded(
    strategy: str, shapes: list[tuple[int, ...]], mesh: jax.sharding.Mesh | None, *, takes_whole: bool
) -> tuple[int, int]:
    """Like `grown`, for a sharded update in the trainer's split form."""
    comm = jaxmpi.world()
    mean = lambda tree: exchange(tree, strategy)  # noqa: E731
    over = (lambda f, donate_argnums=(): steps.over_devices(f, mesh, donate_argnums)) if mesh else comm.jit
    used = kept = 0
    for exchanged in ([(1,)] * 2, shapes):
        shares = strategy == "shm" and not mesh
        workers = comm.size * (mesh.size if mesh else 1)
        like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in exchanged]
        dealt = deal(like, workers) if takes_whole else None
        halves = shards_of(
            strategy,
            "mean",
            comm,
            BUCKET_BYTES,
            deal=None if mesh else dealt,
            host=processes() if shares else None,
        )
        shards = ShardsOfDevices(of=halves, mesh=mesh, deal=dealt) if mesh else halves
        rule = gradients(optax.sgd(0.1), base.Exchange(mean, mean, over, shards=shards))
        grads, params = (on_devices([jnp.ones(shape) for shape in exchanged], mesh) for _ in range(2))
        if halves.shared_params:
            params = halves.shared_params.filled(params)
        assert rule.sharding
        state = over(rule.sharding.init)(params, shards.chunk())
        params, state = jax.block_until_ready(rule.update(grads, state, params))  # compiles
        before, peaks = count_anew(), []
        for call in range(2 * CALLS):
            params, state = jax.block_until_ready(rule.update(grads, state, params))
            peaks.append(held_bytes("VmHWM") - before)
            if call < CALLS:
                count_anew()
        used, kept = min(peaks[:CALLS]), peaks[-1]
    return used, kept


def copies(strategy: str, tree: str, devices: int) -> list[float]:
    """Be a rank: memory used and kept, in copies of the gradients.

    It is that of the rank that grows most; with several devices it is a worker's. All ranks call it together.
    """
    jaxmpi.world()
    shapes = list(trees([tree])[tree].values())
    size_bytes = 4 * devices * sum(map(math.prod, shapes))
    mine = [grown_bytes / size_bytes for grown_bytes in grown(strategy, shapes, devices)]
    return [max(of_ranks) for of_ranks in zip(*processes().allgather_object(mine), strict=True)]


def main() -> None:
    """Print a row per strategy."""
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1, help="of each rank")
    parser.add_argument("--tree", default="alexnet", help="whose gradients, see `jaxmpi models`")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    options = parser.parse_args()
    workers = f"{options.ranks} ranks" + f" x {options.devices} devices" * (options.devices > 1)
    print(f"{workers}, gradients of {options.tree}; goal {GOAL:g} K\n")
    print(harness.table(("strategy", "used", "kept")))
    env = {"JAX_PLATFORMS": "cpu", "OMPI_MCA_mpi_yield_when_idle": "1"}
    for strategy in options.strategies:
        used, kept = harness.on_ranks(copies, strategy, options.tree, options.devices, ranks=options.ranks, env=env)
        print(harness.row([f"`{strategy}`", f"{used:.2f}", f"{kept:.2f}"]), flush=True)


if __name__ == "__main__":
    main()
