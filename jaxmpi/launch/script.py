"""`jaxmpi run -n 4 SCRIPT.py`: start ranks that run a script; an error of one ends the whole job.

`jaxmpi.world()` does that for all that comes after it. This does it from the script's first line on: also where the
script has started MPI itself, and where a library replaces `sys.excepthook`. An exit code other than 0 ends the job.
Without `-n` this process is one rank of a job that a launcher has started, or a job of its own.
"""

import argparse
import os
import runpy
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from jaxmpi.core.arguments import Parser
from jaxmpi.core.errors import UsageError
from jaxmpi.launch import supervisor
from jaxmpi.launch.command import command
from jaxmpi.launch.options import Options, default_launcher
from jaxmpi.runtime import failures, process


def main(argv: Sequence[str]) -> None:
    """Run the script as Python would, or start ranks that do."""
    parser = Parser(
        "jaxmpi run",
        description="Run a script on each rank of a job: an error or an exit code on one ends all, and is named.",
        epilog="example: jaxmpi run -n 8 train.py",
    )
    parser.add_argument("-n", type=int, metavar="N", help="start N ranks; without it, be a rank of the launcher's job")
    parser.add_argument("--launcher-args", default="", help='more arguments for mpirun, such as "--hostfile hosts"')
    parser.add_argument("script", metavar="SCRIPT.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own")
    options = parser.parse_args(argv)
    if not Path(options.script).is_file():
        raise UsageError(f"run: got {options.script!r}; expected a file of Python, then its arguments")
    if options.n is not None:
        start_ranks(options)
    sys.argv, sys.path[0] = [options.script, *options.arguments], str(Path(options.script).parent.resolve())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failures.install_excepthooks()
    try:
        runpy.run_path(options.script, run_name="__main__")
    except SystemExit as left:
        if left.code not in (0, None):
            code = left.code if isinstance(left.code, int) else 1
            why = f"jaxmpi: {failures.describe_rank()} has left with exit code {code}; ending the job\n"
            sys.stderr.write(why if isinstance(left.code, int) else f"{left.code}\n{why}")
            failures.end_job(code)
    except BaseException as error:
        failures.fail(error, script_trace(error.__traceback__))


def start_ranks(options: argparse.Namespace) -> NoReturn:
    """Start the launcher, with the flags that this machine needs.

    Raises:
        UsageError: there is a launcher already, or none can be found.
        SystemExit: with the launcher's code.
    """
    if options.n < 1 or process.launched_workers() > 1:
        raise UsageError(f"run: got -n {options.n}; expected at least 1 rank, and no launcher around `jaxmpi run -n`")
    words = ("run", options.script, *options.arguments)
    ranks = Options(options.n, default_launcher(os.environ), tuple(shlex.split(options.launcher_args)), words)
    line = command(ranks, cores=process.cores(), is_root=os.geteuid() == 0, module="jaxmpi.tools.cli")
    print("+ " + shlex.join(line), flush=True)
    supervisor.relay(line)


def script_trace(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback below this file and Python's `runpy`."""
    while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace
