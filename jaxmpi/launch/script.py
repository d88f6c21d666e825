"""`jaxmpi run SCRIPT.py`: run a script whose errors end the whole job.

`jaxmpi.world()` does that for all that comes after it. This does it from the script's first line on: also where the
script has started MPI itself, and where a library replaces `sys.excepthook`. An exit code other than 0 ends the job.
"""

import argparse
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import failures


def main(argv: Sequence[str]) -> None:
    """Run the script as Python would."""
    parser = argparse.ArgumentParser(
        prog="jaxmpi run",
        description="Run a script on each rank of a job: an error or an exit code on one ends all, and is named.",
        epilog="example: mpirun -n 8 jaxmpi run train.py",
    )
    parser.add_argument("script", metavar="SCRIPT.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own")
    options = parser.parse_args(argv)
    if not Path(options.script).is_file():
        raise UsageError(f"run: got {options.script!r}; expected a file of Python, then its arguments")
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


def script_trace(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback below this file and Python's `runpy`."""
    while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace
