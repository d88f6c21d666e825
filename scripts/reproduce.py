"""Tables and figures of the papers, as ratios, ours beside theirs.

    python scripts/reproduce.py table2                               what models cost
    python scripts/reproduce.py table3 -n 8                          exchange of models' gradients, by strategy
    python scripts/reproduce.py ring --hosts 8 --rate 200mbit        the same on an emulated cluster
    python scripts/reproduce.py speedup --workers 1 2 4 8            images/s of two models; with --hosts a host each
    python scripts/reproduce.py table3 --show                        only the lines that it would run
    python scripts/reproduce.py all --quick                          every one of them, small: to see that all run

It runs the project's other scripts and compares their results; it measures nothing itself. It writes NAME.csv,
NAME.png, and NAME.md with machine, date and a remark on differences, into --out (runs/papers); `all` writes all.md,
too, and goes on past one that cannot run here.
"""

import argparse
import collections
import contextlib
import csv
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import papers_gibiansky
import papers_kumar
import papers_ma
import papers_stooke
from harness import ROOT
from papers import ERROR, FAST, PYTHON, SLOW, PaperTable, Values

from jaxmpi.core.errors import UsageError, check
from jaxmpi.observe import plots
from jaxmpi.observe.plots import Bars, Panel, Quantity

JOBS = papers_ma.JOBS | papers_gibiansky.JOBS | papers_kumar.JOBS | papers_stooke.JOBS


# ---------------------------------------------------------------- running, writing


def run(job: PaperTable, options: argparse.Namespace, folder: Path) -> tuple[Values, list[Panel], list[str], str]:
    """Run the lines; return our values, panels, the lines, and when.

    Raises:
        UsageError: a script is not there, failed, took too long, or printed what cannot be read.
    """
    lines, printed, files = [], [], []
    for i, template in enumerate(job.lines(options)):
        out = folder / (f"kept_{i + 1}.jsonl" if "{kept}" in template else f"of_line_{i + 1}")
        if out.is_dir():  # output of an earlier call
            shutil.rmtree(out)
        if "{kept}" not in template:
            out.unlink(missing_ok=True)
        line = [str(out) if arg in ("{out}", "{kept}") else arg for arg in template]
        lines.append(shlex.join(line).replace(PYTHON, "python").replace(f"{ROOT}/", ""))
        missing = [arg for arg in line if arg.startswith("scripts/") and not (ROOT / arg).is_file()]
        check(
            not missing, f"{', '.join(missing)}: not there in this version; it belongs to another part of the project"
        )
        print("+ " + lines[-1], flush=True)
        if options.show:
            continue
        printed.append(output_of(line, options.timeout_s, lines[-1]))
        files += [text for text in (written(out),) if text]
    if options.show:
        return {}, [], lines, ""
    kept = [written(path) for path in sorted(folder.glob("kept_*.jsonl")) if not options.quick]
    try:
        values, panels = job.read(printed, files), job.panels(printed, files) if job.panels else []
        return values, panels, lines, days_of(kept) or f"{datetime.date.today()}"
    except (ArithmeticError, LookupError, StopIteration, ValueError) as error:
        raise UsageError(f"{lines} printed what cannot be read: {error!r}") from error


def days_of(kept: Sequence[str]) -> str:
    """Days and commits of recorded runs; some may be of earlier days."""
    runs = collections.Counter(
        (row.get("day", "before runs had a day"), row.get("commit", "")[:8])
        for text in kept
        for row in map(json.loads, text.splitlines())
    )
    return ", ".join(f"{day} ({n} runs at {commit or 'no commit'})" for (day, commit), n in sorted(runs.items()))


def output_of(line: list[str], timeout_s: float, shown: str) -> str:
    """Run a line; return its output, or end its ranks after `timeout_s`.

    Raises:
        UsageError: it failed, or took too long.
    """
    job = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        harness.end(job)
        raise UsageError(f"took longer than {timeout_s:g} s (--timeout-s): {shown}") from error
    except BaseException:  # as Ctrl-C, which another session does not get
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)
        raise
    check(job.returncode == 0, f"ended with code {job.returncode}: {shown}")
    return printed


def written(out: Path) -> str:
    """Text that a line wrote: a file, or a run directory's record."""
    file = out / "record.jsonl" if out.is_dir() else out
    return file.read_text() if file.is_file() else ""


def rows_of(theirs: Values, ours: Values) -> list[dict[str, Any]]:
    """Ours beside theirs, and the ratio."""
    return [
        {"quantity": name, "paper": paper, "ours": mine, "ours / paper": mine / paper if mine and paper else None}
        for name in dict.fromkeys([*theirs, *ours])
        for paper, mine in [(theirs.get(name), ours.get(name))]
    ]


def write(
    name: str,
    job: PaperTable,
    rows: Sequence[dict[str, Any]],
    panels: Sequence[Panel],
    lines: Sequence[str],
    when: str,
    folder: Path,
) -> None:
    """Write a CSV, a page, and a picture of panels or bars."""
    with (folder / f"{name}.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["quantity", "paper", "ours", "ours / paper"])
        table.writeheader()
        table.writerows(rows)
    of = {f"{row['quantity']}, {who}": row[who] for row in rows if row["ours / paper"] for who in ("paper", "ours")}
    if panels or of:
        bars = [(text, value, value, value) for text, value in of.items()]
        plots.save(
            panels or [Bars(textwrap.fill(job.source, 60), Quantity("", base=None), bars, colours=2)],
            folder / f"{name}.png",
        )
    (folder / f"{name}.md").write_text(page(name, job, rows, lines, when))


def page(name: str, job: PaperTable, rows: Sequence[dict[str, Any]], lines: Sequence[str], when: str) -> str:
    """A section of docs/papers.md; standard errors stand behind what they are of."""
    errors = {row["quantity"].removesuffix(ERROR): row["ours"] for row in rows if row["quantity"].endswith(ERROR)}
    shown = []
    for row in rows:
        cells = [shown_value(row[key]) for key in ("quantity", "paper", "ours", "ours / paper")]
        cells[2] += f" ± {errors[row['quantity']]:.2g}" if row["quantity"] in errors else ""
        shown += [] if row["quantity"].endswith(ERROR) else [cells]
    table = harness.table(("quantity", "paper", "ours", "ours / paper"), shown)
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, {platform.system()}, {when}."
    commands = [f"    {line}" for line in lines]
    return "\n".join(
        [f"## {name}: {job.source}", "", *commands, "", *([table] if rows else []), "", f"{job.remark} {machine}", ""]
    )


def shown_value(value: Any) -> str:
    """Format with three digits; whole numbers whole."""
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if value == int(value) and abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = harness.parser(__doc__)
    parser.add_argument("name", choices=[*JOBS, "all"], help="a table or figure, or all of them")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round and one seed: a try, no figures")
    parser.add_argument("-n", type=int, help="ranks of this machine (default: 8; --quick: 4)")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        help="of speedup and baidu (default: 1 2 4 8; speedup: 1 and --hosts), of synkhronos (1 2)",
    )
    parser.add_argument(
        "--models", nargs="+", choices=papers_ma.MODELS, default=papers_ma.MODELS, help="of speedup (default: both)"
    )
    parser.add_argument("--seeds", type=int, help="of table1 (default: 3; --quick: 1)")
    parser.add_argument("--hosts", type=int, default=0, help="emulated hosts, a rank each, instead of -n")
    parser.add_argument("--rate", default="", help=f"of each emulated host's link (default: {SLOW}; baidu: {FAST})")
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
        UsageError: a line failed, or it does not run on hosts.
    """
    job, folder = JOBS[name], options.out / name
    job = job._replace(remark=f"A try with --quick, so figures mean nothing. {job.remark}") if options.quick else job
    check(job.over_hosts or not options.hosts, f"--hosts: {name} runs on this machine alone; leave it out")
    folder.mkdir(parents=True, exist_ok=True)
    ours, panels, lines, when = run(job, options, folder)
    if options.show:
        return ""
    write(name, job, rows_of(job.theirs(options), ours), panels, lines, when, folder)
    return (folder / f"{name}.md").read_text()


def main(argv: Sequence[str] | None = None) -> None:
    """Run one, or all; write the results."""
    options = parse(argv)
    pages = []
    for name in JOBS if options.name == "all" else [options.name]:
        try:
            pages.append(reproduce(name, options))
        except UsageError as error:
            if options.name != "all":
                sys.exit(f"reproduce: error: {error}")
            pages.append(f"## {name}: {JOBS[name].source}\n\nDid not run here: {error}\n")
        print(pages[-1], flush=True)
    failed = [page for page in pages if "Did not run here: " in page]
    if options.name == "all" and not options.show:
        (options.out / "all.md").write_text("\n".join(pages))
        print(f"{len(pages) - len(failed)} of {len(pages)} ran; {options.out / 'all.md'}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
