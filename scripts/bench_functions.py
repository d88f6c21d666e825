"""Cost of data-parallel functions beyond their parts, and scaling of ResNet-50.

    python scripts/bench_functions.py calls     # a call beside the bare function and the exchange; bytes it moves
    python scripts/bench_functions.py resnet    # Figs. 2 and 3 and Table 1 of Stooke and Abbeel 2017, in shape

Two workers, a core each; options: [--rounds 200] [--size 32] [--batch 8] [--steps 20] [--workers 1 2] [--only weak].
A script leads forked processes in `resnet`, as in the paper; in `calls` all ranks of mpirun run it, too.
Where the time goes and how many bytes are sent is what `jaxmpi.functions.profile` says.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmpi
from jaxmpi import functions as jm
from jaxmpi.allreduce.buckets import fuse, split
from jaxmpi.functions.groups import sum_now
from jaxmpi.models.resnet import resnet50
from jaxmpi.runtime import process

Result = dict[str, Any]
PLAIN = "plain JAX, 1"
COUNTED = ("shuffle_s", "straggler_s", "reduce_s")  # parts of a step beside its functions, as a profile has them
WARM_UP = 2  # steps


def profiled(run: Callable[[], Any]) -> Result:
    """Run once; the profile of all calls in it, added up."""
    with jm.profile() as profile:
        run()
    return {key: sum(row[key] for row in profile.rows) for key in profile.rows[0] if key != "function"}


def job(function: Callable[..., Result], *arguments: Any, ranks: int = 0) -> Result:
    """Run a job; return rank 0's result."""
    return harness.on_ranks(function, *arguments, ranks=ranks, env={"JAX_PLATFORMS": "cpu"})


# ---------------------------------------------------------------- a call


def calls(rounds: int, led: bool) -> Result:
    """Time a call of a small network's gradients (9 leaves) and its parts, by ranks or a leading script."""
    process.prepare()
    if led:
        jm.fork(2, kind="processes")
    rng = np.random.default_rng(0)
    params = {f"w{i}": jnp.asarray(rng.standard_normal((64, 48)).astype(np.float32) / 8) for i in range(9)}
    x, y = rng.standard_normal((256, 64)).astype(np.float32), rng.standard_normal(256).astype(np.float32)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((sum((jnp.tanh(x @ w) for w in params.values()), jnp.zeros(())).mean(1) - y) ** 2)

    def f(x: Any, y: Any, params: Any) -> Any:
        return jax.value_and_grad(loss)(params, x, y)

    wrapped = jm.function(f, (jm.scatter, jm.scatter, jm.broadcast), (jm.mean, jm.mean))
    bare, half = jax.jit(f), (x[:128], y[:128])
    parts: dict[str, Callable] = {"call": lambda: wrapped(x, y, params), "bare": lambda: bare(*half, params)}
    if not led:
        results = jax.tree.leaves(bare(*half, params))
        parts["exchange"] = lambda: sum_now(jaxmpi.world().shared_sum, results, 2)  # type: ignore[attr-defined]
    runs = {name: lambda call=call: jax.block_until_ready(call()) for name, call in parts.items()}
    seconds = harness.take_turns(runs, rounds, warm_up=rounds // 10 + 3)
    result: Result = {f"{name}_ms": 1e3 * float(np.median(values)) for name, values in seconds.items()}
    if led:
        new = jax.tree.map(lambda leaf: leaf + 0, params)
        result["bytes_new"], result["bytes_same"] = (
            profiled(lambda: wrapped(x, y, new))["sent_bytes"] for _ in range(2)
        )
        result["bytes_share"] = (x.nbytes + y.nbytes) // 2
    return result


def show_calls(options: argparse.Namespace) -> Result:
    """Print a call's time beyond its parts, by ranks and leading script."""
    ranks, led = job(calls, options.rounds, False, ranks=2), job(calls, options.rounds, True)
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


# ---------------------------------------------------------------- ResNet-50


def resnet(workers: int, examples: int, size: int, steps: int, bare: bool) -> Result:
    """Median seconds of a step's parts: gradients, all-reduce and updates, as in the paper.

    A script leads workers, a core each; or, if `bare`, one worker runs plain JAX.
    """
    if workers == 1:  # one core a worker, as forked processes have it
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    process.prepare()
    model, rng = resnet50(classes=10, image_size=size), np.random.default_rng(0)
    images = rng.standard_normal((4 * examples, size, size, 3)).astype(np.float32)
    labels = rng.integers(0, 10, 4 * examples, dtype=np.int32)
    params, stats = model.init(jax.random.key(0), jnp.asarray(images[:1]))
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

    order = np.random.default_rng(0)
    batches = [order.permutation(len(images))[:examples] for _ in range(steps + WARM_UP)]
    steps_of = plain_steps if bare else spread_steps
    rows = steps_of(images, labels, params, stats, gradient, update, workers, batches)[WARM_UP:]
    parts = np.array([[row["total_s"], *(row[key] for key in COUNTED)] for row in rows])
    parts = np.insert(parts, 1, parts[:, 0] - parts[:, 1:].sum(1), axis=1)  # the rest is the functions'
    figures = dict(zip(("total_s", "function_s", *COUNTED), np.median(parts, axis=0).tolist(), strict=True))
    return figures | {"examples": examples, "workers": workers}


def spread_steps(
    images: Any, labels: Any, params: Any, stats: Any, gradient: Any, update: Any, workers: int, batches: Any
) -> list[Result]:
    """Steps of workers that a script leads."""
    jm.fork(workers, kind="processes")
    x, y = jm.shared(images), jm.shared(labels)
    flat = jm.variable(np.zeros(sum(leaf.size for leaf in jax.tree.leaves(params)), np.float32))
    params, stats = jm.variable(params), jm.variable(stats)
    first = jm.function(gradient, (jm.scatter, jm.scatter, params, stats), (jm.mean,), (flat, stats))
    second = jm.function(lambda flat, params: (update(flat, params),), (flat, params), (), (params,))

    def step(batch: np.ndarray) -> None:
        first(x, y, batch=batch)
        flat.all_reduce("mean")
        second()

    return [profiled(lambda batch=batch: step(batch)) for batch in batches]


def plain_steps(
    images: Any, labels: Any, params: Any, stats: Any, gradient: Any, update: Any, workers: int, batches: Any
) -> list[Result]:
    """The same steps in plain JAX, one worker."""
    first, second, rows = jax.jit(gradient), jax.jit(update), []
    for batch in batches:
        begin = time.perf_counter()
        batch_arrays = [np.take(array, batch, axis=0) for array in (images, labels)]
        shuffled = time.perf_counter()
        _, flat, stats = first(*batch_arrays, params, stats)
        params = jax.block_until_ready(second(flat, params))
        spent = {"shuffle_s": shuffled - begin, "total_s": time.perf_counter() - begin}
        rows.append(dict.fromkeys(COUNTED, 0.0) | spent)
    return rows


def show_resnet(options: argparse.Namespace) -> Result:
    """Print weak and strong scaling, and the profile."""
    jobs = {PLAIN: (1, options.batch)} | {f"weak, {n}": (n, n * options.batch) for n in options.workers}
    jobs |= {f"strong, {n}": (n, options.batch) for n in options.workers if n > 1}
    rows = Result()
    for name, sizes in jobs.items():
        if name == PLAIN or any(word in name for word in options.only):
            rows[name] = job(resnet, *sizes, options.size, options.steps, name == PLAIN)
    cores = len(os.sched_getaffinity(0))
    print(harness.table(("", "ms an example", "speedup", "function", "shuffle", "straggler", "all-reduce")))
    for name, row in rows.items():
        per = {key: 1e3 * value / row["examples"] for key, value in row.items() if key.endswith("_s")}
        speedup = rows[PLAIN]["total_s"] / rows[PLAIN]["examples"] / (row["total_s"] / row["examples"])
        parts = [f"{per[key]:.2f}" for key in ("function_s", *COUNTED)]
        beyond = " (beyond the cores)" if row["workers"] > cores else ""
        print(harness.row([f"{name}{beyond}", f"{per['total_s']:.2f}", f"{speedup:.2f}", *parts]))
    return rows


SHOWS = {"calls": show_calls, "resnet": show_resnet}


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
