"""Memory of an exchange beyond the gradients, by strategy: goal at most 3 K a rank for K bytes.

python scripts/exchange_memory.py --ranks 4 --tree alexnet
python scripts/cluster.py --hosts 4 -- python scripts/exchange_memory.py --ranks 4 --strategies ring32 lowrank4

Each strategy has a job of its own. A rank holds the gradients and a compressor's residual, and exchanges them in one
jit. The kernel counts the peak growth of its memory: means, copies, MPI's buffers. Calls under `used` begin with a heap
that has returned freed memory; `kept` is after as many calls without that, with holes in the heap. Compiling and a
first exchange of single numbers (connections, code) do not count. The figure is that of the rank that grows most.
"""

import argparse
import ctypes
import math
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = (
    *("shm", "ar", "asa32", "asa16", "asa8", "ring32", "ring16", "ring:8", "tree:32", "hier-ring32", "hier-ring16"),
    *("root:32", "pipering:32", "color4:32", "lowrank4", "topk1"),
)
GOAL = 3.0
CALLS = 3


def held_bytes(field: str) -> int:
    """Memory of this process by the kernel: VmRSS now, or VmHWM, the peak since the last reset."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) << 10


def count_anew() -> int:
    """Bytes held now, with freed memory returned; resets VmHWM."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return held_bytes("VmRSS")


def grown(name: str, shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """Peak growth of this rank's memory, in bytes: used, and kept."""
    import jax
    import jax.numpy as jnp

    from jaxmpi.allreduce import compression
    from jaxmpi.allreduce.api import exchange, exchange_gradients

    tx = exchange_gradients(name) if compression.is_compressor(name) else None
    step = jax.jit(tx.update if tx else lambda grads, state: (exchange(grads, name), state))
    used = kept = 0
    for exchanged in ([(1,)] * 2, shapes):
        grads = [jnp.ones(shape) for shape in exchanged]
        state = jax.block_until_ready(tx.init(grads)) if tx else ()
        before, peaks = count_anew(), []
        for call in range(1 + 2 * CALLS):
            state = jax.block_until_ready(step(grads, state))[1]  # releases the means
            peaks.append(held_bytes("VmHWM") - before)
            if call < CALLS:
                count_anew()
        used, kept = min(peaks[1 : 1 + CALLS]), peaks[-1]  # at times JAX releases the means too late
    return used, kept


def run_job(options: argparse.Namespace) -> None:
    """Be a rank; rank 0 prints copies of the gradients."""
    import jaxmpi
    from jaxmpi.bench.options import trees
    from jaxmpi.comm.control import processes

    jaxmpi.world()
    shapes = list(trees([options.tree])[options.tree].values())
    size_bytes = 4 * sum(map(math.prod, shapes))
    mine = [grown_bytes / size_bytes for grown_bytes in grown(options.strategies[0], shapes)]
    rows = processes().allgather_object(mine)
    if processes().rank == 0:
        print("copies", *map(max, zip(*rows, strict=True)))


def measured(options: argparse.Namespace, strategy: str) -> tuple[float, float]:
    """Copies of the gradients, used and kept, from a job of its own."""
    line = ["mpirun", "-n", str(options.ranks), sys.executable, __file__, "--rank", "--tree", options.tree]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OMPI_MCA_mpi_yield_when_idle": "1"}
    env |= {"PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe"}
    ended = subprocess.run([*line, "--strategies", strategy], env=env, capture_output=True, text=True, cwd=ROOT)
    found = re.search(r"^copies (\S+) (\S+)$", ended.stdout, re.M)
    if ended.returncode or found is None:
        sys.exit(f"{strategy}: {ended.stdout}{ended.stderr}")
    return float(found[1]), float(found[2])


def main() -> None:
    """Print a row per strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tree", default="alexnet", help="whose gradients, see `jaxmpi models`")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return run_job(options)
    print(f"{options.ranks} ranks, gradients of {options.tree}; goal {GOAL:g} K")
    print("\n| strategy | used | kept |\n|---|---|---|")
    for strategy in options.strategies:
        used, kept = measured(options, strategy)
        print(f"| `{strategy}` | {used:.2f} | {kept:.2f} |", flush=True)
    return None


if __name__ == "__main__":
    main()
