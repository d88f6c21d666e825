"""Overlap of exchange and backward pass: jaxmpi beside PyTorch DDP and JAX's psum on emulated hosts.

    python scripts/bench_overlap.py [--hosts 4] [--rate 200mbit] [--ratios 0.25 0.5 1] [--rounds 2]

One rank a host; hosts share this machine's cores. The net has six convolutions; the batch is chosen so that exchange /
compute is about each ratio, for the first contender. Each contender is a job of its own, and jobs take turns. A job
times, in turn: the step without exchange (compute), the exchange alone, and the step; the slowest rank counts. t_first
is the time of the first gradients. No step can be shorter than max(compute, t_first + exchange), if those times hold
while both run; that is the bound. Hidden is (compute + exchange - step) / (compute + exchange - bound).
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cluster import FRAME_PAYLOAD, bits_per_s

WIDTHS = (3, 64, 128, 128, 256, 256, 256)  # channels; pooled after the first, third and fifth convolution
CLASSES, PIXELS, LR = 10, 32, 0.01
BUCKET_BYTES = 1 << 20  # of all contenders that have buckets
WARM_UP = 2  # steps not counted
IN_A_ROW = 6  # steps without a pause if one step's exchange continues in the next
NOT_PERMITTED = 77  # exit code of scripts/cluster.py if there can be no cluster


class Timed(NamedTuple):
    """A contender with its batch."""

    compute: Callable[[], Any]
    exchange: Callable[[], Any]
    step: Callable[[], Any]
    first_s: Callable[[], float]  # time.perf_counter when the last step's first gradients existed; NaN if unknown
    loss: float  # of the first step, which is the same for all contenders
    steps: int = 1  # number that `step` makes


def params_of_all() -> dict[str, np.ndarray]:
    """The net's params: `w0` f32[3, 3, in, out], `b0` f32[out], ..., `fc` f32[in, classes]."""
    rng, params = np.random.default_rng(0), {}
    for i, (a, b) in enumerate(pairwise(WIDTHS)):
        params[f"w{i}"] = rng.standard_normal((3, 3, a, b), np.float32) * np.float32((2 / 9 / a) ** 0.5)
        params[f"b{i}"] = np.zeros(b, np.float32)
    params["fc"] = rng.standard_normal((WIDTHS[-1], CLASSES), np.float32) * np.float32(0.05)
    return params


def batch_of(rank: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Images f32[batch, 32, 32, 3] and labels i32[batch] of one rank."""
    rng = np.random.default_rng(rank + 1)
    images = rng.standard_normal((batch, PIXELS, PIXELS, 3), np.float32)
    return images, rng.integers(0, CLASSES, batch, np.int32)


# ---------------------------------------------------------------- contenders


def in_jax() -> tuple[Callable, Callable, Any]:
    """(params, images, labels) -> (gradients, loss); (gradients, moments, params) -> (params, moments); its start."""
    import jax
    import jax.numpy as jnp
    import optax

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


def with_jaxmpi(strategy: str, beside: bool, late: bool = False) -> Callable[[int], Timed]:
    """The step in one jit, the exchange beside it or in it."""

    def build(batch: int) -> Timed:
        import jax
        import jax.numpy as jnp

        import jaxmpi
        from jaxmpi.allreduce import overlap
        from jaxmpi.allreduce.buckets import Order
        from jaxmpi.allreduce.comm_thread import courier

        order, (gradients, descend, init) = Order(), in_jax()
        gradients = order.of(gradients)
        options = {"strategy": strategy, "bucket_bytes": BUCKET_BYTES, "order": order}
        delayed = overlap.delayed_gradients(**options)
        mean = partial(overlap.exchange if beside else jaxmpi.exchange, **options)

        def step(params: Any, state: Any, *data: Any) -> Any:
            grads, value = gradients(params, *data)
            moments, waiting = state
            if late:
                grads, waiting = delayed.update(grads, waiting)
            else:
                grads = mean(grads)
            params, moments = descend(grads, moments, params)
            return params, (moments, waiting), value

        def alone(params: Any, state: Any, *data: Any) -> Any:
            grads, value = gradients(params, *data)
            params, moments = descend(grads, state[0], params)
            return params, (moments, state[1]), value

        params = jax.tree.map(jnp.asarray, params_of_all())
        state, data = (
            (init(params), delayed.init(params)),
            jax.tree.map(jnp.asarray, batch_of(jaxmpi.world().rank, batch)),
        )
        run, compute = (Loop(jax.jit(f), params, state, data) for f in (step, alone))
        run.steps = IN_A_ROW if late else 1
        exchange = jax.jit(lambda tree: mean(jax.tree.map(lambda x: x * 2, tree)))

        def first_s() -> float:
            starts = [event.time_s for event in courier().events if event.what == "start"]
            return min(t for t in starts if t > run.began_s) if starts else float("nan")

        return Timed(compute, lambda: jax.block_until_ready(exchange(params)), run, first_s, compute.loss(), run.steps)

    return build


class Loop:
    """A jitted step, repeated with its own results; params keep their initial values."""

    def __init__(self, step: Callable, params: Any, state: Any, data: Any) -> None:
        """Take the arguments of the first call."""
        self.step, self.params, self.state, self.data = step, params, state, data
        self.began_s, self.steps = 0.0, 1

    def __call__(self) -> None:
        """Run a step, or some in a row, and wait for each."""
        import jax

        for _ in range(self.steps):
            self.began_s = time.perf_counter()
            _, self.state, _ = jax.block_until_ready(self.step(self.params, self.state, *self.data))

    def loss(self) -> float:
        """Loss of the first step."""
        return float(self.step(self.params, self.state, *self.data)[2])


def with_psum(batch: int) -> Timed:
    """JAX's own method: psum over a mesh of all processes, with gloo below."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxmpi.comm.control import processes

    control = processes()
    if not jax.distributed.is_initialized():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = control.bcast(np.frombuffer(f"{node_address()}:{29400}".ljust(64).encode(), np.uint8))
        jax.distributed.initialize(address.tobytes().decode().strip(), control.size, control.rank)
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

    every, own = P(), P("workers")
    params = jax.tree.map(lambda x: put(x, every), params_of_all())
    state = jax.tree.map(lambda x: put(x, every), init(params_of_all()))
    data = tuple(put(x, own) for x in batch_of(control.rank, batch))
    run, compute = (
        Loop(
            over(lambda *args, f=f: step(f, *args), (every, every, own, own), (every, every, own)), params, state, data
        )
        for f in (mean, lambda tree: tree)
    )
    exchange = over(lambda tree: mean(jax.tree.map(lambda x: x * 2, tree)), (every,), every)
    [loss] = compute.step(params, state, *data)[2].addressable_data(0)
    return Timed(compute, lambda: jax.block_until_ready(exchange(params)), run, lambda: float("nan"), float(loss))


def node_address() -> str:
    """Address of this host's network card."""
    out = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True)
    return out.stdout.split()[0]


def with_ddp(batch: int) -> Timed:
    """PyTorch's DistributedDataParallel over gloo, buckets as big as ours."""
    import torch  # pyright: ignore[reportMissingImports] # not installed by default
    import torch.distributed as dist  # pyright: ignore[reportMissingImports] # not installed by default
    from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports] # not installed by default

    from jaxmpi.comm.control import processes

    control = processes()
    torch.set_num_threads(1)
    if not dist.is_initialized():
        address = control.bcast(np.frombuffer(node_address().ljust(64).encode(), np.uint8)).tobytes().decode().strip()
        dist.init_process_group("gloo", f"tcp://{address}:29500", rank=control.rank, world_size=control.size)
    images, labels = batch_of(control.rank, batch)
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

    params, layers = params_of_all(), []
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
    "ring32": with_jaxmpi("ring32", beside=True),
    "asa32": with_jaxmpi("asa32", beside=True),
    "ring16": with_jaxmpi("ring16", beside=True),
    "ring32, one step late": with_jaxmpi("ring32", beside=True, late=True),
    "ring32, no overlap": with_jaxmpi("ring32", beside=False),
    "JAX psum": with_psum,
    "PyTorch DDP": with_ddp,
}

NEEDED = {"PyTorch DDP": "torch"}  # modules that may be absent


# ---------------------------------------------------------------- inside a job


def run_job(name: str, batches: list[int], steps: int, file: Path) -> None:
    """Time a contender with each batch; FILE holds the seconds."""
    from jaxmpi.comm.control import processes

    control, results = processes(), []
    for batch in batches:
        timed = CONTENDERS[name](batch)
        seconds: dict[str, list[float]] = {"compute": [], "exchange": [], "step": [], "first": []}
        for _ in range(steps + WARM_UP):
            for kind in ("compute", "exchange", "step"):
                begin = time.perf_counter()
                seconds[kind].append(slowest(control, getattr(timed, kind)))
            first_s = timed.first_s() - begin if timed.steps == 1 else float("nan")
            seconds["first"].append(max(control.allgather_object(first_s)))
            seconds["step"][-1] /= timed.steps
        results.append({"batch": batch, "loss": timed.loss} | {k: v[WARM_UP:] for k, v in seconds.items()})
    if control.rank == 0:
        file.write_text(json.dumps(results))


def slowest(control: Any, run: Callable[[], Any]) -> float:
    """Seconds of the slowest rank; all begin together."""
    control.barrier()
    begin = time.perf_counter()
    run()
    return max(control.allgather_object(time.perf_counter() - begin))


# ---------------------------------------------------------------- outside


class Bench(NamedTuple):
    """Sizes of the measurement, and the cluster's command line."""

    cluster: list[str]  # the beginning of the line that runs a job
    folder: Path
    steps: int

    def run(self, name: str, batches: list[int]) -> list[dict[str, Any]]:
        """One job of a contender; seconds by batch."""
        file = self.folder / "times.json"
        script = [sys.executable, __file__, "--job", name, "--file", str(file), "--steps", str(self.steps)]
        job = subprocess.run([*self.cluster, *script, "--batches", *map(str, batches)], env=self.environment())
        if job.returncode == NOT_PERMITTED:
            raise SystemExit(NOT_PERMITTED)
        if job.returncode:
            raise SystemExit(f"the job of {name} failed")
        return json.loads(file.read_text())

    def environment(self) -> dict[str, str]:
        """One session folder a run, and this project on the path."""
        root = str(Path(__file__).parent.parent)
        return os.environ | {"TMPDIR": str(self.folder), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def batches_for(bench: Bench, name: str, ratios: list[float]) -> list[int]:
    """The batch for each exchange / compute, from the times of two other batches."""
    small, big = bench.run(name, [8, 24])
    a, b = (statistics.median(times["compute"]) for times in (small, big))
    exchange = statistics.median(small["exchange"] + big["exchange"])
    per_image = (b - a) / 16
    return [max(1, round((exchange / ratio - a) / per_image + 8)) for ratio in ratios]


def row(times: dict[str, Any], late: bool) -> dict[str, float]:
    """Medians of one job, and the figures derived from them."""
    compute, exchange, step, first = (statistics.median(times[k]) for k in ("compute", "exchange", "step", "first"))
    known = {"compute": compute, "exchange": exchange, "t_first": first, "step": step}
    bound = max(compute, exchange if late else first + exchange)
    hidden = (compute + exchange - step) / (compute + exchange - bound)
    return known | {"ratio": exchange / compute, "step / bound": step / bound, "hidden": hidden}


def show(results: dict[str, list[list[dict[str, float]]]], batches: list[int]) -> None:
    """Print a table per batch; medians over rounds, with the smallest and the largest."""
    for i, batch in enumerate(batches):
        print(f"\nbatch {batch} a rank\n")
        print("| | compute s | exchange s | exchange / compute | t_first s | step s | step / bound | hidden |")
        print("|---|---|---|---|---|---|---|---|")
        for name, rounds in results.items():
            columns = {key: [rows[i][key] for rows in rounds] for key in rounds[0][i]}
            cell = {key: f"{statistics.median(values):.3f}" for key, values in columns.items()}
            spread = {
                k: f"{cell[k]} ({min(v):.2f}-{max(v):.2f})"
                for k, v in columns.items()
                if k in ("step / bound", "hidden")
            }
            cell |= spread
            keys = ("compute", "exchange", "ratio", "t_first", "step", "step / bound", "hidden")
            print(f"| {name} | " + " | ".join("-" if cell[k].startswith("nan") else cell[k] for k in keys) + " |")


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure all contenders in turn."""
    cluster = [sys.executable, str(Path(__file__).parent / "cluster.py"), "--hosts", str(options.hosts)]
    line = [*cluster, "--rate", options.rate, "--", "mpirun", "-n", str(options.hosts)]
    bench = Bench(line, folder, options.steps)
    batches = options.batches or batches_for(bench, options.contenders[0], options.ratios)
    contenders = [name for name in options.contenders if is_here(name)]
    results: dict[str, list[list[dict[str, float]]]] = {name: [] for name in contenders}
    losses = set()
    for turn in range(options.rounds):
        for name in contenders:
            jobs = bench.run(name, batches)
            results[name].append([row(times, "late" in name) for times in jobs])
            losses.add(f"{jobs[0]['loss']:.3f}")
            print(f"round {turn + 1}, {name}", file=sys.stderr)
    size_bytes = sum(x.nbytes for x in params_of_all().values())
    limit_s = 2 * (options.hosts - 1) / options.hosts * 8 * size_bytes / (FRAME_PAYLOAD * bits_per_s(options.rate))
    print(f"{options.hosts} hosts x {options.rate}, {os.cpu_count()} cores, {size_bytes / 1e6:.1f} MB of gradients")
    print(f"limit of the links for 32 bits: {limit_s:.3f} s")
    print(f"loss of the first step, all contenders: {', '.join(sorted(losses))}")
    show(results, batches)
    if options.json:
        facts = {"hosts": options.hosts, "rate": options.rate, "size_bytes": size_bytes, "limit_s": limit_s}
        options.json.write_text(json.dumps({**facts, "batches": batches, "results": results}, indent=2) + "\n")


def is_here(name: str) -> bool:
    """Return True if a contender can take part; print a line if not."""
    module = NEEDED.get(name)
    absent = module is not None and importlib.util.find_spec(module) is None
    if absent:
        print(f"{name} is left out: {module} cannot be imported", file=sys.stderr)
    return not absent


def main() -> None:
    """Without --job: start the jobs and print. With it: be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="200mbit", help="of each host's link")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="exchange / compute")
    parser.add_argument("--batches", type=int, nargs="+", help="images a rank, instead of ratios")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7, help="of each kind in a job")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--job", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return run_job(options.job, options.batches, options.steps, options.file)
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
