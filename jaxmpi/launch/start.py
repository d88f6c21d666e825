"""`jaxmpi train`: refuse wrong options before ranks start, without JAX."""

from typing import NoReturn

from jaxmpi.config import experiment_file
from jaxmpi.config.flags import summary
from jaxmpi.launch.command import launch
from jaxmpi.launch.options import USAGE, parse


def main(argv: list[str]) -> NoReturn:
    """Launch an experiment, or print the usage.

    Raises:
        UsageError: an option that there is not, or a value that cannot be.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\nfields used most:\n{summary()}")
        raise SystemExit(0)
    options = parse(argv)
    # The launcher's own arguments may name other hosts, which alone have the file.
    are_ranks_here = options.launcher == "mpirun" and not options.launcher_args
    experiment_file.refuse_early(options.train_args, file_is_here=are_ranks_here)
    launch(options)
