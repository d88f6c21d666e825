"""Figures from measured seconds, such as bandwidths: as JSON and tables.

A case is a vector or a tree of K bytes on each of N ranks. algorithm bandwidth = K / t; bus bandwidth =
2 (N-1)/N K / t: the load of a link each way if every rank sends the minimum.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from jaxmpi.bench.contenders import COPY, COPY_BYTES, LINK, LINK_BYTES
from jaxmpi.bench.options import PEERS

FRAME_PAYLOAD = 1448 / 1514  # payload's share of a full Ethernet frame, TCP with time stamps
Json = dict[str, Any]


def case_figures(runs: Sequence[Json], rate_mbit: float | None = None) -> list[Json]:
    """The figures of each case from its rounds' seconds."""
    return [one_case_figures(run, rate_mbit) for run in runs]


def one_case_figures(run: Json, rate_mbit: float | None) -> Json:
    """The figures of one case."""
    size_bytes, speed = 4 * run["floats"], bytes_per_s(run, rate_mbit)
    facts = {k: run[k] for k in ("case", "is_tree", "floats", "leaves", "ranks", "hosts")}
    facts |= {"bytes": size_bytes, "least_sent_bytes": least_sent(size_bytes, run["ranks"])}
    facts |= {"bound_s": bound_s(run, speed), "bound_bytes_per_s": speed}
    seconds = {name: row for name, row in run["seconds"].items() if name not in (COPY.name, LINK.name)}
    peers = [name for name in seconds if name in PEERS]
    fastest = min(peers, key=lambda name: np.median(seconds[name]), default=None)
    rows = []
    for name, row in seconds.items():
        middle, low, high = np.percentile(row, (50, 25, 75)).tolist()
        ratio = None if fastest is None else np.percentile(np.divide(row, seconds[fastest]), (50, 25, 75)).tolist()
        figures = {
            "by": name,
            "is_peer": name in PEERS,
            "picked": run["picked"].get(name),
            "seconds": row,
            "median_s": middle,
            "quartiles_s": [low, high],
            "algorithm_bytes_per_s": size_bytes / middle,
            "bus_bytes_per_s": facts["least_sent_bytes"] / middle,
            "of_bound": facts["bound_s"] / middle if facts["bound_s"] else None,
            "to_fastest_peer": None if fastest is None else {"peer": fastest, "ratio": ratio},
        }
        rows.append(figures | run["sent"][name])
    return {**facts, "rows": rows}


def least_sent(size_bytes: int, ranks: int) -> float:
    """Bytes that each rank must send: 2 (N-1)/N K."""
    return 2 * (ranks - 1) / ranks * size_bytes


def bound_s(case: Json, bytes_per_s: float | None) -> float | None:
    """Lower bound on an exchange's time; None if unknown or without bytes.

    An exchange that stays in caches may be faster.
    Between H hosts each link carries 2 (H-1)/H K bytes each way. Inside one host a rank reads its slice of all, and
    all sums, and writes the sums: 3 K bytes for each of N ranks.
    """
    if bytes_per_s is None or case["floats"] == 0:
        return None
    size_bytes, hosts = 4 * case["floats"], case["hosts"]
    work = least_sent(size_bytes, hosts) if hosts > 1 else 3 * size_bytes * case["ranks"]
    return work / bytes_per_s


def bytes_per_s(job: Json, rate_mbit: float | None) -> float | None:
    """Payload speed of the links, or of memory inside one host.

    Between hosts: of a host's link each way, given or measured. Inside one host: of all ranks' copies, read and write.
    The measured value is the median round, because disturbances of the machine affect all timings alike.
    """
    if job["ranks"] == 1:
        return None
    if job["hosts"] == 1:
        return 2 * COPY_BYTES * job["ranks"] / float(np.median(job["seconds"][COPY.name]))
    if rate_mbit is not None:
        return rate_mbit * 1e6 / 8 * FRAME_PAYLOAD
    return LINK_BYTES / float(np.median(job["seconds"][LINK.name]))


# ---------------------------------------------------------------- table and plot


def table(case: Json) -> Table:
    """A row per contender of a case, below the bound's basis."""
    has_bound, is_far = case["bound_bytes_per_s"] is not None, case["hosts"] > 1
    speed = (case["bound_bytes_per_s"] or 0.0) / 1e9
    link_bound, memory_bound = "2 (H-1)/H K a host over a link", "3 K a rank through memory, read and written"
    basis = f"bound: {link_bound if is_far else memory_bound} at {speed:.3g} GB/s" * has_bound
    out = Table(title=describe(case), caption=basis, title_justify="left", caption_justify="left")
    out.add_column("by")
    has_peer = any(row["to_fastest_peer"] for row in case["rows"])
    headings = ["ms (quartiles)", "alg GB/s", "bus GB/s", "of bound", *["sent MB"] * is_far]
    for heading in [*headings, *["/ fastest peer"] * has_peer]:
        out.add_column(heading, justify="right")
    for row in case["rows"]:
        low, high = row["quartiles_s"]
        ratio, sent_bytes = row["to_fastest_peer"], row["sent_bytes"]
        out.add_row(
            label(row),
            f"{1e3 * row['median_s']:.4g} ({1e3 * low:.4g}-{1e3 * high:.4g})",
            f"{row['algorithm_bytes_per_s'] / 1e9:.3g}",
            f"{row['bus_bytes_per_s'] / 1e9:.3g}",
            "" if row["of_bound"] is None else f"{100 * row['of_bound']:.3g} %",
            *(["" if sent_bytes is None else f"{sent_bytes / 1e6:.4g}"] * is_far),
            *(["{:.2f} ({:.2f}-{:.2f})".format(*ratio["ratio"]) if ratio else ""] * has_peer),
        )
    return out


def describe(case: Json) -> str:
    """A case: its operand, ranks and hosts."""
    name, ranks, hosts = f"{case['case']}, {case['leaves']} leaves, " * case["is_tree"], case["ranks"], case["hosts"]
    where = f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}"
    return f"{name}{case['floats']:,} floats, {case['bytes'] / 1e6:.4g} MB, {where}"


def label(row: Json) -> str:
    """A row's name, and the strategy that `auto` has picked."""
    return f"{row['by']}, {row['picked']['strategy']}" if row["picked"] else row["by"]


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """The median and its 95 % confidence interval, from order statistics."""
    ordered, n = np.sort(values), len(values)
    half_width = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - half_width)), min(n - 1, math.ceil(n / 2 + half_width))
    return float(np.median(values)), float(ordered[low]), float(ordered[high])
