"""Command lines of `jaxmpi forecast`, `evaluate`, `predict` and `export`, parsed without JAX.

So a mistyped one ends at once. Further flags are fields of the experiment: unknown ones are refused here, and their
values wait for the experiment file.
"""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from jaxmpi.config import experiment_file
from jaxmpi.core.arguments import Parser
from jaxmpi.core.errors import UsageError

PROGRAM = ".jaxexport"  # ends the name of a file with a model's program
PLATFORMS = ("cpu", "cuda", "tpu")  # by default
KNOWN_PLATFORMS = (*PLATFORMS, "rocm")  # JAX lowers for any other name as well


def forecast(argv: Sequence[str]) -> argparse.Namespace:
    """Parse options of `jaxmpi forecast`; `fields` are the experiment and its flags."""
    parser = Parser(
        "jaxmpi forecast",
        usage="jaxmpi forecast EXPERIMENT [-n WORKERS] [--slots RANKS] [--field value ...]",
        description="Forecast the memory of each worker, part by part, with sharded updates and without. Fields are "
        "those of the experiment, as of `jaxmpi train`.",
        epilog="example: jaxmpi forecast googlenet -n 8 --slots 4",
    )
    parser.add_argument("-n", type=int, default=1, metavar="WORKERS", help="ranks in all (default 1)")
    parser.add_argument("--slots", type=int, default=0, metavar="RANKS", help="ranks of a host (default: all of them)")
    options, options.fields = parser.parse_known_args(list(argv))
    experiment_file.refuse_early(options.fields)
    options.slots = options.slots or options.n
    if not 1 <= options.slots <= options.n:
        raise UsageError(f"--slots: got {options.slots}; expected 1 to {options.n} ranks a host")
    return options


def evaluate(argv: Sequence[str]) -> argparse.Namespace:
    """Parse options of `jaxmpi evaluate`."""
    parser = run_parser("evaluate", "Evaluate a run's model on its validation data.", "runs/first --best")
    options = parse_run(parser, argv)
    experiment_file.read_config(options.run_dir)
    return options


def predict(argv: Sequence[str]) -> argparse.Namespace:
    """Parse options of `jaxmpi predict`; refuse a file that exists, or does not end in .npz."""
    does = "Write a model's outputs for the validation data, in its order, to a NumPy file."
    parser = run_parser("predict", does, "runs/first outputs.npz")
    parser.add_argument("out", type=Path, help="new file, .npz")
    options = parse_run(parser, argv)
    experiment_file.read_config(options.run_dir)
    if options.out.suffix != ".npz":
        raise UsageError(f"{options.out}: expected a name that ends in .npz")
    refuse_existing(options.out)
    return options


def export(argv: Sequence[str]) -> argparse.Namespace:
    """Parse options of `jaxmpi export`; refuse those that only a program has."""
    parser = run_parser(
        "export",
        "Write the model of a checkpoint for other programs. A file .jaxexport has params, model state and program, "
        "for JAX alone. A file .safetensors and an Orbax folder, of any other name, have params and model state: for "
        "--params of another run, or for the library that the model was written in (docs/models.md).",
        "runs/first model.safetensors --best",
    )
    parser.add_argument("out", type=Path, help="new file .jaxexport or .safetensors, or new folder, to write")
    parser.add_argument(
        "--platforms",
        type=lambda text: tuple(text.split(",")),
        default=(),
        help=f"of .jaxexport (default: {','.join(PLATFORMS)})",
    )
    parser.add_argument("--batch", type=int, default=0, help="of .jaxexport: examples of a call (default: any number)")
    options = parse_run(parser, argv)
    given = {"--platforms": options.platforms, "--batch": options.batch}
    if options.out.suffix == PROGRAM:
        check_program_file(options.out, options.platforms)
    elif unused := [*options.fields, *(flag for flag, value in given.items() if value)]:
        raise UsageError(f"{' '.join(unused)}: got {options.out}; only a file {PROGRAM} has them: leave them out")
    return options


def run_parser(name: str, description: str, example: str) -> Parser:
    """Options that commands on a finished run share."""
    parser = Parser(
        f"jaxmpi {name}",
        description=f"{description} Any further --field value changes the experiment, as in training: --data.dir, "
        "--data.validation-split.",
        epilog=f"example: mpirun -n 8 jaxmpi {name} {example}",
    )
    parser.add_argument("run_dir", type=Path, help="run directory")
    parser.add_argument(
        "--experiment", default="", metavar="FILE.py", help="of a run that Python started or somebody else has begun"
    )
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    parser.add_argument("--best", action="store_true", help="the best checkpoint by the run's --monitor")
    return parser


def parse_run(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command on a finished run; `fields` are the experiment's flags."""
    options, options.fields = parser.parse_known_args(list(argv))
    if several := next((field for field in options.fields if re.fullmatch(r"-n\d*", field)), ""):
        raise UsageError(f"got {several}; several workers are started by a launcher: mpirun -n 8 {parser.prog} RUN ...")
    experiment_file.refuse_unknown(options.fields)
    return options


def check_program_file(file: Path, platforms: Sequence[str]) -> None:
    """Refuse an existing or misnamed file, and unknown platforms, before an export."""
    if file.suffix != PROGRAM:
        raise UsageError(f"{file}: expected a name that ends in {PROGRAM}")
    refuse_existing(file)
    refuse_existing(facts_file(file))
    if unknown := [name for name in platforms if name not in KNOWN_PLATFORMS]:
        raise UsageError(f"platforms: got {', '.join(unknown)}; expected {', '.join(KNOWN_PLATFORMS)}")


def refuse_existing(file: Path) -> None:
    """Raise `UsageError` if there is such a file, or a link of this name."""
    if os.path.lexists(file):
        raise UsageError(f"{file} exists; name a new file")


def facts_file(file: Path) -> Path:
    """The file of facts about an exported program."""
    return file.with_name(f"{file.name}.json")
