"""Command lines of `plan`, `doctor` and `models`, parsed without JAX.

So a mistyped one ends at once.
"""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from jaxmpi.config import experiment_file
from jaxmpi.core.errors import UsageError
from jaxmpi.launch import command
from jaxmpi.launch.options import parse
from jaxmpi.observe import plots
from jaxmpi.runtime import job_folder, process

DOCTOR_USAGE = """usage: jaxmpi doctor [-n N] [--launcher mpirun|srun] [--launcher-args "..."]

Show MPI, launcher, cores, interfaces, shared memory, devices and versions of all ranks, test the exchange for 5 s, and
say what to change.

  -n N               ranks (default: 1)
  --launcher NAME    mpirun or srun (default: as jaxmpi train)
  --launcher-args    more arguments for it, such as "--hostfile hosts"

example: jaxmpi doctor -n 4"""


def doctor(argv: Sequence[str]) -> None:
    """Check the options of `jaxmpi doctor`; with `-n N`, become the launcher.

    Ranks run `jaxmpi doctor` without options.

    Raises:
        UsageError: an unknown option, or any under a launcher.
        SystemExit: after --help.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(DOCTOR_USAGE)
        raise SystemExit(0)
    if argv and process.launched_workers() > 1:
        raise UsageError(f"got {' '.join(argv)} under a launcher; the number of ranks is its own")
    options = parse([*argv])
    odd = [arg for arg in argv if arg in ("--comm", "--restarts", "--elastic")] or options.train_args
    if odd:
        raise UsageError(f"got {' '.join(odd)}\n{DOCTOR_USAGE}")
    if options.workers > 1:
        ranks = options._replace(train_args=("doctor",))
        line = command.command(ranks, cores=process.cores(), is_root=os.geteuid() == 0, module="jaxmpi.tools.cli")
        os.execv("/bin/sh", job_folder.remove_leftovers_first(line))


def plan_parser() -> argparse.ArgumentParser:
    """Options of `jaxmpi plan`."""
    parser = argparse.ArgumentParser(
        prog="jaxmpi plan",
        description="Predict step time and best strategy for 2 to 4,096 workers, from prices of links: those given, or "
        "those of a probe of the ranks that a launcher has started.",
        epilog="example: mpirun -n 8 jaxmpi plan --step-s 0.3 --experiment googlenet",
    )
    parser.add_argument("--alpha-s", type=float, help="seconds that a message between hosts costs by itself")
    parser.add_argument("--beta-s-per-byte", type=float, help="seconds for each byte between hosts, as 4e-8")
    parser.add_argument("--alpha-inside-s", type=float, help="the same inside a host (default: as between hosts)")
    parser.add_argument("--beta-inside-s-per-byte", type=float, help="the same inside a host")
    parser.add_argument(
        "--gamma-s-per-byte", type=float, default=0.0, help="seconds to add a byte of float32 (default 0)"
    )
    parser.add_argument("--cores", type=float, default=math.inf, help="of a host, for its ranks (default: enough)")
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds of one worker's step without exchange")
    parser.add_argument("--bytes", type=float, help="of float32 gradients, as 53e6")
    parser.add_argument("--experiment", help="file, or name that ships, whose model's params count instead of --bytes")
    parser.add_argument("--slots", type=int, nargs="+", help="ranks a host (default: 1 and the probe's)")
    parser.add_argument("--wires", nargs="+", default=["32"], help="what may travel (default: 32)")
    parser.add_argument("--overlap", type=float, help="share of the step after which exchanging starts, as 0.4")
    parser.add_argument("--plot", type=Path, help="file for a plot: .png, .svg or .pdf")
    return parser


def plan(argv: Sequence[str]) -> argparse.Namespace:
    """Parse options of `jaxmpi plan`.

    Raises:
        UsageError: a number out of range, or options that contradict one another.
    """
    options = plan_parser().parse_args(list(argv))
    if (options.alpha_s is None) != (options.beta_s_per_byte is None):
        raise UsageError("give --alpha-s and --beta-s-per-byte together, or neither to use a probe")
    defaults = {"alpha_inside_s": None, "beta_inside_s_per_byte": None, "gamma_s_per_byte": 0.0, "cores": math.inf}
    unused = [flag(name) for name, default in defaults.items() if getattr(options, name) != default]
    if options.alpha_s is None and unused:
        raise UsageError(
            f"{', '.join(unused)}: a probe has its own; give --alpha-s and --beta-s-per-byte too, or leave it out"
        )
    seconds = ("alpha_s", "beta_s_per_byte", "alpha_inside_s", "beta_inside_s_per_byte", "gamma_s_per_byte", "step_s")
    for name in seconds:
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{flag(name)}: got {value}; expected seconds >= 0")
    if options.overlap is not None and not 0 <= options.overlap <= 1:
        raise UsageError(f"--overlap: got {options.overlap}; expected a share of the step in [0, 1]")
    if not options.cores > 0:
        raise UsageError(f"--cores: got {options.cores}; expected > 0")
    if any(slots < 1 for slots in options.slots or []):
        raise UsageError(f"--slots: got {options.slots}; expected >= 1")
    if (options.bytes is None) == (options.experiment is None):
        raise UsageError("give --bytes or --experiment, one of the two")
    if options.experiment is not None:
        experiment_file.check_file(experiment_file.locate(options.experiment))
    elif not 4 <= options.bytes < math.inf:
        raise UsageError(f"--bytes: got {options.bytes}; expected a number >= 4")
    if options.plot:
        plots.check_file(options.plot)
    return options


def flag(name: str) -> str:
    """An option as it is typed."""
    return "--" + name.replace("_", "-")


def models(argv: Sequence[str]) -> argparse.Namespace:
    """Parse options of `jaxmpi models`."""
    parser = argparse.ArgumentParser(
        "jaxmpi models",
        description="Print depth, params, input size, operations and gradient bytes of each model.",
        epilog="example: jaxmpi models --tree alexnet",
    )
    parser.add_argument(
        "--tree",
        nargs="+",
        metavar="MODEL",
        help="instead: shapes of their params, as JSON; also an experiment's, FILE.py",
    )
    return parser.parse_args(list(argv))
