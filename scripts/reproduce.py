"""Tables and figures of the papers, as ratios, ours beside theirs.

    python scripts/reproduce.py table2                               what models cost
    python scripts/reproduce.py table3 -n 8                          exchange of models' gradients, by strategy
    python scripts/reproduce.py ring --hosts 8 --rate 200mbit        the same on an emulated cluster
    python scripts/reproduce.py speedup --workers 1 2 4 8            images/s of two models; with --hosts a host each
    python scripts/reproduce.py table3 --show                        only the lines that it would run
    python scripts/reproduce.py all --quick                          every one of them, small: to see that all run

It runs the project's other scripts and compares their results; it measures nothing itself. It writes NAME.md, with
machine and date, into --out (runs/papers); `all` writes all.md, too, and continues after a table that cannot run here.
"""

import argparse
import datetime
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from harness import ROOT
from papers import ERROR, MODELS, PYTHON, SLOW, TABLES, PaperTable, Values

from jaxmpi.core.errors import UsageError

WHO = ("paper", "ours")


def run(table: PaperTable, options: argparse.Namespace, folder: Path) -> tuple[Values, list[str]]:
    """Run a table's commands; return our figures, and the commands.

    Raises:
        UsageError: a script failed, took too long, or wrote what cannot be read.
    """
    shown, outputs = [], []
    for i, template in enumerate(table.commands(options), 1):
        out = folder / (f"kept_{i}" if "{kept}" in template else f"out_{i}")
        if "{out}" in template:  # output of an earlier call
            shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
        line = [str(out) if arg in ("{out}", "{kept}") else arg for arg in template]
        shown.append(shlex.join(line).replace(PYTHON, "python").replace(f"{ROOT}/", ""))
        print("+ " + shown[-1], flush=True)
        if not options.show:
            printed = output(line, options.timeout_s, shown[-1])
            file = next(out.rglob("sweep.jsonl"), out / "record.jsonl") if out.is_dir() else out
            outputs.append(file.read_text() if file.is_file() else printed)
    if options.show:
        return {}, shown
    try:
        return table.read(outputs), shown
    except (ArithmeticError, LookupError, StopIteration, ValueError) as error:
        raise UsageError(f"{shown} wrote what cannot be read: {error!r}") from error


def output(line: list[str], timeout_s: float, shown: str) -> str:
    """Run a command; return its output, or end its ranks after `timeout_s`.

    Raises:
        UsageError: it failed, or took too long.
    """
    job = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"took longer than {timeout_s:g} s (--timeout-s): {shown}") from error
    finally:
        if job.poll() is None:  # also after Ctrl-C, which does not reach another session
            harness.end(job)
    if job.returncode:
        raise UsageError(f"ended with code {job.returncode}: {shown}")
    return printed


def compare(paper: Values, ours: Values) -> list[dict[str, Any]]:
    """Ours beside the paper's, and the ratio."""
    rows = []
    for name in dict.fromkeys([*paper, *ours]):
        theirs, mine = paper.get(name), ours.get(name)
        ratio = mine / theirs if mine and theirs else None
        rows.append({"quantity": name, "paper": theirs, "ours": mine, "ours / paper": ratio})
    return rows


def page(name: str, table: PaperTable, rows: Sequence[dict[str, Any]], lines: Sequence[str]) -> str:
    """A section of docs/papers.md; standard errors stand behind their means."""
    errors = {row["quantity"].removesuffix(ERROR): row["ours"] for row in rows if row["quantity"].endswith(ERROR)}
    headings, cells = ("quantity", *WHO, "ours / paper"), []
    for row in rows:
        if not row["quantity"].endswith(ERROR):
            cells.append([format_value(row[key]) for key in headings])
            cells[-1][2] += f" ± {errors[row['quantity']]:.2g}" if row["quantity"] in errors else ""
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, {platform.system()}, {datetime.date.today()}."
    commands = [f"    {line}" for line in lines]
    text = [f"## {name}: {table.source}", "", *commands, "", harness.table(headings, cells), ""]
    return "\n".join([*text, f"How the settings differ: docs/papers.md. {machine}", ""])


def format_value(value: Any) -> str:
    """Format with three digits; whole numbers whole."""
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if value == int(value) and abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = harness.parser(__doc__)
    parser.add_argument("name", choices=[*TABLES, "all"], help="a table or figure, or all of them")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round and one seed: a try, no figures")
    parser.add_argument("-n", type=int, help="ranks of this machine (default: 8; --quick: 4)")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        help="of speedup (default: 1 2 4 8; with --hosts 1 and these), of synkhronos (1 2)",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="of speedup (default: both)")
    parser.add_argument("--seeds", type=int, help="of table1 (default: 3; --quick: 1)")
    parser.add_argument("--hosts", type=int, default=0, help="emulated hosts, a rank each, instead of -n")
    parser.add_argument("--rate", default="", help=f"of each emulated host's link (default: {SLOW})")
    parser.add_argument("--rounds", type=int, help="of exchanges (default: 10; --quick: 1)")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before, of exchanges")
    parser.add_argument("--timeout-s", type=float, default=7200, help="of each line")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "papers", help="folder for what comes of it")
    parser.add_argument("--show", action="store_true", help="print the lines, run nothing")
    options = parser.parse_args(argv)
    for name, (whole, quick) in {"n": (8, 4), "seeds": (3, 1), "rounds": (10, 1)}.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else whole)
    options.out = (options.out / "quick" if options.quick else options.out).resolve()
    return options


def reproduce(name: str, options: argparse.Namespace) -> str:
    """Run one, write its results, and return its page; empty with --show.

    Raises:
        UsageError: a command failed, or the table does not run on emulated hosts.
    """
    table, folder = TABLES[name], options.out / name
    if options.hosts and not table.on_hosts:
        raise UsageError(f"--hosts: {name} runs on this machine alone; leave it out")
    folder.mkdir(parents=True, exist_ok=True)
    ours, lines = run(table, options, folder)
    if options.show:
        return ""
    rows = compare(table.paper(options), ours)
    text = "A try with --quick, so figures mean nothing.\n\n" * options.quick + page(name, table, rows, lines)
    (folder / f"{name}.md").write_text(text)
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Run one, or all; write the results."""
    options = parse(argv)
    pages, failed = [], 0
    for name in TABLES if options.name == "all" else [options.name]:
        try:
            pages.append(reproduce(name, options))
        except UsageError as error:
            if options.name != "all":
                sys.exit(f"reproduce: error: {error}")
            failed += 1
            pages.append(f"## {name}: {TABLES[name].source}\n\nDid not run here: {error}\n")
        print(pages[-1], flush=True)
    if options.name == "all" and not options.show:
        (options.out / "all.md").write_text("\n".join(pages))
        print(f"{len(pages) - failed} of {len(pages)} ran; {options.out / 'all.md'}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
