"""Epoch times by data's place and devices' layout (Kumar et al. 2018).

python scripts/bench_epoch.py data --ranks 2 --images 400             files, packed, in memory; figures 10 and 11
python scripts/bench_epoch.py devices --ranks 2 --devices 2           a process a device, or one for several; figure 12
python scripts/bench_epoch.py devices --ranks 4 --rate 200mbit        the same, each process on an emulated host
python scripts/bench_epoch.py together --ranks 4 --rate 1gbit         memory and trees, or files and Allreduce; table 1

Contenders are whole runs of `jaxmpi.train` that take turns: a recipe of experiments/dimd with a small model, so that
cores have time left for data. `together` has the recipe's own, whose gradients take time to sum. A time is that of an
epoch at the median pace of a run's progress lines.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import bench_data
import harness
from harness import ROOT

from jaxmpi.config.data import Data
from jaxmpi.data import open_source, packing

EXPERIMENT = """
import dataclasses, sys
from jaxmpi.experiments.dimd.{recipe} import experiment as recipe
from jaxmpi.models import MODELS

data = dataclasses.replace(recipe.data, crop=64, loader="threads")  # of all alike: data in memory have no other
model = MODELS["{model}"](image_size=64)
experiment = dataclasses.replace(recipe, model=model, data=data, fallback=None, local_batch=8, eval_every="0st",
                                 checkpoint_every="0st", log_every=5)
"""
SMALL = {"resnet50": "resnet18_tiny", "googlenetbn": "googlenetbn_tiny"}  # by recipe
FAR = """
sys.path.insert(0, {scripts!r})
from bench_shuffle import Far
from jaxmpi.data import open_source

files = dataclasses.replace(data, source="imagefolder", dir={folder!r})
train, validation = (open_source(files, split) for split in ("train", "validation"))
slow = dataclasses.replace(data, source="array", memory="none", train=Far(train, {latency_s}), validation=validation)
experiment = dataclasses.replace(experiment, data=slow)
"""


def write_images(folder: Path, images: int) -> None:
    """The same photographs as files, and packed at 256 px."""
    bench_data.write(folder / "files", images, formats=False, held_out=8)
    for split in ("train", "validation"):
        files = open_source(Data(source="imagefolder", dir=str(folder / "files")), split)
        packing.pack(files, folder / "packed" / split, packing.PackingOptions(resize=256))


def epoch_s(launcher: list[str], file: Path, options: argparse.Namespace, *flags: str) -> float:
    """An epoch's seconds at the median pace after the first progress line."""
    with tempfile.TemporaryDirectory() as folder:
        line = [*launcher, sys.executable, "-m", "jaxmpi.train", str(file), *flags]
        line += ["--train-for", options.train_for, "--run-dir", folder]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        subprocess.run(line, cwd=ROOT, env=environ, stdout=sys.stderr, check=True, timeout=options.timeout_s)
        rows = harness.record(Path(folder))
    return options.images / statistics.median([row["images_per_s"] for row in rows if row["kind"] == "train"][1:])


def report(seconds: dict[str, list[float]]) -> None:
    """Print each contender's time, also over the first one's, round by round."""
    print("\n" + harness.table(("contender", "epoch s", "over the first")))
    first = next(iter(seconds.values()))
    for name, each in seconds.items():
        ratio = statistics.median(mine / other for mine, other in zip(each, first, strict=True))
        print(harness.row([name, f"{statistics.median(each):.3f}", f"{ratio:.3f}"]))


def written(file: Path, options: argparse.Namespace) -> str:
    """The experiment file of a recipe with its or a small model."""
    model = options.recipe if options.what == "together" else SMALL[options.recipe]
    text = EXPERIMENT.format(recipe=options.recipe, model=model)
    file.write_text(text)
    return text


def data(options: argparse.Namespace, folder: Path) -> None:
    """Time epochs from files, packed files, memory, and slowed files."""
    experiment = written(folder / "recipe.py", options)
    far = {"scripts": str(ROOT / "scripts"), "folder": str(folder / "files"), "latency_s": options.latency_ms / 1000}
    (folder / "far.py").write_text(experiment + FAR.format(**far))
    run = partial(epoch_s, harness.launcher(options.ranks, options.rate, 1))
    recipe, files, packed = folder / "recipe.py", str(folder / "files"), str(folder / "packed")
    none = ("--data.memory", "none", "--data.dir")
    runs = {
        "memory": partial(run, recipe, options, "--data.dir", packed),
        "packed": partial(run, recipe, options, *none, packed),
        "files": partial(run, recipe, options, *none, files, "--data.source", "imagefolder"),
        f"files with {options.latency_ms:g} ms a read": partial(run, folder / "far.py", options),
    }
    report(harness.take_turns(runs, options.rounds, clock=harness.result))


def devices(options: argparse.Namespace, folder: Path) -> None:
    """Time equally many workers, a process each and several to a process."""
    written(folder / "recipe.py", options)
    k, ranks = options.devices, options.ranks
    few, many = harness.launcher(ranks, options.rate, 1), harness.launcher(ranks * k, options.rate, k)
    where = ("--data.dir", str(folder / "packed"), "--exchange.strategy")
    # On one host there is nothing between hosts: `hier` is then the sum inside.
    runs = {
        "a process a device": partial(epoch_s, many, folder / "recipe.py", options, *where, "hier-ring:32"),
        f"a process for {k}": partial(
            epoch_s, few, folder / "recipe.py", options, *where, "ring:32", "--devices", str(k)
        ),
    }
    report(harness.take_turns(runs, options.rounds, clock=harness.result))


def together(options: argparse.Namespace, folder: Path) -> None:
    """Time epochs of the recipe, and without the paper's two ways."""
    written(folder / "recipe.py", options)
    run = partial(epoch_s, harness.launcher(options.ranks, options.rate, 1), folder / "recipe.py", options)
    files = ("--data.memory", "none", "--data.source", "imagefolder", "--data.dir", str(folder / "files"))
    runs = {
        "memory and four trees": partial(run, "--data.dir", str(folder / "packed")),
        "files and Allreduce": partial(run, *files, "--exchange.strategy", "ar"),
    }
    report(harness.take_turns(runs, options.rounds, clock=harness.result))


def main() -> None:
    """Run one of the three."""
    parser = harness.parser(__doc__, ranks=2, rate="", rounds=3)
    parser.add_argument("what", choices=["data", "devices", "together"])
    parser.add_argument("--recipe", choices=SMALL, default="resnet50", help="of experiments/dimd")
    parser.add_argument("--devices", type=int, default=2, help="of each of these")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--train-for", default="3ep", help="length of each run")
    parser.add_argument("--latency-ms", type=float, default=10, help="of a read that takes longer")
    parser.add_argument("--timeout-s", type=float, default=1200, help="of each run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), options.images)
        {"data": data, "devices": devices, "together": together}[options.what](options, Path(folder))


if __name__ == "__main__":
    main()
