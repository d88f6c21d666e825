"""Records in memory: room for them, how they are loaded and read, and what goes when nobody reads it."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
from PIL import Image

from jaxmpi.config.data import Data
from jaxmpi.core import shared_memory
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, CorruptExample, Loader, Sampler, memory_source, open_source
from jaxmpi.data.memory_source import Arena, MemorySource
from jaxmpi.data.shuffle import new_arena, plan_moves


def numbered(n: int) -> ArraySource:
    return ArraySource(
        np.arange(n, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 3, 1), np.uint8), np.arange(n)
    )


class Compressed:
    """Example i is i bytes, or what is taken for an image; some cannot be read."""

    name, classes = "compressed", 100

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


def loaded(n: int, records=None, **options) -> MemorySource:
    source = MemorySource(Compressed(n, **options), Data())
    source.load(np.arange(n) if records is None else records)
    return source


class TestRoom:
    def test_a_part_is_read_into_the_memory_in_which_it_stays(self, monkeypatch):
        """On a machine with room for the part and a fifth of it, though the estimate is too small."""
        taken, whole = [], memory_source.map_pages
        monkeypatch.setattr(memory_source, "map_pages", lambda size: taken.append(size) or whole(size // 3))
        monkeypatch.setattr(memory_source, "available_bytes", lambda: 1500 - sum(taken))
        monkeypatch.setattr(memory_source, "BUFFER_BYTES", 100)
        source = loaded(50)
        assert source.newest().bytes.size == 1225 == taken[0]
        assert all(bytes(source.record(i)[0]) == bytes([i]) * i for i in range(50))

    def test_what_others_took_since_is_seen_before_a_shuffle(self, monkeypatch):
        source, stays = loaded(9), np.zeros(9, int)
        monkeypatch.setattr(memory_source, "available_bytes", lambda: 35)
        with pytest.raises(UsageError, match=r"data\.memory"):
            new_arena(source, plan_moves(np.arange(9), stays, stays, source.lengths, 0, 1))


class TestAvailable:
    OWN = "/sys/fs/cgroup/job_7/task_0"

    @pytest.fixture
    def files(self, monkeypatch):
        """Files of the kernel: 8 GB of the machine are available, and the task's own group has no limit."""
        files = {"/proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:   8000000 kB\n"}
        files |= {"/proc/self/cgroup": "4:memory:/x\n0::/job_7/task_0\n", f"{self.OWN}/memory.max": "max\n"}
        monkeypatch.setattr(shared_memory.Path, "read_text", lambda path: files.get(str(path), ""))
        return files

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


class TestGroups:
    def test_sizes_divide_the_workers_and_cut_no_process_of_several(self):
        assert [memory_source.check_group(group, 8) for group in (0, 1, 4)] == [8, 1, 4]
        assert [memory_source.check_group(group, 8, per_process=4) for group in (0, 1, 2, 4, 8)] == [8, 1, 2, 4, 8]
        for group, workers, each, fits in (
            (6, 12, 4, "1, 2, 4, 12"),
            (3, 8, 1, "1, 2, 4, 8"),
            (16, 8, 1, "1, 2, 4, 8"),
        ):
            with pytest.raises(UsageError, match=rf"data\.group_size: got {group} .*{fits}"):
                memory_source.check_group(group, workers, each)

    def test_the_smallest_that_fits_is_chosen(self):
        """Eight ranks on two hosts, 8 GB of records and buffers of 64 MiB a rank; half of what is left is taken."""

        def chosen(left_bytes: float) -> int:
            left = np.array([9e12] * 4 + [left_bytes] * 4)
            return memory_source.smallest_group(8e9, left, (0, 0, 0, 0, 1, 1, 1, 1))

        assert [chosen(left) for left in (2 * 33e9, 2 * 32e9, 2 * 17e9, 2 * 16e9, 2 * 9e9, 1e9)] == [1, 4, 4, 8, 8, 8]


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

    def test_a_corrupt_record_stops_or_is_noted(self):
        with pytest.raises(CorruptExample, match=r"file4 .* cut short"):
            loaded(9, bad=(4,))
        source = MemorySource(Compressed(9, (4,)), Data(on_error="skip"))
        source.load(np.arange(9))
        assert source.lengths.tolist() == [0, 1, 2, 3, 0, 5, 6, 7, 8]
        with pytest.raises(CorruptExample, match=r"compressed\[4\]"):
            source.record(4)

    @pytest.mark.parametrize("label", [-1, 100, 2.0, [1]])
    def test_labels_out_of_range_are_named(self, label):
        with pytest.raises(UsageError, match=r"compressed\[0\]: got label .* 0 <= label < 100"):
            loaded(3, label=label)


class TestShuffles:
    def test_a_record_on_its_way_is_waited_for(self):
        source = loaded(9, np.arange(4))
        source.promise()
        got = []
        reader = threading.Thread(target=lambda: got.append(bytes(source.record(7)[0])))
        reader.start()
        time.sleep(0.02)
        assert got == []
        assert bytes(source.record(3)[0]) == b"\3\3\3"  # others go on
        source.lengths[7] = 7
        arena = Arena(np.array([7]), source.lengths)
        arena.bytes[:] = 7
        source.take(arena, promised=True)
        reader.join(5)
        assert got == [b"\7" * 7]
        assert bytes(source.record(8)[0]) == b"\10" * 8  # neither here nor on its way

    def test_a_loader_that_waits_for_a_record_is_not_stalled(self):
        data = Data(stall_timeout_s=0.4, loaders=1, prefetch=1)
        source = MemorySource(numbered(8), data)
        source.load(np.arange(4))
        source.promise()

        def shuffle() -> None:
            time.sleep(1.0)
            source.lengths[4:] = source.lengths[0]
            arena = Arena(np.arange(4, 8), source.lengths)
            arena.bytes[:] = source.newest().bytes
            source.take(arena, promised=True)

        threading.Thread(target=shuffle, daemon=True).start()
        with Loader(source, Sampler(8, 4, shuffle=False), data, train=False) as loader:
            assert [batch.count for batch in loader] == [4, 4]
        assert source.read_again == 0

    def test_memory_that_nobody_reads_any_more_is_used_again(self, monkeypatch):
        source = loaded(90, np.arange(80))
        address, size_bytes = source.newest().bytes.ctypes.data, source.newest().bytes.size
        view = source.newest().bytes[5:7]
        source.take(Arena(np.arange(9), source.lengths))
        assert source.forget() is None  # a view of it is left
        del view
        source.load(np.arange(80))
        address = source.newest().bytes.ctypes.data
        source.take(Arena(np.arange(9), source.lengths))
        monkeypatch.setattr(memory_source, "available_bytes", lambda: size_bytes)  # the spare pages are counted, too
        stays = np.zeros(78, int)
        arena = new_arena(source, plan_moves(np.arange(78), stays, stays, source.lengths, 0, 1))
        assert (arena.bytes.ctypes.data, arena.bytes.size) == (address, sum(range(78)))
        source.lengths[79] = len(arena.pages)
        assert Arena(np.arange(80), source.lengths, arena.pages).bytes.size == len(arena.pages) + sum(range(79))

    @pytest.mark.parametrize("kind", ["a damaged image is skipped", "a share is empty"])
    def test_a_loader_keeps_nothing_of_a_part_that_is_forgotten(self, kind, tmp_path):
        """Were it to wait for a collection of cycles, a run would keep part after part."""
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
                end_s = time.monotonic() + 10  # a batch that is being made ahead has a record for a moment
                while part() is not None and time.monotonic() < end_s:
                    time.sleep(0.01)
                assert part() is None
                assert loader.skipped == (kind == "a damaged image is skipped")
        finally:
            gc.enable()
