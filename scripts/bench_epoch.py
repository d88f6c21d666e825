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
import dataclasses
from jaxmpi.experiments.dimd.{recipe} import experiment as recipe
from jaxmpi.models import MODELS

data = dataclasses.replace(recipe.data, crop=64, loader="threads")  # of all alike: data in memory have no other
model = MODELS["{model}"](image_size=64)
experiment = dataclasses.replace(recipe, model=model, data=data, fallback=None, local_batch=8, eval_every="0st",
                                 checkpoint_every="0st", log_every=5)
"""
SMALL = {"resnet50": "resnet18_tiny", "googlenetbn": "googlenetbn_tiny"}  # by recipe


def write_images(folder: Path, images: int) -> None:
    """The same photographs as files, and packed at 256 px."""
    bench_data.write(folder / "files", images, formats=False, held_out=8)
    for split in ("train", "validation"):
        files = open_source(Data(source="imagefolder", dir=str(folder / "files")), split)
        packing.pack(files, folder / "packed" / split, packing.PackingOptions(resize=256))


def contenders(options: argparse.Namespace, folder: Path) -> dict[str, harness.Run]:
    """Runs by name; each returns the seconds of an epoch."""
    ranks, k, strategy = options.ranks, options.devices, "--exchange.strategy"
    run = partial(epoch_s, harness.launcher(ranks, options.rate, 1), options, folder)
    packed, files = ("--data.dir", str(folder / "packed")), ("--data.dir", str(folder / "files"))
    from_files = ("--data.memory", "none", "--data.source", "imagefolder", *files)
    if options.what == "data":
        return {
            "memory": partial(run, *packed),
            "packed": partial(run, "--data.memory", "none", *packed),
            "files": partial(run, *from_files),
        }
    if options.what == "together":
        return {
            "memory and four trees": partial(run, *packed),
            "files and Allreduce": partial(run, *from_files, strategy, "ar"),
        }
    # On one host there is nothing between hosts: `hier` is then the sum inside.
    many = partial(epoch_s, harness.launcher(ranks * k, options.rate, k), options, folder)
    return {
        "a process a device": partial(many, *packed, strategy, "hier-ring:32"),
        f"a process for {k}": partial(run, *packed, strategy, "ring:32", "--devices", str(k)),
    }


def epoch_s(launcher: list[str], options: argparse.Namespace, folder: Path, *flags: str) -> float:
    """An epoch's seconds at the median pace after the first progress line."""
    with tempfile.TemporaryDirectory() as run_dir:
        line = [*launcher, sys.executable, "-m", "jaxmpi.train", str(folder / "recipe.py"), *flags]
        line += ["--train-for", options.train_for, "--run-dir", run_dir]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        subprocess.run(line, cwd=ROOT, env=environ, stdout=sys.stderr, check=True, timeout=options.timeout_s)
        rows = harness.record(Path(run_dir))
    return options.images / statistics.median([row["images_per_s"] for row in rows if row["kind"] == "train"][1:])


def main() -> None:
    """Print each contender's time, also over the first one's, round by round."""
    parser = harness.parser(__doc__, ranks=2, rate="", rounds=3, json=None)
    parser.add_argument("what", choices=["data", "devices", "together"])
    parser.add_argument("--recipe", choices=SMALL, default="resnet50", help="of experiments/dimd")
    parser.add_argument("--devices", type=int, default=2, help="of each of these")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--train-for", default="3ep", help="length of each run")
    parser.add_argument("--timeout-s", type=float, default=1200, help="of each run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, options.images)
        model = options.recipe if options.what == "together" else SMALL[options.recipe]
        (folder / "recipe.py").write_text(EXPERIMENT.format(recipe=options.recipe, model=model))
        seconds = harness.take_turns(contenders(options, folder), options.rounds, clock=harness.result)
    print("\n" + harness.table(("contender", "epoch s", "over the first")))
    first = next(iter(seconds.values()))
    for name, each in seconds.items():
        ratio = statistics.median(mine / other for mine, other in zip(each, first, strict=True))
        print(harness.row([name, f"{statistics.median(each):.3f}", f"{ratio:.3f}"]))
    harness.save(options.json, {name: statistics.median(each) for name, each in seconds.items()})


if __name__ == "__main__":
    main()
