"""Peak memory of an exchange beyond the K bytes of gradients; the goal is 3 K.

    python scripts/exchange_memory.py --ranks 4 --tree alexnet
    python scripts/exchange_memory.py --ranks 4 --rate 200mbit --strategies ring32 lowrank4

Each strategy has its own job. A rank keeps the gradients and a compressor's residual, and exchanges them in one jit.
The kernel reports the peak growth of its memory, which includes the means, copies and MPI's buffers. `used` is for
calls that start after the heap has returned freed memory; `kept` is after as many calls without that, when the heap has
holes. Compiling and a first exchange of single numbers are not counted. The figure is that of the rank that grows most.
"""

import ctypes
import math
import re
from pathlib import Path

import harness
import jax
import jax.numpy as jnp

import jaxmpi
from jaxmpi.allreduce import compression
from jaxmpi.allreduce.api import exchange, exchange_gradients
from jaxmpi.bench.plan import trees
from jaxmpi.comm.job import processes

STRATEGIES = (
    *("shm", "ar", "asa32", "asa16", "asa8", "ring32", "ring16", "ring:8", "tree:32", "hier-ring32", "hier-ring16"),
    *("root:32", "pipering:32", "color4:32", "lowrank4", "topk1"),
)
GOAL = 3.0
CALLS = 3


def memory_bytes(field: str) -> int:
    """This process's memory: VmRSS now, or VmHWM, the peak since a reset."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match is not None
    return int(match[1]) << 10


def return_freed_memory() -> int:
    """Bytes held now, with freed memory returned; resets VmHWM."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


def peak_growth(strategy: str, shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """Peak growth of this rank's memory in bytes: used, and kept."""
    tx = exchange_gradients(strategy) if compression.is_compressor(strategy) else None
    step = jax.jit(tx.update if tx else lambda grads, state: (exchange(grads, strategy), state))
    used = retained = 0
    for exchanged in ([(1,)] * 2, shapes):
        grads = [jnp.ones(shape) for shape in exchanged]
        state = jax.block_until_ready(tx.init(grads)) if tx else ()
        before, peaks = return_freed_memory(), []
        for call in range(1 + 2 * CALLS):
            state = jax.block_until_ready(step(grads, state))[1]  # releases the means
            peaks.append(memory_bytes("VmHWM") - before)
            if call < CALLS:
                return_freed_memory()
        used, retained = min(peaks[1 : 1 + CALLS]), peaks[-1]  # sometimes JAX releases the means late
    return used, retained


def copies(strategy: str, tree: str) -> list[float]:
    """Be a rank: memory used and kept, in copies of the gradients, of the rank that grows most."""
    jaxmpi.world()
    shapes = list(trees([tree])[tree].values())
    size_bytes = 4 * sum(map(math.prod, shapes))
    mine = [grown_bytes / size_bytes for grown_bytes in peak_growth(strategy, shapes)]
    return [max(figures) for figures in zip(*processes().allgather_object(mine), strict=True)]


def main() -> None:
    """Print a row per strategy."""
    parser = harness.parser(__doc__, ranks=4, rate="")
    parser.add_argument("--tree", default="alexnet", help="whose gradients, see `jaxmpi models`")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    options = parser.parse_args()
    print(f"{options.ranks} ranks, gradients of {options.tree}; goal {GOAL:g} K\n")
    print(harness.table(("strategy", "used", "kept")))
    job = {"ranks": options.ranks, "rate": options.rate}
    env = {"JAX_PLATFORMS": "cpu", "OMPI_MCA_mpi_yield_when_idle": "1"}
    for strategy in options.strategies:
        used, retained = harness.on_ranks(copies, strategy, options.tree, **job, env=env)
        print(harness.row([f"`{strategy}`", f"{used:.2f}", f"{retained:.2f}"]), flush=True)


if __name__ == "__main__":
    main()
