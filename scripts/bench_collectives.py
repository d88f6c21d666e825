"""Cost of collectives in jit beside mpi4jax and mpi4py, and their overlap.

    python scripts/bench_collectives.py calls [--operations allreduce sendrecv allgather messages ...] [--ranks 2 4 8]
        [--rounds 20]
    python scripts/bench_collectives.py overlap [--ms 500] [--rate 200mbit]

`calls`: medians of the ratio to mpi4jax's call, of rounds in which all three take turns. All ranks begin a round
together, and its time is the slowest rank's: the root of a bcast may be far ahead. Reductions are of a maximum. A
`sendrecv` goes to the next rank. An `allgather` gives each rank the arrays of all. `messages` are a send and a recv
between two ranks. `overlap`: a computation and an exchange that take equally long, in sequence, and with start and
wait; on one host, or between two emulated ones. Run it on a quiet machine.
"""

import argparse
import itertools
from typing import Any

import harness
import numpy as np

SIZES = [8 << 3 * i for i in range(8)] + [64 << 20]  # bytes: 8 B to 16 MB, 64 MB
LIBRARIES = "jaxmpi", "mpi4jax", "mpi4py"
CALLS_MOST = 64  # most calls of a program in one measurement


OPERATIONS = (
    *("allreduce", "sendrecv", "allgather", "messages", "alltoall", "reduce", "scan", "bcast", "gather", "scatter"),
)


def looped(call: Any, repeats: int) -> Any:
    """A program of so many calls, one after another."""
    import jax

    return jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda _, y: call(y), x))


def calls_by_library(operation: str) -> dict[str, Any]:
    """A call by library: f32[n] -> f32[n]; mpi4py's (f32[n], f32[...]) -> None."""
    import jax.numpy as jnp
    import mpi4jax
    from mpi4py import MPI

    import jaxmpi
    from jaxmpi import collectives as ours

    jaxmpi.world()
    theirs, bare = MPI.COMM_WORLD.Clone(), MPI.COMM_WORLD.Clone()
    rank, size = bare.rank, bare.size
    left, right, other, is_root = (rank - 1) % size, (rank + 1) % size, rank ^ 1, rank == 0

    def messages(library: Any, x: Any, **comm: Any) -> Any:
        if rank % 2 == 0:
            library.send(x, other, **comm)
            return library.recv(x, other, **comm)
        received = library.recv(x, other, **comm)
        library.send(received, other, **comm)
        return received

    def bare_messages(x: Any, out: Any) -> None:
        for step in (bare.Send, bare.Recv) if rank % 2 == 0 else (bare.Recv, bare.Send):
            step(x if step == bare.Send else out, other)

    def alltoall(library: Any, x: Any, **comm: Any) -> Any:
        # An array of fewer numbers than ranks cannot be divided, so each rank gets a whole one.
        rows = x.reshape(size, -1) if x.size >= size else x[None] * np.ones((size, 1), np.float32)
        return library.alltoall(rows, **comm).reshape(-1)[: x.size]

    def scatter(library: Any, x: Any, **comm: Any) -> Any:
        return library.scatter(jnp.broadcast_to(x, (size, *x.shape)) if is_root else x, 0, **comm)

    def gather(library: Any, x: Any, **comm: Any) -> Any:
        rows = library.gather(x, 0, **comm)
        return rows[right] if is_root else rows

    def reduction(name: str, *root: int) -> tuple[Any, Any, Any]:
        return (
            lambda x: getattr(ours, name)(x, "max", *root),
            lambda x: getattr(mpi4jax, name)(x, MPI.MAX, *root, comm=theirs),
            lambda x, out: getattr(bare, name.capitalize())(x, out, MPI.MAX, *root),
        )

    def in_jit(call: Any) -> tuple[Any, Any]:
        return lambda x: call(ours, x), lambda x: call(mpi4jax, x, comm=theirs)

    calls = {
        "allreduce": reduction("allreduce"),
        "scan": reduction("scan"),
        "reduce": reduction("reduce", 0),
        "bcast": (*in_jit(lambda library, x, **comm: library.bcast(x, 0, **comm)), lambda x, out: bare.Bcast(x)),
        "gather": (*in_jit(gather), lambda x, out: bare.Gather(x, out if is_root else None)),
        "scatter": (*in_jit(scatter), lambda x, out: bare.Scatter(out if is_root else None, x)),
        "alltoall": (
            *in_jit(alltoall),
            lambda x, out: bare.Alltoall(*(np.resize(y, max(y.size, size)) for y in (x, out))),
        ),
        "sendrecv": (
            *in_jit(lambda library, x, **comm: library.sendrecv(x, x, left, right, **comm)),
            lambda x, out: bare.Sendrecv(x, right, recvbuf=out, source=left),
        ),
        "messages": (*in_jit(messages), bare_messages),
        # The next call takes the next rank's row: with this rank's row XLA could leave the others out.
        "allgather": (
            *in_jit(lambda library, x, **comm: library.allgather(x, **comm)[right]),
            lambda x, out: bare.Allgather(x, out),
        ),
    }
    return dict(zip(LIBRARIES, calls[operation], strict=True))


def calls(operation: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Be a rank: return seconds of a call by size and library."""
    import jax.numpy as jnp
    from mpi4py import MPI

    import jaxmpi

    workers, by, together = jaxmpi.world().size, calls_by_library(operation), MPI.COMM_WORLD.Clone()

    def slowest(run: harness.Run) -> float:
        together.Barrier()
        return together.allreduce(harness.seconds(run), MPI.MAX)

    results = {}
    for size in SIZES:
        repeats = max(1, min(CALLS_MOST, (1 << 20) // size))
        x, message = jnp.ones(size // 4, jnp.float32), np.ones(size // 4, np.float32)
        out = np.empty((workers if operation in ("allgather", "gather", "scatter") else 1, size // 4), np.float32)

        def by_mpi4py(message: Any = message, out: Any = out, repeats: int = repeats) -> None:
            for _ in range(repeats):
                by["mpi4py"](message, out)

        programs = {name: looped(by[name], repeats) for name in ("jaxmpi", "mpi4jax")}
        runs: dict[str, Any] = {
            name: lambda program=program, x=x: program(x).block_until_ready() for name, program in programs.items()
        }
        timed = harness.take_turns(runs | {"mpi4py": by_mpi4py}, rounds, warm_up=3, clock=slowest, swap=True)
        results[str(size)] = {name: [s / repeats for s in values] for name, values in timed.items()}
    return results


def overlap(goal_s: float, rounds: int) -> dict[str, list[float]]:
    """Be a rank: seconds of compute, exchange, both in sequence, both overlapped.

    The amounts are such that rank 0 takes `goal_s` for each alone.
    """
    import jax
    import jax.numpy as jnp

    import jaxmpi
    from jaxmpi import collectives as mpi

    jaxmpi.world()

    def compute(n: int, a: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda _, a: jnp.tanh(a @ a), a)

    a, n, floats = jnp.eye(256) / 2, 20, 1 << 20
    for _ in range(4):  # a time is not quite in proportion to an amount
        computation, exchange = jax.jit(lambda a, n=n: compute(n, a)), jax.jit(lambda x: mpi.allreduce(x, "max"))
        x = jnp.ones(floats)
        runs: dict[str, Any] = {
            "compute": lambda computation=computation: computation(a).block_until_ready(),
            "exchange": lambda exchange=exchange, x=x: exchange(x).block_until_ready(),
        }
        timed = harness.take_turns(runs, 3, warm_up=2)
        took = jaxmpi.broadcast(np.array([np.median(timed["compute"]), np.median(timed["exchange"])]))
        n, floats = int(n * goal_s / took[0]), int(floats * goal_s / took[1])
    x = jnp.ones(floats)

    def start_and_wait(a: Any, x: Any) -> Any:
        handle = jaxmpi.start(mpi.allreduce, x, "max")
        values = compute(n, a)
        return values, jaxmpi.wait(handle, after=values)

    computation, exchange = jax.jit(lambda a: compute(n, a)), jax.jit(lambda x: mpi.allreduce(x, "max"))
    both = jax.jit(start_and_wait)
    runs = {
        "compute": lambda: computation(a).block_until_ready(),
        "exchange": lambda: exchange(x).block_until_ready(),
        "in sequence": lambda: (computation(a).block_until_ready(), exchange(x).block_until_ready()),
        "start and wait": lambda: jax.block_until_ready(both(a, x)),
    }
    return harness.take_turns(runs, rounds, warm_up=2)


def show_calls(options: argparse.Namespace) -> dict[str, Any]:
    """Print a table for each operation and number of ranks."""
    results: dict[str, Any] = {}
    for operation, ranks in itertools.product(options.operations, options.ranks):
        job = {"ranks": ranks, "env": {"JAX_PLATFORMS": "cpu"}}
        measured = harness.on_ranks(calls, operation, options.rounds, **job)
        results.setdefault(operation, {})[str(ranks)] = measured
        rows = []
        for size, by in measured.items():
            micro = [f"{1e6 * float(np.median(values)):.1f}" for values in by.values()]
            ratio = np.array(by["jaxmpi"]) / np.array(by["mpi4jax"])
            rows.append([size, *micro, harness.interval(ratio, 2)])
        print(f"\n{operation}, {ranks} ranks, us a call\n")
        print(harness.table(("bytes", "jaxmpi", "mpi4jax", "mpi4py", "jaxmpi / mpi4jax (goal 1.0)"), rows), flush=True)
    return results


def show_overlap(options: argparse.Namespace) -> dict[str, Any]:
    """Print seconds, and the ratio to the longer of both."""
    job = {"ranks": 2, "rate": options.rate, "env": {"JAX_PLATFORMS": "cpu"}}
    times = harness.on_ranks(overlap, options.ms / 1e3, options.rounds, **job)
    longer = np.maximum(times["compute"], times["exchange"])
    rows = [
        [name, f"{np.median(values):.3f}", harness.interval(np.array(values) / longer, 2)]
        for name, values in times.items()
    ]
    print(harness.table(("two ranks", "s", "of the longer (goal 1.15)"), rows))
    return times


def main() -> None:
    """Measure, print and save."""
    parser = harness.parser(__doc__, ranks=[2, 4, 8], rate="", rounds=20, json=None)
    parser.add_argument("what", choices=("calls", "overlap"))
    parser.add_argument("--operations", choices=OPERATIONS, nargs="+", default=["allreduce"], help="of calls")
    parser.add_argument("--ms", type=float, default=500, help="of compute and of exchange, of overlap")
    options = parser.parse_args()
    harness.save(options.json, (show_calls if options.what == "calls" else show_overlap)(options))


if __name__ == "__main__":
    main()
