"""Who has which record when, and what moves: by properties, all members of a group in one process."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxmpi.data import Sampler
from jaxmpi.data.shuffle import GroupSampler, place_owners, plan_moves, record_owners, slice_owners
from jaxmpi.data.sources.packed import MAX_RECORD_BYTES

ORDERS = st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))


def samplers(n: int, batch: int, parts: int, groups: int = 1, period: int = 1) -> list[GroupSampler]:
    size = parts * groups
    return [GroupSampler(n, batch, rank, size, 5, parts=parts, period=period) for rank in range(size)]


@given(ORDERS, st.integers(0, 7))
def test_groups_read_each_record_once_and_a_worker_what_its_member_has(order, epoch):
    """Also if workers do not divide the batch, as when a run goes on with another number of them."""
    n, batch, parts = order[:3]
    workers = samplers(*order)
    first = workers[0].shuffle_of_turn(epoch)
    owners = record_owners(workers[0].epoch_order(first), place_owners(n, batch, parts))
    read = []
    for rank, mine in enumerate(workers):
        for step in range(epoch * mine.steps_per_epoch, (epoch + 1) * mine.steps_per_epoch):
            share = mine.indices(step).indices
            assert (owners[share] == rank % parts).all()
            read.extend(share)
    assert sorted(read) == list(range(n))


@given(ORDERS, st.integers(0, 40))
def test_a_step_has_the_same_examples_for_any_number_of_groups(order, step):
    n, _, parts, groups, period = order
    batch = 12 * parts * groups
    [whole, *_] = [GroupSampler(n, batch, 0, 1, 5, parts=parts, period=period).indices(step)]
    joined = np.empty(whole.count, int)
    for rank, mine in enumerate(samplers(n, batch, parts, groups, period)):
        joined[rank :: parts * groups] = mine.indices(step).indices
    assert joined.tolist() == whole.indices.tolist()


@given(ORDERS, st.integers(0, 7))
def test_shuffled_every_epoch_the_order_is_that_from_files(order, epoch):
    n, batch, parts, groups, _ = order
    plain = Sampler(n, n, seed=5).indices(epoch).indices.tolist()
    assert samplers(n, batch, parts, groups)[0].epoch_order(epoch).tolist() == plain
    assert samplers(n, batch, 1, groups, period=3)[0].epoch_order(epoch).tolist() == plain


@pytest.mark.parametrize("period", [1, 3])
def test_places_are_uniform(period):
    """Counts of (record, member) over E shuffles; were a shuffle worse than uniform, they would spread more.

    With uniform permutations sum (count - E / S)^2 / (E / S) tends to n / (n - 1) times chi-square with (n - 1) (S - 1)
    degrees of freedom, since every epoch adds independent rows and columns of fixed sums, of covariance
    (1[i=j] - 1/n) n / (n - 1) x (1[a=b] - 1/S) / S. Bounds: one in a million on either side.
    """
    n, parts, shuffles = 60, 4, 1000
    mine = samplers(n, parts, parts, period=period)[0]
    counts = np.zeros((n, parts))
    for epoch in range(0, shuffles * period, period):
        counts[np.arange(n), record_owners(mine.epoch_order(epoch), np.arange(n) % parts)] += 1
    expected = shuffles / parts
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], (n - 1) * (parts - 1))
    assert low < ((counts - expected) ** 2 / expected).sum() * (n - 1) / n < high
    stuck = counts + np.where(np.arange(parts) == 0, 0.2, -0.2 / (parts - 1)) * expected  # 20 % favour one member
    assert ((stuck - expected) ** 2 / expected).sum() > high


@pytest.mark.parametrize("parts", [1, 3, 64])
def test_no_count_passes_what_a_c_int_holds(parts):
    """70 records of up to 1 GiB, all big ones at one member: nothing is allocated, only counted."""
    lengths = np.where(np.arange(70) < 40, MAX_RECORD_BYTES, 1000)
    order = np.argsort(np.random.default_rng(0).random(70))
    sent_bytes, numbers = 0, set()
    for me in range(parts):
        moves = plan_moves(order, slice_owners(70, parts), np.arange(70) % parts, lengths, me, parts)
        numbers.add(len(moves))
        assert all(max(move.sent_bytes.sum(), move.received_bytes.sum()) < 2**31 for move in moves)
        sent_bytes += sum(move.sent_bytes.sum() for move in moves)
    assert len(numbers) == 1
    assert sent_bytes == lengths.sum()
