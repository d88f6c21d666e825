"""Check who holds which record when, and what moves: by properties, all members of a group in one process."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxmpi.config.data import Data, shuffle_schedule
from jaxmpi.core.errors import UsageError
from jaxmpi.data import Sampler, group_order
from jaxmpi.data.group_order import GroupSampler
from jaxmpi.data.memory_source import Arena

GROUPS = st.tuples(st.integers(1, 60), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))


def sampler(n: int, parts: int, groups: int = 1, period: int = 1, rank: int = 0, batch: int = 1) -> GroupSampler:
    size = parts * groups
    return GroupSampler(n, batch * size, rank, size, seed=5, parts=parts, period=period)


def one_epoch(n: int, parts: int, groups: int, period: int, epoch: int) -> list[np.ndarray]:
    """Examples that each worker reads in an epoch."""
    read = []
    for rank in range(parts * groups):
        mine = sampler(n, parts, groups, period, rank, batch=2)
        steps = range(epoch * mine.steps_per_epoch, (epoch + 1) * mine.steps_per_epoch)
        read.append(np.concatenate([mine.indices(step).indices for step in steps]))
    return read


class TestOrder:
    @given(GROUPS, st.integers(0, 7))
    def test_all_groups_together_read_each_record_once(self, group, epoch):
        read = np.concatenate(one_epoch(*group, epoch=epoch))
        assert sorted(read.tolist()) == list(range(group[0]))

    @given(GROUPS, st.integers(0, 7))
    def test_a_worker_reads_what_its_member_holds(self, group, epoch):
        parts = group[1]
        whose = sampler(*group)
        places = group_order.members(group[0], 2 * parts * group[2], parts)
        holders = group_order.holders_by_place(whose.places(whose.moved(epoch)), places)
        for rank, read in enumerate(one_epoch(*group, epoch=epoch)):
            assert (holders[read] == rank % parts).all()

    @given(GROUPS, st.integers(0, 7))
    def test_shuffled_every_epoch_the_order_is_that_from_files(self, group, epoch):
        n, parts, groups, _ = group
        plain = Sampler(n, n, seed=5)
        assert sampler(n, parts, groups, period=1).places(epoch).tolist() == plain._order(epoch, 0, n).tolist()
        assert sampler(n, 1, groups, period=3).places(epoch).tolist() == plain._order(epoch, 0, n).tolist()

    @given(st.integers(1, 90), st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
    def test_a_batch_that_does_not_divide(self, n, batch, parts, groups, period):
        """A run that goes on with another number of workers keeps its batch: shares are uneven."""
        size, epoch = parts * groups, 4
        samplers = [GroupSampler(n, batch, rank, size, 5, parts=parts, period=period) for rank in range(size)]
        whose = samplers[0]
        holders = group_order.holders_by_place(whose.places(whose.moved(epoch)), group_order.members(n, batch, parts))
        read = []
        for rank, mine in enumerate(samplers):
            for step in range(epoch * mine.steps_per_epoch, (epoch + 1) * mine.steps_per_epoch):
                share = mine.indices(step).indices
                assert (holders[share] == rank % parts).all()
                read.extend(share)
        assert sorted(read) == list(range(n))

    @given(GROUPS, st.integers(0, 40))
    def test_any_number_of_groups_has_the_same_order(self, group, step):
        """The examples of a step depend on the effective batch and, between shuffles, on the group's size only."""
        n, parts, groups, period = group
        whole = GroupSampler(n, 12 * parts, 0, 1, 5, parts=parts, period=period).indices(step)
        size = parts * (groups if 12 % groups == 0 else 1)
        shares = [
            GroupSampler(n, 12 * parts, rank, size, 5, parts=parts, period=period).indices(step) for rank in range(size)
        ]
        rejoined = np.empty(whole.count, int)
        for rank, share in enumerate(shares):
            rejoined[rank::size] = share.indices
        assert rejoined.tolist() == whole.indices.tolist()

    @given(st.integers(1, 90), st.integers(1, 9), st.integers(1, 4), st.integers(1, 7))
    def test_pieces_have_what_is_read_in_the_order_of_files(self, n, batch, parts, piece_steps):
        """Also if parts do not divide the batch, and pieces not the epoch."""
        samplers = [
            GroupSampler(n, batch, rank, parts, 5, parts=parts, piece_steps=piece_steps) for rank in range(parts)
        ]
        of_epoch = []
        for rank, mine in enumerate(samplers):
            plain = Sampler(n, batch, rank, parts, 5)
            for step in range(2 * mine.steps_per_epoch):
                share = mine.indices(step).indices
                assert share.tolist() == plain.indices(step).indices.tolist()
                records, worker = mine.brought(mine.shuffle_of(mine.turn_of(step)))
                assert set(share) <= set(records[worker == rank])
                assert len(records) <= piece_steps * batch
        turns = range(samplers[0].turn_of(samplers[0].steps_per_epoch))
        of_epoch = np.concatenate([samplers[0].brought(turn)[0] for turn in turns])
        assert sorted(of_epoch) == list(range(n))
        assert samplers[0].name == ""

    def test_an_evaluation_is_in_the_order_of_the_source(self):
        whose = GroupSampler(7, 4, 1, 2, 5, shuffle=False, parts=2, period=3)
        assert [whose.indices(step).indices.tolist() for step in range(2)] == [[1, 3], [5]]

    def test_what_makes_a_run_this_run(self):
        """Only if it changes the order."""
        names = {(parts, period): sampler(40, parts, period=period).name for parts in (1, 2, 4) for period in (0, 1, 2)}
        assert [names[parts, period] for parts, period in names if parts == 1 or period == 1] == [""] * 5
        assert len({names[2, 0], names[4, 0], names[2, 2], names[4, 2]}) == 4

    @pytest.mark.parametrize("period", [1, 3])
    def test_places_are_uniform(self, period):
        """Counts of (record, member) over E shuffles; were a shuffle worse than uniform, they would spread more.

        With uniform permutations sum (count - E / S)^2 / (E / S) tends to n / (n - 1) times chi-square. The chi-square
        has (n - 1) (S - 1) degrees of freedom. The reason is that every epoch adds independent rows and columns of
        fixed sums. Their covariance is (1[i=j] - 1/n) n / (n - 1) x (1[a=b] - 1/S) / S. Bounds: one in a million on
        either side.
        """
        n, parts, shuffles = 60, 4, 2000
        whose = sampler(n, parts, period=period)
        counts = np.zeros((n, parts))
        for epoch in range(0, shuffles * period, period):
            counts[np.arange(n), group_order.holders_by_place(whose.places(epoch), np.arange(n) % parts)] += 1
        expected = shuffles / parts
        statistic = ((counts - expected) ** 2 / expected).sum() * (n - 1) / n
        low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], (n - 1) * (parts - 1))
        assert low < statistic < high
        stuck = counts + np.where(np.arange(parts) == 0, 0.1, -0.1 / (parts - 1)) * expected  # 10 % favour one member
        assert ((stuck - expected) ** 2 / expected).sum() > high


# ---------------------------------------------------------------- moves


def lengths_of(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, n)


def content(record: int, lengths: np.ndarray) -> np.ndarray:
    return ((record * 31 + np.arange(lengths[record])) % 251).astype(np.uint8)


def held_in_slices(n: int, parts: int, lengths: np.ndarray) -> list[Arena]:
    begins = group_order.slices(n, parts)
    arenas = []
    for part in range(parts):
        arena = Arena(np.arange(begins[part], begins[part + 1]), lengths)
        for record in range(begins[part], begins[part + 1]):
            arena[record][:] = content(record, lengths)
        arenas.append(arena)
    return arenas


def shuffle(
    arenas: list[Arena], order: np.ndarray, before: np.ndarray, after: np.ndarray, lengths: np.ndarray, segment: int
) -> tuple[list[Arena], list[list[group_order.Move]]]:
    """Every member's new arena, and the moves; bytes are carried as MPI_Alltoallv carries them."""
    parts = len(arenas)
    planned = [list(group_order.moves(order, before, after, lengths, me, parts, segment)) for me in range(parts)]
    new = [Arena(np.concatenate([m.received for m in own] or [np.empty(0, int)]), lengths) for own in planned]
    at = [0] * parts
    for moves in zip(*planned, strict=True):
        sent = [arena.gather(move.sent) for arena, move in zip(arenas, moves, strict=True)]
        for to, move in enumerate(moves):
            got = []
            for source, own in enumerate(moves):
                assert own.sent_bytes[to] == move.received_bytes[source]
                begin = own.sent_bytes[:to].sum()
                got.append(sent[source][begin : begin + own.sent_bytes[to]])
            size = move.received_bytes.sum()
            new[to].bytes[at[to] : at[to] + size] = np.concatenate(got)
            at[to] += size
    return new, planned


class TestMoves:
    @given(st.integers(0, 80), st.integers(1, 6), st.integers(1, 3), st.integers(1, 200), st.integers(0, 99))
    def test_every_record_goes_where_the_order_wants_it(self, n, parts, each, segment, seed):
        lengths, whose = lengths_of(n, seed), sampler(max(n, 1), parts * each)
        arenas, before = held_in_slices(n, parts, lengths), group_order.holders_by_slice(n, parts)
        whose_place = group_order.members(n, 6 * parts * each, parts * each) // each
        for epoch in range(3):
            order = whose.places(epoch) if n else np.empty(0, int)
            arenas, planned = shuffle(arenas, order, before, whose_place, lengths, segment)
            before = group_order.holders_by_place(order, whose_place)
            for me, arena in enumerate(arenas):
                mine = [order[member :: parts * each] for member in range(me * each, (me + 1) * each)]
                assert arena.records.tolist() == sorted(np.concatenate(mine).tolist())
                assert all((arena[r] == content(r, lengths)).all() for r in arena.records)
            assert max(len(a.records) for a in arenas) - min(len(a.records) for a in arenas) <= each
            for move in itertools.chain(*planned):
                assert move.sent_bytes.sum() < parts * segment + 50
                for records, member, size_bytes in (move[:3], move[3:]):
                    assert (np.diff(member) >= 0).all()
                    assert np.bincount(member, lengths[records], parts).tolist() == size_bytes.tolist()
                assert (whose_place[np.argsort(order)[move.sent]] == move.to).all()

    @pytest.mark.parametrize("parts", [1, 3, 64])
    def test_no_count_passes_what_a_c_int_holds(self, parts):
        """70 records of up to 1 GiB, all big ones at one member: nothing is allocated, only counted."""
        lengths = np.where(np.arange(70) < 40, group_order.MOST_BYTES, 1000)
        order = np.argsort(np.random.default_rng(0).random(70))
        total = np.zeros((parts, parts), np.int64)
        numbers = []
        for me in range(parts):
            moves = list(
                group_order.moves(
                    order, group_order.holders_by_slice(70, parts), np.arange(70) % parts, lengths, me, parts
                )
            )
            numbers.append(len(moves))
            for move in moves:
                assert max(move.sent_bytes.sum(), move.received_bytes.sum()) < 2**31
                total[me] += move.sent_bytes
        assert set(numbers) == {numbers[0]}
        assert total.sum() == lengths.sum()


@pytest.mark.parametrize(
    ("period", "expected"),
    [
        (1, (1, 0)),
        (0, (0, 0)),
        ("0st", (0, 0)),
        ("10st", (1, 10)),
        ("0.5ep", (1, 12)),
        ("120ex", (1, 2)),
        ("60st", (2, 0)),
    ],
)
def test_a_period_is_steps_within_an_epoch_or_whole_epochs(period, expected):
    assert shuffle_schedule(period, 24, 60) == expected


@pytest.mark.parametrize("period", ["2", "soon", -1])
def test_a_period_that_is_none(period):
    with pytest.raises(UsageError, match=rf"data.shuffle_period: got '?{period}'?; expected epochs, such as 2, or"):
        Data(shuffle_period=period)
