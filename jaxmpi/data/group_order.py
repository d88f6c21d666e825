"""Who has which record of a data set in memory, and which records move in a shuffle: index arithmetic.

Workers form groups of S. Each group has one full copy of the data, each worker 1/S of it. Every place of the epoch's
order has an index within its step; in every group, member m has the records at the places whose index is m modulo S.
Worker r reads the places whose index is r modulo the number of workers, which S divides. So a worker has what it
reads, and all groups together read each record once.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxmpi.data.sampler import Sampler, random_bits
from jaxmpi.data.sources.packed import MAX_RECORD_BYTES

SEGMENT_BYTES = 32 << 20  # a worker's part of what is sent at once


@dataclass(frozen=True)
class GroupSampler(Sampler):
    """The order of examples that move between the workers of a group of `parts` every `period` epochs (0: once).

    At the first of these epochs the order is that of `Sampler`. In the others each member's records are permuted among
    themselves, by (seed, epoch, member): it then depends on the group's size too. A turn is an epoch.
    """

    parts: int = 1
    period: int = 1

    @property
    def name(self) -> str:
        """Facts that distinguish this order from others of the same seed; empty if nothing does."""
        is_plain = self.period == 1 or self.parts == 1 or not self.shuffle
        return "" if is_plain else f"shuffled over {self.parts} workers every {self.period} epochs"

    def turn_of_step(self, step: int) -> int:
        """The turn in which `step` is read."""
        return step // max(self.steps_per_epoch, 1)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """i64[n]: the epoch's whole order, if examples are shuffled."""
        first = self.shuffle_of_turn(epoch)
        if epoch == first:
            return super()._order(epoch, 0, self.examples)
        return permute_within_parts(self.examples, self.effective_batch, self.seed, epoch, self.parts, first)

    def shuffle_of_turn(self, turn: int) -> int:
        """The turn whose shuffle brought the records that are read in this one."""
        if self.parts == 1:
            return turn  # nothing needs to move
        return turn - turn % self.period if self.period else 0

    def _order(self, epoch: int, begin: int, end: int) -> np.ndarray:
        return self.epoch_order(epoch)[begin:end] if self.shuffle else super()._order(epoch, begin, end)


@functools.lru_cache(maxsize=2)
def permute_within_parts(examples: int, batch: int, seed: int, epoch: int, parts: int, first: int) -> np.ndarray:
    """i64[n]: the order of epoch `first`, permuted within each member's places by (seed, epoch, member)."""
    order = Sampler(examples, examples, seed=seed)._order(first, 0, examples).copy()
    owners = place_owners(examples, batch, parts)
    for part in range(parts):
        places = np.flatnonzero(owners == part)
        keys = random_bits(len(places), seed, epoch, stream=3, index=part)
        order[places] = order[places[np.argsort(keys, kind="stable")]]
    order.flags.writeable = False
    return order


def place_owners(examples: int, batch: int, group: int) -> np.ndarray:
    """i32[n]: the group member that has each place of an order; members take the places of each step in turn."""
    return (np.arange(examples) % batch % group).astype(np.int32)


def record_owners(order: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """i32[n]: the member that has each record, from the one that has each place."""
    by_record = np.empty(len(order), np.int32)
    by_record[order] = owners
    return by_record


def slice_bounds(examples: int, parts: int) -> np.ndarray:
    """i64[parts + 1]: member m reads the records from bound m up to the next from files."""
    return np.arange(parts + 1) * examples // parts


def slice_owners(examples: int, parts: int) -> np.ndarray:
    """i32[n]: the member that reads each record from files."""
    return np.repeat(np.arange(parts, dtype=np.int32), np.diff(slice_bounds(examples, parts)))


class Move(NamedTuple):
    """One member's sends and receives in one segment of a shuffle, by member, and in the order of places."""

    sent: list[np.ndarray]  # i64[k], records that go to each member
    sent_bytes: np.ndarray  # i64[parts]
    received: list[np.ndarray]  # i64[k], records that come from each member
    received_bytes: np.ndarray  # i64[parts]


def plan_moves(
    order: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    lengths: np.ndarray,
    me: int,
    parts: int,
    segment_bytes: int = SEGMENT_BYTES,
) -> list[Move]:
    """A shuffle in segments, equally many for every member: Algorithm 2 of IBM's DIMD (Kumar et al. 2018).

    A segment is a run of places of the new order whose records have about `parts` x `segment_bytes`. It begins below
    2^30 bytes and no record is longer than that, so no count of MPI passes 2^31.

    Args:
        order: i64[n], records in the order of the new epoch.
        before: i32[n], the member that has each record.
        after: i32[n], the member that is to have the record of each place.
        lengths: i64[n], bytes of each record.
        me: one of `parts` members, each in a process of its own.
    """
    assert lengths.max(initial=0) <= MAX_RECORD_BYTES
    segments = (np.cumsum(lengths[order]) - lengths[order]) // min(parts * segment_bytes, MAX_RECORD_BYTES)
    moves = []
    for number in range(int(segments[-1]) + 1 if len(order) else 0):
        places = slice(*np.searchsorted(segments, [number, number + 1]))
        records, sources, targets = order[places], before[order[places]], after[places]
        sent_records = [records[(sources == me) & (targets == member)] for member in range(parts)]
        received = [records[(sources == member) & (targets == me)] for member in range(parts)]
        sent_bytes, received_bytes = (
            np.array([lengths[r].sum() for r in by_member]) for by_member in (sent_records, received)
        )
        moves.append(Move(sent_records, sent_bytes, received, received_bytes))
    return moves
