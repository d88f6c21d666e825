"""Overlap of exchange and backward pass: jaxmpi, PyTorch DDP, JAX's psum.

    python scripts/bench_overlap.py [--hosts 4] [--rate 200mbit] [--ratios 0.25 0.5 1] [--rounds 2]

One rank a host; hosts share this machine's cores. The net has six convolutions; the batch is chosen so that exchange /
compute is about each ratio, for the first contender. Each contender is a job of its own, and jobs take turns. A job
times, in turn: the step without exchange (compute), the exchange alone, and the step; the slowest rank counts. t_first
is the time of the first gradients. No step can be shorter than max(compute, t_first + exchange), if those times hold
while both run; that is the bound. Hidden is (compute + exchange - step) / (compute + exchange - bound).
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cluster import FRAME_PAYLOAD, bits_per_s
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmpi
from jaxmpi.allreduce import overlap
from jaxmpi.allreduce.buckets import Order
from jaxmpi.allreduce.measuring import slowest
from jaxmpi.bench.baselines import connect_jax, connect_torch
from jaxmpi.bench.options import is_installed
from jaxmpi.comm.job import processes
from jaxmpi.runtime import progress

WIDTHS = (3, 64, 128, 128, 256, 256, 256)  # channels; pooled after the first, third and fifth convolution
CLASSES, PIXELS, LR = 10, 32, 0.01
BUCKET_BYTES = 1 << 20  # bytes of a bucket, for all contenders that have buckets
WARM_UP = 2  # steps not counted


class Timed(NamedTuple):
    """A contender with its batch."""

    compute: Callable[[], Any]
    exchange: Callable[[], Any]
    step: Callable[[], Any]
    first_s: Callable[[], float]  # time.perf_counter when the last step's first gradients existed; NaN if unknown
    loss: float  # loss of the first step, the same for all contenders


def initial_params() -> dict[str, np.ndarray]:
    """Params: `w0` f32[3, 3, in, out], `b0` f32[out], ..., `fc` f32[in, classes]."""
    rng, params = np.random.default_rng(0), {}
    for i, (a, b) in enumerate(pairwise(WIDTHS)):
        params[f"w{i}"] = rng.standard_normal((3, 3, a, b), np.float32) * np.float32((2 / 9 / a) ** 0.5)
        params[f"b{i}"] = np.zeros(b, np.float32)
    params["fc"] = rng.standard_normal((WIDTHS[-1], CLASSES), np.float32) * np.float32(0.05)
    return params


def random_batch(rank: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Images f32[batch, 32, 32, 3] and labels i32[batch] of one rank."""
    rng = np.random.default_rng(rank + 1)
    images = rng.standard_normal((batch, PIXELS, PIXELS, 3), np.float32)
    return images, rng.integers(0, CLASSES, batch, np.int32)


# ---------------------------------------------------------------- contenders


def in_jax() -> tuple[Callable, Callable, Any]:
    """Functions in JAX: gradients, update, and the optimizer's start.

    (params, images, labels) -> (gradients, loss); (gradients, moments, params) -> (params, moments); params -> moments.
    """

    def loss(params: Any, x: Any, labels: Any) -> Any:
        for i in range(len(WIDTHS) - 1):
            x = jax.lax.conv_general_dilated(
                x, params[f"w{i}"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + params[f"b{i}"])
            if i % 2 == 0:
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        logits = x.mean((1, 2)) @ params["fc"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def gradients(params: Any, x: Any, labels: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        return grads, value

    tx = optax.sgd(LR, momentum=0.9)

    def descend(grads: Any, moments: Any, params: Any) -> Any:
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    return gradients, descend, tx.init


def with_jaxmpi(strategy: str, overlaps: bool) -> Callable[[int], Timed]:
    """The step in one jit, the exchange beside it or in it."""

    def build(batch: int) -> Timed:
        order, (gradients, descend, init) = Order(), in_jax()
        gradients = order.record(gradients)
        options = {"strategy": strategy, "bucket_bytes": BUCKET_BYTES, "order": order}
        mean = partial(overlap.exchange if overlaps else jaxmpi.exchange, **options)

        def step(params: Any, state: Any, *data: Any) -> Any:
            grads, value = gradients(params, *data)
            return *descend(mean(grads), state, params), value

        def local_step(params: Any, state: Any, *data: Any) -> Any:
            grads, value = gradients(params, *data)
            return *descend(grads, state, params), value

        params = jax.tree.map(jnp.asarray, initial_params())
        state, data = init(params), jax.tree.map(jnp.asarray, random_batch(int(jaxmpi.world().rank), batch))
        run, compute = (Loop(jax.jit(f), params, state, data) for f in (step, local_step))
        exchange = jax.jit(lambda tree: mean(jax.tree.map(lambda x: x * 2, tree)))

        def first_s() -> float:
            starts = [span.begin_s for span in progress.drain() if span.track == "travel"]
            return min(t for t in starts if t > run.began_s) if starts else float("nan")

        return Timed(compute, lambda: jax.block_until_ready(exchange(params)), run, first_s, compute.loss())

    return build


class Loop:
    """A jitted step, repeated with its state; params keep initial values."""

    def __init__(self, step: Callable, params: Any, state: Any, data: Any) -> None:
        """Take the arguments of the first call."""
        self.step, self.params, self.state, self.data = step, params, state, data
        self.began_s = 0.0

    def __call__(self) -> None:
        """Run a step and wait for it."""
        self.began_s = time.perf_counter()
        _, self.state, _ = jax.block_until_ready(self.step(self.params, self.state, *self.data))

    def loss(self) -> float:
        """Loss of the first step."""
        return float(self.step(self.params, self.state, *self.data)[2])


def with_psum(batch: int) -> Timed:
    """JAX's own method: psum over a mesh of all processes, with gloo."""
    control = harness.control()
    if not jax.distributed.is_initialized():
        connect_jax(control)
    mesh = jax.make_mesh((control.size,), ("workers",))
    gradients, descend, init = in_jax()

    def mean(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.psum(x, "workers") / control.size, tree)

    def step(exchange: Callable, params: Any, state: Any, *data: Any) -> Any:
        grads, value = gradients(params, *data)
        params, state = descend(exchange(grads), state, params)
        return params, state, value[None]

    def over(function: Callable, specs: Any, out: Any) -> Callable:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))

    def put(x: Any, spec: Any) -> Any:
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), np.asarray(x))

    replicated, sharded = P(), P("workers")
    params = jax.tree.map(lambda x: put(x, replicated), initial_params())
    state = jax.tree.map(lambda x: put(x, replicated), init(initial_params()))
    data = tuple(put(x, sharded) for x in random_batch(control.rank, batch))
    run, compute = (
        Loop(
            over(
                lambda *args, f=f: step(f, *args),
                (replicated, replicated, sharded, sharded),
                (replicated, replicated, sharded),
            ),
            params,
            state,
            data,
        )
        for f in (mean, lambda tree: tree)
    )
    exchange = over(lambda tree: mean(jax.tree.map(lambda x: x * 2, tree)), (replicated,), replicated)
    [loss] = compute.step(params, state, *data)[2].addressable_data(0)
    return Timed(compute, lambda: jax.block_until_ready(exchange(params)), run, lambda: float("nan"), float(loss))


def with_ddp(batch: int) -> Timed:
    """PyTorch's DistributedDataParallel over gloo, buckets as big as ours."""
    import torch  # pyright: ignore[reportMissingImports] # not installed by default
    import torch.distributed as dist  # pyright: ignore[reportMissingImports] # not installed by default
    from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports] # not installed by default

    control = harness.control()
    torch.set_num_threads(1)
    if not dist.is_initialized():
        connect_torch(control)
    images, labels = random_batch(control.rank, batch)
    data = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels.astype(np.int64))
    nets = [torch_net(), DistributedDataParallel(torch_net(), bucket_cap_mb=BUCKET_BYTES / 2**20)]
    first = [0.0]

    def note(_: Any) -> None:
        first[0] = time.perf_counter()

    next(p for p in nets[1].parameters() if p.shape[0] == CLASSES).register_hook(note)
    steps = [torch_step(net, data) for net in nets]
    flat = torch.ones(sum(p.numel() for p in nets[0].parameters()))
    return Timed(steps[0], lambda: dist.all_reduce(flat), steps[1], lambda: first[0], steps[0]())


def torch_net() -> Any:
    """The same net with the same params."""
    import torch  # pyright: ignore[reportMissingImports] # not installed by default

    params, layers = initial_params(), []
    for i, (a, b) in enumerate(pairwise(WIDTHS)):
        layer = torch.nn.Conv2d(a, b, 3, padding=1)
        layer.weight.data = torch.from_numpy(params[f"w{i}"].transpose(3, 2, 0, 1).copy())
        assert layer.bias is not None
        layer.bias.data.zero_()
        layers += [layer, torch.nn.ReLU(), *([torch.nn.MaxPool2d(2)] if i % 2 == 0 else [])]
    last = torch.nn.Linear(WIDTHS[-1], CLASSES, bias=False)
    last.weight.data = torch.from_numpy(params["fc"].T.copy())
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), last)


def torch_step(net: Any, data: tuple) -> Callable[[], float]:
    """Forward, backward, momentum."""
    import torch  # pyright: ignore[reportMissingImports] # not installed by default

    optimizer = torch.optim.SGD(net.parameters(), LR, momentum=0.9)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(data[0]), data[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


CONTENDERS: dict[str, Callable[[int], Timed]] = {
    "ring32": with_jaxmpi("ring32", overlaps=True),
    "asa32": with_jaxmpi("asa32", overlaps=True),
    "ring16": with_jaxmpi("ring16", overlaps=True),
    "color4": with_jaxmpi("color4", overlaps=True),
    "color4, no overlap": with_jaxmpi("color4", overlaps=False),
    "ring32, no overlap": with_jaxmpi("ring32", overlaps=False),
    "JAX psum": with_psum,
    "PyTorch DDP": with_ddp,
}

# ---------------------------------------------------------------- inside a job


def time_contender(name: str, batches: list[int], steps: int) -> list[dict[str, Any]]:
    """Be a rank: time a contender by batch; the slowest rank counts."""
    control, results = processes(), []
    for batch in batches:
        timed = CONTENDERS[name](batch)
        seconds: dict[str, list[float]] = {"compute": [], "exchange": [], "step": [], "first": []}
        for _ in range(steps + WARM_UP):
            for kind in ("compute", "exchange", "step"):
                begin = time.perf_counter()
                seconds[kind].append(slowest(control, getattr(timed, kind)))
            seconds["first"].append(max(control.allgather_object(timed.first_s() - begin)))
        results.append({"batch": batch, "loss": timed.loss} | {k: v[WARM_UP:] for k, v in seconds.items()})
    return results


# ---------------------------------------------------------------- outside


def job(name: str, batches: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One job of a contender on the cluster; seconds by batch."""
    print(name, file=sys.stderr, flush=True)
    cluster = {"ranks": options.hosts, "rate": options.rate, "env": {"OMP_NUM_THREADS": "1"}}
    return harness.on_ranks(time_contender, name, batches, options.steps, **cluster)


def batches_for(options: argparse.Namespace) -> list[int]:
    """The batch for each exchange / compute, from times of two batches."""
    small, big = job(options.contenders[0], [8, 24], options)
    a, b = (statistics.median(times["compute"]) for times in (small, big))
    exchange = statistics.median(small["exchange"] + big["exchange"])
    per_image = (b - a) / 16
    return [max(1, round((exchange / ratio - a) / per_image + 8)) for ratio in options.ratios]


def figures(times: dict[str, Any]) -> dict[str, float]:
    """Medians of one job, and the figures derived from them."""
    compute, exchange, step, first = (statistics.median(times[k]) for k in ("compute", "exchange", "step", "first"))
    bound = max(compute, first + exchange)
    return {
        "compute s": compute,
        "exchange s": exchange,
        "exchange / compute": exchange / compute,
        "t_first s": first,
        "step s": step,
        "step / bound": step / bound,
        "hidden": (compute + exchange - step) / (compute + exchange - bound),
    }


def cells(name: str, rounds: list[dict[str, float]]) -> list[str]:
    """A row of a contender: medians over rounds, with the smallest and largest of the last two figures."""
    shown = [name]
    for key in rounds[0]:
        low, middle, high = np.percentile([times[key] for times in rounds], (0, 50, 100))
        spread = f" ({low:.2f}-{high:.2f})" if key in ("step / bound", "hidden") else ""
        shown.append("-" if math.isnan(middle) else f"{middle:.3f}{spread}")
    return shown


def main() -> None:
    """Measure all contenders in turn, and print a table for each batch."""
    parser = harness.parser(__doc__, hosts=4, rate="200mbit", rounds=2, json=None)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="exchange / compute")
    parser.add_argument("--batches", type=int, nargs="+", help="images a rank, instead of ratios")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--steps", type=int, default=7, help="of each kind in a job")
    options = parser.parse_args()
    batches = options.batches or batches_for(options)
    absent = {"PyTorch DDP"} if not is_installed("torch") else set()
    if absent & set(options.contenders):
        print("PyTorch DDP is left out: torch cannot be imported", file=sys.stderr)
    runs = {name: partial(job, name, batches, options) for name in options.contenders if name not in absent}
    times = harness.take_turns(runs, options.rounds, clock=harness.result)
    losses = {f"{by_batch[0]['loss']:.3f}" for rounds in times.values() for by_batch in rounds}
    results = {name: [[figures(batch) for batch in by_batch] for by_batch in rounds] for name, rounds in times.items()}
    size_bytes = sum(x.nbytes for x in initial_params().values())
    limit_s = 2 * (options.hosts - 1) / options.hosts * 8 * size_bytes / (FRAME_PAYLOAD * bits_per_s(options.rate))
    print(f"{options.hosts} hosts x {options.rate}, {os.cpu_count()} cores, {size_bytes / 1e6:.1f} MB of gradients")
    print(f"limit of the links for 32 bits: {limit_s:.3f} s")
    print(f"loss of the first step, all contenders: {', '.join(sorted(losses))}")
    for i, batch in enumerate(batches):
        rows = [cells(name, [by_batch[i] for by_batch in rounds]) for name, rounds in results.items()]
        headings = ["", *next(iter(results.values()))[0][i]]
        print(f"\nbatch {batch} a rank\n\n{harness.table(headings, rows)}")
    facts = {"hosts": options.hosts, "rate": options.rate, "size_bytes": size_bytes, "limit_s": limit_s}
    harness.save(options.json, {**facts, "batches": batches, "results": results})


if __name__ == "__main__":
    main()
