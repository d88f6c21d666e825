"""Stooke and Abbeel 2017, Synkhronos: scaling of ResNet-50 over functions."""

import argparse

from papers import PaperTable, Values, from_one, script, tables

from jaxmpi.observe.plots import Bars, Lines, Panel, Quantity

AT_8 = {"weak": 7.5, "strong": 5.0}  # speed-ups of 8 workers
SHARES = {"shuffle": 1.6 / 52.6, "straggler": 1.0 / 52.6, "all-reduce": 0.46 / 52.6}  # their Table 1


def functions(options: argparse.Namespace) -> list[list[str]]:
    """Scale ResNet-50 over functions.

    One worker is the base of the picture's lines.
    """
    short = ["--steps", "2", "--batch", "4"] if options.quick else []
    return [script("bench_functions", "resnet", "--workers", *map(str, from_one(options, (1, 2))), *short)]


def scaling(printed: list[str], files: list[str]) -> Values:
    """Speed-ups over the number of workers, and shares of the time.

    They are of the job of `bench_functions.py resnet` with the most workers.
    """
    rows = rows_of_functions(printed)
    workers = max(int(name.split()[-1]) for name in rows if name.startswith("weak"))
    weak, strong = rows[f"weak, {workers}"], rows.get(f"strong, {workers}")
    ours = {"weak scaling, speed-up over workers": weak[1] / workers}
    ours |= {"strong scaling, speed-up over workers": strong[1] / workers} if strong else {}
    parts = dict(zip(("shuffle", "straggler", "all-reduce"), weak[3:], strict=True))
    return ours | {f"weak scaling, {part} of the time": value / weak[0] for part, value in parts.items()}


def rows_of_functions(printed: list[str]) -> dict[str, list[float]]:
    """Numbers of `bench_functions.py resnet` by row."""
    return {row[0].removesuffix(" (beyond the cores)"): [*map(float, row[1:])] for row in tables(printed[0])[1:]}


def functions_by_workers(printed: list[str], files: list[str]) -> list[Panel]:
    """Figure 2: speed-ups by workers. Table 1: parts of the time."""
    rows, series = rows_of_functions(printed), {}
    for kind, theirs in AT_8.items():
        ours = [(float(name.split()[-1]), row[1]) for name, row in rows.items() if name.startswith(f"{kind}, ")]
        series |= {f"{kind}, the paper": [(1.0, 1.0), (8.0, theirs)]}
        series |= {f"{kind}, ours": [*([] if kind == "weak" else [(1.0, rows["weak, 1"][1])]), *ours]} if ours else {}
    speedup = Quantity("speed-up over one worker of plain JAX", base=None)
    of = scaling(printed, files)
    bars = [
        (f"{part}, {who}", value, value, value)
        for part, theirs in SHARES.items()
        for who, value in (("the paper", theirs), ("ours", of[f"weak scaling, {part} of the time"]))
    ]
    time = Bars("weak scaling with the most workers", Quantity("share of the time", base=None), bars, colours=2)
    return [Lines("ResNet-50 over functions", Quantity("workers", base=None), speedup, series), time]


JOBS = {
    "synkhronos": PaperTable(
        "Stooke and Abbeel 2017, Figs. 2 and 3, Table 1",
        functions,
        scaling,
        lambda o: {
            **{f"{kind} scaling, speed-up over workers": of_8 / 8 for kind, of_8 in AT_8.items()},
            **{f"weak scaling, {part} of the time": share for part, share in SHARES.items()},
        },
        "Theirs are 8 GPUs with NVLink and a batch of 64 each; ours cores of one processor, which share its memory, "
        "and a batch of 8: an all-reduce is a larger part of a step.",
        over_hosts=False,
        panels=functions_by_workers,
    ),
}
