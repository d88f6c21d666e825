"""Kumar et al. 2018: multi-colour trees, data in memory, a node's devices."""

import argparse
import functools
from collections.abc import Sequence

from papers import SLOW, PaperTable, Values, bench, over, script, tables

from jaxmpi.observe.plots import Lines, Panel, Quantity

IBM_S = {"resnet50": "ResNet-50", "googlenetbn": "GoogLeNetBN"}  # recipes


# ---------------------------------------------------------------- commands


def shuffles(options: argparse.Namespace) -> list[list[str]]:
    """Time the shuffle with few and many workers, and all sources."""
    many = options.hosts or options.n
    workers = [str(n) for n in dict.fromkeys((2, many))]
    images = "48" if options.quick else "200"
    return [
        script("bench_shuffle", "shuffle", *layout(options, workers), "--rounds", str(options.rounds)),
        script("bench_shuffle", "sources", "--images", images, "--rounds", str(min(options.rounds, 3))),
    ]


def layout(options: argparse.Namespace, workers: Sequence[str]) -> list[str]:
    """Options of `bench_shuffle.py`: on hosts or here, and how many MB."""
    if options.hosts:
        return ["--hosts", *workers, "--rate", options.rate or SLOW, "--mb", "40"]
    return ["--ranks", *workers, *(["--mb", "8"] if options.quick else [])]


def group_shuffles(options: argparse.Namespace) -> list[list[str]]:
    """Time the shuffle by workers and size of a group."""
    workers = map(str, workers_of(options))
    return [script("bench_shuffle", "shuffle", *layout(options, list(workers)), "--rounds", str(options.rounds))]


def workers_of(options: argparse.Namespace) -> list[int]:
    """Numbers of workers by which Figs. 7 and 8 go."""
    many = options.hosts or options.n
    return sorted({max(many // part, 2) for part in (4, 2, 1)})


def epochs(what: str, options: argparse.Namespace) -> list[list[str]]:
    """Train in two layouts of devices, or with data in several places."""
    here = max(options.n // 2, 1) if what == "devices" else options.n
    ranks, rate = options.hosts or here, ["--rate", options.rate or SLOW] if options.hosts else []
    short = ["--images", "96", "--train-for", "2ep"] if options.quick else []
    short += ["--images", "160"] if what == "together" and not options.quick else []  # a step takes seconds
    line = ("--ranks", str(ranks), "--rounds", str(min(options.rounds, 5)), *rate, *short)
    return [script("bench_epoch", what, "--recipe", recipe, *line) for recipe in IBM_S]


# ---------------------------------------------------------------- results


def memory(printed: list[str], files: list[str]) -> Values:
    """Ratios of the shuffle over all workers and of epochs from memory."""
    whole = {row[0]: row for row in tables(printed[0])[1:] if row[0] == row[1]}
    few, many = min(whole, key=int), max(whole, key=int)
    rates = {row[0]: float(row[1].replace(",", "")) for row in tables(printed[1])[1:]}
    kept = rates["memory, packed at 256 px"]
    ours = {f"shuffle, {n} workers, bare Alltoallv / ours": float(row[-1]) for n, row in whole.items()}
    return ours | {
        f"shuffle, {many} workers / {few}": float(whole[many][3]) / float(whole[few][3]),
        "reading an epoch, memory / files": rates["folder"] / kept,
        "reading an epoch, memory / files with 10 ms a read": rates["folder, reads take longer"] / kept,
    }


def by_groups(printed: list[str], files: list[str]) -> Values:
    """Ratios of a shuffle's memory and time, by groups and by workers."""
    whole, groups = rows_by_groups(printed)
    few, many = min(whole), max(whole)
    ours: Values = {}
    for i, what in enumerate(("MB a worker", "shuffle")):
        ours |= {f"{many} workers / {few}, {what}": whole[many][i] / whole[few][i]} if many > few else {}
        ours |= {f"{many} workers, {n} groups / 1, {what}": row[i] / whole[many][i] for n, row in groups.items()}
    return ours


def rows_by_groups(printed: list[str]) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """MB a worker and seconds of a shuffle.

    By workers in one group, and by groups of all workers.
    """
    rows = [[float(cell) for cell in row[:4]] for row in tables(printed[0])[1:] if row[3] != "indices only"]
    whole = {int(ranks): row for ranks, group, *row in rows if group == ranks}
    many = max(whole)
    return whole, {int(many / group): row for ranks, group, *row in rows if ranks == many and group < many}


def figures7_to_9(printed: list[str], files: list[str]) -> list[Panel]:
    """Memory and shuffle by workers and by groups, over the fewest.

    The paper's figures have no numbers. Beside ours are the arithmetic of its layout, and its words on time.
    """
    whole, groups = rows_by_groups(printed)
    few, many = min(whole), max(whole)
    rows = {1: whole[many]} | groups
    layout = "by the layout"
    leaving = {n: (n - 1) / n**2 * few**2 / (few - 1) for n in whole}  # ratio to `few`: of a share 1 / n, 1 / n stays
    by_workers = (layout, {n: few / n for n in whole}), ("bytes that leave a worker", leaving)
    by_groups = (layout, {n: float(n) for n in rows}), ("the paper: not much better", dict.fromkeys(rows, 1.0))
    panels = list[Panel]()
    for title, at, base, found, theirs in (
        ("in one group", "workers", f"{few} workers'", whole, by_workers),
        (f"{many} workers", "groups", "one group's", rows, by_groups),
    ):
        for i, what in enumerate(("memory of a worker", "time of a shuffle")):
            name, line = theirs[i]
            ours = [(float(n), row[i] / found[min(found)][i]) for n, row in sorted(found.items())]
            series = {name: [(float(n), ratio) for n, ratio in sorted(line.items())], "ours": ours}
            panels.append(Lines(title, Quantity(at, base=None), Quantity(f"{what} over {base}", base=None), series))
    return panels


def held(options: argparse.Namespace) -> Values:
    """Bytes of each worker: one copy over the workers of a group."""
    many, few = options.hosts or options.n, min(workers_of(options))
    groups = [n for n in range(2, many // 2 + 1) if many % n == 0]
    by_workers = {f"{many} workers / {few}, MB a worker": few / many} if many > few else {}
    return by_workers | {f"{many} workers, {n} groups / 1, MB a worker": float(n) for n in groups}


def epoch_ratios(names: dict[str, tuple[str, str]], printed: list[str], files: list[str]) -> Values:
    """Time of one contender's epoch over another's, by name, of `bench_epoch.py`."""
    ratios: Values = {}
    for model, text in zip(IBM_S.values(), printed, strict=True):
        seconds = {row[0]: float(row[1]) for row in tables(text)[1:]}
        for name, pair in names.items():
            above, below = (next(s for key, s in seconds.items() if key.startswith(prefix)) for prefix in pair)
            ratios[f"{model}, {name}"] = above / below
    return ratios


JOBS = {
    "multicolor": PaperTable(
        "Kumar et al. 2018: multi-colour trees over Open MPI's Allreduce, GoogLeNetBN",
        lambda o: [bench(o, "--tree", "googlenetbn", "--strategies", "ar", "color4:32", "--peers", "none")],
        over("color4:32", "ar"),
        lambda o: {"googlenetbn, color4:32 / ar": 0.45},
        "Theirs took 50 to 60 % less time on 16 nodes with RDMA; a tree inside one host only adds copies.",
    ),
    "dimd": PaperTable(
        "Kumar et al. 2018: data in memory, and its shuffle",
        shuffles,
        memory,
        lambda o: {"reading an epoch, memory / files": 0.67},
        "Theirs is the whole epoch of GoogLeNetBN on a cluster's file system (ResNet-50: 0.75); ours reading and "
        "decoding alone, files in the page cache. Their shuffle of 220 GB took 4.2 s on 32 nodes and less with more.",
    ),
    "groups": PaperTable(
        "Kumar et al. 2018, Figs. 7 to 9: time and memory of the shuffle, by workers and groups",
        group_shuffles,
        by_groups,
        held,
        "Memory follows from the layout. The paper's shuffle takes less time with more workers (4.2 s for 220 GB on 32 "
        "nodes), and about as long with groups, since all its links are alike.",
        panels=figures7_to_9,
    ),
    "epoch": PaperTable(
        "Kumar et al. 2018, Figs. 10 and 11: an epoch with and without data in memory",
        functools.partial(epochs, "data"),
        functools.partial(
            epoch_ratios,
            {
                "an epoch, memory / files": ("memory", "files"),
                "an epoch, memory / files with 10 ms a read": ("memory", "files with"),
                "an epoch, packed / files": ("packed", "files"),
            },
        ),
        lambda o: {"ResNet-50, an epoch, memory / files": 0.75, "GoogLeNetBN, an epoch, memory / files": 0.67},
        "Theirs read ImageNet-1k from a cluster's file system; ours are small models of the kind, so that cores have "
        "time for data, and files in the page cache.",
    ),
    "devices": PaperTable(
        "Kumar et al. 2018, Fig. 12: an epoch with a better use of a node's devices",
        functools.partial(epochs, "devices"),
        functools.partial(
            epoch_ratios, {"an epoch, a process for several devices / for one": ("a process for", "a process a")}
        ),
        lambda o: {
            "ResNet-50, an epoch, a process for several devices / for one": 0.82,
            "GoogLeNetBN, an epoch, a process for several devices / for one": 0.85,
        },
        "Theirs improved one layout, Torch's data-parallel table; ours compares algorithm 1, one process a node, with "
        "one process a device. Our devices are CPU devices that share cores.",
    ),
    "together": PaperTable(
        "Kumar et al. 2018, Table 1: an epoch with data in memory and trees over one with neither",
        functools.partial(epochs, "together"),
        functools.partial(epoch_ratios, {"an epoch, both / neither": ("memory and", "files and")}),
        lambda o: {"ResNet-50, an epoch, both / neither": 1 / 2.2, "GoogLeNetBN, an epoch, both / neither": 1 / 1.65},
        "Theirs is throughput, 110 to 130 and 58 to 72 % more (here 120 and 65), on 8 to 32 nodes with a better use of "
        "devices as well, over open code with Open MPI. Ours are the same models for images of 64 px, 8 a worker.",
    ),
}
