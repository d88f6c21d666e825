"""Gibiansky 2017: sums over a ring, and a language model."""

import argparse
import json

from papers import FAST, PaperTable, Values, bench, counted, from_one, medians, script, up_to

from jaxmpi.observe.plots import Lines, Panel, Quantity

RING = ("root", "ring32")
OF_40 = 370 / 675  # ms of a step with 1 and with 40 workers


# ---------------------------------------------------------------- a sum


def rings(options: argparse.Namespace) -> list[list[str]]:
    """Sum a vector by 2 ranks, 4, ..., and by all."""
    args = ("--sizes", "600000" if options.quick else "6000000", "--strategies", *RING, "--peers", "none")
    return [bench(counted(options, n), *args) for n in up_to(options.hosts or options.n)]


def over_ring(printed: list[str], files: list[str]) -> Values:
    """Time through one rank over that of a ring, by ranks."""
    found = {json.loads(text)["cases"][0]["ranks"]: next(iter(medians(text).values())) for text in files}
    return {f"root / ring32, {n}": by["root"] / by["ring32"] for n, by in found.items()}


def formula_of_ring(options: argparse.Namespace) -> Values:
    """The article's N / 2."""
    return {f"root / ring32, {n}": n / 2 for n in up_to(options.hosts or options.n)}


def ring_by_ranks(printed: list[str], files: list[str]) -> list[Panel]:
    """The same ratio by ranks, beside both formulas."""
    ours = [(float(name.split()[-1]), value) for name, value in over_ring(printed, files).items()]
    series = {
        "the article, N / 2: one rank receives": [(n, n / 2) for n, _ in ours],
        "N: it also sends the sum back": [(n, n) for n, _ in ours],
        "ours": ours,
    }
    over = Quantity("time through one rank over a ring's", base=None)
    return [Lines("a sum of 32-bit floats", Quantity("ranks", base=None), over, series)]


# ---------------------------------------------------------------- a language model


def language(options: argparse.Namespace) -> list[list[str]]:
    """Time steps of a language model on emulated hosts."""
    hosts = map(str, from_one(options, (1, 2) if options.quick else (1, 2, 4, 8)))
    size = ["--shrink", "64" if options.quick else "1.7", "--rounds", str(min(options.rounds, 5))]
    return [script("bench_language", "--hosts", *hosts, "--rate", options.rate or FAST, *size, "--json", "{out}")]


def samples(printed: list[str], files: list[str]) -> Values:
    """Samples/s of `bench_language.py` over those of one host, measured and predicted."""
    one, *others = sorted(json.loads(files[0])["rows"], key=lambda row: row["hosts"])
    ours: Values = {}
    for row in others:
        hosts = int(row["hosts"])
        for name, kind in (("shared", ""), ("own", "own cores")):
            behind, beside = row[kind or "behind"], row[f"{kind}, beside" if kind else "beside"]
            predicted = row[f"{kind}, predicted" if kind else "predicted"]
            ours[f"{hosts} hosts / 1, {name} cores"] = behind / one[kind or "behind"]
            ours[f"{hosts} hosts / 1, {name} cores, overlap"] = beside / one[kind or "behind"]
            ours[f"{hosts} hosts, predicted / measured, {name} cores"] = predicted / behind
    most = [one, *others][-1]
    of_one = most["hosts"] * one["own cores"]
    ours["samples/s of a worker, most / 1"] = most["own cores, beside"] / of_one
    ours["samples/s of a worker, most / 1, without overlap"] = most["own cores"] / of_one
    ours["samples/s of a worker, most / 1, without overlap, predicted"] = most["own cores, predicted"] / of_one
    return ours


def scaling_of_samples(printed: list[str], files: list[str]) -> list[Panel]:
    """Samples/s over one host's, by hosts: measured, predicted and the paper's."""
    rows = json.loads(files[0])["rows"]
    at = [float(row["hosts"]) for row in rows]
    drawn = {
        "shared cores": ("behind", "behind"),
        "own cores": ("own cores", "own cores"),
        "own cores, with overlap": ("own cores, beside", "own cores"),
        "own cores, predicted": ("own cores, predicted", "own cores"),
    }
    series = {
        name: [(n, row[of] / rows[0][base]) for n, row in zip(at, rows, strict=True)]
        for name, (of, base) in drawn.items()
    }
    series["the paper, between 1 and 40"] = [(n, 1 + (n - 1) * (40 * OF_40 - 1) / 39) for n in at]
    over = Quantity("samples/s over one host's", base=None)
    return [Lines("a language model over a ring", Quantity("hosts", base=None), over, series)]


JOBS = {
    "ring": PaperTable(
        "Gibiansky 2017: everything through one rank over the ring, by its formula N / 2",
        rings,
        over_ring,
        formula_of_ring,
        "Their formula counts what the one rank receives; ours sends the sum back after that, which makes N. "
        "Inside one host links are memory, which ranks share.",
        panels=ring_by_ranks,
    ),
    "baidu": PaperTable(
        "Gibiansky 2017: samples/s of a language model over a ring, measured and predicted",
        language,
        samples,
        lambda o: {"samples/s of a worker, most / 1": OF_40},
        "Theirs are 300 million params, 40 GPUs on 5 nodes, 370 ms a step alone and 650 to 700 ms with all, and they "
        "overlap; ours 103 million, all sizes over 1.7: of the whole size two hosts fit. Emulated hosts share one "
        "machine's cores; with own cores: one host's computing time for all. Predicted by a probe on two hosts.",
        over_hosts=False,
        panels=scaling_of_samples,
    ),
}
