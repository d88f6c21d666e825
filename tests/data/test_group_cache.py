"""Who holds which record when, and what moves: by properties, all members of a group in one process."""

import gc
import itertools
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

from jaxmpi.config.data import Data, shuffle_rhythm
from jaxmpi.core import shared_memory
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, CorruptExample, Loader, Sampler, group_cache, open_source
from jaxmpi.data.group_cache import Arena, GroupSampler, MemorySource

GROUPS = st.tuples(st.integers(1, 60), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))


def sampler(n: int, parts: int, groups: int = 1, period: int = 1, rank: int = 0, batch: int = 1) -> GroupSampler:
    size = parts * groups
    return GroupSampler(n, batch * size, rank, size, seed=5, parts=parts, period=period)


def one_epoch(n: int, parts: int, groups: int, period: int, epoch: int) -> list[np.ndarray]:
    """What each worker reads in an epoch."""
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
        places = group_cache.members(group[0], 2 * parts * group[2], parts)
        holders = group_cache.holders_by_place(whose.places(whose.moved(epoch)), places)
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
        holders = group_cache.holders_by_place(whose.places(whose.moved(epoch)), group_cache.members(n, batch, parts))
        read = []
        for rank, mine in enumerate(samplers):
            for step in range(epoch * mine.steps_per_epoch, (epoch + 1) * mine.steps_per_epoch):
                share = mine.indices(step).indices
                assert (holders[share] == rank % parts).all()
                read.extend(share)
        assert sorted(read) == list(range(n))

    def test_between_shuffles_members_permute_what_they_hold(self):
        whose = sampler(400, parts=4, period=3)
        orders = [whose.places(epoch) for epoch in range(6)]
        assert len({order.tobytes() for order in orders}) == 6
        for epoch, order in enumerate(orders):
            begun = orders[epoch // 3 * 3]
            for member in range(4):
                assert set(order[member::4]) == set(begun[member::4])
        assert set(orders[3][::4]) != set(orders[0][::4])
        never = sampler(400, parts=4, period=0)
        assert [never.moved(epoch) for epoch in range(9)] == [0] * 9

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

        With uniform permutations sum (count - E / S)^2 / (E / S) tends to n / (n - 1) times chi-square with (n - 1)
        (S - 1) degrees of freedom: every epoch adds independent rows and columns of fixed sums, covariance
        (1[i=j] - 1/n) n / (n - 1) x (1[a=b] - 1/S) / S. Bounds: one in a million on either side.
        """
        n, parts, shuffles = 60, 4, 2000
        whose = sampler(n, parts, period=period)
        counts = np.zeros((n, parts))
        for epoch in range(0, shuffles * period, period):
            counts[np.arange(n), group_cache.holders_by_place(whose.places(epoch), np.arange(n) % parts)] += 1
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
    begins = group_cache.slices(n, parts)
    arenas = []
    for part in range(parts):
        arena = Arena(np.arange(begins[part], begins[part + 1]), lengths)
        for record in range(begins[part], begins[part + 1]):
            arena[record][:] = content(record, lengths)
        arenas.append(arena)
    return arenas


def shuffle(
    arenas: list[Arena], order: np.ndarray, before: np.ndarray, after: np.ndarray, lengths: np.ndarray, segment: int
) -> tuple[list[Arena], list[list[group_cache.Move]]]:
    """Every member's new arena, and the moves; bytes are carried as MPI_Alltoallv carries them."""
    parts = len(arenas)
    planned = [list(group_cache.moves(order, before, after, lengths, me, parts, segment)) for me in range(parts)]
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
        arenas, before = held_in_slices(n, parts, lengths), group_cache.holders_by_slice(n, parts)
        whose_place = group_cache.members(n, 6 * parts * each, parts * each) // each
        for epoch in range(3):
            order = whose.places(epoch) if n else np.empty(0, int)
            arenas, planned = shuffle(arenas, order, before, whose_place, lengths, segment)
            before = group_cache.holders_by_place(order, whose_place)
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

    @given(st.integers(1, 300), st.integers(1, 9))
    def test_slices_are_equal_up_to_rounding(self, n, parts):
        sizes = np.bincount(group_cache.holders_by_slice(n, parts), minlength=parts)
        assert sizes.max() - sizes.min() <= 1
        assert np.diff(group_cache.slices(n, parts)).tolist() == sizes.tolist()

    @pytest.mark.parametrize("parts", [1, 3, 64])
    def test_no_count_passes_what_a_c_int_holds(self, parts):
        """70 records of up to 1 GiB, all big ones at one member: nothing is allocated, only counted."""
        lengths = np.where(np.arange(70) < 40, group_cache.MOST_BYTES, 1000)
        order = np.argsort(np.random.default_rng(0).random(70))
        total = np.zeros((parts, parts), np.int64)
        numbers = []
        for me in range(parts):
            moves = list(
                group_cache.moves(
                    order, group_cache.holders_by_slice(70, parts), np.arange(70) % parts, lengths, me, parts
                )
            )
            numbers.append(len(moves))
            for move in moves:
                assert max(move.sent_bytes.sum(), move.received_bytes.sum()) < 2**31
                total[me] += move.sent_bytes
        assert set(numbers) == {numbers[0]}
        assert total.sum() == lengths.sum()

    def test_a_record_stays_one_piece(self):
        arena = Arena(np.array([5, 2, 9]), np.arange(10))
        assert [arena[r].size for r in (5, 2, 9)] == [5, 2, 9]
        assert [r in arena for r in (1, 2, 5, 9, 10)] == [False, True, True, True, False]
        assert arena.bytes.size == 16


# ---------------------------------------------------------------- the source


def numbered(n: int) -> ArraySource:
    return ArraySource(
        np.arange(n, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 3, 1), np.uint8), np.arange(n)
    )


class Damaged:
    """Compressed, or what is taken for it; some examples cannot be read."""

    name, classes = "damaged", 100

    def __init__(self, n: int, bad: tuple[int, ...] = (), label: object = 3) -> None:
        self.n, self.bad, self.label = n, bad, label

    def __len__(self) -> int:
        return self.n

    def encoded(self, index: int):
        if index in self.bad:
            raise CorruptExample(f"file{index}", index, "cut short")
        return bytes([index]) * index, self.label

    def __getitem__(self, index: int):
        raise AssertionError("it has a compressed form")


class TestRoom:
    def test_more_than_the_machine_has_is_refused(self):
        assert 2**20 < shared_memory.available_bytes() < 2**50
        with pytest.raises(UsageError, match=r"1,125,900\.0 GB more are needed on this machine, .* left; .*group_size"):
            group_cache.check_alone(2**50)

    def test_ranks_of_a_host_need_it_together(self):
        hosts = (0, 1, 0, 1)
        rows = np.array([[2e9, 5e9], [2e9, 4e9], [3e9, 5e9], [2e9, 4e9]])
        group_cache.check_room(rows, hosts)
        rows[3, 0] = 3e9
        said = r"5\.0 GB more are needed by 2 ranks on rank 1's machine, which has 4\.0 GB left"
        with pytest.raises(UsageError, match=said):
            group_cache.check_room(rows, hosts)

    def test_the_second_part_of_a_shuffle_is_counted(self, monkeypatch):
        monkeypatch.setattr(group_cache, "available_bytes", lambda: 7)
        assert group_cache.room(1000, 100).tolist() == [1900, 7]
        assert group_cache.room(1000, 100, copies=2).tolist() == [3900, 7]
        assert group_cache.room(10 * group_cache.CHUNK_BYTES, 0, copies=2).tolist() == [22 * group_cache.CHUNK_BYTES, 7]

    def test_all_is_asked_for_once_after_a_sample(self, monkeypatch):
        monkeypatch.setattr(group_cache, "SAMPLE", 64)
        source, asked, read = MemorySource(Damaged(200), Data()), [], []
        monkeypatch.setattr(source.inner, "encoded", lambda i: read.append(i) or (bytes(i), 3))

        def check_part(part_bytes: float, held_bytes: float) -> None:
            asked.append((part_bytes, held_bytes, len(read)))

        source.load(np.arange(200), check_part)
        [(part_bytes, held_bytes, reads)] = asked
        assert part_bytes == pytest.approx(sum(range(200)), rel=0.15)
        assert held_bytes == pytest.approx(64 * part_bytes / 200)
        assert 64 <= reads < 200
        assert sorted(read) == list(range(200))

    def test_a_worker_without_records_asks_too(self):
        asked = []
        MemorySource(Damaged(9), Data()).load(np.arange(0), lambda *sizes: asked.append(sizes))
        assert asked == [(0, 0)]

    def test_chunks_that_wait_are_not_counted_twice(self, monkeypatch):
        """On a machine with room for the part and a fifth of it."""
        taken, whole = [], group_cache._pages
        monkeypatch.setattr(group_cache, "_pages", lambda size_bytes: taken.append(size_bytes) or whole(size_bytes))
        monkeypatch.setattr(group_cache, "available_bytes", lambda: 1500 - sum(taken))
        monkeypatch.setattr(group_cache, "CHUNK_BYTES", 100)
        source = MemorySource(Damaged(50), Data())
        source.load(np.arange(50))
        assert source.newest().bytes.size == 1225

    def test_what_others_took_since_is_seen_before_a_shuffle(self, monkeypatch):
        source = MemorySource(Damaged(9), Data())
        source.load(np.arange(9))
        monkeypatch.setattr(group_cache, "available_bytes", lambda: 35)
        with pytest.raises(UsageError, match="GB more are needed"):
            group_cache.shuffled(source, np.arange(9), np.zeros(9, int), np.zeros(9, int), 0, 1)


class TestAvailable:
    OWN = "/sys/fs/cgroup/job_7/task_0"

    @pytest.fixture
    def files(self, monkeypatch):
        """What the kernel says: 8 GB of the machine are available, and the task's own group has no limit."""
        files = {"/proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:   8000000 kB\n"}
        files |= {"/proc/self/cgroup": "4:memory:/x\n0::/job_7/task_0\n", f"{self.OWN}/memory.max": "max\n"}
        monkeypatch.setattr(shared_memory, "read", lambda path: files.get(str(path), ""), raising=False)
        return files

    def test_the_machine_where_no_group_has_a_limit(self, files):
        assert shared_memory.available_bytes() == 8_000_000 << 10

    @pytest.mark.parametrize("group", ["/job_7", "/job_7/task_0", ""])
    def test_the_limit_of_any_group_above(self, files, group):
        """Files in the page cache go when memory is needed."""
        place = f"/sys/fs/cgroup{group}"
        files |= {f"{place}/memory.max": "2000000000\n", f"{place}/memory.current": "1900000000\n"}
        assert shared_memory.available_bytes() == 100_000_000
        files[f"{place}/memory.stat"] = "anon 500\nfile 700\ninactive_file 400000000\nactive_file 300000000\n"
        assert shared_memory.available_bytes() == 800_000_000

    @pytest.mark.parametrize("group", ["/x", ""])
    def test_the_limit_of_a_group_of_version_1(self, files, group):
        """A container sees the root of the mount, whatever path the machine gives its group."""
        place = f"/sys/fs/cgroup/memory{group}"
        files |= {f"{place}/memory.limit_in_bytes": "2000000000\n", f"{place}/memory.usage_in_bytes": "1900000000\n"}
        files[f"{place}/memory.stat"] = "active_file 1\ntotal_inactive_file 400000000\ntotal_active_file 300000000\n"
        assert shared_memory.available_bytes() == 800_000_000

    def test_a_system_that_does_not_say(self, monkeypatch):
        monkeypatch.setattr(shared_memory, "read", lambda path: "", raising=False)
        assert shared_memory.available_bytes() == sys.maxsize


class TestSource:
    def test_arrays_come_back_as_they_were(self):
        source = MemorySource(numbered(9), Data())
        source.load(np.array([7, 1, 4]))
        assert source.encoded is None
        for i in (1, 4, 7):
            assert np.array_equal(source[i][0], numbered(9)[i][0])
            assert source[i][1] == i
        assert source.read_again == 0
        assert source[2][1] == 2  # not here, and nothing comes: from the source
        assert source.read_again == 1

    @pytest.mark.parametrize("dtype", ["u1", "?", "<i8", ">f4", "f2", "c8"])
    @pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
    def test_arrays_of_any_type(self, dtype, shape):
        array = np.arange(24).astype(dtype)[: int(np.prod(shape))].reshape(shape)
        again = group_cache.array_of(memoryview(group_cache.bytes_of(array, "x")))
        assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert not again.flags.writeable

    @pytest.mark.parametrize("array", [np.array([None]), np.array(["a"])], ids=["objects", "text"])
    def test_what_is_no_array_of_numbers_is_refused(self, array):
        with pytest.raises(UsageError, match=r"x\[3\]: got .*expected numbers to keep in memory"):
            group_cache.bytes_of(array, "x[3]")

    def test_many_threads_read_arrays(self):
        source = MemorySource(numbered(40), Data())
        source.load(np.arange(40))
        with ThreadPoolExecutor(8) as pool:
            for got, i in zip(pool.map(lambda i: source[i % 40], range(4000)), range(4000), strict=True):
                assert got[0][0, 0, 0] == got[1] == i % 40

    def test_compressed_records_are_views(self):
        source = MemorySource(Damaged(9), Data())
        source.load(np.arange(9))
        blob, label = source.record(5)
        assert (bytes(blob), label) == (b"\5" * 5, 3)
        assert isinstance(blob, memoryview)

    def test_many_chunks(self, monkeypatch):
        monkeypatch.setattr(group_cache, "CHUNK_BYTES", 10)
        source = MemorySource(Damaged(50), Data())
        source.load(np.arange(49, -1, -1))
        assert [bytes(source.record(i)[0]) for i in range(50)] == [bytes([i]) * i for i in range(50)]

    def test_a_corrupt_record_stops_or_is_noted(self):
        with pytest.raises(CorruptExample, match=r"file4 .* cut short"):
            MemorySource(Damaged(9, (4,)), Data()).load(np.arange(9))
        source = MemorySource(Damaged(9, (4,)), Data(on_error="skip"))
        source.load(np.arange(9))
        assert source.lengths.tolist() == [0, 1, 2, 3, 0, 5, 6, 7, 8]
        with pytest.raises(CorruptExample, match="when it was loaded"):
            source.record(4)

    def test_skipped_records_are_counted_by_the_loader(self):
        class Bad(ArraySource):
            def __getitem__(self, index):
                if index == 2:
                    raise CorruptExample("x", 2, "cut short")
                return super().__getitem__(index)

        inner = Bad(numbered(6).images, np.arange(6))
        source = MemorySource(inner, Data(on_error="skip"))
        source.load(np.arange(6))
        with Loader(source, Sampler(6, 3), Data(on_error="skip"), train=True, stop_step=4) as loader:
            weights = [batch.weight for batch in loader]
        assert loader.skipped == 2
        assert sum(float((w == 0).sum()) for w in weights) == 2

    @pytest.mark.parametrize("label", [-1, 100, 2.0, [1]])
    def test_labels_out_of_range_are_named(self, label):
        with pytest.raises(UsageError, match=r"damaged\[0\]: got label .*expected a whole number, 0 <= label < 100"):
            MemorySource(Damaged(3, label=label), Data()).load(np.arange(3))

    def test_a_record_on_its_way_is_waited_for(self):
        source = MemorySource(Damaged(9), Data())
        source.load(np.arange(4))
        source.promise()
        got = []
        reader = threading.Thread(target=lambda: got.append(bytes(source.record(7)[0])))
        reader.start()
        time.sleep(0.02)
        assert got == []  # which records come is not known yet
        assert bytes(source.record(3)[0]) == b"\3\3\3"  # others go on
        source.lengths[7] = 7
        arena = Arena(np.array([7]), source.lengths)
        source.expect(arena.records)
        assert bytes(source.record(8)[0]) == b"\10" * 8  # neither here nor on its way
        assert reader.is_alive()
        arena[7][:] = 7
        source.take(arena)
        reader.join(5)
        assert got == [b"\7" * 7]

    def test_a_loader_that_waits_for_a_record_is_not_stalled(self):
        data = Data(stall_timeout_s=2, loaders=1, prefetch=1)
        source = MemorySource(numbered(8), data)
        source.load(np.arange(4))
        source.promise()

        def shuffle() -> None:
            time.sleep(2.5)
            source.expect(np.arange(4, 8))
            time.sleep(2.5)
            for i in range(4, 8):
                source.lengths[i] = source.lengths[0]
            arena = Arena(np.arange(4, 8), source.lengths)
            arena.bytes[:] = source.newest().bytes
            source.take(arena)

        threading.Thread(target=shuffle, daemon=True).start()
        with Loader(source, Sampler(8, 4, shuffle=False), data, train=False) as loader:
            assert [batch.count for batch in loader] == [4, 4]
        assert source.read_again == 0

    def test_a_record_that_has_come_is_awaited_no_more(self):
        source = MemorySource(Damaged(9), Data())
        source.load(np.arange(4))
        came_s = source.awaited_s(7)
        assert came_s == source.awaited_s(3) <= time.monotonic()
        source.promise()
        assert source.awaited_s(7) > came_s == source.awaited_s(3)
        source.expect(np.array([7]))
        told_s = source.awaited_s(3)
        assert source.awaited_s(7) > told_s == source.awaited_s(8) > came_s

    def test_memory_that_nobody_reads_any_more_is_used_again(self, monkeypatch):
        source = MemorySource(Damaged(90), Data())
        source.load(np.arange(80))
        address, size_bytes = source.newest().bytes.ctypes.data, source.newest().bytes.size
        view = source.newest().bytes[5:7]
        assert source.forget() is None  # the newest stays
        source.take(Arena(np.arange(9), source.lengths))
        assert source.forget() is None  # a view of it is left
        del view
        source.take(Arena(np.arange(9), source.lengths))
        source.load(np.arange(80))
        address = source.newest().bytes.ctypes.data
        source.take(Arena(np.arange(9), source.lengths))
        spare = source.forget()
        assert spare is not None
        arena = Arena(np.arange(78), source.lengths, spare)
        assert (arena.bytes.ctypes.data, arena.bytes.size) == (address, sum(range(78)))
        monkeypatch.setattr(group_cache, "available_bytes", lambda: size_bytes)
        stays = np.zeros(80, int)
        group_cache.shuffled(source, np.arange(80), stays, stays, 0, 1, spare)  # counted as there already
        source.lengths[79] = len(spare)
        assert Arena(np.arange(80), source.lengths, spare).bytes.size == len(spare) + sum(range(79))

    @pytest.mark.parametrize("kind", ["a damaged image is skipped", "a share is empty"])
    def test_a_loader_keeps_nothing_of_a_part_that_is_forgotten(self, kind, tmp_path):
        """Were it to wait for a collection of cycles, a run would hold part after part."""
        inner = numbered(5)
        if kind == "a damaged image is skipped":
            for i in range(5):
                path = tmp_path / "train" / "one" / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.random.default_rng(i).integers(0, 256, (40, 40, 3), np.uint8)).save(path)
            path.write_bytes(path.read_bytes()[:-500])
            inner = open_source(Data("imagefolder", dir=str(tmp_path)), "train")
        data = Data(on_error="skip", loader="threads")
        source = MemorySource(inner, data)
        source.load(np.arange(5))
        gc.collect()
        gc.disable()
        try:
            with Loader(source, Sampler(5, 4, 1, 2), data, train=True) as loader:
                for _ in range(3):
                    next(loader)
                part = weakref.ref(source.newest().bytes)
                source.take(Arena(np.arange(2), source.lengths))
                source.forget()
                end_s = time.monotonic() + 10  # a batch that is being made ahead holds a record for a moment
                while part() is not None and time.monotonic() < end_s:
                    time.sleep(0.01)
                assert part() is None
                assert loader.skipped == (kind == "a damaged image is skipped")
        finally:
            gc.enable()

    def test_memory_goes_back_with_the_last_view(self):
        source = MemorySource(Damaged(9), Data())
        source.load(np.arange(9))
        pages = weakref.ref(source.newest().pages)
        view = source.record(3)[0]
        source.take(Arena(np.array([1]), source.lengths))
        assert bytes(source.record(3)[0]) == b"\3\3\3"  # while records are shuffled the old ones are there
        source.forget()
        gc.collect()
        assert bytes(view) == b"\3\3\3"
        assert pages() is not None
        del view
        gc.collect()
        assert pages() is None


@pytest.mark.parametrize(("group", "workers", "expected"), [(0, 8, 8), (1, 8, 1), (4, 8, 4)])
def test_group_sizes(group, workers, expected):
    assert group_cache.check_group(group, workers) == expected


def test_processes_of_several_workers_are_not_cut():
    assert [group_cache.check_group(group, 8, each=4) for group in (0, 1, 2, 4, 8)] == [8, 1, 2, 4, 8]
    with pytest.raises(UsageError, match=r"got 6 with 12 workers, 4 a process; expected one of 1, 2, 4, 12"):
        group_cache.check_group(6, 12, each=4)


def test_the_smallest_group_that_fits_is_chosen():
    """Eight ranks on two hosts, 8 GB of records and two chunks of 64 MiB a rank; half of what is left is taken."""
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)

    def chosen(left_bytes: float, copies: float = 2.0) -> int:
        return group_cache.smallest_group(8e9, copies, np.array([9e12] * 4 + [left_bytes] * 4), hosts)

    assert [chosen(left) for left in (2 * 33e9, 2 * 32e9, 2 * 17e9, 2 * 16e9, 2 * 9e9, 1e9)] == [1, 4, 4, 8, 8, 8]
    assert chosen(2 * 18e9, copies=1.1) == 2


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
    assert shuffle_rhythm(period, 24, 60) == expected


@pytest.mark.parametrize("period", ["2", "10%", "soon", -1])
def test_a_period_that_is_none(period):
    with pytest.raises(UsageError, match=rf"data.shuffle_period: got '?{period}'?; expected epochs, such as 2, or"):
        Data(shuffle_period=period)


@pytest.mark.parametrize("size", [-1, "some"])
def test_a_group_size_that_is_none(size):
    with pytest.raises(UsageError, match=rf"data.group_size: got '?{size}'?; expected a number .*, or auto"):
        Data(group_size=size)


@pytest.mark.parametrize("group", [3, 16])
def test_a_group_that_does_not_divide(group):
    with pytest.raises(UsageError, match=rf"data.group_size: got {group} with 8 workers; expected one of 1, 2, 4, 8"):
        group_cache.check_group(group, 8)
