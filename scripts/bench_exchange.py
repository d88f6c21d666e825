"""Time of `exchange` beside mpi4jax.allreduce on AlexNet's gradient tree, in jit, mean in and mean out.

    python scripts/bench_exchange.py [-n 8] [--rounds 20] [--strategies asa32 ring32 asa16]

Two jobs of n ranks take turns, round by round, and every round times each contender once: in one job glibc allocates as
it comes, in the other with the settings that jaxmpi makes; cores are shared out alike. The peers run in both: one call
a leaf, and one flat array (in the second job, which keeps its memory, with --flat only). A time is that of the
slowest rank. A ratio is taken within a round, to the fastest peer of that job; printed are medians and quartiles.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxmpi
from jaxmpi import launch
from jaxmpi.processes import processes

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
WARM_UP = 8  # rounds not counted: the first compiles, the next ones settle the heap


def tree() -> dict[str, dict[str, jax.Array]]:
    """AlexNet's 16 gradients, 60,965,224 floats."""
    return {
        name: {"kernel": jnp.ones(shape, jnp.float32), "bias": jnp.ones(shape[-1], jnp.float32)}
        for name, shape in ALEXNET.items()
    }


# ---------------------------------------------------------------- inside a job


def contenders(strategies: list[str], with_flat: bool) -> dict[str, Run]:
    """Name to function of the tree."""
    import mpi4jax
    from mpi4py import MPI

    peer = MPI.COMM_WORLD.Clone()

    @jax.jit
    def flat(grads: Any) -> Any:
        vector, back = ravel_pytree(grads)
        return back(mpi4jax.allreduce(vector, op=MPI.SUM, comm=peer) / peer.size)

    @jax.jit
    def per_leaf(grads: Any) -> Any:
        return jax.tree.map(lambda leaf: mpi4jax.allreduce(leaf, op=MPI.SUM, comm=peer) / peer.size, grads)

    rows: dict[str, Run] = {"allreduce per leaf": per_leaf, **({"allreduce flat": flat} if with_flat else {})}
    for strategy in strategies:
        rows[strategy] = jax.jit(lambda grads, strategy=strategy: jaxmpi.exchange(grads, strategy))
    return rows


def run_job(job: str, strategies: list[str], with_flat: bool, rounds: int, folder: Path) -> None:
    """Time this job's contenders whenever it has the baton; FOLDER/<job>.json holds the seconds."""
    control = processes()
    rows = contenders(strategies, with_flat)
    grads, times = tree(), {name: [] for name in rows}
    for turn in range(rounds + WARM_UP):
        if control.rank == 0:
            take_baton(folder, job, turn)
        for name, run in rows.items():
            control.barrier()  # polled: whoever waits leaves the cores to the other job
            begin = time.perf_counter()
            jax.block_until_ready(run(grads))
            seconds = max(float(text) for text in control.gather(str(time.perf_counter() - begin)))
            times[name].append(seconds)
        if control.rank == 0:
            (folder / "baton").write_text(OTHER[job])
    if control.rank == 0:
        (folder / f"{job}.json").write_text(json.dumps({k: v[WARM_UP:] for k, v in times.items()}))
        (folder / f"{job} is done").touch()


OTHER = {"as it comes": "tuned", "tuned": "as it comes"}


def take_baton(folder: Path, job: str, turn: int) -> None:
    """Wait until it is this job's turn, or the other has ended."""
    deadline = time.monotonic() + 300
    while (folder / "baton").read_text() != job and not (folder / f"{OTHER[job]} is done").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{job}: no baton for round {turn}")
        time.sleep(0.002)


# ---------------------------------------------------------------- outside


def run_both(ranks: int, arguments: list[str]) -> dict[str, dict[str, np.ndarray]]:
    """Start the two jobs, wait for them; job to contender to f64[rounds] seconds."""
    line = launch.mpirun(launch.Options(ranks, "mpirun", (), ()), len(os.sched_getaffinity(0)), os.geteuid() == 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "baton").write_text("tuned")
        jobs = []
        for job, allocator in (("tuned", "jaxmpi"), ("as it comes", "system")):
            script = [sys.executable, __file__, *arguments, "--job", job, "--folder", name]
            jobs.append(subprocess.Popen([*line, *script], env=os.environ | {"JAXMPI_ALLOCATOR": allocator}))
        for process in jobs:
            if process.wait() != 0:
                raise SystemExit("a job failed")
        return {
            job: {k: np.array(v) for k, v in json.loads((folder / f"{job}.json").read_text()).items()} for job in OTHER
        }


def show(times: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """A row a contender: seconds, and ratios to the faster peer of each round."""
    best = {job: np.min([v for k, v in rows.items() if k.startswith("allreduce")], 0) for job, rows in times.items()}
    result = {}
    print(f"| {'':34} | allocator   | median s | / faster peer as it comes | / faster peer tuned |")
    print("|---|---|---|---|---|")
    for job, rows in times.items():
        for name, values in rows.items():
            if job == "as it comes" and not name.startswith("allreduce"):
                continue
            ratios = {peer: np.percentile(values / seconds, (50, 25, 75)).tolist() for peer, seconds in best.items()}
            cells = " | ".join(f"{m:.2f} ({low:.2f}-{high:.2f})" for m, low, high in ratios.values())
            print(f"| {name:34} | {job:11} | {np.median(values):.3f} | {cells} |")
            result[f"{name}, {job}"] = {"median_s": float(np.median(values)), "ratios": ratios}
    return result


def main() -> None:
    """Without --job: start both jobs and print. With it: be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=8, help="ranks")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--strategies", nargs="+", default=["asa32", "ring32", "asa16"])
    parser.add_argument("--flat", action="store_true", help="the flat peer in the tuned job too: 20 GB for 8 ranks")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--job", choices=list(OTHER), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        only_peers = options.job == "as it comes"
        strategies = [] if only_peers else options.strategies
        return run_job(options.job, strategies, only_peers or options.flat, options.rounds, options.folder)
    times = run_both(
        options.n, ["--rounds", str(options.rounds), "--strategies", *options.strategies, *["--flat"] * options.flat]
    )
    print(f"{options.n} ranks on {len(os.sched_getaffinity(0))} cores, {platform.machine()}, {options.rounds} rounds")
    result = show(times)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
