"""Which examples a worker reads at a step: by properties, for any number of workers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmpi.core.errors import UsageError
from jaxmpi.data import FileSampler, Sampler
from jaxmpi.data.sampler import StreamSampler

SIZES = st.integers(1, 9)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_filled_shares_have_one_length_and_the_weights_of_their_examples(size):
    samplers = [Sampler(11, 4, rank, size) for rank in range(size)]
    for step in range(samplers[0].steps_per_epoch):
        total = 0.0
        for sampler in samplers:
            share = sampler.indices(step)
            indices, weights = share.filled(sampler.local_batch)
            assert indices.shape == weights.shape == (samplers[0].local_batch,)
            assert indices[weights > 0].tolist() == share.indices.tolist()
            total += weights.sum()
        assert total == samplers[0].indices(step).count
    with pytest.raises(UsageError, match="filled"):
        samplers[0].indices(0).filled(0)


@given(st.integers(1, 60), st.integers(1, 20), SIZES, st.integers(0, 2**32), st.booleans())
def test_workers_cover_an_epoch_once_and_see_in_a_step_what_one_sees(examples, batch, size, seed, shuffle):
    one = Sampler(examples, batch, seed=seed, shuffle=shuffle)
    many = [Sampler(examples, batch, rank, size, seed, shuffle) for rank in range(size)]
    seen: list[int] = []
    for step in range(one.steps_per_epoch):
        shares = [sampler.indices(step) for sampler in many]
        joined = np.full(shares[0].count, -1)
        for rank, share in enumerate(shares):
            joined[rank::size] = share.indices
        assert joined.tolist() == one.indices(step).indices.tolist()
        lengths = [len(share.indices) for share in shares]
        assert max(lengths) - min(lengths) <= 1
        assert max(lengths) <= many[0].local_batch
        seen += joined.tolist()
    assert sorted(seen) == list(range(examples))


@given(st.integers(1, 60), st.integers(1, 20), SIZES, st.integers(0, 50))
def test_a_step_number_is_all_a_resumed_run_needs(examples, batch, size, start):
    first = Sampler(examples, batch, 0, size, seed=3)
    for step in range(start + 4):
        share = first.indices(step)
        if step >= start:
            resumed = Sampler(examples, batch, 0, size, seed=3).indices(step)
            assert (share.epoch, share.indices.tolist()) == (resumed.epoch, resumed.indices.tolist())


def test_order_depends_on_seed_and_epoch_and_never_changes():
    def order(seed, epoch):
        return Sampler(10, 10, seed=seed).indices(epoch).indices.tolist()

    # Literal, because a checkpoint of today must resume in the same order on any later version.
    assert order(0, 0) == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"examples": 0}, "0 training examples"),
        ({"effective_batch": 0}, "effective batch"),
        ({"rank": 2, "size": 2}, "rank 2 of 2"),
        *(({"seed": seed}, "seed") for seed in (-1, 2**64, 2**80, 0.5, "1")),
    ],
)
def test_numbers_out_of_range(wrong, named):
    with pytest.raises(UsageError, match=named):
        Sampler(**{"examples": 10, "effective_batch": 4, **wrong})


def test_numbers_of_numpy_will_do():
    sizes: Any = map(np.int64, (10, 4, 1, 2))
    seed: Any = np.uint64(2**64 - 1)
    assert Sampler(*sizes, seed=seed) == Sampler(10, 4, 1, 2, seed=2**64 - 1)


# ---------------------------------------------------------------- whole files

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


def file_samplers(lengths: list[int], batch: int, size: int, seed: int, mixed: bool = False) -> list[FileSampler]:
    ends = tuple(np.cumsum(lengths).tolist())
    return [FileSampler(ends[-1], batch, rank, size, seed, file_ends=ends, mixed=mixed) for rank in range(size)]


@given(LENGTHS, st.integers(1, 20), SIZES, st.integers(0, 9), st.integers(0, 3))
def test_an_epoch_reads_each_file_once_in_sequence_on_any_number_of_workers(lengths, batch, size, seed, epoch):
    [one], many = file_samplers(lengths, batch, 1, seed), file_samplers(lengths, batch, size, seed)
    order: list[int] = []
    for step in range(epoch * one.steps_per_epoch, (epoch + 1) * one.steps_per_epoch):
        shares = [sampler.indices(step) for sampler in many]
        assert [i for share in shares for i in share.indices] == one.indices(step).indices.tolist()
        assert {share.epoch for share in shares} == {epoch}
        parts = [len(share.indices) for share in shares]
        assert max(parts) - min(parts) <= 1
        assert max(parts) <= many[0].local_batch
        order += one.indices(step).indices.tolist()
    assert sorted(order) == list(range(sum(lengths)))
    files = np.searchsorted(np.cumsum(lengths), order, side="right")
    assert np.count_nonzero(np.diff(files)) == len(set(files.tolist())) - 1  # none is come back to
    assert np.all((np.diff(order) == 1) | (np.diff(files) != 0))


@given(LENGTHS, st.integers(1, 20), SIZES, st.integers(0, 9))
def test_mixed_files_come_in_the_order_of_files_and_their_examples_in_any(lengths, batch, size, seed):
    [plain], many = file_samplers(lengths, batch, 1, seed), file_samplers(lengths, batch, size, seed, mixed=True)
    steps = range(plain.steps_per_epoch, 2 * plain.steps_per_epoch)
    order = np.concatenate([sampler.indices(step).indices for step in steps for sampler in many])
    in_files = np.concatenate([plain.indices(step).indices for step in steps])
    assert sorted(order) == list(range(sum(lengths)))
    files = [np.searchsorted(np.cumsum(lengths), each, side="right").tolist() for each in (order, in_files)]
    assert files[0] == files[1]


def test_with_files_of_the_local_batch_each_worker_reads_one_file_a_step_in_another_order_each_epoch():
    shares = [[s.indices(step).indices.tolist() for s in file_samplers([4] * 6, 8, 2, 1)] for step in range(6)]
    assert all(share == list(range(share[0], share[0] + 4)) for step in shares for share in step)
    # Literal, because a checkpoint of today must resume in the same order on any later version.
    assert [[share[0] // 4 for share in step] for step in shares] == [[3, 5], [2, 0], [1, 4], [0, 5], [3, 4], [2, 1]]


@pytest.mark.parametrize("ends", [(), (4, 9), (6, 4, 10)])
def test_ends_of_files_that_are_not_those_of_the_examples(ends):
    with pytest.raises(UsageError, match="file_ends"):
        FileSampler(10, 4, file_ends=ends)


@pytest.mark.parametrize("step", [1.5, 2**70, "1"])
@pytest.mark.parametrize("sampler", [Sampler(10, 2), StreamSampler(10, 2, lengths=(10,))], ids=["order", "streams"])
def test_what_is_no_step_is_refused(step, sampler):
    with pytest.raises(UsageError, match=r"step: got .*; expected a whole number"):
        sampler.indices(step)
