"""Records in memory: an arena, how it is loaded and read, and what goes when nobody reads it."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
from PIL import Image

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, CorruptExample, Loader, Sampler, memory_source, open_source
from jaxmpi.data.memory_source import Arena, MemorySource


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
    def test_all_is_asked_for_once_after_a_sample(self, monkeypatch):
        monkeypatch.setattr(memory_source, "SAMPLE", 64)
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
        taken, whole = [], memory_source._pages
        monkeypatch.setattr(memory_source, "_pages", lambda size_bytes: taken.append(size_bytes) or whole(size_bytes))
        monkeypatch.setattr(memory_source, "available_bytes", lambda: 1500 - sum(taken))
        monkeypatch.setattr(memory_source, "CHUNK_BYTES", 100)
        source = MemorySource(Damaged(50), Data())
        source.load(np.arange(50))
        assert source.newest().bytes.size == 1225

    def test_what_others_took_since_is_seen_before_a_shuffle(self, monkeypatch):
        source = MemorySource(Damaged(9), Data())
        source.load(np.arange(9))
        monkeypatch.setattr(memory_source, "available_bytes", lambda: 35)
        with pytest.raises(UsageError, match="GB more are needed"):
            memory_source.shuffled(source, np.arange(9), np.zeros(9, int), np.zeros(9, int), 0, 1)


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

    @pytest.mark.parametrize("dtype", ["u1", "?", ">f4", "c8"])
    @pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
    def test_arrays_of_any_type(self, dtype, shape):
        array = np.arange(24).astype(dtype)[: int(np.prod(shape))].reshape(shape)
        again = memory_source.array_of(memoryview(memory_source.bytes_of(array, "x")))
        assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert not again.flags.writeable

    @pytest.mark.parametrize("array", [np.array([None]), np.array(["a"])], ids=["objects", "text"])
    def test_what_is_no_array_of_numbers_is_refused(self, array):
        with pytest.raises(UsageError, match=r"x\[3\]: got .*expected numbers to keep in memory"):
            memory_source.bytes_of(array, "x[3]")

    def test_compressed_records_are_views(self):
        source = MemorySource(Damaged(9), Data())
        source.load(np.arange(9))
        blob, label = source.record(5)
        assert (bytes(blob), label) == (b"\5" * 5, 3)
        assert isinstance(blob, memoryview)

    def test_a_corrupt_record_stops_or_is_noted(self):
        with pytest.raises(CorruptExample, match=r"file4 .* cut short"):
            MemorySource(Damaged(9, (4,)), Data()).load(np.arange(9))
        source = MemorySource(Damaged(9, (4,)), Data(on_error="skip"))
        source.load(np.arange(9))
        assert source.lengths.tolist() == [0, 1, 2, 3, 0, 5, 6, 7, 8]
        with pytest.raises(CorruptExample, match="when it was loaded"):
            source.record(4)

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
        data = Data(stall_timeout_s=1, loaders=1, prefetch=1)
        source = MemorySource(numbered(8), data)
        source.load(np.arange(4))
        source.promise()

        def shuffle() -> None:
            time.sleep(1.5)
            source.expect(np.arange(4, 8))
            time.sleep(1.5)
            for i in range(4, 8):
                source.lengths[i] = source.lengths[0]
            arena = Arena(np.arange(4, 8), source.lengths)
            arena.bytes[:] = source.newest().bytes
            source.take(arena)

        threading.Thread(target=shuffle, daemon=True).start()
        with Loader(source, Sampler(8, 4, shuffle=False), data, train=False) as loader:
            assert [batch.count for batch in loader] == [4, 4]
        assert source.read_again == 0

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
        monkeypatch.setattr(memory_source, "available_bytes", lambda: size_bytes)
        stays = np.zeros(80, int)
        memory_source.shuffled(source, np.arange(80), stays, stays, 0, 1, spare)  # counted as there already
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
