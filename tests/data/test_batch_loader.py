"""Batches in exact order: shapes, weights, memory that is used again, errors, and what ends with a loader."""

import contextlib
import gc
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, CorruptExample, Loader, Sampler, open_source
from launching import wait_until

PX = 6


def numbered(n: int) -> ArraySource:
    """Example i is all i, labelled i."""
    images = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, PX, PX, 1))
    return ArraySource(images, np.arange(n))


def loader(source, batch, rank=0, size=1, train=True, data=None, seed=0, **kwargs) -> Loader:
    sampler = Sampler(len(source), batch, rank, size, seed, shuffle=train)
    return Loader(source, sampler, data or Data(), train, **kwargs)


def loader_names() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("jaxmpi-loader")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    if loader_names():
        gc.collect()
    assert loader_names() == []


class Odd(ArraySource):
    """The numbered examples, some corrupt, each `read` after some seconds."""

    def __init__(self, n: int, bad: tuple[int, ...] = (), seconds: float = 0) -> None:
        super().__init__(numbered(n).images, np.arange(n), name="odd")
        self.bad, self.seconds, self.read = bad, seconds, 0

    def where(self, index: int) -> str:
        return f"file{index}.jpg"

    def __getitem__(self, index: int):
        self.read += 1
        time.sleep(self.seconds)
        if index in self.bad:
            raise CorruptExample(self.where(index), index, "truncated")
        return super().__getitem__(index)


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize(("examples", "batch"), [(1, 1), (1, 32), (11, 4), (12, 4), (12, 32)])
def test_an_evaluation_counts_every_example_once(examples, batch, size):
    seen: list[int] = []
    for rank in range(size):
        with loader(numbered(examples), batch, rank, size, train=False, data=Data(loaders=1)) as batches:
            for b in batches:
                seen += b.label[b.weight > 0].tolist()
                assert set(b.weight.tolist()) <= {0.0, 1.0}
                assert b.image.shape == (-(-batch // size), PX, PX, 3)
    assert sorted(seen) == list(range(examples))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_weighted_losses_averaged_over_workers_are_the_global_mean(size):
    source, batch = numbered(11), 8  # the last step has 3 examples, so at size 4 one worker has none
    losses = np.random.default_rng(0).uniform(size=11)
    with contextlib.ExitStack() as stack:
        all_workers = [stack.enter_context(loader(source, batch, r, size, stop_step=4)) for r in range(size)]
        for step, parts in enumerate(zip(*all_workers, strict=True)):
            mean = np.mean([(b.weight * losses[b.label]).sum() for b in parts])
            share = Sampler(11, batch).indices(step)
            assert parts[0].count == share.count
            assert mean == pytest.approx(losses[share.indices].mean(), rel=1e-6)
            assert np.mean([b.weight.sum() for b in parts]) == pytest.approx(1, rel=1e-6)


def owns(image: np.ndarray) -> bool:
    """Return True if a view is of memory of its own, not of a slot."""
    assert image.base is not None
    return image.base.flags.owndata


def test_batches_that_are_kept_stay_as_they_are():
    """Batches are in prefetch + 2 slots at most; who keeps more gets copies."""
    with loader(numbered(60), 2, train=False, data=Data(prefetch=1)) as batches:
        kept = [next(batches).image[1:] for _ in range(10)]  # a view of a view
        assert [int(image[0, 0, 0, 0]) for image in kept] == list(range(1, 20, 2))
        assert [owns(image) for image in kept].count(False) == 2
        kept.clear()
        assert not owns(next(batches).image)


def test_made_ahead_is_bounded():
    source = Odd(100)
    with loader(source, 2, data=Data(prefetch=3)) as batches:
        next(batches)
        bound = 1 + 2 * (1 + 3 + 1)  # to see the shape; given out, waiting, in the making
        wait_until(lambda: source.read >= bound)
        time.sleep(0.1)
        assert source.read == bound


class TestErrors:
    @pytest.mark.parametrize("kind", ["threads", "processes"])
    def test_floats_that_f32_cannot_hold_are_refused_and_infinities_are_not(self, kind):
        data = Data(loader=kind, loaders=1)
        with loader(ArraySource(np.array([[np.inf], [1.0]]), [0] * 2), 2, train=False, data=data) as batches:
            assert next(batches).image[0] == np.inf
        with (
            loader(ArraySource(np.array([[1.0], [1e300]]), [0] * 2), 2, train=False, data=data) as batches,
            pytest.raises(UsageError, match=r"array\[1\]: image"),
        ):
            next(batches)

    @pytest.mark.parametrize(("label", "named"), [(7, "< 3"), (0.7, "float"), (np.float32(1), "float")])
    def test_labels_that_cannot_be(self, label, named):
        source = ArraySource(np.zeros((2, 4, 4), np.uint8), [0, label], classes=3)
        with loader(source, 2, train=False) as batches, pytest.raises(UsageError, match=rf"array\[1\]: .*{named}"):
            next(batches)

    @pytest.mark.parametrize("on_error", ["stop", "skip"])
    def test_labels_above_the_models_classes_where_the_source_has_none(self, on_error):
        pairs = [(np.zeros((4, 4, 1), np.uint8), label) for label in (0, 12)]
        data = Data("array", train=pairs, channels=1, on_error=on_error)
        source = open_source(data, "train")
        with (
            loader(source, 2, train=False, data=data, classes=10) as batches,
            pytest.raises(UsageError, match=r"data\.train\[1\]: got label 12; .*< 10"),
        ):
            next(batches)
        with loader(source, 2, train=False, data=data) as batches:
            assert next(batches).label.tolist() == [0, 12]

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_skip_in_training_is_the_same_on_any_number_of_workers(self, size):
        losses = np.arange(8) + 1.0
        total, skipped = 0.0, 0
        for rank in range(size):
            with loader(Odd(8, (1, 2, 5)), 8, rank, size, data=Data(on_error="skip"), stop_step=1) as batches:
                batch = next(batches)
                total += (batch.weight * losses[batch.label]).sum() / size
                skipped += batches.skipped
        assert total == pytest.approx(losses[[0, 3, 4, 6, 7]].sum() / 8, rel=1e-6)
        assert skipped == 3

    def test_all_corrupt(self):
        data = Data(on_error="skip")
        with loader(Odd(3, (0, 1, 2)), 2, data=data) as batches, pytest.raises(UsageError, match="not one of 3"):
            next(batches)

    @pytest.mark.parametrize("batch", [1, 4])
    def test_images_of_different_size(self, batch):
        images = [np.zeros((4, 4, 3), np.uint8)] * 3 + [np.zeros((4, 5, 3), np.uint8)]
        match = r"array\[3\]: got image uint8\[4, 5, 3\].*data\.crop"
        with (
            loader(ArraySource(images, [0] * 4), batch, train=False) as batches,
            pytest.raises(UsageError, match=match),
        ):
            list(batches)


class TestClosing:
    def test_close_is_prompt_and_drops_what_is_queued(self, monkeypatch):
        monkeypatch.setattr("jaxmpi.data.loader_pool.ThreadLoader.JOIN_S", 0.1)
        gate = threading.Event()

        class Blocked(Odd):
            """All but the first batch cannot be read yet."""

            def __getitem__(self, index: int):
                example = super().__getitem__(index)
                if index >= 4:
                    gate.wait(60)
                return example

        source, read = Blocked(1000), 1 + 4 + 2  # to see the shape; the first batch; what each of two loaders is at
        with loader(source, 4, train=False, data=Data(prefetch=8, loaders=2)) as batches:
            next(batches)
            wait_until(lambda: source.read >= read)
            begin = time.perf_counter()
        assert time.perf_counter() - begin < 10
        gate.set()
        wait_until(lambda: loader_names() == [])
        assert source.read == read

    def test_closing_from_another_thread_frees_the_consumer(self):
        batches = loader(Odd(8, seconds=0.3), 8, data=Data(loaders=1))
        timer = threading.Timer(0.1, batches.close)
        timer.start()
        with pytest.raises(CancelledError):
            next(batches)
        timer.join()
