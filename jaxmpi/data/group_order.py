"""Holders of records, and the records that move in a shuffle.

A data set lies in the memory of groups of workers. Each group of S workers holds one full copy, each worker 1/S of it.
Each place of the epoch's order has an index within its step. In every group, member m holds the records at the places
whose index is m modulo S. Worker r reads the places whose index is r modulo the number of workers, and S divides that
number. So a worker holds what it reads, and all groups together read each record once.

All here is index arithmetic, alike in all processes. `memory_source` keeps the bytes; what sends them is elsewhere.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxmpi.data.sampler import Sampler, random_bits
from jaxmpi.data.sources.packed import MAX_RECORD_BYTES

SEGMENT_BYTES = 32 << 20  # a worker's part of what is sent at once
MOST_BYTES = 1 << 30  # bytes of all parts together, and of a record; their sum stays below 2^31, whatever the lengths


@dataclass(frozen=True)
class GroupSampler(Sampler):
    """The order of examples that move between workers every `period` epochs.

    At the first of these epochs it is that of `Sampler`. In the others each member's records are permuted among
    themselves, by (seed, epoch, member): so it depends on the group's size, and on nothing else. With period 1 it is
    that of `Sampler` always.

    With `piece_steps` the order is that of `Sampler`, too. Members then keep what they have read from files. Copies of
    the records that they read in the next steps come in pieces. A turn is a piece, or an epoch whose records come at
    once; turns are numbered over all epochs.

    Args:
        parts: S, the group's size.
        period: epochs between two shuffles, >= 1; 0: after the first none.
        piece_steps: steps of an epoch whose records come at once; 0: all of them.
    """

    parts: int = 1
    period: int = 1
    piece_steps: int = 0

    @property
    def name(self) -> str:
        """Facts that distinguish this order from others of the same seed; empty if nothing does."""
        is_plain = self.period == 1 or self.parts == 1 or not self.shuffle
        return "" if is_plain else f"shuffled over {self.parts} workers every {self.period} epochs"

    def moved(self, epoch: int) -> int:
        """The epoch whose shuffle moved records to their holders in `epoch`."""
        if self.parts == 1:
            return epoch  # nothing needs to move
        return epoch - epoch % self.period if self.period else 0

    def turn_of(self, step: int) -> int:
        """The turn in which `step` is read."""
        epoch, batch = divmod(step, max(self.steps_per_epoch, 1))
        return epoch * self.pieces + batch // self.piece_steps if self.piece_steps else epoch

    @property
    def pieces(self) -> int:
        """Pieces of an epoch."""
        return math.ceil(self.steps_per_epoch / self.piece_steps) if self.piece_steps else 1

    @property
    def copies(self) -> float:
        """The most that a member holds, in parts: its own, and the next epoch's or two pieces."""
        return 2.0 if not self.piece_steps else 1 + min(2 * self.piece_steps / self.steps_per_epoch, 1)

    def shuffle_of(self, turn: int) -> int:
        """The shuffle whose records a turn reads, numbered by its first turn."""
        return turn if self.piece_steps else self.moved(turn)

    def brought(self, shuffle: int) -> tuple[np.ndarray, np.ndarray]:
        """i64[k], records in epoch order; i32[k], the group's worker that reads each."""
        epoch, piece = divmod(shuffle, self.pieces)
        begin = piece * self.piece_steps * self.effective_batch
        end = min(begin + self.piece_steps * self.effective_batch, self.examples) if self.piece_steps else self.examples
        return self.places(epoch)[begin:end], members(self.examples, self.effective_batch, self.parts)[begin:end]

    def places(self, epoch: int) -> np.ndarray:
        """i64[n]: the epoch's whole order, if examples are shuffled."""
        moved = self.moved(epoch)
        if epoch == moved:
            return super()._order(epoch, 0, self.examples)
        return within_parts(self.examples, self.effective_batch, self.seed, epoch, self.parts, moved)

    def _order(self, epoch: int, begin: int, end: int) -> np.ndarray:
        return self.places(epoch)[begin:end] if self.shuffle else super()._order(epoch, begin, end)


@functools.lru_cache(maxsize=2)
def within_parts(examples: int, batch: int, seed: int, epoch: int, parts: int, moved: int) -> np.ndarray:
    """i64[n]: the order of epoch `moved`, permuted within each member's places."""
    order = Sampler(examples, examples, seed=seed)._order(moved, 0, examples).copy()
    whose = members(examples, batch, parts)
    by_member = np.argsort(whose, kind="stable")
    for part, places in enumerate(np.split(by_member, np.searchsorted(whose[by_member], np.arange(1, parts)))):
        keys = random_bits(len(places), seed, epoch, stream=3, index=part)
        order[places] = order[places[np.argsort(keys, kind="stable")]]
    order.flags.writeable = False
    return order


def members(examples: int, batch: int, group: int) -> np.ndarray:
    """i32[n]: the group member that holds each place of an order; they take the places of each step in turn."""
    return (np.arange(examples) % batch % group).astype(np.int32)


def holders_by_place(order: np.ndarray, whose: np.ndarray) -> np.ndarray:
    """i32[n]: the holder of each record, from that of each place."""
    holders = np.empty(len(order), np.int32)
    holders[order] = whose
    return holders


def slices(examples: int, parts: int) -> list[int]:
    """Bounds of the slices of records that members read from files."""
    return [part * examples // parts for part in range(parts + 1)]


def holders_by_slice(examples: int, parts: int) -> np.ndarray:
    """i32[n]: the member that reads record i from files."""
    return np.repeat(np.arange(parts, dtype=np.int32), np.diff(slices(examples, parts)))


class Move(NamedTuple):
    """One member's sends and receives in one segment of a shuffle."""

    sent: np.ndarray  # i64[k], records by destination, then by place
    to: np.ndarray  # i64[k], the member that each goes to
    sent_bytes: np.ndarray  # i64[parts], to each member
    received: np.ndarray  # i64[l], records by source, then by place
    source: np.ndarray  # i64[l], the member that each comes from
    received_bytes: np.ndarray  # i64[parts], from each member


def moves(
    order: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    lengths: np.ndarray,
    me: int,
    parts: int,
    segment_bytes: int = SEGMENT_BYTES,
) -> Iterator[Move]:
    """Yield a shuffle in segments, equally many for every member.

    This is Algorithm 2 of IBM's paper (Kumar et al. 2018). A segment is a run of places of the new order whose records
    have about `parts` x `segment_bytes`, and never 2^31.

    Args:
        order: i64[n], the new epoch's.
        before: i32[n], who holds record i.
        after: i32[n], who is to hold place i of the order.
        lengths: i64[n], bytes of record i, at most 2^30.
        me: this part.
        parts: of the data set, each in a process of its own.
        segment_bytes: of one part, about.
    """
    assert lengths.max(initial=0) <= MAX_RECORD_BYTES == MOST_BYTES
    ends = np.cumsum(lengths[order])
    segment = (ends - lengths[order]) // min(parts * segment_bytes, MOST_BYTES)

    def sort(places: np.ndarray, member: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places by their keys, segment x parts + member; and the keys."""
        keys = segment[places] * parts + member
        by_key = np.argsort(keys, kind="stable")
        return places[by_key], keys[by_key]

    def of_segment(number: int, places: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Records of one segment, the member of each, and bytes by member."""
        begin, end = np.searchsorted(keys, [number * parts, (number + 1) * parts])
        records, member = order[places[begin:end]], keys[begin:end] - number * parts
        size_bytes = np.zeros(parts, np.int64)
        np.add.at(size_bytes, member, lengths[records])
        return records, member, size_bytes

    leaving, coming = np.flatnonzero(before[order] == me), np.flatnonzero(after == me)
    to, source = sort(leaving, after[leaving]), sort(coming, before[order[coming]])
    for number in range(int(segment[-1]) + 1 if len(order) else 0):
        yield Move(*of_segment(number, *to), *of_segment(number, *source))
