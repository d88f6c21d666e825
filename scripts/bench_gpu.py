"""Models on one GPU beside PyTorch twins, and steps of several ranks.

    python scripts/bench_gpu.py [--models resnet50 vgg16] [--dtypes float32 bfloat16] [--batch 128] [--out FILE]
    python scripts/bench_gpu.py --only-exchange --ranks 2 --models resnet50
    python scripts/bench_gpu.py --dry

jaxmpi is the trainer's own step with one worker. PyTorch is the twin of tests/torch_zoo.py with the same layers,
channels_last, under torch.compile. It has fused SGD, batches in pinned memory and TF32 allowed, as XLA allows it. Both
sides have the same batches and SGD with momentum; params are float32, forward and backward run in the dtype of the row.
Each side is a process, and they take turns, round by round. Batches are made beforehand: the loader is in no figure.
FILE.json holds all, FILE.md the table; both are written after every row. If there is no GPU, the exit code is 77. With
--dry all runs on the CPU at tiny size, which checks this script and measures nothing. A step takes images in host
memory to new params, and its loss is read one step late.

With --only-exchange, ranks that share the GPU run the trainer's step in every form of FORMS, by turns.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
import jax
import numpy as np
from harness import ROOT
from zoo_steps import ALONE, recipe, step_memory

from jaxmpi.comm.topology import Workers, gather_workers
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.train_state import Batch
from jaxmpi.models import MODELS
from jaxmpi.runtime import failures, process, provenance
from jaxmpi.trainer.plan import make_plan

TWINNED = [name for name, make in MODELS.items() if not (name.startswith("digits") or make().takes_tokens)]
MOMENTUM = 0.9  # of optimizer momentum by default
NO_GPU = 77  # exit code that test suites take for "skipped"
DTYPES = ("float32", "bfloat16")
SETTLE = 2  # rounds not counted: in the first, programs are compiled
BATCHES = 4  # in host memory, taken in turn
WHOLE = [name for name in TWINNED if not name.endswith("_tiny")]
SIZES = {  # defaults of the options, by --dry
    False: {"models": WHOLE, "batch": 128, "rounds": 20, "steps": 10},
    True: {"models": ["alexnet_tiny", "resnet18_tiny"], "batch": 4, "rounds": 3, "steps": 1},
}
TORCH_MODES = ("default", "reduce-overhead", "max-autotune")
Run = Callable[[int], Any]  # does a part so many times and waits for the last
FORMS = {  # forms of a step between ranks, by name
    "no exchange": ExchangeConfig("none"),
    "asa32": ExchangeConfig("asa32", overlap="off"),
    "shm": ExchangeConfig("shm"),
}


def host_batches(config: Experiment, workers: Workers = ALONE) -> list[Batch]:
    """The first batches of the trainer's loader."""
    return list(itertools.islice(make_plan(config, workers).feed.batches(), BATCHES))


# ---------------------------------------------------------------- the two sides


class Jaxmpi:
    """The trainer's step."""

    def __init__(self, config: Experiment, dry: bool, torch_mode: str, workers: Workers = ALONE) -> None:
        plan, functions, self.state = harness.build_training(config, workers)
        self.config, self.train_step = plan.experiment, functions.train_step
        self.batches = itertools.cycle(host_batches(config, workers))

    def steps(self, n: int) -> None:
        """The loop of `jaxmpi.train`, without log, evaluation and checkpoints."""
        late = []
        for _ in range(n):
            self.state, metrics = self.train_step(self.state, next(self.batches))
            late.append(metrics.loss)
            if len(late) > 1:
                read(float(late.pop(0)))
        jax.block_until_ready(self.state)
        read(float(late[0]))

    def peak_bytes(self) -> int:
        """Peak memory since the start; without counters XLA's plan for a step."""
        counted = jax.local_devices()[0].memory_stats() or {}
        return counted.get("peak_bytes_in_use") or step_memory(self.config).total


class Torch:
    """The twin, as a user of PyTorch trains it."""

    def __init__(self, config: Experiment, dry: bool, torch_mode: str) -> None:
        sys.path.append(str(ROOT / "tests"))  # which is no package
        torch, torch_zoo = (importlib.import_module(name) for name in ("torch", "torch_zoo"))
        self.torch, self.on_gpu = torch, not dry
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        twin = torch_zoo.TWINS[config.model.name]().to(self.device, memory_format=torch.channels_last).train()
        self.optimizer = torch.optim.SGD(twin.parameters(), config.optim.lr, MOMENTUM, fused=self.on_gpu)
        mean, std = (torch.tensor(x, device=self.device) for x in (config.data.mean, config.data.std))

        def loss_of(image: Any, label: Any) -> Any:
            pixels = ((image.float() / 255 - mean) / std).permute(0, 3, 1, 2)  # channels_last in memory already
            with torch.autocast(self.device.type, torch.bfloat16, enabled=config.compute_dtype == "bfloat16"):
                return torch_zoo.with_heads(twin(pixels), label).mean()

        how = {"mode": torch_mode} if self.on_gpu else {"backend": "eager"}  # which needs no compiler
        self.loss = torch.compile(loss_of, **how)
        batches = [self.tensors(batch) for batch in host_batches(config)]
        self.batches = itertools.cycle(batches)

    def tensors(self, batch: Batch) -> tuple[Any, Any]:
        """Image and label in host memory, pinned if there is a GPU."""
        pair = (self.torch.tensor(batch["image"]), self.torch.tensor(batch["label"]).long())
        return (pair[0].pin_memory(), pair[1].pin_memory()) if self.on_gpu else pair

    def to_device(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Start copying a batch to the device."""
        return batch[0].to(self.device, non_blocking=True), batch[1].to(self.device, non_blocking=True)

    def steps(self, n: int) -> None:
        """Run the usual loop; it also reads each loss a step late."""
        late = []
        for _ in range(n):
            late.append(self.gradients(self.to_device(next(self.batches))))
            self.optimizer.step()
            if len(late) > 1:
                read(late.pop(0).item())
        self.wait()
        read(late[0].item())

    def gradients(self, batch: tuple[Any, Any]) -> Any:
        """Compute new gradients of all params; return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(*batch)
        loss.backward()
        return loss.detach()

    def wait(self, _: Any = None) -> None:
        """Wait for the device."""
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        """Peak GPU memory of two steps; 0 on a CPU."""
        if not self.on_gpu:
            return 0
        self.torch.cuda.reset_peak_memory_stats()
        self.steps(2)
        return self.torch.cuda.max_memory_allocated()


SIDES = {"jaxmpi": Jaxmpi, "torch": Torch}


def read(loss: float) -> None:
    """Read a loss, as a trainer does.

    Raises:
        TrainingError: it is not finite.
    """
    if not np.isfinite(loss):
        raise TrainingError(f"got loss {loss}; expected a finite one")


def serve(name: str, model: str, dtype: str, batch: int, dry: bool, torch_mode: str) -> None:
    """Be a side: read numbers of steps, write their seconds, or the peak bytes for 0."""
    failures.install_excepthooks()
    process.prepare()
    side = SIDES[name](recipe(model, local_batch=batch, compute_dtype=dtype), dry, torch_mode)
    for line in sys.stdin:
        times = json.loads(line)
        begin = time.perf_counter()
        answer = side.steps(times) if times else side.peak_bytes()
        print(json.dumps(answer or time.perf_counter() - begin), flush=True)


# ---------------------------------------------------------------- taking turns


@contextlib.contextmanager
def started(name: str, model: str, dtype: str, options: argparse.Namespace) -> Iterator[Callable[[int], float]]:
    """Start a side as a process; yield `ask(steps)`."""
    line = harness.call(serve, name, model, dtype, options.batch, options.dry, options.torch_mode)
    on_cpu = {"JAX_PLATFORMS": "cpu"} if options.dry or name == "torch" else {}
    env, pipe = os.environ | on_cpu | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, subprocess.PIPE  # room for both sides
    side = subprocess.Popen(line, bufsize=0, env=env, stdin=pipe, stdout=pipe)
    assert side.stdin is not None
    assert side.stdout is not None
    questions, answers = side.stdin, side.stdout

    def ask(steps: int) -> float:
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            questions.write(json.dumps(steps).encode() + b"\n")
        answer = answers.readline()
        if not answer:
            raise ChildProcessError(f"{name} ended with code {side.wait()}; its message is above")
        return json.loads(answer)

    with side:
        try:
            yield ask
        finally:
            side.kill() if sys.exc_info()[0] else questions.close()


def measure(model: str, dtype: str, options: argparse.Namespace, sides: list[str]) -> dict[str, Any]:
    """Measure steps on the sides in turn: seconds and peak bytes."""
    with started("jaxmpi", model, dtype, options) as ask:
        ask(1)  # compiles, and tries algorithms in memory of their own; the next start reads the program
    with contextlib.ExitStack() as stack:
        asks = {name: stack.enter_context(started(name, model, dtype, options)) for name in sides}
        for ask in asks.values():
            ask(SETTLE)
        peak = {name: int(ask(0)) for name, ask in asks.items()}
        runs = {name: partial(ask, options.steps) for name, ask in asks.items()}
        times = harness.take_turns(runs, options.rounds, warm_up=SETTLE, clock=harness.result, swap=True)
    seconds = {name: [turn_s / options.steps for turn_s in values] for name, values in times.items()}
    return {"model": model, "dtype": dtype, "batch": options.batch, "seconds": seconds, "peak_bytes": peak}


# ---------------------------------------------------------------- tables


def quartiles(values: Any, form: str = ",.0f") -> str:
    """Median and quartiles."""
    middle, low, high = np.percentile(values, (50, 25, 75))
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def speed_row(row: dict[str, Any]) -> list[str]:
    """Images a second and memory of both sides, with the rounds' ratios."""
    steps = {name: np.array(values) for name, values in row["seconds"].items()}
    cells = [row["model"], row["dtype"], str(row["batch"])]
    cells += [quartiles(row["batch"] / steps[name]) if name in steps else "-" for name in SIDES]
    cells.append(quartiles(steps["torch"] / steps["jaxmpi"], ".2f") if "torch" in steps else "-")
    peak = row["peak_bytes"]
    return cells + [f"{peak[name] / 1e9:.3g}" if peak.get(name) else "-" for name in SIDES]


SPEED = ("model", "dtype", "batch", "jaxmpi images/s", "torch images/s", "jaxmpi / torch", "jaxmpi GB", "torch GB")


def markdown(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """All tables."""
    head = [f"- {name}: {value}" for name, value in facts.items()]
    return "\n".join([*head, "", harness.table(SPEED, [speed_row(row) for row in rows]), ""])


# ---------------------------------------------------------------- steps of ranks that share the GPU


def step_seconds(model: str, dtype: str, batch: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Be a rank: seconds of a step in every form, by turns."""
    failures.install_excepthooks()
    process.prepare()
    workers, config = gather_workers(1), recipe(model, local_batch=batch, compute_dtype=dtype)
    with failures.at_work():
        sides = {
            name: Jaxmpi(dataclasses.replace(config, exchange=form), False, "", workers) for name, form in FORMS.items()
        }
        runs = {name: partial(side.steps, steps) for name, side in sides.items()}
        times = harness.take_turns(runs, rounds, warm_up=SETTLE, clock=harness.together, swap=True)
    return {name: [turn_s / steps for turn_s in seconds] for name, seconds in times.items()}


def exchange_table(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Table of images/s and step ratios by form of exchange, and failures.

    Times are by rank 0's clock; ratios are to a step without an exchange.
    """
    rows, results, failed, table = [], [], [], ""
    for model, dtype in itertools.product(options.models, options.dtypes):
        sizes = options.batch, options.rounds, options.steps
        env = {"JAX_PLATFORMS": "cpu"} if options.dry else {}
        try:
            seconds = harness.on_ranks(step_seconds, model, dtype, *sizes, ranks=options.ranks, env=env)
        except (harness.JobFailed, UsageError) as error:
            failed.append(f"{model}, {dtype}: {error}")
            continue
        baseline = np.array(seconds["no exchange"])
        for form, values in seconds.items():
            images = quartiles(options.ranks * options.batch / np.array(values))
            rows.append([model, dtype, form, images, quartiles(np.array(values) / baseline, ".2f")])
        results.append({"model": model, "dtype": dtype, "batch": options.batch, "seconds": seconds})
        table = harness.table(("model", "dtype", "exchange", "images/s", "step / step without"), rows)
        if options.out:
            harness.save(options.out.with_suffix(".json"), {"facts": machine(options.dry), "rows": results})
            options.out.with_suffix(".md").write_text(table + "\n")
    return table, failed


# ---------------------------------------------------------------- the whole measurement

PROBES = {
    "jax": "import jax; d = jax.devices()[0]; print(d.platform if d.platform == 'cpu' else d.device_kind)",
    "torch": "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu')",
}


def probe(package: str, dry: bool) -> str:
    """The device of a package, found in another process; empty if missing."""
    env = os.environ | ({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} if dry else {})
    probed = subprocess.run([sys.executable, "-c", PROBES[package]], env=env, capture_output=True, text=True)
    return probed.stdout.strip()


def machine(dry: bool) -> dict[str, Any]:
    """Device, driver, processor and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    has_driver = not dry and shutil.which(query[0])
    card = subprocess.run(query, capture_output=True, text=True).stdout.strip() if has_driver else ""
    versions = provenance.versions()
    for package in importlib.metadata.distributions():
        if package.name.lower().startswith(("torch", "jax-cuda", "nvidia-cud", "nvidia-nccl", "triton")):
            versions[package.name.lower()] = package.version
    return {
        "GPU, driver, memory": card or "none used: nothing here is a measurement",
        "GB": "as XLA plans the step; PyTorch counts none on a CPU" if dry else "the most that an allocator had in use",
        "machine": f"{platform.machine()}, {process.cores()} cores, {platform.system()} {platform.release()}",
        "commit": provenance.commit(ROOT),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def parse() -> argparse.Namespace:
    """Parse the options; --dry makes the default sizes tiny."""
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=TWINNED, help="default: the zoo; of each its full size")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batch", type=int, help="examples of a step, 128 by default; fewer need less memory")
    parser.add_argument("--rounds", type=harness.positive, help="turns of every part, 20 by default")
    parser.add_argument("--steps", type=harness.positive, help="of a turn, 10 by default")
    parser.add_argument("--torch-mode", choices=TORCH_MODES, default="default", help="mode of torch.compile")
    parser.add_argument("--ranks", type=harness.positive, default=2, help="with --only-exchange")
    parser.add_argument("--only-exchange", action="store_true", help="measure the steps of these ranks alone")
    parser.add_argument("--out", type=Path, help="FILE.json and FILE.md")
    parser.add_argument("--dry", action="store_true", help="all of it on the CPU at tiny size, in some minutes")
    options = parser.parse_args()
    for name, value in SIZES[options.dry].items():
        setattr(options, name, value if getattr(options, name) is None else getattr(options, name))
    if options.out and not os.access(options.out.absolute().parent, os.W_OK):
        parser.error(f"--out: {options.out.absolute().parent} is no folder to write in")
    return options


def main() -> None:
    """Measure every model in every dtype."""
    options = parse()
    if not options.dry and probe("jax", options.dry) in ("", "cpu"):
        print("bench_gpu.py: no GPU: JAX finds none (`uv sync --extra cuda` makes it look for one); --dry needs none")
        sys.exit(NO_GPU)
    if options.only_exchange:
        table, failed = exchange_table(options)
        print("\n".join([table, *failed]))
        sys.exit(1 if failed else 0)
    sides, facts, rows, failed = list(SIDES), machine(options.dry), [], []
    theirs = probe("torch", options.dry)
    if not theirs or (theirs == "cpu" and not options.dry):
        print(f"PyTorch {'sees no GPU' if theirs else 'is not installed'}: its columns stay empty")
        sides = ["jaxmpi"]
    for model, dtype in itertools.product(options.models, options.dtypes):
        try:
            rows.append(measure(model, dtype, options, sides))
        except ChildProcessError as error:
            failed.append(f"{model}, {dtype}: {error}")  # out of memory, most likely: the others go on
            continue
        print(" | ".join(speed_row(rows[-1])), flush=True)
        if options.out:
            harness.save(options.out.with_suffix(".json"), {"facts": facts, "rows": rows})
            options.out.with_suffix(".md").write_text(markdown(facts, rows))
    print("\n" + markdown(facts, rows) + "\n".join(failed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
