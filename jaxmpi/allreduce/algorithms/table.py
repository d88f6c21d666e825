"""The table of strategies, and what a name means.

A row has all that is known of an algorithm: its sum in a program, its schedule for C, its halves for sharded updates,
the seconds that it is predicted to take, and where it fits. Names have blanks, `color<k>` and `hier-<cross>`: filling
them in makes a row of the sums that the blank stands for. A word of which a row has nothing is refused by name, with
the rows that have it.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxmpi.allreduce.algorithms.asa import ASA
from jaxmpi.allreduce.algorithms.baselines import ALLREDUCE, NONE, ROOT, SHARED_MEMORY
from jaxmpi.allreduce.algorithms.color_trees import COLOR, MAX_COLOURS, PIPELINED_RING
from jaxmpi.allreduce.algorithms.hierarchical import HIERARCHICAL
from jaxmpi.allreduce.algorithms.ring import RING
from jaxmpi.allreduce.algorithms.spec import StrategySpec
from jaxmpi.allreduce.algorithms.tree import TREE
from jaxmpi.allreduce.schedules import Group, Schedule, in_columns
from jaxmpi.allreduce.wires import WIRES, Wire, is_packaged
from jaxmpi.core.errors import UsageError, lookup, nearest

STRATEGIES: dict[str, StrategySpec] = {
    "ar": ALLREDUCE,
    "asa": ASA,
    "ring": RING,
    "tree": TREE,
    "color<k>": COLOR,
    "pipering": PIPELINED_RING,
    "root": ROOT,
    "hier-<cross>": HIERARCHICAL,
    "shm": SHARED_MEMORY,
    "none": NONE,
}
PACKAGED_STRATEGIES = dict(STRATEGIES)  # before a user adds or replaces rows
WIRES_OF_ALIASES = {"asa": ("32", "16", "bf16", "8"), "ring": ("32", "16"), "hier-ring": ("32", "16")}
ALIASES = {f"{name}{wire}": f"{name}:{wire}" for name, wires in WIRES_OF_ALIASES.items() for wire in wires}


class Strategy(NamedTuple):
    """A spelled-out choice, such as `ring:16`."""

    name: str
    spec: StrategySpec  # its blanks filled in
    wire: Wire

    def is_in_c(self, hosts: Sequence[int] | None = None) -> bool:
        """Whether C has the sum for these hosts, or for some.

        What a user has added or replaced runs in programs alone, since its steps are not known.
        """
        algorithm = re.sub(r"color\d+", "color<k>", self.name.partition(":")[0])
        keys = ["hier-<cross>", algorithm.removeprefix("hier-")] if algorithm.startswith("hier-") else [algorithm]
        is_ours = all(STRATEGIES[key] is PACKAGED_STRATEGIES.get(key) for key in keys) and is_packaged(self.wire)
        return is_ours and bool(self.spec.parts) and (hosts is None or self.spec.fits_parts(hosts))

    def schedule(self, n: int, group: Group, half: str = "", operand_begin: int = 0) -> Schedule:
        """The steps of the sum of f32[n] on one rank, or of a half of it: `scatter` or `gather`.

        The operand is the vector from float `operand_begin` on: a gather reads nothing but this rank's chunk.
        """
        parts, halves = self.spec.parts, self.spec.halves
        if half and halves:
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
    if not isinstance(spelling, str):
        raise UsageError(f"strategy: got {spelling!r}; expected a name, such as asa32")
    algorithm, _, wire = ALIASES.get(spelling, spelling).partition(":")
    wire = wire or "32"
    row = find(algorithm)
    encoding = lookup(WIRES, wire, "wire")
    if wire not in row.wires:
        raise UsageError(f"strategy {algorithm!r} cannot use wire {wire!r}; it takes {', '.join(row.wires)}")
    return Strategy(f"{algorithm}:{wire}", row, encoding)


def find(algorithm: str) -> StrategySpec:
    """The row of an algorithm such as `hier-ring`, its blanks filled in."""
    if colours := re.fullmatch(r"color(\d+)", algorithm):
        if not 1 <= int(colours[1]) <= MAX_COLOURS:
            raise UsageError(f"got strategy {algorithm!r}; expected color1 to color{MAX_COLOURS}")
        return _fill("color<k>", int(colours[1]))
    with_wire = re.fullmatch(f"(.+?)({'|'.join(WIRES)})", algorithm)
    if algorithm not in STRATEGIES and with_wire and with_wire[1].removeprefix("hier-") in STRATEGIES:
        raise UsageError(f"unknown strategy {algorithm!r}; did you mean '{with_wire[1]}:{with_wire[2]}'?")
    if algorithm.startswith("hier-") and "<" not in algorithm:
        cross = find(algorithm.removeprefix("hier-"))
        if not cross.crosses:
            able = ", ".join(name for name, other in STRATEGIES.items() if other.crosses)
            raise UsageError(f"got strategy {algorithm!r}; between hosts there can be {able}")
        return _fill("hier-<cross>", cross)
    blanks = [name for name in STRATEGIES if "<" in name and algorithm in (name, name.partition("<")[0].strip("-"))]
    if blanks:
        raise UsageError(f"got strategy {algorithm!r}; fill in what is in <> in {blanks}, as in color4 and hier-ring")
    if algorithm not in STRATEGIES:
        raise UsageError(f"unknown strategy {algorithm!r}; {nearest(algorithm, {**STRATEGIES, **ALIASES})}")
    return STRATEGIES[algorithm]


def _fill(name: str, blank: Any) -> StrategySpec:
    fill = STRATEGIES[name].fill
    assert fill
    return fill(blank)


def exchanges(spelling: str) -> bool:
    """Return False if each worker keeps its own, as with `none`; compressors and `auto` exchange."""
    row = STRATEGIES.get(ALIASES.get(spelling, spelling).partition(":")[0])
    return row is None or row.exchanges


def in_shared_memory(spelling: str) -> bool:
    """Return True if ranks of a host add in shared memory."""
    row = STRATEGIES.get(spelling.rpartition("/")[2].partition(":")[0])
    return row is not None and row.in_shared_memory


def spelled(fits: Callable[[StrategySpec], bool]) -> list[str]:
    """Algorithms to choose from whose row fits, their blanks filled in."""
    return [name for key, row in STRATEGIES.items() if fits(row) for name in row.spelled or (key,)]


def with_halves(hosts: Sequence[int], wire: str = "32") -> tuple[str, ...]:
    """Algorithms with two halves, the second in this wire, on these hosts."""
    able = spelled(lambda row: bool(row.halves) and wire in row.halves.gathers and row.fits(hosts))
    return tuple(name for name in able if find(name).halves)


def algorithms_in_c(hosts: Sequence[int]) -> tuple[str, ...]:
    """Algorithms that C has for ranks on these hosts."""
    return tuple(name for name in spelled(lambda row: bool(row.parts)) if parse(name).is_in_c(hosts))
