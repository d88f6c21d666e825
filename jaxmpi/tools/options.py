"""Command lines of `plan`, `doctor` and `models`, parsed without JAX.

So a mistyped one ends at once.
"""

import argparse
import math
import os
from collections.abc import Sequence

from jaxmpi.config import experiment_file
from jaxmpi.core.arguments import Parser
from jaxmpi.core.errors import UsageError
from jaxmpi.launch import command, supervisor
from jaxmpi.launch.options import parse
from jaxmpi.runtime import process

DOCTOR_USAGE = """usage: jaxmpi doctor [-n N] [--launcher mpirun|srun] [--launcher-args "..."]

Show MPI, launcher, cores, interfaces, shared memory, devices and versions of all ranks, test the exchange, and say
what to change.

  -n N               ranks (default: 1)
  --launcher NAME    mpirun or srun (default: as jaxmpi train)
  --launcher-args    more arguments for it, such as "--hostfile hosts"

example: jaxmpi doctor -n 4"""


def doctor(argv: Sequence[str]) -> None:
    """Check the options of `jaxmpi doctor`; with `-n N`, start the launcher.

    Ranks run `jaxmpi doctor` without options.

    Raises:
        UsageError: an unknown option, or any under a launcher.
        SystemExit: after --help, and after the launcher.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(DOCTOR_USAGE)
        raise SystemExit(0)
    if argv and process.launched_workers() > 1:
        raise UsageError(f"got {' '.join(argv)} under a launcher; the number of ranks is its own")
    options = parse([*argv])
    odd = [arg for arg in argv if arg in ("--restarts", "--elastic")] or options.train_args
    if odd:
        raise UsageError(f"got {' '.join(odd)}\n{DOCTOR_USAGE}")
    if options.workers > 1:
        ranks = options._replace(train_args=("doctor",))
        line = command.command(ranks, cores=process.cores(), is_root=os.geteuid() == 0, module="jaxmpi.tools.cli")
        supervisor.relay(line)


def plan(argv: Sequence[str]) -> argparse.Namespace:
    """Parse options of `jaxmpi plan`.

    Raises:
        UsageError: options that contradict one another, or an experiment that is not there.
    """
    parser = Parser(
        "jaxmpi plan",
        description="Predict step time and best strategy for 2 to 4,096 workers, from prices of links: those given, or "
        "those of a probe of the ranks that a launcher has started.",
        epilog="example: mpirun -n 8 jaxmpi plan --step-s 0.3 --experiment googlenet",
    )
    add = parser.add_argument
    add("--alpha-s", type=seconds, help="seconds that a message between hosts costs by itself")
    add("--beta-s-per-byte", type=seconds, help="seconds for each byte between hosts, as 4e-8")
    add("--alpha-inside-s", type=seconds, help="the same inside a host (default: as between hosts)")
    add("--beta-inside-s-per-byte", type=seconds, help="the same inside a host")
    add("--gamma-s-per-byte", type=seconds, help="seconds to add a byte of float32 (default: 0)")
    add("--cores", type=float, help="of a host, for its ranks (default: enough)")
    add("--step-s", type=seconds, default=0.0, help="seconds of one worker's step without exchange")
    operand = parser.add_mutually_exclusive_group(required=True)
    operand.add_argument("--bytes", type=float, help="of float32 gradients, as 53e6")
    operand.add_argument("--experiment", help="file, or name that ships, whose model's params count")
    add("--slots", type=int, nargs="+", help="ranks a host (default: 1 and the probe's)")
    add("--wires", nargs="+", default=["32"], help="what may travel (default: 32)")
    add("--overlap", type=float, help="share of the step after which exchanging starts, as 0.4")
    options = parser.parse_args(list(argv))
    prices = [name for name in vars(options) if name.endswith("_per_byte") or name in ("alpha_s", "alpha_inside_s")]
    names = [name for name in [*prices, "cores"] if getattr(options, name) is not None]
    if names and not {"alpha_s", "beta_s_per_byte"} <= {*names}:
        raise UsageError(f"got {', '.join(names)}; give --alpha-s and --beta-s-per-byte together, or none for a probe")
    ranges = {"bytes": (4, 1e15), "cores": (0.01, 1e6), "overlap": (0, 1), "slots": (1, 4096)}
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        if value is not None and not low <= (min(value) if name == "slots" else value) <= high:
            raise UsageError(f"--{name}: got {value}; expected {low} to {high}")
    if options.experiment is not None:
        experiment_file.check_file(experiment_file.locate(options.experiment))
    return options


def seconds(text: str) -> float:
    """A number of seconds, the type of an option."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}; expected seconds >= 0")
    return value


def models(argv: Sequence[str]) -> argparse.Namespace:
    """Parse options of `jaxmpi models`."""
    parser = Parser(
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
