"""The benchmark's command line, parsed without JAX.

So a mistyped one ends at once.
"""

import argparse
import importlib.util
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxmpi.core.arguments import Parser
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.launch.options import default_launcher

STRATEGIES = ("asa32", "asa16", "ring32", "ring16")


class Peer(NamedTuple):
    """Another library's allreduce: the package that it needs, and its operation."""

    package: str
    op: Literal["mean", "sum"]  # mean of the tree, or the easier work: sum of one flat array


PEERS = {  # `baselines.CALLS` has how each is called
    "mpi4py": Peer("mpi4py", "sum"),
    "mpi4jax": Peer("mpi4jax", "mean"),
    "mpi4jax-flat": Peer("mpi4jax", "sum"),
    "psum": Peer("jax", "mean"),
    "torch": Peer("torch", "sum"),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options; `words` are these arguments.

    Raises:
        UsageError: an unknown one, or a value out of range.
    """
    parser = Parser(
        "jaxmpi bench",
        description="Time exchanges beside those of other libraries and the bound.",
        epilog="example: jaxmpi bench -n 4 --tree resnet50 --strategies auto ring32",
    )
    add = parser.add_argument
    add("-n", type=int, help="ranks (default: 2; under a launcher: its ranks)")
    add("--launcher", default=default_launcher(os.environ), help="mpirun or srun (default: as jaxmpi train)")
    add("--launcher-args", default="", help='more arguments for it, such as "--hostfile hosts"')
    add(
        "--strategies",
        nargs="*",
        default=STRATEGIES,
        metavar="NAME",
        help=f"also auto and compressors (default: {' '.join(STRATEGIES)})",
    )
    add("--sizes", nargs="*", metavar="N", help="floats, such as 0 4096 64Mi; without a number Baidu's list")
    add(
        "--tree",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="gradients of `jaxmpi models`, or of an experiment, FILE.py",
    )
    add(
        "--experiment",
        metavar="FILE.py",
        help="at one path on all hosts, whose strategies, wires and compressors are known; without --tree and --sizes "
        "its model is the tree",
    )
    add(
        "--peers",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help=f"{', '.join(PEERS)}, or all that there are, or none",
    )
    add("--rounds", type=int, default=10, help="that count (default: 10)")
    add("--warm-up", type=int, default=8, help="rounds before, until the heap has settled (default: 8)")
    add("--rate-mbit", type=float, help="of each host's link, for the bound (default: as measured)")
    add("--out", type=Path, help="JSON file for all figures")
    options = parser.parse_args(join_launcher_args(argv), argparse.Namespace(words=[*argv]))
    for name in ("n", "rounds", "warm_up"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"-{'-' * (len(name) > 1)}{name.replace('_', '-')}: got {value}; expected >= 1")
    try:
        shlex.split(options.launcher_args)
    except ValueError as error:
        raise UsageError(f"--launcher-args: got {options.launcher_args!r}: {error}") from error
    if options.rate_mbit is not None and not options.rate_mbit > 0:
        raise UsageError(f"--rate-mbit: got {options.rate_mbit}; expected > 0")
    return options


def join_launcher_args(argv: Sequence[str]) -> list[str]:
    """Join `--launcher-args --hostfile` by `=`, since argparse would see two options."""
    text = "\0".join(argv)
    return re.sub("(^|\0)--launcher-args\0", r"\1--launcher-args=", text).split("\0") if argv else []


def select_peers(names: Sequence[str]) -> tuple[str, ...]:
    """Peers of these names; `all` means other installed libraries, `none` no peer.

    Raises:
        UsageError: an unknown name, or one whose package is not installed.
    """
    if tuple(names) in (("all",), ("none",)):
        return tuple(name for name in PEERS if names[0] == "all" and is_installed(name))
    for name in names:
        package = lookup(PEERS, name, "peer (all and none stand alone)").package
        if not is_installed(name):
            raise UsageError(f"peer {name!r} needs {package}, which is not installed: install it, or leave {name} out")
    return tuple(dict.fromkeys(names))


def is_installed(peer: str) -> bool:
    """Return True if the package is installed; importing could start MPI."""
    return importlib.util.find_spec(PEERS[peer].package) is not None
