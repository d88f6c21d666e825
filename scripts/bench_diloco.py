"""Seconds to one loss over slow links, by DiLoCo and gradient means.

    python scripts/bench_diloco.py [--hosts 8] [--rate 50mbit] [--steps 200] [--seeds 3] [--json FILE] [--tiny]
    python scripts/bench_diloco.py --json FILE --part losses      # and, when the machine is quiet, --part seconds

Contenders are ours and PyTorch DDP's. A GPT of 10.9 million params learns the source of Python's standard library, one
rank a host; hosts share this machine's cores. A step learns the same over any link. So held-out losses are recorded
without a cluster, and steps are multiplied by the time of a step on the cluster: the median, and for DiLoCo the mean
over a whole period after the first. The goal is the loss of `ring32` after --steps; the others stop at the goal, after
four times as many steps at most. All contenders have the same initial params, order of examples and AdamW, and all but
DiLoCo the same learning rate. `none` never exchanges, so it shows compute alone. With --json, recorded losses are kept,
and new seconds are added to the recorded ones.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import harness
import jax
import numpy as np

from jaxmpi.allreduce.measuring import slowest
from jaxmpi.bench.baselines import connect_torch
from jaxmpi.comm.topology import gather_workers, put
from jaxmpi.config.data import Data
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.models.gpt import EPS, gpt, gpt_tiny
from jaxmpi.runtime import failures
from jaxmpi.trainer import build
from jaxmpi.trainer.plan import Plan, make_plan
from jaxmpi.trainer.state import initial_states

DECAY = 0.1
HELD_OUT = 4  # batches of an evaluation
MOST = 4  # times as many steps as ring32, after which a contender stops
PARTS = ("losses", "seconds")
Losses = dict[str, float]  # held out, by step


class Contender(NamedTuple):
    """A contender: rule and strategy of ours, or the hook of PyTorch's."""

    rule: str = "gradients"
    strategy: str = "ring32"
    hook: str = ""
    rate: float = 1.0  # times the learning rate of the others


# The outer optimizer multiplies what workers move, up to eta / (1 - mu) = 7 times.
DILOCO = Contender(rule="diloco", rate=1 / 3)


CONTENDERS = {
    "ring32": Contender(),
    "ring16": Contender(strategy="ring16"),
    "DiLoCo": DILOCO,
    "DiLoCo, 16 bits": DILOCO._replace(strategy="ring16"),
    "DiLoCo, 8 bits": DILOCO._replace(strategy="ring:8"),
    "DDP": Contender(hook="allreduce"),
    "DDP, fp16 hook": Contender(hook="fp16"),
    "DDP, PowerSGD rank 4": Contender(hook="powersgd"),
    "none": Contender(strategy="none"),
}


class Sizes(NamedTuple):
    """Sizes of a measurement."""

    steps: int  # number of steps of ring32, to the goal
    period: int  # H
    local_batch: int
    window: int  # tokens of an example
    every: int  # steps from one evaluation to the next
    lr: float  # learning rate of AdamW, after a warmup over a twentieth of the steps
    tiny: bool


def recipe(contender: Contender, sizes: Sizes, seed: int) -> Experiment:
    """A contender's experiment; contenders of PyTorch take data and rates from it."""
    model = gpt_tiny(window=sizes.window) if sizes.tiny else gpt(window=sizes.window)
    return Experiment(
        model=model,
        data=Data("stdlib", window=model.input_shape[0]),
        optim=Optim("adamw", lr=contender.rate * sizes.lr, weight_decay=DECAY, decay_bias=False),
        schedule=Schedule("constant", warmup=f"{max(sizes.steps // 20, 1)}st"),
        rule=RuleConfig(contender.rule, local_steps=sizes.period, noise_scale=False),
        exchange=ExchangeConfig(contender.strategy, overlap="off" if contender.strategy == "none" else "auto"),
        local_batch=sizes.local_batch,
        train_for=f"{MOST * sizes.steps}st",
        seed=seed,
    )


# ---------------------------------------------------------------- inside a job


class Trainee(NamedTuple):
    """A contender in training: both functions take batches of this rank."""

    step: Callable[[dict[str, Any]], None]  # returns when params are updated
    loss: Callable[[list[dict[str, Any]]], float]  # held out, of this rank's part, the mean over its bytes


def ours(plan: Plan) -> Trainee:
    """The trainer's own step and evaluation."""
    functions = build.build_functions(plan)
    state = put(initial_states(plan, functions.rule), plan.workers)

    def step(batch: dict[str, Any]) -> None:
        nonlocal state
        state, _ = functions.train_step(state, batch)
        jax.block_until_ready(state)

    def loss(batches: list[dict[str, Any]]) -> float:
        params = functions.eval_params(state.params, state.rule_state)
        found = [functions.eval_step(params, state.model_state, batch) for batch in batches]
        return statistics.mean(float(sums / counts) for sums, counts in (metrics["loss"] for metrics in found))

    return Trainee(step, loss)


def ddp(plan: Plan, hook: str) -> Trainee:
    """The same model, params, AdamW and rates under PyTorch's DDP over gloo."""
    import torch  # pyright: ignore[reportMissingImports] # not installed by default
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # pyright: ignore[reportMissingImports]
    from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports] # see above

    torch.set_num_threads(1)
    connect_torch(harness.control())
    config, functions = plan.experiment, build.build_functions(plan)
    start = initial_states(plan, functions.rule)[plan.workers.mine[0]].params
    net = torch_gpt(start, heads=2 if "tiny" in config.model.name else 6)
    # The hook of PowerSGD takes two buckets in no fixed order, so gloo's ranks would mismatch: it gets one.
    model = DistributedDataParallel(net, bucket_cap_mb=1000 if hook == "powersgd" else None)
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    decayed, plain = ([p for p in net.parameters() if (p.ndim > 1) == is_wide] for is_wide in (True, False))
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer, done = torch.optim.AdamW(groups, lr=config.optim.lr), 0

    def loss_of(model: Any, batch: dict[str, Any]) -> Any:
        tokens, labels = (torch.from_numpy(np.array(batch[name])).long() for name in ("image", "label"))
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    def step(batch: dict[str, Any]) -> None:
        nonlocal done
        for group in optimizer.param_groups:
            group["lr"] = np.asarray(plan.lr(done)).item()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        done += 1

    def loss(batches: list[dict[str, Any]]) -> float:
        with torch.no_grad():
            return statistics.mean(loss_of(net, batch).item() for batch in batches)

    return Trainee(step, loss)


def torch_gpt(params: Any, heads: int) -> Any:
    """models/gpt.py in PyTorch, with these params."""
    import torch  # pyright: ignore[reportMissingImports] # not installed by default
    from torch.nn import functional as f  # pyright: ignore[reportMissingImports] # not installed by default

    leaves = {name.replace("/", "_"): torch.from_numpy(np.array(leaf)) for name, leaf in named_leaves(params)}
    blocks = len(params["blocks"])

    class Gpt(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = torch.nn.ParameterDict(leaves)

        def dense(self, name: str, x: Any) -> Any:
            return x @ self.p[f"{name}_kernel"] + self.p[f"{name}_bias"]

        def norm(self, name: str, x: Any) -> Any:
            return f.layer_norm(x, x.shape[-1:], self.p[f"{name}_scale"], self.p[f"{name}_bias"], EPS)

        def attention(self, name: str, x: Any) -> Any:
            parts = self.dense(f"{name}_qkv", x).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
            mixed = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.dense(f"{name}_out", mixed.transpose(1, 2).flatten(2))

        def forward(self, tokens: Any) -> Any:
            x = self.p["embedding"][tokens] + self.p["places"]
            for i in range(blocks):
                name = f"blocks_{i}"
                x = x + self.attention(name, self.norm(f"{name}_norm1", x))
                up = self.dense(f"{name}_up", self.norm(f"{name}_norm2", x))
                x = x + self.dense(f"{name}_down", f.gelu(up, approximate="tanh"))
            return self.dense("logits", self.norm("norm", x))

    return Gpt()


def train(name: str, fields: dict[str, Any], seed: int, steps: int, goal: float | None) -> dict[str, Any]:
    """Be a rank: train; return seconds and held-out losses of steps.

    The first evaluation at the goal ends the run. Without a goal nothing is evaluated.
    """
    workers = gather_workers(1)
    control, contender = workers.processes, CONTENDERS[name]
    if goal is not None and contender.strategy == "ring32" and not contender.hook:
        contender = contender._replace(strategy="shm")  # the same sums but for rounding, sooner
    sizes = Sizes(**fields)
    config = recipe(contender, sizes, seed)
    seconds: list[float] = []
    losses: dict[int, float] = {}
    with failures.at_work():
        plan = make_plan(config, workers)
        made = ddp(plan, contender.hook) if contender.hook else ours(plan)
        held_out = list(plan.validation.batches(0, HELD_OUT)) if goal is not None else []
        batches = iter(plan.feed.batches(0, steps))
        for k in range(steps + 1):
            if goal is not None and (k % sizes.every == 0 or k == steps):
                # Each rank computes its share of the same windows for all contenders.
                losses[k] = float(control.allreduce_sum(np.array([made.loss(held_out)]))[0]) / workers.size
                if losses[k] <= goal:
                    break
            if k < steps:
                seconds.append(slowest(control, partial(made.step, next(batches))))
        control.barrier()
    return {"seconds": seconds, "losses": losses}


# ---------------------------------------------------------------- outside


def step_s(name: str, pieces: list[list[float]], sizes: Sizes) -> float:
    """Median seconds of a step.

    For DiLoCo each job counts by the mean over its last whole period, which has one exchange.
    """
    if CONTENDERS[name].rule != "diloco":
        return statistics.median(itertools.chain(*(seconds[1:] for seconds in pieces)))
    ends = [len(seconds) // sizes.period * sizes.period for seconds in pieces]
    periods = (seconds[end - sizes.period : end] for seconds, end in zip(pieces, ends, strict=True))
    return statistics.median(statistics.mean(period) for period in periods)


def steps_to(goal: float, losses: Losses) -> float:
    """Steps to the goal, interpolated between evaluations; infinite if never reached."""
    points = sorted((int(step), loss) for step, loss in losses.items())
    for (before, high), (after, low) in itertools.pairwise(points):
        if low <= goal:
            return after if high <= low else before + (after - before) * max(high - goal, 0.0) / (high - low)
    return math.inf


def measure(options: argparse.Namespace, sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Measure losses here, then seconds on the cluster; keep both in --json.

    Returns:
        by contender `losses`, by seed and step, and `seconds` of each step on the cluster, job by job

    Raises:
        SystemExit: --json has figures of other sizes.
    """
    results: dict[str, dict[str, Any]] = {name: {"losses": {}, "seconds": []} for name in options.contenders}
    if options.json and options.json.exists():
        written = json.loads(options.json.read_text())
        if written["sizes"] != sizes._asdict():
            raise SystemExit(f"{options.json} has figures of other sizes, {written['sizes']}: name another file")
        results |= written["results"]

    def run(name: str, seed: str, steps: int, goal: float | None, rate: str) -> dict[str, Any]:
        arguments = (name, sizes._asdict(), int(seed), steps, goal)
        return harness.on_ranks(train, *arguments, ranks=options.hosts, rate=rate, env={"OMP_NUM_THREADS": "1"})

    def keep() -> None:
        harness.save(options.json, {"sizes": sizes._asdict(), "results": results})

    if "losses" in options.part:
        in_order = sorted(options.contenders, key="ring32".__ne__)  # first, because it sets the goal
        for seed, name in itertools.product(map(str, range(options.seeds)), in_order):
            if name == "none" or seed in results[name]["losses"]:
                continue
            is_first = name == "ring32"
            goal = 0.0 if is_first else results["ring32"]["losses"][seed][str(sizes.steps)]
            losses = run(name, seed, sizes.steps * (1 if is_first else MOST), goal, rate="")["losses"]
            print(f"{name}, seed {seed}: {max(map(int, losses))} steps", file=sys.stderr, flush=True)
            results[name]["losses"][seed] = losses
            keep()
    if "seconds" in options.part:
        for name in options.contenders:
            steps = 2 * sizes.period if CONTENDERS[name].rule == "diloco" else options.timed
            results[name]["seconds"].append(run(name, "0", 1 + steps, None, options.rate)["seconds"])
            keep()
    return results


def table(results: dict[str, dict[str, Any]], sizes: Sizes) -> str:
    """Markdown table of steps and seconds; ratios to ring32, seed by seed."""
    seconds = {name: step_s(name, found["seconds"], sizes) for name, found in results.items() if found["seconds"]}
    goals = {seed: losses[str(sizes.steps)] for seed, losses in results["ring32"]["losses"].items()}
    compute = seconds.get("none", math.nan)
    rows = []
    for name, found in results.items():
        if not found["losses"] or name not in seconds:
            continue
        steps = np.array([steps_to(goals[seed], losses) for seed, losses in found["losses"].items()])
        shares = steps * seconds[name] / (sizes.steps * seconds["ring32"])
        figures = (steps, 0), (steps * seconds[name], 0), (shares, 3)  # with the decimals that are shown
        spreads = [(np.percentile(values, (0, 50, 100)), digits) for values, digits in figures]
        cells = ["{1:.{d}f} ({0:.{d}f}-{2:.{d}f})".format(*values, d=digits) for values, digits in spreads]
        rows.append([name, f"{seconds[name]:.3f}", f"{100 * compute / seconds[name]:.0f} %", *cells])
    goal = ", ".join(map("{:.4f}".format, goals.values()))
    headings = ("contender", "s a step", "compute", "steps to the goal", "s to the goal", "of ring32's")
    return f"goal: ring32's held-out loss after {sizes.steps} steps: {goal}\n\n{harness.table(headings, rows)}"


def main() -> None:
    """Start the jobs, and print."""
    parser = harness.parser(__doc__, hosts=8, rate="50mbit", json=None)
    parser.add_argument("--steps", type=int, default=200, help="of ring32, to the goal")
    parser.add_argument("--timed", type=int, default=20, help="steps that are timed on the cluster")
    parser.add_argument("--period", type=int, default=50, help="H of DiLoCo")
    parser.add_argument("--local-batch", type=int, default=1, help="windows a rank and step")
    parser.add_argument("--window", type=int, default=64, help="tokens of an example")
    parser.add_argument("--every", type=int, default=20, help="steps from one evaluation to the next")
    parser.add_argument("--lr", type=float, default=3e-4, help="of AdamW; of DiLoCo's a third")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--tiny", action="store_true", help="a model of 82,240 params, to see that it works")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="losses here, seconds on the cluster")
    options = parser.parse_args()
    if "ring32" not in options.contenders:
        parser.error("--contenders: ring32 sets the goal; name it too")
    sizes = Sizes(*(getattr(options, name) for name in Sizes._fields))
    results = measure(options, sizes)
    print(f"{options.hosts} hosts x {options.rate}, {os.cpu_count()} cores; {table(results, sizes)}")


if __name__ == "__main__":
    main()
