"""Samples/s of a language model by hosts, measured and predicted (Gibiansky 2017).

    python scripts/bench_language.py --hosts 1 2 4 8 --rate 10gbit
    python scripts/bench_language.py --hosts 1 2 --shrink 1              the article's size: 9 GB of memory a host
    python scripts/bench_language.py --hosts 1 2 --shrink 64 --rounds 2  seconds

The model is `lm300m` with words, width and cells divided by --shrink. Two hosts of the whole size fit into 20 GB, and
eight of one divided by 1.7, which leaves 103 million params. On each number of hosts a step of plain SGD takes turns
with two others. One exchanges beside the backward pass, and one is without an exchange. The cost model of `auto` and
`jaxmpi plan` predicts the exchange, from a probe on two hosts.

Emulated hosts share this machine's cores, so computing takes longer the more there are; --rate limits links alone. So
the last columns take one host's computing time for all: what hosts with as many cores of their own would do. With
overlap they add what an exchange adds to a step here, which is too much: cores of one's own would hide more.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import plan_check

import jaxmpi
from jaxmpi.allreduce import measuring, overlap
from jaxmpi.allreduce.buckets import Order
from jaxmpi.comm.job import processes
from jaxmpi.model.contract import Model
from jaxmpi.models.lstm import lstm

WORDS, WIDTH, CELLS, WINDOW, BATCH = 72_000, 1024, 8192, 20, 32  # sizes of lm300m, and the article's batch
STRATEGY = "ring:32"


# ---------------------------------------------------------------- inside a job


def times_of_steps(shrink: float, rounds: int) -> dict[str, list[float]]:
    """Seconds of steps: exchange behind the backward pass, beside it, and none.

    Each is the slowest rank's.
    """
    jaxmpi.world()
    model = shrunk(shrink)
    params, state = jax.jit(model.init)(jax.random.key(0), model.example())
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.classes, (BATCH, WINDOW + 1)), jnp.int32)

    def loss(params: Any) -> jax.Array:
        logits, _ = model.apply(params, state, tokens[:, :-1], jax.random.key(0), True)
        log_p = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

    def run(exchange: Callable[[Any, Order], Any]) -> harness.Run:
        order = Order()
        gradients = order.of(lambda params: (jax.grad(loss)(params), None))

        def step(params: Any) -> Any:
            grads, _ = gradients(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, exchange(grads, order))

        compiled = jax.jit(step, donate_argnums=0)

        def once() -> None:
            nonlocal params  # in turn of all three: eight hosts have room for one copy each
            params = jax.block_until_ready(compiled(params))

        return once

    steps = {
        "behind": run(lambda grads, _: jaxmpi.exchange(grads, STRATEGY)),
        "beside": run(lambda grads, order: overlap.exchange(grads, STRATEGY, order=order)),
        "alone": run(lambda grads, _: grads),
    }
    return harness.take_turns(steps, rounds, warm_up=1, clock=lambda work: measuring.slowest(processes(), work))


# ---------------------------------------------------------------- outside


def shrunk(shrink: float) -> Model:
    """The model with words, width and cells divided."""
    words, width, cells = (int(whole / shrink) for whole in (WORDS, WIDTH, CELLS))
    return lstm(words, WINDOW, width, cells)


def floats(shrink: float) -> int:
    """Params of the model."""
    model = shrunk(shrink)
    params, _ = jax.eval_shape(model.init, jax.random.key(0), model.example())
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def rows_of(seconds: dict[int, dict[str, list[float]]], predicted: dict[int, float]) -> list[dict[str, float]]:
    """A row per number of hosts, from median steps and predicted exchanges.

    Names in `_s` are seconds of a step, the others samples/s.
    """
    rows, alone_s = [], statistics.median(seconds[min(seconds)]["alone"])
    for hosts, found in seconds.items():
        behind, beside, alone = (statistics.median(found[name]) for name in ("behind", "beside", "alone"))
        more = [
            statistics.median(np.subtract(found[name], found["alone"])) if hosts > 1 else 0.0
            for name in ("behind", "beside")
        ]
        steps = {
            "behind": behind,
            "beside": beside,
            "predicted": alone + predicted[hosts],
            "own cores": alone_s + more[0],
            "own cores, beside": alone_s + more[1],
            "own cores, predicted": alone_s + predicted[hosts],
        }
        seconds_of_steps = {"behind_s": behind, "beside_s": beside, "alone_s": alone, "exchange_s": more[0]}
        samples = {name: hosts * BATCH / step_s for name, step_s in steps.items()}
        rows.append({"hosts": hosts, **seconds_of_steps, "predicted_s": predicted[hosts], **samples})
    return rows


def main() -> None:
    """Probe two hosts, time each number of hosts, print the table."""
    parser = harness.parser(__doc__, hosts=[1, 2, 4, 8], rate="10gbit", rounds=5, json=None)
    parser.add_argument("--shrink", type=float, default=2, help="divides words, width and cells of lm300m")
    options = parser.parse_args()
    size = floats(options.shrink)
    print(f"{size:,} params, {BATCH} examples of {WINDOW} words a host, {options.rate}, {options.rounds} rounds")
    probe = measuring.from_json(
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
    digits = {name: 0 if name == "hosts" else 3 if name.endswith("_s") else 1 for name in rows[0]}
    cells = [[f"{value:.{digits[name]}f}" for name, value in row.items()] for row in rows]
    print(harness.table(list(rows[0]), cells))
    harness.save(options.json, {"floats": size, "seconds": seconds, "predicted_s": exchange, "rows": rows})


if __name__ == "__main__":
    main()
