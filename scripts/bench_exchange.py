"""Time of `exchange` beside mpi4jax.allreduce on a gradient tree, in jit, mean in and mean out.

    mpirun -n 8 python scripts/bench_exchange.py [--rounds 20] [--strategies asa32 ring32 asa16] [--json FILE]

All contenders run once a round, in one job; a time is that of the slowest rank. The peers, one flat array and one call
a leaf, run twice: with glibc's allocator as it comes, and with the settings that jaxmpi makes for itself. A ratio is
taken within a round, to the faster of the two peers in that round; printed are medians and quartiles.
"""

import argparse
import ctypes
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxmpi
from jaxmpi import runtime
from jaxmpi.comm import processes

CONTROL = processes()  # before mpi4py is imported: it sets what Open MPI reads when it starts

import mpi4jax  # noqa: E402
from mpi4py import MPI  # noqa: E402

# Kernels of AlexNet with two-group conv2, 4 and 5; each has a bias of its last axis.
ALEXNET = {
    "conv1": (11, 11, 3, 96),
    "conv2": (5, 5, 48, 256),
    "conv3": (3, 3, 256, 384),
    "conv4": (3, 3, 192, 384),
    "conv5": (3, 3, 192, 256),
    "fc6": (9216, 4096),
    "fc7": (4096, 4096),
    "fc8": (4096, 1000),
}
Run = Callable[[Any], Any]


def tree() -> dict[str, dict[str, jax.Array]]:
    """AlexNet's 16 gradients, 60,965,224 floats."""
    return {
        name: {"kernel": jnp.ones(shape, jnp.float32), "bias": jnp.ones(shape[-1], jnp.float32)}
        for name, shape in ALEXNET.items()
    }


def allocator_as_it_comes() -> None:
    """The C library's own settings, as they are once its threshold has grown to its limit of 32 MB."""
    m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_max, 65536)
    libc.mallopt(m_mmap_threshold, 32 << 20)
    libc.mallopt(m_trim_threshold, 64 << 20)


def contenders(strategies: list[str]) -> dict[str, tuple[Callable[[], None], Run]]:
    """Name to (allocator, function of the tree)."""
    peer = MPI.COMM_WORLD.Clone()
    size = peer.size

    @jax.jit
    def flat(grads: Any) -> Any:
        vector, back = ravel_pytree(grads)
        return back(mpi4jax.allreduce(vector, op=MPI.SUM, comm=peer) / size)

    @jax.jit
    def per_leaf(grads: Any) -> Any:
        return jax.tree.map(lambda leaf: mpi4jax.allreduce(leaf, op=MPI.SUM, comm=peer) / size, grads)

    tuned = runtime.keep_freed_memory
    rows: dict[str, tuple[Callable[[], None], Run]] = {}
    for allocator, settings in (("as it comes", allocator_as_it_comes), ("tuned", tuned)):
        rows[f"allreduce flat, allocator {allocator}"] = settings, flat
        rows[f"allreduce per leaf, allocator {allocator}"] = settings, per_leaf
    for strategy in strategies:
        rows[strategy] = tuned, jax.jit(lambda grads, strategy=strategy: jaxmpi.exchange(grads, strategy))
        rows[f"{strategy}, one flat buffer"] = (
            tuned,
            jax.jit(lambda grads, strategy=strategy: jaxmpi.exchange(grads, strategy, bucket_bytes=None)),
        )
    return rows


def measure(rounds: int, rows: dict[str, tuple[Callable[[], None], Run]]) -> dict[str, np.ndarray]:
    """Seconds of the slowest rank, f64[rounds] for each row."""
    grads, clock = tree(), MPI.COMM_WORLD.Clone()
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds + 1):  # the first compiles
        for name, (settings, run) in rows.items():
            settings()
            jax.block_until_ready(run(grads))  # the first after a change of allocator pays for it
            clock.Barrier()
            begin = time.perf_counter()
            jax.block_until_ready(run(grads))
            times[name].append(clock.allreduce(time.perf_counter() - begin, op=MPI.MAX))
    return {name: np.array(values[1:]) for name, values in times.items()}


def show(times: dict[str, np.ndarray]) -> dict[str, Any]:
    """A row a contender: seconds, and ratios to the faster peer of each round."""
    peers = {
        allocator: np.minimum(*(times[f"allreduce {form}, allocator {allocator}"] for form in ("flat", "per leaf")))
        for allocator in ("as it comes", "tuned")
    }
    result = {}
    print(f"{'':44}{'median s':>10}  {'/ fastest peer as it comes':>28}  {'/ fastest peer, tuned':>28}")
    for name, values in times.items():
        ratios = {allocator: np.percentile(values / best, (50, 25, 75)).tolist() for allocator, best in peers.items()}
        cells = "  ".join(f"{m:14.2f} ({low:.2f}-{high:.2f})" for m, low, high in ratios.values())
        print(f"{name:44}{np.median(values):10.3f}  {cells}")
        result[name] = {"median_s": float(np.median(values)), "ratios": ratios}
    return result


def main() -> None:
    """Measure on all ranks, print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--strategies", nargs="+", default=["asa32", "ring32", "asa16"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times = measure(options.rounds, contenders(options.strategies))
    if CONTROL.rank == 0:
        print(f"{CONTROL.size} ranks, {platform.machine()}, {jax.default_backend()}, {options.rounds} rounds")
        result = show(times)
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
