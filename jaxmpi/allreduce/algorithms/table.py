"""The table of strategies, and what a name means.

A row has all that is known of an algorithm: its sum in a program, its schedule for C, its halves for sharded updates,
the seconds that it is predicted to take, and where it fits. Names have blanks, `color<k>` and `hier-<cross>`: filling
them in makes a row of the sums that the blank stands for. A word of which a row has nothing is refused by name, with
the rows that have it.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxmpi.allreduce.algorithms.asa import ASA
from jaxmpi.allreduce.algorithms.baselines import ALLREDUCE, NONE, ROOT, SHARED_MEMORY
from jaxmpi.allreduce.algorithms.color_trees import COLOR, MAX_COLOURS, PIPERING
from jaxmpi.allreduce.algorithms.hierarchical import HIERARCHICAL
from jaxmpi.allreduce.algorithms.ring import RING
from jaxmpi.allreduce.algorithms.spec import StrategySpec
from jaxmpi.allreduce.algorithms.tree import TREE
from jaxmpi.allreduce.schedules import Group, Schedule, in_columns
from jaxmpi.allreduce.wires import WIRES, Wire, is_packaged
from jaxmpi.core.errors import UsageError, check, lookup, nearest

STRATEGIES: dict[str, StrategySpec] = {
    "ar": ALLREDUCE,
    "asa": ASA,
    "ring": RING,
    "tree": TREE,
    "color<k>": COLOR,
    "pipering": PIPERING,
    "root": ROOT,
    "hier-<cross>": HIERARCHICAL,
    "shm": SHARED_MEMORY,
    "none": NONE,
}
PACKAGED_STRATEGIES = dict(STRATEGIES)  # before a user adds or replaces rows
ALIASES = {
    "asa32": "asa:32",
    "asa16": "asa:16",
    "asabf16": "asa:bf16",
    "asa8": "asa:8",
    "ring32": "ring:32",
    "ring16": "ring:16",
    "hier-ring32": "hier-ring:32",
    "hier-ring16": "hier-ring:16",
}


class Strategy(NamedTuple):
    """A spelled-out choice, such as `ring:16`."""

    name: str
    spec: StrategySpec  # its blanks filled in
    wire: Wire

    def is_in_c(self, hosts: Sequence[int] | None = None) -> bool:
        """Whether C has the sum for these hosts, or for some.

        What a user has added or replaced runs in programs alone, since its steps are not known.
        """
        is_ours = all(any(row is ours for ours in PACKAGED_STRATEGIES.values()) for row in rows_of(self.algorithm))
        has_schedule = is_ours and is_packaged(self.wire) and bool(self.spec.parts)
        return has_schedule and (hosts is None or self.spec.fits_parts(hosts))

    @property
    def algorithm(self) -> str:
        """The name without the wire."""
        return self.name.partition(":")[0]

    def schedule(self, n: int, group: Group, half: str = "", operand_begin: int = 0) -> Schedule:
        """The steps of the sum of f32[n] on one rank, or of a half of it: `scatter` or `gather`.

        The operand is the vector from float `operand_begin` on: a gather reads nothing but this rank's chunk.
        """
        parts, halves = self.spec.parts, self.spec.halves
        if half:
            assert halves
            sum = halves.scatter_part if half == "scatter" else halves.gather_part
            assert sum
            parts = functools.partial(in_columns, sum=sum)
        assert parts
        schedule = Schedule(self.wire, group.message_bytes, operand_begin)
        for part in parts(n, group, self.wire):
            schedule.add_part(part, group, is_whole=half != "scatter")
        return schedule


def parse(spelling: str) -> Strategy:
    """`algorithm[:wire]` or an alias as a Strategy; the default wire is 32.

    Raises:
        UsageError: the algorithm or the wire is unknown, or the algorithm cannot use the wire.
    """
    check(isinstance(spelling, str), f"strategy: got {spelling!r}; expected a name, such as asa32")
    algorithm, _, wire = ALIASES.get(spelling, spelling).partition(":")
    wire = wire or "32"
    row = find(algorithm)
    encoding = lookup(WIRES, wire, "wire")
    if wire not in row.wires:
        raise UsageError(f"strategy {algorithm!r} cannot use wire {wire!r}; it takes {', '.join(row.wires)}")
    return Strategy(f"{algorithm}:{wire}", row, encoding)


def exchanges(spelling: str) -> bool:
    """Return False if each worker keeps its own, as with `none`.

    Compressors and `auto` exchange.
    """
    row = STRATEGIES.get(ALIASES.get(spelling, spelling).partition(":")[0])
    return row is None or row.exchanges


def in_shared_memory(spelling: str) -> bool:
    """Return True if ranks of a host add in shared memory."""
    spelling = spelling.rpartition("/")[2]
    row = STRATEGIES.get(ALIASES.get(spelling, spelling).partition(":")[0])
    return row is not None and row.in_shared_memory


def rows_of(algorithm: str) -> tuple[StrategySpec, ...]:
    """The rows that `find` takes, as they stand in the table."""
    if re.fullmatch(r"color\d+", algorithm):
        return (STRATEGIES["color<k>"],)
    if algorithm.startswith("hier-"):
        return STRATEGIES["hier-<cross>"], *rows_of(algorithm.removeprefix("hier-"))
    return (STRATEGIES[algorithm],)


def find(algorithm: str) -> StrategySpec:
    """The row of an algorithm such as `hier-ring`, its blanks filled in."""
    if colours := re.fullmatch(r"color(\d+)", algorithm):
        k = int(colours[1])
        check(1 <= k <= MAX_COLOURS, f"got strategy {algorithm!r}; expected color1 to color{MAX_COLOURS}")
        row = STRATEGIES["color<k>"]
        return row._replace(
            sum=functools.partial(row.sum, colours=k),
            parts=row.parts and functools.partial(row.parts, colours=k),
            seconds=row.seconds and functools.partial(row.seconds, colours=k),
            cut=row.cut and functools.partial(row.cut, colours=k),
            pieces=row.pieces and functools.partial(row.pieces, colours=k),
        )
    if algorithm.startswith("hier-") and "<" not in algorithm:
        cross, row = find(algorithm.removeprefix("hier-")), STRATEGIES["hier-<cross>"]
        able = ", ".join(name for name, other in STRATEGIES.items() if other.crosses)
        check(cross.crosses, f"got strategy {algorithm!r}; between hosts there can be {able}")
        return StrategySpec(
            functools.partial(row.sum, cross=cross.sum),
            row.wires,
            fits=row.fits,
            parts=row.parts and cross.parts and functools.partial(row.parts, cross=cross.parts),
            fits_parts=lambda hosts: row.fits_parts(hosts) and cross.fits_parts(sorted(set(hosts))),
            seconds=row.seconds and cross.seconds and functools.partial(row.seconds, cross=cross.seconds),
            is_candidate=row.is_candidate,
            pieces=row.pieces and functools.partial(row.pieces, cross=cross.pieces or len),
            halves=row.halves and cross.halves and row.halves.across(cross.halves),
        )
    blanks = [name for name in STRATEGIES if "<" in name and algorithm in (name, name.partition("<")[0].strip("-"))]
    check(not blanks, f"got strategy {algorithm!r}; fill in what is in <> in {blanks}, as in color4 and hier-ring")
    if algorithm not in STRATEGIES:
        raise UsageError(f"unknown strategy {algorithm!r}; {nearest(algorithm, {**STRATEGIES, **ALIASES})}")
    return STRATEGIES[algorithm]


def spelled(fits: Callable[[StrategySpec], bool]) -> list[str]:
    """Algorithms to choose from whose row fits, their blanks filled in."""
    return [name for key, row in STRATEGIES.items() if fits(row) for name in row.spelled or (key,)]


def with_halves(hosts: Sequence[int], wire: str = "32") -> tuple[str, ...]:
    """Algorithms with two halves, the second in this wire, on these hosts."""
    able = spelled(lambda row: bool(row.halves) and wire in row.halves.gathers)
    return tuple(name for name in able if (spec := find(name)).halves and spec.fits(hosts))


def algorithms_in_c(hosts: Sequence[int]) -> tuple[str, ...]:
    """Algorithms that C has for ranks on these hosts."""
    return tuple(name for name in spelled(lambda row: bool(row.parts)) if parse(name).is_in_c(hosts))
