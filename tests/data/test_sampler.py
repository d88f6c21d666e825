from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmpi.core.errors import UsageError
from jaxmpi.data import FileSampler, Sampler

sizes = st.integers(1, 9)


def workers(size: int, **kwargs) -> list[Sampler]:
    return [Sampler(rank=rank, size=size, **kwargs) for rank in range(size)]


def interleaved(samplers: list[Sampler], step: int) -> list[int]:
    shares = [s.indices(step).indices for s in samplers]
    order = np.full(sum(map(len, shares)), -1)
    for rank, share in enumerate(shares):
        order[rank :: len(shares)] = share
    return order.tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_that_are_filled_have_one_length_and_the_weights_of_their_examples(size):
    samplers = [Sampler(11, 4, rank, size) for rank in range(size)]
    for step in range(samplers[0].steps_per_epoch):
        shares = [each.indices(step) for each in samplers]
        filled = [share.filled(each.local_batch) for share, each in zip(shares, samplers, strict=True)]
        for share, (indices, weights) in zip(shares, filled, strict=True):
            assert indices.shape == weights.shape == (samplers[0].local_batch,)
            assert indices[weights > 0].tolist() == share.indices.tolist()
        assert sum(weights.sum() for _, weights in filled) == shares[0].count
    with pytest.raises(UsageError, match=r"filled: got 0; expected \d or more"):
        samplers[0].indices(0).filled(0)


@given(st.integers(1, 60), st.integers(1, 20), sizes, st.integers(0, 2**32), st.booleans())
def test_an_epoch_covers_every_example_once(examples, batch, size, seed, shuffle):
    samplers = workers(size, examples=examples, effective_batch=batch, seed=seed, shuffle=shuffle)
    steps = range(samplers[0].steps_per_epoch)
    shares = [s.indices(step) for step in steps for s in samplers]
    seen = np.concatenate([share.indices for share in shares])
    assert sorted(seen.tolist()) == list(range(examples))
    for step in steps:
        lengths = [len(s.indices(step).indices) for s in samplers]
        assert max(lengths) - min(lengths) <= 1
        assert max(lengths) <= samplers[0].local_batch
        assert sum(lengths) == samplers[0].indices(step).count


@given(st.integers(1, 60), st.integers(1, 20), sizes, st.integers(0, 100), st.integers(0, 9))
def test_any_number_of_workers_sees_what_one_sees(examples, batch, size, step, seed):
    one = Sampler(examples, batch, seed=seed)
    many = workers(size, examples=examples, effective_batch=batch, seed=seed)
    assert interleaved(many, step) == one.indices(step).indices.tolist()


@given(st.integers(1, 60), st.integers(1, 20), sizes, st.integers(0, 50))
def test_a_step_number_is_all_a_resumed_run_needs(examples, batch, size, start):
    first = Sampler(examples, batch, 0, size, seed=3)
    run = [first.indices(step) for step in range(start + 4)]
    resumed = [Sampler(examples, batch, 0, size, seed=3).indices(start + k) for k in range(4)]
    for a, b in zip(run[start:], resumed, strict=True):
        assert a.epoch == b.epoch
        assert a.indices.tolist() == b.indices.tolist()


def test_order_depends_on_seed_and_epoch_and_is_fixed_for_ever():
    def order(seed, epoch):
        return Sampler(10, 10, seed=seed).indices(epoch).indices.tolist()

    # Literal, because a checkpoint of today must resume in the same order on any later version.
    assert order(0, 0) == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_numbers_out_of_range():
    with pytest.raises(UsageError, match="got 0 training examples"):
        Sampler(0, 4)
    with pytest.raises(UsageError, match="effective batch: got 0"):
        Sampler(4, 0)
    with pytest.raises(UsageError, match="rank 2 of 2"):
        Sampler(4, 4, rank=2, size=2)
    with pytest.raises(IndexError, match="step 1 of 1"):
        Sampler(4, 4, shuffle=False).indices(1)


@pytest.mark.parametrize("seed", [-1, 2**64, 2**80, 0.5, "1"])
def test_a_seed_that_is_no_number_of_64_bits_is_refused(seed):
    with pytest.raises(UsageError, match="seed"):
        Sampler(10, 4, seed=seed)


def test_numbers_of_numpy_will_do():
    sizes: Any = map(np.int64, (10, 4, 1, 2))
    seed: Any = np.uint64(2**64 - 1)
    step: Any = np.int64(4)
    plain, numpy = Sampler(10, 4, 1, 2, seed=2**64 - 1), Sampler(*sizes, seed=seed)
    assert plain == numpy
    np.testing.assert_array_equal(plain.indices(4).indices, numpy.indices(step).indices)
    assert type(numpy.indices(step).epoch) is int


# ---------------------------------------------------------------- whole files

lengths_of_files = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


def file_workers(lengths: list[int], batch: int, size: int, seed: int) -> list[FileSampler]:
    ends = tuple(np.cumsum(lengths).tolist())
    return [FileSampler(ends[-1], batch, rank, size, seed, file_ends=ends) for rank in range(size)]


@given(lengths_of_files, st.integers(1, 20), sizes, st.integers(0, 9), st.integers(0, 3))
def test_an_epoch_of_whole_files_reads_each_once_in_sequence_on_any_number_of_workers(
    lengths, batch, size, seed, epoch
):
    one, many = file_workers(lengths, batch, 1, seed)[0], file_workers(lengths, batch, size, seed)
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
    ends = np.cumsum(lengths)
    files = np.searchsorted(ends, order, side="right")
    assert np.count_nonzero(np.diff(files)) == len(set(files.tolist())) - 1  # none is come back to
    assert np.all((np.diff(order) == 1) | (np.diff(files) != 0))


@given(lengths_of_files, st.integers(1, 20), sizes, st.integers(0, 9))
def test_mixed_files_come_in_the_order_of_files_and_their_examples_in_any(lengths, batch, size, seed):
    """From any step, on any number of workers."""
    plain, ends = file_workers(lengths, batch, 1, seed)[0], tuple(np.cumsum(lengths).tolist())
    many = [FileSampler(ends[-1], batch, rank, size, seed, file_ends=ends, mixed=True) for rank in range(size)]
    steps = range(plain.steps_per_epoch, 2 * plain.steps_per_epoch)
    order = np.concatenate([sampler.indices(step).indices for step in steps for sampler in many])
    in_files = np.concatenate([plain.indices(step).indices for step in steps])
    assert sorted(order) == list(range(ends[-1]))
    files = [np.searchsorted(ends, each, side="right").tolist() for each in (order, in_files)]
    assert files[0] == files[1]


def test_with_files_of_the_local_batch_each_worker_reads_one_file_a_step_in_another_order_each_epoch():
    shares = [[s.indices(step).indices.tolist() for s in file_workers([4] * 6, 8, 2, 1)] for step in range(6)]
    files = [[share[0] // 4 for share in step] for step in shares]
    assert all(share == list(range(share[0], share[0] + 4)) for step in shares for share in step)
    # Literal, because a checkpoint of today must resume in the same order on any later version.
    assert files == [[3, 5], [2, 0], [1, 4], [0, 5], [3, 4], [2, 1]]


def test_ends_of_files_that_are_not_those_of_the_examples():
    for ends in ((), (4, 9), (6, 4, 10)):
        with pytest.raises(UsageError, match="file_ends: "):
            FileSampler(10, 4, file_ends=ends)
