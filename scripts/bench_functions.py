"""Cost of data-parallel functions beyond their parts, and scaling of ResNet-50.

    python scripts/bench_functions.py calls     # a call beside the bare function and the exchange; bytes it moves
    python scripts/bench_functions.py shuffle   # rows by index beside one worker's own np.take
    python scripts/bench_functions.py resnet    # Figs. 2 and 3 and Table 1 of Stooke and Abbeel 2017, in shape

Two workers, a core each; options: [--rounds 200] [--size 32] [--batch 8] [--steps 20] [--workers 1 2] [--only weak].
A script leads forked processes in `resnet`, as in the paper; all ranks of mpirun run it in `shuffle`; `calls` has both.
Where the time goes and how many bytes are sent is what `jaxmpi.functions.profile` says.
"""

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmpi
from jaxmpi import functions as jm
from jaxmpi.allreduce.buckets import fuse, split
from jaxmpi.bench.results import median_interval
from jaxmpi.models.resnet import resnet50
from jaxmpi.runtime import process

Result = dict[str, Any]


# ---------------------------------------------------------------- measurements


def network(share: int) -> tuple[Callable, tuple, Any]:
    """Loss and gradients of a small network, examples, and params (9 leaves)."""
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.standard_normal((64, 48)).astype(np.float32) / 8 for i in range(9)}
    x, y = rng.standard_normal((share, 64)).astype(np.float32), rng.standard_normal(share).astype(np.float32)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((sum((jnp.tanh(x @ w) for w in params.values()), jnp.zeros(())).mean(1) - y) ** 2)

    return lambda x, y, params: jax.value_and_grad(loss)(params, x, y), (x, y), jax.tree.map(jnp.asarray, params)


def calls(rounds: int, led: bool) -> Result:
    """Time a call and its parts, by ranks or a leading script."""
    process.prepare()
    if led:
        jm.fork(2, kind="processes")
    f, (x, y), params = network(256)
    wrapped = jm.function(f, (jm.scatter, jm.scatter, jm.broadcast), (jm.mean, jm.mean))
    bare, half = jax.jit(f), (x[:128], y[:128])
    parts: dict[str, Callable] = {"call": lambda: wrapped(x, y, params), "bare": lambda: bare(*half, params)}
    if not led:
        results = jax.tree.leaves(bare(*half, params))
        parts["exchange"] = lambda: jaxmpi.world().sum_on_host_now(results, 2)  # type: ignore[attr-defined]
    runs = {name: lambda call=call: jax.block_until_ready(call()) for name, call in parts.items()}
    seconds = harness.take_turns(runs, rounds, warm_up=rounds // 10 + 3)
    result: Result = {f"{name}_ms": 1e3 * float(np.median(values)) for name, values in seconds.items()}
    if led:
        result |= bytes_moved(wrapped, x, y, params)
    return result


def bytes_moved(f: Callable, x: np.ndarray, y: np.ndarray, params: Any) -> Result:
    """Bytes to the other worker with new params, and with the same."""
    new = jax.tree.map(lambda leaf: leaf + 0, params)
    bytes_new, bytes_same = (profiled(lambda: f(x, y, new))["sent_bytes"] for _ in range(2))
    return {"bytes_new": bytes_new, "bytes_same": bytes_same, "bytes_share": (x.nbytes + y.nbytes) // 2}


def profiled(run: Callable[[], Any]) -> Result:
    """Run once; the profile of all calls in it, added up."""
    with jm.profile() as profile:
        run()
    return {key: sum(row[key] for row in profile.rows) for key in profile.rows[0] if key != "function"}


def shuffle(rounds: int) -> Result:
    """Time rows from shared memory beside np.take, on all ranks at once."""
    process.prepare()
    control, rows = harness.control(), 20_000
    data = jm.shared(lambda: np.random.default_rng(0).standard_normal((60_000, 512), np.float32))
    order = np.random.default_rng(1).permutation(len(data))[:rows]
    mine = order[control.rank * rows // control.size : (control.rank + 1) * rows // control.size]
    f = jm.function(lambda x: jnp.sum(x[:, 0]), jm.scatter, jm.sum)
    f(data, batch=order)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def fetch() -> float:
        control.barrier()
        return profiled(lambda: f(data, batch=order))["shuffle_s"]

    def take() -> float:
        control.barrier()
        return harness.seconds(lambda: np.take(data.array, mine, axis=0))

    found = [[fetch(), take(), take(), fetch()] for _ in range(rounds + 3)][3:]  # slow drifts cancel
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    seconds = np.array(found)  # f64[rounds, 4]
    mine_s = [*median_interval(seconds[:, ::3].sum(1) / seconds[:, 1:3].sum(1)), 1e3 * np.median(seconds[:, 1:3])]
    return {
        "workers": control.allgather_array(np.array(mine_s)).tolist(),
        "memory_grown_mb": grown / 1024,
        "data_mb": data.nbytes / 2**20,
        "share_mb": mine.size * 512 * 4 / 2**20,
    }


# ---------------------------------------------------------------- ResNet-50


class Net(NamedTuple):
    """ResNet-50 with examples, and the two functions of a step."""

    x: np.ndarray  # f32[4 batch, size, size, 3]
    y: np.ndarray  # i32[4 batch]
    params: Any
    stats: Any
    gradient: Callable  # (x, y, params, stats) -> loss, flat gradient, stats
    update: Callable  # (flat gradient, params) -> params


def resnet(settings: Result) -> Result:
    """Median seconds of a step's parts, in a script that leads workers."""
    options = argparse.Namespace(**settings)
    if options.workers == 1:  # one core a worker, as forked processes have it
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    process.prepare()
    net = build_net(options)
    return (bare_resnet if options.bare else spread_resnet)(options, net)


def build_net(options: argparse.Namespace) -> Net:
    """The model, and random examples for four batches."""
    model = resnet50(classes=10, image_size=options.size)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4 * options.batch, options.size, options.size, 3)).astype(np.float32)
    y = rng.integers(0, 10, 4 * options.batch, dtype=np.int32)
    params, stats = model.init(jax.random.key(0), jax.numpy.asarray(x[:1]))
    leaves, structure = jax.tree.flatten(params)

    def loss(params: Any, stats: Any, x: Any, y: Any) -> tuple[Any, Any]:
        logits, stats = model.apply(params, stats, x, jax.random.key(1), True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), stats

    def gradient(x: Any, y: Any, params: Any, stats: Any) -> tuple[Any, Any, Any]:
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, x, y)
        return value, fuse(jax.tree.leaves(grads)), stats

    def update(flat: Any, params: Any) -> Any:
        grads = jax.tree.unflatten(structure, split(flat, leaves))
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    return Net(x, y, params, stats, gradient, update)


def spread_resnet(options: argparse.Namespace, net: Net) -> Result:
    """Time steps as in the paper: gradients, all-reduce, updates on each worker."""
    jm.fork(options.workers, kind="processes")
    x, y = jm.shared(net.x), jm.shared(net.y)
    params, stats = jm.variable(net.params), jm.variable(net.stats)
    flat = jm.variable(np.zeros(sum(leaf.size for leaf in jax.tree.leaves(net.params)), np.float32))
    first = jm.function(net.gradient, (jm.scatter, jm.scatter, params, stats), (jm.mean,), (flat, stats))
    second = jm.function(lambda flat, params: (net.update(flat, params),), (flat, params), (), (params,))
    rng = np.random.default_rng(0)

    def step() -> None:
        batch = options.batch
        first(x, y, batch=rng.permutation(len(x))[:batch])
        flat.all_reduce("mean")
        second()

    return medians([profiled(step) for _ in range(options.steps + WARM_UP)], options)


def medians(rows: list[Result], options: argparse.Namespace) -> Result:
    """Median seconds of steps and parts; the rest is the functions'."""
    parts = np.array([[row["total_s"], *(row[key] for key in COUNTED)] for row in rows[WARM_UP:]])
    parts = np.insert(parts, 1, parts[:, 0] - parts[:, 1:].sum(1), axis=1)
    figures = np.median(parts, axis=0).tolist()
    return dict(zip(("total_s", "function_s", *COUNTED), figures, strict=True)) | {"examples": options.batch}


def bare_resnet(options: argparse.Namespace, net: Net) -> Result:
    """Time the same steps in plain JAX, one worker."""
    first, second = jax.jit(net.gradient), jax.jit(net.update)
    rng = np.random.default_rng(0)
    state = net.params, net.stats

    def step() -> Result:
        nonlocal state
        begin = time.perf_counter()
        rows = rng.permutation(len(net.x))[: options.batch]
        taken = [np.take(array, rows, axis=0) for array in (net.x, net.y)]
        shuffled = time.perf_counter()
        _, flat, stats = first(*taken, *state)
        state = jax.block_until_ready((second(flat, state[0]), stats))
        spent = {"shuffle_s": shuffled - begin, "total_s": time.perf_counter() - begin}
        return dict.fromkeys(COUNTED, 0.0) | spent

    return medians([step() for _ in range(options.steps + WARM_UP)], options)


# ---------------------------------------------------------------- jobs and tables


def job(function: Callable[..., Result], *arguments: Any, ranks: int) -> Result:
    """Run a job of so many workers; return rank 0's result."""
    return harness.on_ranks(function, *arguments, ranks=ranks if ranks > 1 else 0, env={"JAX_PLATFORMS": "cpu"})


def show_calls(options: argparse.Namespace) -> Result:
    """Print a call's time beyond its parts, by ranks and leading script."""
    ranks, led = (job(calls, options.rounds, led, ranks=1 if led else 2) for led in (False, True))
    led["exchange_ms"] = ranks["exchange_ms"]
    for name, row in (("every rank runs the script", ranks), ("a script leads", led)):
        row["beyond_ms"] = row["call_ms"] - row["bare_ms"] - row["exchange_ms"]
        parts = f"call {row['call_ms']:.2f} ms, bare {row['bare_ms']:.2f}, exchange {row['exchange_ms']:.2f}"
        print(f"{name}: {parts}: {row['beyond_ms']:.2f} ms beyond (goal 1)")
    print(
        f"bytes to the other worker: {led['bytes_new']} with new params, {led['bytes_same']} with the same, of which "
        f"{led['bytes_share']} are its examples"
    )
    return {"ranks": ranks, "led": led}


def show_shuffle(options: argparse.Namespace) -> Result:
    """Print the times of rows by index."""
    row = job(shuffle, options.rounds, ranks=2)
    print(f"medians of {options.rounds} rounds, and between what they lie with 95 %")
    for rank, (rows, low, high, take_ms) in enumerate(row["workers"]):
        print(
            f"worker {rank}: its own take {take_ms:.2f} ms; rows by index {rows:.3f} ({low:.3f} to {high:.3f}) of it, "
            "goal 1.10"
        )
    print(f"memory grew by {row['memory_grown_mb']:.0f} MB; share {row['share_mb']:.0f}, data {row['data_mb']:.0f}")
    return row


def show_resnet(options: argparse.Namespace) -> Result:
    """Print weak and strong scaling, and the profile."""
    batch, rows = options.batch, Result()
    jobs = {PLAIN: (1, batch)} | {f"weak, {n}": (n, n * batch) for n in options.workers}
    jobs |= {f"strong, {n}": (n, batch) for n in options.workers if n > 1}
    for name, (workers, examples) in jobs.items():
        if name == PLAIN or any(word in name for word in options.only):
            settings = {"workers": workers, "batch": examples, "bare": name == PLAIN}
            settings |= {"size": options.size, "steps": options.steps}
            rows[name] = job(resnet, settings, ranks=1) | {"workers": workers}
    cores = len(os.sched_getaffinity(0))
    print(harness.table(("", "ms an example", "speedup", "function", "shuffle", "straggler", "all-reduce")))
    for name, row in rows.items():
        per = {key: 1e3 * value / row["examples"] for key, value in row.items() if key.endswith("_s")}
        speedup = rows[PLAIN]["total_s"] / rows[PLAIN]["examples"] / (row["total_s"] / row["examples"])
        parts = [f"{per[key]:.2f}" for key in ("function_s", *COUNTED)]
        beyond = " (beyond the cores)" if row["workers"] > cores else ""
        print(harness.row([f"{name}{beyond}", f"{per['total_s']:.2f}", f"{speedup:.2f}", *parts]))
    return rows


PLAIN = "plain JAX, 1"
COUNTED = ("shuffle_s", "straggler_s", "reduce_s")  # parts of a step beside its functions, as a profile has them
WARM_UP = 2  # steps
SHOWS = {"calls": show_calls, "shuffle": show_shuffle, "resnet": show_resnet}


def main() -> None:
    """Measure and print."""
    parser = harness.parser(__doc__, rounds=200, json=None)
    parser.add_argument("name", choices=SHOWS)
    parser.add_argument("--size", type=int, default=32, help="px of ResNet-50's images")
    parser.add_argument("--batch", type=int, default=8, help="examples a worker, of weak scaling")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--only", nargs="*", default=["weak", "strong"], help="rows of ResNet-50 with such names")
    options = parser.parse_args()
    harness.save(options.json, SHOWS[options.name](options))


if __name__ == "__main__":
    main()
