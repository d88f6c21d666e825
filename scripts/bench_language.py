"""Samples/s of a language model by hosts, measured and predicted (Gibiansky 2017).

    python scripts/bench_language.py --hosts 1 2 4 8 --rate 10gbit
    python scripts/bench_language.py --hosts 1 2 --shrink 1              the article's size: 9 GB of memory a host
    python scripts/bench_language.py --hosts 1 2 --shrink 64 --rounds 2  seconds

The model is `lm300m` with words, width and cells divided by --shrink, a whole number. Of the whole size two hosts fit
into 20 GB; 2 leaves 75 million params, of which eight do. On each number of hosts a step of plain SGD takes turns with
the same one without an exchange. The exchange is predicted by the cost model of `auto` and `jaxmpi plan`, from a probe
on two hosts.

Emulated hosts share this machine's cores, so computing takes longer the more there are; --rate limits links alone. So
the last columns take one host's computing time for all: what hosts with as many cores of their own would do.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import plan_check

import jaxmpi
from jaxmpi.allreduce import autotune
from jaxmpi.comm import control
from jaxmpi.models.lstm import lstm

WORDS, WIDTH, CELLS, WINDOW, BATCH = 72_000, 1024, 8192, 20, 32  # of lm300m, and the article's batch
STRATEGY = "ring:32"


# ---------------------------------------------------------------- inside a job


def times_of_steps(shrink: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank's steps with and without an exchange."""
    jaxmpi.world()
    model = lstm(WORDS // shrink, WINDOW, WIDTH // shrink, CELLS // shrink)
    params, state = jax.jit(model.init)(jax.random.key(0), model.example())
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.classes, (BATCH, WINDOW + 1)), jnp.int32)

    def loss(params: Any) -> jax.Array:
        logits, _ = model.apply(params, state, tokens[:, :-1], jax.random.key(0), True)
        log_p = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

    def step(params: Any, strategy: str) -> Any:
        grads = jax.grad(loss)(params)
        grads = jaxmpi.exchange(grads, strategy) if strategy else grads
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def run(strategy: str) -> harness.Run:
        compiled = jax.jit(lambda params: step(params, strategy))
        return lambda: jax.block_until_ready(compiled(params))

    steps = {"whole": run(STRATEGY), "alone": run("")}
    return harness.take_turns(steps, rounds, warm_up=1, clock=lambda work: autotune.slowest(control.processes(), work))


# ---------------------------------------------------------------- outside


def floats(shrink: int) -> int:
    """Params of the model."""
    model = lstm(WORDS // shrink, WINDOW, WIDTH // shrink, CELLS // shrink)
    params, _ = jax.eval_shape(model.init, jax.random.key(0), model.example())
    return sum(leaf.size for leaf in jax.tree.leaves(params))


HEADINGS = (
    "hosts", "step s", "without exchange s", "exchange s", "predicted s", "samples/s", "predicted",
    "with cores of their own", "predicted",
)  # fmt: skip


def rows_of(seconds: dict[int, dict[str, list[float]]], exchange: dict[int, float]) -> list[list[float]]:
    """A row per number of hosts, from median steps and predicted exchanges."""
    rows, own = [], statistics.median(seconds[min(seconds)]["alone"])
    for hosts, found in seconds.items():
        whole, alone = (statistics.median(found[name]) for name in ("whole", "alone"))
        sent = statistics.median(np.subtract(found["whole"], found["alone"])) if hosts > 1 else 0.0
        samples = [hosts * BATCH / each for each in (whole, alone + exchange[hosts], own + sent, own + exchange[hosts])]
        rows.append([hosts, whole, alone, sent, exchange[hosts], *samples])
    return rows


def main() -> None:
    """Probe two hosts, time each number of hosts, print the table."""
    parser = harness.parser(__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rate", default="10gbit", help="of each host's link")
    parser.add_argument("--shrink", type=int, default=2, help="divides words, width and cells of lm300m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    size = floats(options.shrink)
    print(f"{size:,} params, {BATCH} examples of {WINDOW} words a host, {options.rate}, {options.rounds} rounds")
    probe = autotune.from_json(
        harness.on_ranks(
            plan_check.probe_and_measure,
            *([STRATEGY], min(size, 1_000_000), 1),
            ranks=2,
            rate=options.rate,
            env={"JAXMPI_PROBE_S": plan_check.PROBE_S},
        )["probe"]
    )
    exchange = {
        n: plan_check.predicted(probe, n, argparse.Namespace(floats=size), STRATEGY) if n > 1 else 0.0
        for n in options.hosts
    }
    seconds = {
        n: harness.on_ranks(times_of_steps, options.shrink, options.rounds, ranks=n, rate=options.rate)
        for n in sorted(options.hosts)
    }
    rows = rows_of(seconds, exchange)
    cells = [[hosts, *(f"{s:.3f}" for s in row[:4]), *(f"{rate:.1f}" for rate in row[4:])] for hosts, *row in rows]
    print(harness.table(HEADINGS, cells))
    harness.save(options.json, {"floats": size, "seconds": seconds, "predicted_s": exchange, "rows": rows})


if __name__ == "__main__":
    main()
