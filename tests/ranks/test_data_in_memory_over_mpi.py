"""A data set in the memory of real processes."""

import collections
import contextlib
import gc
import threading
import time
import weakref
from typing import cast

import numpy as np
import pytest

import jaxmpi
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import processes
from jaxmpi.comm.topology import gather_workers
from jaxmpi.config.data import Data
from jaxmpi.core.errors import AgreedError, UsageError
from jaxmpi.data import ArraySource, Loader, Sampler, memory_source, shuffle
from jaxmpi.data.feed import DeviceFeed
from jaxmpi.data.loader_pool import make_pool
from jaxmpi.data.shuffle import SEGMENT_BYTES, THREAD, keep_in_memory
from jaxmpi.runtime import progress

if not isinstance(processes(), MpiProcesses):
    pytest.skip("one rank has nobody to shuffle with", allow_module_level=True)
CONTROL = cast(MpiProcesses, processes())
WORKERS = gather_workers(1)
SIZE, RANK = CONTROL.size, CONTROL.rank
GROUPS = [d for d in range(1, SIZE + 1) if SIZE % d == 0]
N, LOCAL = 161, 5


class Shapes:
    """Example i is i, i % 7 + 1 px wide, labelled i, compressed as that many bytes; counts what is read."""

    name, classes = "shapes", N

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return N

    def encoded(self, index: int) -> tuple[bytes, int]:
        self.reads += 1
        return bytes([index]) * (index % 7 + 1), index

    def __getitem__(self, index: int):
        raise AssertionError("it has a compressed form")


def in_memory_feed(source, train: bool = True, **data):
    """A feed whose source is in memory."""
    options = Data(memory="partition", **data)
    memory, samplers = keep_in_memory(source, options, 3, LOCAL * SIZE, train, WORKERS)
    return DeviceFeed(memory.source, samplers, options, train, make_pool(options, memory.source, 2), memory=memory)


def from_files(source, train: bool = True, start: int = 0, stop: int | None = None):
    sampler = Sampler(len(source), LOCAL * SIZE, RANK, SIZE, 3, shuffle=train)
    with Loader(source, sampler, Data(), train, start, stop) as loader:
        return [(batch.image, batch.label, batch.weight) for batch in loader]


def numbered() -> ArraySource:
    images = np.arange(N, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 3, 3), np.uint8)
    return ArraySource(images, np.arange(N))


def assert_same(got, expected) -> None:
    assert len(got) == len(expected)
    for batch, (image, label, weight) in zip(got, expected, strict=True):
        assert np.array_equal(batch["image"], image)
        assert np.array_equal(batch["label"], label)
        assert np.array_equal(batch["weight"], weight)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("start", [0, 7])
def test_batches_equal_those_read_from_files(group, start):
    """Five epochs and a bit, from a step in the middle of an epoch too; the last step of an epoch is short."""
    per_epoch = -(-N // (LOCAL * SIZE))
    stop = start + 5 * per_epoch + 2
    feed = in_memory_feed(numbered(), group_size=group)
    assert_same(list(feed.batches(start, stop)), from_files(numbered(), start=start, stop=stop))
    assert feed.memory is not None
    epochs = (stop - 1) // per_epoch - start // per_epoch + 1
    assert len(feed.memory.shuffles) == (0 if group == 1 else epochs)
    is_empty = RANK >= (N - 1) % (LOCAL * SIZE) + 1  # this worker's share of an epoch's last step
    # Read from the source are what fills it, and what is made ahead into the next epoch before the first batch is used.
    assert feed.memory.source.read_again <= epochs * is_empty + 4 * LOCAL * (start > 0)


def test_partitions_take_the_memory_counted_beforehand_in_every_epoch(monkeypatch):
    """Two parts, and no cycles."""
    sizes, per_epoch = [], -(-N // (LOCAL * SIZE))
    whole = memory_source.Arena.__init__

    def noted(self, *args) -> None:
        whole(self, *args)
        sizes.append((weakref.ref(self.bytes), self.bytes.size))

    monkeypatch.setattr(memory_source.Arena, "__init__", noted)
    feed = in_memory_feed(numbered())
    assert feed.memory is not None
    most = 0
    gc.disable()
    try:
        for _ in feed.batches(0, 5 * per_epoch):
            most = max(most, sum(size for view, size in sizes if view() is not None))
    finally:
        gc.enable()
    part = sizes[0][1]
    assert part < most <= 2 * part * 1.1  # parts differ by a record


def test_a_rollback_reads_the_same_batches_again():
    """As with `on_nonfinite rollback`: the generator is closed in the middle and restarted at an earlier step."""
    feed, per_epoch = in_memory_feed(numbered()), -(-N // (LOCAL * SIZE))
    for start, used in ((2 * per_epoch, per_epoch + 1), (1, 2 * per_epoch), (4 * per_epoch, 3)):
        batches = feed.batches(start, None)
        got = [next(batches) for _ in range(used)]
        batches.close()
        assert_same(got, from_files(numbered(), start=start, stop=start + used))


def test_an_evaluation_reads_each_example_once_and_keeps_its_partition():
    feed = in_memory_feed(numbered(), train=False)
    for _ in range(2):
        assert_same(list(feed.batches()), from_files(numbered(), train=False))
    assert feed.memory is not None
    assert feed.memory.source.newest().records.tolist() == list(range(RANK, N, SIZE))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("period", "segment_bytes"), [(0, SEGMENT_BYTES), (1, 7), (3, SEGMENT_BYTES)])
def test_shuffles_conserve_every_record(group, period, segment_bytes, monkeypatch):
    monkeypatch.setattr(shuffle.plan_moves, "__defaults__", (segment_bytes,))
    source = Shapes()
    feed = in_memory_feed(source, group_size=group, shuffle_period=period)
    memory, sampler = feed.memory, feed.samplers[0]
    assert memory is not None
    per_epoch = sampler.steps_per_epoch
    memory.begin(0, 7 * per_epoch)
    for epoch in range(7):
        memory.reached(epoch * per_epoch)
        read = np.concatenate([sampler.indices(epoch * per_epoch + step).indices for step in range(per_epoch)])
        for index in read:
            blob, label = memory.source.record(int(index))
            assert (bytes(blob), label) == (bytes([index]) * (index % 7 + 1), index)
        gathered_values = CONTROL.allgather_object(" ".join(map(str, read)))
        assert collections.Counter(" ".join(gathered_values).split()) == collections.Counter(map(str, range(N)))
    memory.stop()
    held = [set(text.split()) for text in CONTROL.allgather_object(" ".join(map(str, memory.source.newest().records)))]
    for first in range(0, SIZE, group):
        members = held[first : first + group]
        assert sorted(r for records in members for r in records) == sorted(map(str, range(N)))
        assert max(map(len, members)) - min(map(len, members)) <= 1
    assert memory.source.read_again == 0
    assert source.reads == len(range(RANK % group * N // group, (RANK % group + 1) * N // group))
    shuffles = {0: 1, 1: 7, 3: 3}[period] if group > 1 else 0
    assert len(memory.shuffles) == shuffles


@pytest.mark.parametrize(("train", "copies"), [(True, 2), (False, 1)])
def test_the_ranks_of_a_host_need_memory_together(train, copies, monkeypatch):
    """Each alone would find room; all say the same, before they have read more than a sample."""
    monkeypatch.setattr(memory_source, "SAMPLE", 8)
    memory = in_memory_feed(numbered(), train).memory
    assert memory is not None
    part_bytes = N / SIZE * len(memory_source.array_to_bytes(numbered()[0][0], ""))
    monkeypatch.setattr(memory_source, "available_bytes", lambda: 1.2 * copies * 2 * part_bytes)
    said = rf"by {SIZE} ranks on rank 0's machine, which has 0\.0 GB left; take more workers"
    with pytest.raises(UsageError, match=said) as caught:
        memory.begin(0, None)
    assert set(CONTROL.allgather_object(str(caught.value))) == {str(caught.value)}
    monkeypatch.setattr(memory_source, "available_bytes", lambda: SIZE * copies * 2 * part_bytes)
    memory.begin(0, None)
    memory.close()


def test_groups_chosen_by_auto_fit_into_the_free_memory(monkeypatch):
    """All say the same; with the memory of one rank's whole copy, and with much."""
    all_bytes = N * len(memory_source.array_to_bytes(numbered()[0][0], ""))
    for left, expected in ((2 * SIZE * 2 * all_bytes, 1), (2 * SIZE * 2 * all_bytes - 1, GROUPS[1])):
        monkeypatch.setattr(shuffle, "available_bytes", lambda left=left: left)
        memory = in_memory_feed(numbered(), group_size="auto").memory
        assert memory is not None
        assert set(CONTROL.allgather_object(memory.sampler.parts)) == {expected}
        memory.close()


def gathered_values(values: np.ndarray) -> list[int]:
    return [int(v) for text in CONTROL.allgather_object(" ".join(map(str, values.tolist()))) for v in text.split()]


def test_a_custom_loop_reads_each_example_once_before_and_after_a_shuffle():
    """The first epoch is the trainer's; from a state it resumes with the same batches; shuffles report what moved."""
    progress.drain()
    with jaxmpi.InMemory(numbered(), LOCAL, group_size=0, seed=3) as data:
        epochs = [[data.batch() for _ in range(data.steps_per_epoch)] for _ in range(2)]
        data.shuffle()
        state = data.state()
        epochs.append([data.batch() for _ in range(data.steps_per_epoch)])
        shuffles, part = data.shuffles, data.held_bytes
    assert_same(epochs[0], from_files(numbered(), stop=len(epochs[0])))
    for epoch in epochs:
        seen = [np.asarray(batch["label"])[np.asarray(batch["weight"]) > 0] for batch in epoch]
        assert sorted(gathered_values(np.concatenate(seen))) == list(range(N))
    assert len(shuffles) == 2
    assert all(0 < moved_bytes <= part and seconds > 0 for seconds, moved_bytes in shuffles)
    names = [span.name for span in progress.drain() if span.track == "shuffle"]
    assert names == [f"shuffle {i}, {moved_bytes / 1e6:.3g} MB" for i, (_, moved_bytes) in enumerate(shuffles, 1)]
    with jaxmpi.InMemory(numbered(), LOCAL, seed=3, state=state) as data:
        assert data.group_size == SIZE
        for batch in epochs[2]:
            assert np.array_equal(batch["label"], data.batch()["label"])


def test_ranks_with_other_settings_of_data_in_memory_are_refused():
    with pytest.raises(UsageError, match="local_batch"):
        jaxmpi.InMemory(numbered(), LOCAL + RANK)


def shuffle_threads() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


class Together(Exception):
    """All ranks raise this at once."""


@pytest.mark.parametrize("error", [None, Together, AgreedError])
def test_a_run_leaves_no_thread_no_memory_and_no_communicator(error):
    before = shuffle_threads()
    feed = in_memory_feed(numbered())
    with contextlib.suppress(Together, AgreedError), feed.open_until_agreed(Together):
        next(feed.batches(0, 100))
        if error:
            raise error
    assert shuffle_threads() == before
    assert feed.memory is not None
    assert feed.memory.group is None
    memory = weakref.ref(feed.memory)
    del feed
    gc.collect()
    assert memory() is None


def test_a_failing_rank_does_not_wait_for_the_others():
    """Its thread ends once nobody needs it."""
    before = shuffle_threads()
    feed = in_memory_feed(numbered())
    with contextlib.suppress(ZeroDivisionError), feed.open_until_agreed(Together):
        next(feed.batches(0, 100))
        raise ZeroDivisionError
    memory = feed.memory
    assert memory is not None
    assert memory.group is not None
    deadline = time.monotonic() + 20
    while len(memory.shuffles) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    group = memory.group
    del feed, memory
    deadline = time.monotonic() + 5
    while shuffle_threads() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    assert shuffle_threads() == before
    group.Free()
