"""Order of equal calls, by the lines of users that make them.

Two sums of equal shapes have nothing by which ranks could tell them apart but the lines at which they are made. Ranks
may make one call at different lines: `if rank == 0: allreduce(x) else: allreduce(y)`, or a loop that has ended on one
rank, which gives zeros meanwhile. So other lines alone are no mistake. Lines in another order are: of two ranks, one
has been at `a` while the other was at `b`, and then the other way round. By then numbers of `a` have gone into `b`, so
the last of these calls ends the job.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

MOST_CALLS = 1024  # in which two ranks differ; then they start anew
SAID = 4  # of the last calls at other places, in a message


class CallPlaces:
    """Calls in which each rank differs from the rank before it."""

    def __init__(self) -> None:
        """All ranks have been at the same places."""
        self._ranks = 0
        self._more: dict[int, Counter[bytes]] = {}  # by rank; what it has made less often has a negative number
        self.said: deque[str] = deque(maxlen=SAID)  # this rank's calls while others were elsewhere

    def permuted(self, calls: Sequence[bytes]) -> list[int]:
        """Ranks that have permuted the calls of the rank before them.

        Two ranks that meet again at one of the places at which they differ start anew: it was a loop of uneven length.

        Args:
            calls: what each rank calls and where, the same sequence on all ranks.
        """
        if len(calls) != self._ranks:  # at first, and after a death
            self._ranks, self._more = len(calls), {}
        found = []
        for rank in range(1, len(calls)):
            mine, before = calls[rank], calls[rank - 1]
            more = self._more.get(rank)
            if mine == before:
                if more and mine in more:
                    del self._more[rank]
                continue
            more = self._more.setdefault(rank, Counter())
            more[mine] += 1
            more[before] -= 1
            for call in {mine, before}:
                if not more[call]:
                    del more[call]
            if not more:
                found.append(rank)
            if not more or len(more) > MOST_CALLS:
                del self._more[rank]
        return found


def another_order(calls: Mapping[int, Sequence[str]]) -> str:
    """Describe, by rank in the job, calls made in another order."""
    each = "; ".join(f"rank {rank}: {', then '.join(texts)}" for rank, texts in calls.items())
    return (
        f"ranks made the same calls in another order, so each got the other's numbers: {each}; all must make the same "
        "calls in the same order; ranks that take turns make one call, as allreduce(x if mine else y)"
    )
