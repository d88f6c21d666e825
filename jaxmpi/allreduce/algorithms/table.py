"""The table of strategies, and what a name means.

A row has all that is known of an algorithm: its sum in a program, its sum in NumPy beside a program, and its halves for
sharded updates. The row also has the seconds that the algorithm is predicted to take, and where it fits. Names have
blanks, `color<k>` and `hier-<cross>`: filling them in makes a row of the sums that the blank stands for. A word of
which a row has nothing is refused by name, with the rows that have it.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxmpi.allreduce.algorithms.asa import ASA
from jaxmpi.allreduce.algorithms.color_trees import COLOR, MAX_COLOURS, PIPERING
from jaxmpi.allreduce.algorithms.hierarchical import HIERARCHICAL
from jaxmpi.allreduce.algorithms.library import ALLREDUCE, NONE
from jaxmpi.allreduce.algorithms.ring import RING
from jaxmpi.allreduce.algorithms.root import ROOT
from jaxmpi.allreduce.algorithms.shared_memory import SHARED_MEMORY
from jaxmpi.allreduce.algorithms.spec import PartsOnHost, StrategySpec, in_columns
from jaxmpi.allreduce.algorithms.tree import TREE
from jaxmpi.allreduce.host_comm import HostComm, Requests
from jaxmpi.allreduce.wires import WIRES, HostWire, Wire
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

    def has_sum_on_host(self, hosts: Sequence[int]) -> bool:
        """Return True if there is a sum in NumPy for these hosts."""
        return bool(self.spec.on_host and self.wire.on_host) and self.spec.fits_on_host(hosts)


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
            on_host=row.on_host and functools.partial(row.on_host, colours=k),
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
            on_host=row.on_host and cross.on_host and functools.partial(row.on_host, cross=cross.on_host),
            fits_on_host=lambda hosts: row.fits_on_host(hosts) and cross.fits_on_host(sorted(set(hosts))),
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


# ---------------------------------------------------------------- sums in NumPy


def spelled(fits: Callable[[StrategySpec], bool]) -> list[str]:
    """Algorithms to choose from whose row fits, their blanks filled in."""
    return [name for key, row in STRATEGIES.items() if fits(row) for name in row.spelled or (key,)]


def with_halves(hosts: Sequence[int], wire: str = "32") -> tuple[str, ...]:
    """Algorithms with two halves, the second in this wire, on these hosts."""
    able = spelled(lambda row: bool(row.halves) and wire in row.halves.gathers)
    return tuple(name for name in able if (spec := find(name)).halves and spec.fits(hosts))


def fitting_on_host(hosts: Sequence[int]) -> tuple[str, ...]:
    """Algorithms that have a sum in NumPy over ranks on these hosts."""
    return tuple(name for name in spelled(lambda row: bool(row.on_host)) if parse(name).has_sum_on_host(hosts))


class HostSum(NamedTuple):
    """A strategy's sum in NumPy, over a HostComm."""

    parts: PartsOnHost
    wire: HostWire
    comm: HostComm

    @classmethod
    def named(cls, name: str, comm: HostComm, half: str = "") -> "HostSum":
        """The NumPy sum of a name such as `ring:16`, or a half.

        The strategy must have one. A half is `scatter` or `gather`.
        """
        strategy = parse(name)
        parts, halves = strategy.spec.on_host, strategy.spec.halves
        if half:
            assert halves
            parts = functools.partial(in_columns, sum=getattr(halves.on_host, half))
        assert parts
        assert strategy.wire.on_host
        return cls(parts, strategy.wire.on_host, comm)

    def segments(self, n: int) -> int:
        """Number of parts of f32[n], and of tags; equal on all ranks."""
        return sum(1 for _ in self.parts(n, self.comm, self.wire))

    def of(self, x: np.ndarray, tags: Sequence[int]) -> Iterator[Iterator[Requests]]:
        """Generators which together make f32[n], C-contiguous, the sum over workers; in place."""
        for part, tag in zip(self.parts(x.size, self.comm, self.wire), tags, strict=True):
            yield part.of(x, self.comm, self.wire, tag)
