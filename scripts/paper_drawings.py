"""Draw figures of the papers, theirs on the left and ours on the right, from the tables of docs/papers.md."""

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from svg import WIDTH, Picture

PAGE = Path(__file__).parent.parent / "docs" / "papers.md"
Table = list[list[str]]  # cells by row, the head first


class Row(NamedTuple):
    """A figure in the paper's words and in ours, as the page writes it."""

    head: str
    label: str
    paper: str
    ours: str


def read_tables(section: str) -> list[Table]:
    """All tables below a heading of the page."""
    text = re.split(
        r"^## ", PAGE.read_text().replace("`", "").partition(f"\n## {section}\n")[2], maxsplit=1, flags=re.M
    )[0]
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "---" not in line]
        for table in tables
    ]


def compared_rows(section: str) -> list[Row]:
    """Rows of a table of quantities, in groups by what stands before the first comma."""
    table = read_tables(section)[0]
    return [Row(*quantity.partition(", ")[::2], *cells[:2]) for quantity, *cells in table[1:]]


def errors_over_one_worker(section: str) -> list[Row]:
    """Table 1: errors over those of one worker."""
    return [
        Row(f"{table[0][0]}, top-5 error over one worker's", cells[0], *cells[4:6])
        for table in read_tables(section)
        for cells in table[1:]
        if cells[5]
    ]


def exchanges_over_training(section: str) -> list[Row]:
    """Figure 3: the exchange of 8 workers over the training of each, an eighth of one worker's."""
    row = read_tables(section)[1][1]
    single, *exchanges = ([number(cell) for cell in cells.split(", ")] for cells in row[1:5])
    head = f"{row[0]} a worker: exchange over training"
    ratios = [[8 * mine / one for mine, one in zip(seconds, single, strict=True)] for seconds in exchanges]
    return [Row(head, name, *(f"{x:.3g}" for x in pair)) for name, pair in zip(WIRES, ratios, strict=True)]


def speedups_of_eight(section: str) -> list[Row]:
    """Table 3: speed-ups of 8 workers by model and strategy."""
    return [
        Row(f"{cells[0]} a worker", name, *pair.split(", "))
        for cells in read_tables(section)[1][1:]
        for name, pair in zip(WIRES, cells[5:], strict=True)
    ]


def shares_of_one_worker(section: str) -> list[Row]:
    """A worker's samples/s over those of one worker alone; the article has one such figure."""
    rows, model = list[Row](), ""
    for cells in read_tables(section)[1][1:]:
        model, ours = cells[0] or model, cells[5].partition(" ")
        rows.append(Row(f"{model} params", f"{cells[1]} hosts", "", ours[0]))
    [(gpus, theirs)] = re.findall(r"\((\d+) GPUs in the article: ([\d.]+)\)", PAGE.read_text())
    return [Row("300 million params", f"{gpus} GPUs", theirs, ""), *rows]


WIRES = ("ar", "asa32", "asa16")
PAPERS: dict[str, tuple[str, str, Callable[[str], list[Row]]]] = {  # title, section, rows
    "table1": ("Error by workers", "table1", errors_over_one_worker),
    "table3": ("Allreduce's time over that of asa, between hosts", "table3", compared_rows),
    "figure3": ("Exchange over training", "table3", exchanges_over_training),
    "eight": ("Speed-ups of 8 workers", "table3", speedups_of_eight),
    "ring": ("Time of a sum through one rank over that of a ring", "ring", compared_rows),
    "baidu": ("A worker's samples a second over one worker's", "baidu", shares_of_one_worker),
    "dimd": ("Data in memory, and the shuffle", "dimd", compared_rows),
    "groups": ("Memory and time of the shuffle", "groups", compared_rows),
    "epoch": ("An epoch with data in memory or packed, over files", "epoch", compared_rows),
    "devices": ("An epoch with a process for several devices, over one for each", "devices", compared_rows),
    "together": ("An epoch with data in memory and trees, over neither", "together", compared_rows),
    "speedup": ("Images a second over those of one worker", "speedup", compared_rows),
    "multicolor": ("Four trees over Open MPI's Allreduce", "multicolor", compared_rows),
    "synkhronos": ("ResNet-50 over functions", "synkhronos", compared_rows),
}


def number(cell: str) -> float:
    """The number of a cell, without unit and standard error; 0 for words."""
    match = re.fullmatch(r"([\d,.]+)( %)?( ± .*)?", cell)
    return float(match[1].replace(",", "")) if match else 0.0


def draw_paper(name: str) -> Picture:
    """Bars of theirs and of ours, with one scale for both; percentages have a scale of their own."""
    title, section, read = PAPERS[name]
    picture = Picture(f"{title}: the paper's figures and ours")
    rows, half, y = read(section), WIDTH / 2, 34
    picture.text((0, 14), "the paper", "head")
    picture.text((half, 14), "ours", "head")
    for (head, unit), group in groupby(rows, lambda row: (row.head, "%" in row.ours)):
        picture.text((0, y + 12), head, "small head")
        y += 18
        highest = max(number(cell) for row in rows for cell in row[2:] if ("%" in row.ours) == unit)
        for row in group:
            picture.text((0, y + 12), row.label)
            y += 18
            for x, cell, kind in ((0, row.paper, "fill c0"), (half, row.ours, "fill c1")):
                length = number(cell) / highest * (half - 60)
                if length:
                    picture.box((x, y), (length, 14), kind)
                picture.text((x + length + 4 * bool(length), y + 12), cell or "no figure")
            y += 22
        y += 8
    return picture
