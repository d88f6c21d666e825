"""`jaxmpi report RUN [RUN...]`: a page of runs."""

from collections.abc import Sequence
from pathlib import Path

from jaxmpi.core.arguments import Parser
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import refuse_ways_out
from jaxmpi.observe.record_reader import read
from jaxmpi.observe.report_page import page


def main(argv: Sequence[str]) -> None:
    """Read, draw, write, and print the page's path."""
    parser = Parser(
        "jaxmpi report",
        description="Make an HTML page from the records of one run, or of several to compare them.",
        epilog="example: jaxmpi report runs/first runs/second --out report",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("--out", type=Path, help="folder for the page (default: report/ in RUN, or here for several)")
    options = parser.parse_args(argv)
    # A page of several runs must not replace that of the first.
    folder = options.out or (options.runs[0] if len(options.runs) == 1 else Path()) / "report"
    print(f"report: {write(options.runs, folder)}")


def write(runs: Sequence[Path], folder: Path) -> Path:
    """Write the page to this folder; return the page's path.

    Raises:
        UsageError: a record cannot be read, or nothing can be written there.
    """
    records = [read(path, name) for path, name in zip(runs, unique_names(runs), strict=True)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder.parent, folder) if folder.parent in runs else ():  # a stranger may have filled them
            refuse_ways_out(place, repr(str(place)), "a report is not written through those: remove it, or use --out")
        # Names in a record, and of folders, may hold surrogates, which no encoding has.
        (folder / "index.html").write_bytes(page(records).encode(errors="replace"))
    except OSError as error:
        raise UsageError(f"nothing can be written to {str(folder)!r}: {error.strerror}; use --out FOLDER") from error
    return folder / "index.html"


def unique_names(runs: Sequence[Path]) -> list[str]:
    """Names of the run directories, numbered if two are equal."""
    short = [run.resolve().name for run in runs]
    return [name if short.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(short)]
