"""Order of equal calls, by the lines of users that make them.

Ranks can tell two sums of equal shapes apart only by the lines at which they are made. Ranks may make one call at
different lines: `if rank == 0: allreduce(x) else: allreduce(y)`, or a loop that has ended on one rank, which gives
zeros meanwhile. So other lines alone are no mistake, and mostly none is another order of lines: ranks may take turns.
It is said once, with the lines, and the program goes on. When a refusal was tried, it refused workers whose leader
changes, and a `continue` that ranks take at different steps. It also refused an epoch in which one rank has no batch.

Two ranks have come to lines in another order if their meetings go round. One was at `a` while the other was at `b`.
Then it was at `b` while the other was at `c`, and so on back to `a`. Any permutation of calls does that.
"""

from collections.abc import Sequence

MOST_MEETINGS = 1024  # number of meetings of two ranks at different places; then no more are noted


class CallPlaces:
    """Places at which ranks have met while each was at another."""

    def __init__(self) -> None:
        """All ranks have been at the same places."""
        self._ranks, self._is_said = 0, False
        self._met: dict[tuple[int, int], dict[bytes, set[bytes]]] = {}  # by two ranks: places of one by the other's

    def round_trip(self, calls: Sequence[bytes]) -> tuple[int, int] | None:
        """Two ranks whose meetings have just gone round, said once.

        Each rank is compared with rank 0 and with the one before it.

        Args:
            calls: what each rank calls and where, the same sequence on all ranks.
        """
        if len(calls) != self._ranks:  # at first, and after a death
            self._ranks, self._met = len(calls), {}
        if self._is_said or len(set(calls)) == 1:
            return None
        for pair in [(a, b) for b in range(1, len(calls)) for a in {0, b - 1}]:
            here, there = (calls[rank] for rank in pair)
            met = self._met.setdefault(pair, {})
            if here == there or there in met.get(here, ()) or sum(map(len, met.values())) >= MOST_MEETINGS:
                continue
            met.setdefault(here, set()).add(there)
            if leads(met, there, here):
                self._is_said = True
                return pair
        return None


def leads(met: dict[bytes, set[bytes]], start: bytes, goal: bytes) -> bool:
    """Return True if meetings lead from one place to another."""
    seen, ahead = {start}, [start]
    while ahead:
        place = ahead.pop()
        if place == goal:
            return True
        more = met.get(place, set()) - seen
        seen |= more
        ahead.extend(more)
    return False
