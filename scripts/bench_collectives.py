"""Cost of collectives in jit beside mpi4jax and mpi4py, and their overlap.

    python scripts/bench_collectives.py calls [--operations allreduce sendrecv allgather messages ...] [--ranks 2 4 8]
        [--rounds 20] [--png calls.png]
    python scripts/bench_collectives.py overlap [--ms 500] [--rate 200mbit]

`calls`: medians of the ratio to mpi4jax's call, of rounds in which all three take turns. All ranks begin a round
together, and its time is the slowest rank's: the root of a bcast may be far ahead. Reductions are of a maximum. A
`sendrecv` goes to the next rank. An `allgather` gives each rank the arrays of all. `messages` are a send and a recv
between two ranks. `overlap`: a computation and an exchange that take equally long, in sequence, and with start and
wait; on one host, or between two emulated ones. Run it on a quiet machine.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import harness
import numpy as np

from jaxmpi.observe import plots

SIZES = [8 << 3 * i for i in range(8)] + [64 << 20]  # bytes: 8 B to 16 MB, 64 MB
LIBRARIES = "jaxmpi", "mpi4jax", "mpi4py"
CALLS_MOST = 64  # most calls of a program in one measurement


SYMMETRIC = "allreduce", "sendrecv", "allgather", "messages", "alltoall"
OPERATIONS = *SYMMETRIC, "reduce", "scan", "bcast", "gather", "scatter"


def looped(call: Any, repeats: int) -> Any:
    """A program of so many calls, one after another."""
    import jax

    return jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda _, y: call(y), x))


def ways(operation: str) -> dict[str, Any]:
    """A call by library: f32[n] -> f32[n]; mpi4py's (f32[n], f32[...]) -> None."""
    import jax
    import mpi4jax
    from mpi4py import MPI

    import jaxmpi
    from jaxmpi import collectives as mpi

    jaxmpi.world()
    theirs, bare = MPI.COMM_WORLD.Clone(), MPI.COMM_WORLD.Clone()
    left, right = (bare.rank - 1) % bare.size, (bare.rank + 1) % bare.size
    if operation == "allreduce":
        return {
            "jaxmpi": lambda x: mpi.allreduce(x, "max"),
            "mpi4jax": lambda x: mpi4jax.allreduce(x, op=MPI.MAX, comm=theirs),
            "mpi4py": lambda x, out: bare.Allreduce(x, out, MPI.MAX),
        }
    if operation in ("reduce", "scan"):
        root = {"root": 0} if operation == "reduce" else {}
        return {
            "jaxmpi": lambda x: getattr(mpi, operation)(x, "max", **root),
            "mpi4jax": lambda x: getattr(mpi4jax, operation)(x, op=MPI.MAX, comm=theirs, **root),
            "mpi4py": lambda x, out: getattr(bare, operation.capitalize())(x, out, MPI.MAX, **root),
        }
    if operation == "bcast":
        return {
            "jaxmpi": mpi.bcast,
            "mpi4jax": lambda x: mpi4jax.bcast(x, root=0, comm=theirs),
            "mpi4py": lambda x, out: bare.Bcast(x),
        }
    if operation == "gather":
        taken = lambda y: y[right] if bare.rank == 0 else y  # noqa: E731  # of rows, of which root has all
        return {
            "jaxmpi": lambda x: taken(mpi.gather(x)),
            "mpi4jax": lambda x: taken(mpi4jax.gather(x, root=0, comm=theirs)),
            "mpi4py": lambda x, out: bare.Gather(x, out if bare.rank == 0 else None),
        }
    if operation == "scatter":
        given = lambda x: jax.numpy.broadcast_to(x, (bare.size, *x.shape)) if bare.rank == 0 else x  # noqa: E731
        return {
            "jaxmpi": lambda x: mpi.scatter(given(x)),
            "mpi4jax": lambda x: mpi4jax.scatter(given(x), root=0, comm=theirs),
            "mpi4py": lambda x, out: bare.Scatter(out if bare.rank == 0 else None, x),
        }
    if operation == "alltoall":  # an array of fewer numbers than ranks cannot be divided: each rank gets a whole one
        rows = np.ones((bare.size, 1), np.float32)

        def exchanged(alltoall: Any, x: Any, **options: Any) -> Any:
            whole = x.reshape(bare.size, -1) if x.size >= bare.size else x[None] * rows
            return alltoall(whole, **options).reshape(-1)[: x.size]

        return {
            "jaxmpi": lambda x: exchanged(mpi.alltoall, x),
            "mpi4jax": lambda x: exchanged(mpi4jax.alltoall, x, comm=theirs),
            "mpi4py": lambda x, out: bare.Alltoall(*(np.resize(y, max(y.size, bare.size)) for y in (x, out))),
        }
    if operation == "sendrecv":
        return {
            "jaxmpi": lambda x: mpi.sendrecv(x, x, left, right),
            "mpi4jax": lambda x: mpi4jax.sendrecv(x, x, left, right, comm=theirs),
            "mpi4py": lambda x, out: bare.Sendrecv(x, right, recvbuf=out, source=left),
        }
    if operation == "messages":
        other, is_first = bare.rank ^ 1, bare.rank % 2 == 0

        def there_and_back(library: Any, x: Any, **options: Any) -> Any:
            if is_first:
                library.send(x, other, **options)
                return library.recv(x, other, **options)
            received = library.recv(x, other, **options)
            library.send(received, other, **options)
            return received

        def by_mpi4py(x: Any, out: Any) -> None:
            for step in (bare.Send, bare.Recv) if is_first else (bare.Recv, bare.Send):
                step(x if step == bare.Send else out, other)

        return {
            "jaxmpi": lambda x: there_and_back(mpi, x),
            "mpi4jax": lambda x: there_and_back(mpi4jax, x, comm=theirs),
            "mpi4py": by_mpi4py,
        }
    return {  # the next call takes the next rank's row: a row of one's own would let XLA leave the others out
        "jaxmpi": lambda x: mpi.allgather(x)[right],
        "mpi4jax": lambda x: mpi4jax.allgather(x, comm=theirs)[right],
        "mpi4py": lambda x, out: bare.Allgather(x, out),
    }


def calls(operation: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Be a rank: return seconds of a call by size and library."""
    import jax.numpy as jnp
    from mpi4py import MPI

    import jaxmpi

    workers, by, together = jaxmpi.world().size, ways(operation), MPI.COMM_WORLD.Clone()

    def of_the_slowest(run: harness.Run) -> float:
        together.Barrier()
        return together.allreduce(harness.seconds(run), MPI.MAX)

    found = {}
    for size in SIZES:
        repeats = max(1, min(CALLS_MOST, (1 << 20) // size))
        x, sent = jnp.ones(size // 4, jnp.float32), np.ones(size // 4, np.float32)
        out = np.empty((workers if operation in ("allgather", "gather", "scatter") else 1, size // 4), np.float32)

        def by_mpi4py(sent: Any = sent, out: Any = out, repeats: int = repeats) -> None:
            for _ in range(repeats):
                by["mpi4py"](sent, out)

        programs = {name: looped(by[name], repeats) for name in ("jaxmpi", "mpi4jax")}
        runs: dict[str, Any] = {
            name: lambda program=program, x=x: program(x).block_until_ready() for name, program in programs.items()
        }
        timed = harness.take_turns(runs | {"mpi4py": by_mpi4py}, rounds, warm_up=3, clock=of_the_slowest, swap=True)
        found[str(size)] = {name: [s / repeats for s in values] for name, values in timed.items()}
    return found


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
        alone, sent = jax.jit(lambda a, n=n: compute(n, a)), jax.jit(lambda x: mpi.allreduce(x, "max"))
        x = jnp.ones(floats)
        runs: dict[str, Any] = {
            "compute": lambda alone=alone: alone(a).block_until_ready(),
            "exchange": lambda sent=sent, x=x: sent(x).block_until_ready(),
        }
        timed = harness.take_turns(runs, 3, warm_up=2)
        took = jaxmpi.broadcast(np.array([np.median(timed["compute"]), np.median(timed["exchange"])]))
        n, floats = int(n * goal_s / took[0]), int(floats * goal_s / took[1])
    x = jnp.ones(floats)

    def beside(a: Any, x: Any) -> Any:
        handle = jaxmpi.start(mpi.allreduce, x, "max")
        done = compute(n, a)
        return done, jaxmpi.wait(handle, after=done)

    alone, sent = jax.jit(lambda a: compute(n, a)), jax.jit(lambda x: mpi.allreduce(x, "max"))
    both = jax.jit(beside)
    runs = {
        "compute": lambda: alone(a).block_until_ready(),
        "exchange": lambda: sent(x).block_until_ready(),
        "in sequence": lambda: (alone(a).block_until_ready(), sent(x).block_until_ready()),
        "start and wait": lambda: jax.block_until_ready(both(a, x)),
    }
    return harness.take_turns(runs, rounds, warm_up=2)


def show_calls(options: argparse.Namespace) -> dict[str, Any]:
    """Print a table for each operation and number of ranks."""
    found: dict[str, Any] = {}
    for operation, ranks in itertools.product(options.operations, options.ranks):
        job = {"ranks": ranks, "env": {"JAX_PLATFORMS": "cpu"}}
        measured = harness.on_ranks(calls, operation, options.rounds, **job)
        found.setdefault(operation, {})[str(ranks)] = measured
        rows = []
        for size, by in measured.items():
            micro = [f"{1e6 * float(np.median(values)):.1f}" for values in by.values()]
            ratio = np.array(by["jaxmpi"]) / np.array(by["mpi4jax"])
            rows.append([size, *micro, harness.interval(ratio, 2)])
        print(f"\n{operation}, {ranks} ranks, us a call\n")
        print(harness.table(("bytes", "jaxmpi", "mpi4jax", "mpi4py", "jaxmpi / mpi4jax (goal 1.0)"), rows), flush=True)
    if options.png:
        x, y = plots.Quantity("array", "B"), plots.Quantity("a call", "s")
        panels = [
            plots.Lines(f"{operation} inside jit, {ranks} ranks", x, y, {name: line(by, name) for name in LIBRARIES})
            for operation, of in found.items()
            for ranks, by in of.items()
        ]
        plots.save(panels, options.png)
    return found


def line(by: dict[str, dict[str, list[float]]], name: str) -> list[plots.Point]:
    """Median seconds of a library by bytes."""
    return [(float(size), float(np.median(times[name]))) for size, times in by.items()]


def show_overlap(options: argparse.Namespace) -> dict[str, Any]:
    """Print seconds, and the ratio to the longer of both."""
    job = {"ranks": 2, "rate": options.rate, "env": {"JAX_PLATFORMS": "cpu"}}
    found = harness.on_ranks(overlap, options.ms / 1e3, options.rounds, **job)
    longer = np.maximum(found["compute"], found["exchange"])
    rows = [
        [name, f"{np.median(values):.3f}", harness.interval(np.array(values) / longer, 2)]
        for name, values in found.items()
    ]
    print(harness.table(("two ranks", "s", "of the longer (goal 1.15)"), rows))
    return found


def main() -> None:
    """Measure, print and save."""
    parser = harness.parser(__doc__, ranks=[2, 4, 8], rate="", rounds=20, json=None)
    parser.add_argument("what", choices=("calls", "overlap"))
    parser.add_argument("--operations", choices=OPERATIONS, nargs="+", default=["allreduce"], help="of calls")
    parser.add_argument("--ms", type=float, default=500, help="of compute and of exchange, of overlap")
    parser.add_argument("--png", type=Path, help="where plots of calls go")
    options = parser.parse_args()
    harness.save(options.json, (show_calls if options.what == "calls" else show_overlap)(options))


if __name__ == "__main__":
    main()
