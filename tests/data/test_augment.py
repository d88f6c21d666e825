"""The way of an image into a batch: crops, mirroring, a mean image, a function of the user's own."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, Augment, Loader, Sampler, open_source
from jaxmpi.data.example import random_window

IMAGE = np.arange(20 * 30 * 3, dtype=np.uint32).reshape(20, 30, 3).astype(np.uint8)
# Each pixel has its own place, so that a crop shows where it was taken.
PLACES = np.stack([*np.indices((20, 30)), np.zeros((20, 30))], axis=-1).astype(np.uint8)
AREA = Data(crop=12, crop_area=(0.1, 0.9), mirror=True)


def augmented(data: Data, image: np.ndarray, train=True, epoch=0, index=0, seed=0, mean=None):
    return Augment(data, train, seed, mean)(image, epoch, index, f"photo{index}.jpg")


def test_an_evaluation_takes_the_centre_and_does_not_mirror():
    for index in range(8):
        out = augmented(Data(crop=10, mirror=True), PLACES, train=False, index=index)
        assert np.array_equal(out, PLACES[5:15, 10:20])


def test_training_crops_cover_all_places_evenly_and_mirror_half():
    crops = [augmented(Data(crop=18, mirror=True), PLACES, index=i) for i in range(3000)]
    rows = np.bincount([crop[0, 0, 0] for crop in crops], minlength=3)
    columns = np.bincount([crop[0, :, 1].min() for crop in crops], minlength=13)
    mirrored = sum(crop[0, 0, 1] > crop[0, -1, 1] for crop in crops)
    assert (len(rows), len(columns)) == (3, 13)
    # 5 standard deviations of a binomial count
    assert np.abs(rows - 1000).max() < 5 * np.sqrt(3000 * 1 / 3 * 2 / 3)
    assert np.abs(columns - 3000 / 13).max() < 5 * np.sqrt(3000 / 13)
    assert abs(mirrored - 1500) < 5 * np.sqrt(3000 / 4)


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 2**40))
def test_choices_depend_on_seed_epoch_and_index_alone(seed, epoch, index):
    one, two = (augmented(Data(crop=10, mirror=True), PLACES, True, epoch, index, seed) for _ in range(2))
    assert np.array_equal(one, two)
    assert one.shape == (10, 10, 3)


def test_shorter_side_then_crop():
    out = augmented(Data(resize=40, crop=32), IMAGE, train=False)
    assert (out.shape, out.dtype) == ((32, 32, 3), np.uint8)
    assert augmented(Data(resize=10), IMAGE).shape == (10, 15, 3)
    assert augmented(Data(resize=40), IMAGE.transpose(1, 0, 2)).shape == (60, 40, 3)


def test_grey_is_repeated():
    for grey in (IMAGE[..., 0], IMAGE[..., :1]):
        out = augmented(Data(crop=20), grey, train=False)
        assert out.shape == (20, 20, 3)
        assert np.array_equal(out[..., 0], out[..., 2])
    assert augmented(Data(channels=1), IMAGE[..., 0]).shape == (20, 30, 1)
    with pytest.raises(UsageError, match=r"photo0\.jpg.*data\.channels"):
        augmented(Data(channels=1), IMAGE)


class TestMeanImage:
    @pytest.fixture
    def mean(self) -> np.ndarray:
        return np.random.default_rng(0).uniform(0, 255, (16, 16, 3)).astype(np.float32)

    def test_centre_crop_to_the_mean_subtract_crop_mirror(self, mean):
        """The whole image first, as the reference does it: the same numbers."""
        data = Data(crop=12, mirror=True, std=(0.2, 0.3, 0.4))
        whole = (IMAGE[2:18, 7:23].astype(np.float32) - mean) / 255 / np.array(data.std, np.float32)
        windows = [whole[r : r + 12, c : c + 12] for r in range(5) for c in range(5)]
        windows += [window[:, ::-1] for window in windows]
        for index in range(20):
            out = augmented(data, IMAGE, index=index, mean=mean)
            assert out.dtype == np.float32
            assert any(np.allclose(out, window, rtol=1e-6, atol=0) for window in windows)
        centre = augmented(data, IMAGE, train=False, mean=mean)
        assert np.allclose(centre, whole[2:14, 2:14], rtol=1e-6, atol=0)


# ---------------------------------------------------------------- crops of random area and aspect


def test_area_and_aspect_of_windows_are_in_range():
    shares = np.random.default_rng(0).random((2000, 10, 4))
    windows = np.array([random_window((300, 400), (0.1, 0.9), (3 / 4, 4 / 3), s) for s in shares])
    top, left, height, width = windows.T
    assert min(top.min(), left.min()) >= 0
    assert ((top + height) <= 300).all()
    assert ((left + width) <= 400).all()
    # Sides are rounded to px: by at most half of one, of sides of at least sqrt(0.1 * 300 * 400 * 3 / 4) px.
    slack = 0.5 / np.sqrt(0.1 * 300 * 400 * 3 / 4)
    area, aspect = height * width / (300 * 400), width / height
    assert 0.1 * (1 - 2 * slack) < area.min() <= area.max() < 0.9 * (1 + 2 * slack) ** 2
    assert 3 / 4 * (1 - 3 * slack) < aspect.min() <= aspect.max() < 4 / 3 * (1 + 3 * slack)
    small = area < 0.5  # such windows always fit, so nothing is thrown away
    assert abs(np.log(aspect[small]).mean()) < 5 * np.log(16 / 9) / np.sqrt(12 * small.sum())


@pytest.mark.parametrize("image", [IMAGE, IMAGE[..., :1], IMAGE.astype(np.float32)])
def test_scaled_crops_have_the_size_of_the_crop_and_repeat(image):
    data = dataclasses.replace(AREA, channels=image.shape[-1])
    outs = [augmented(data, image, index=i) for i in range(20)]
    assert {(out.shape, out.dtype) for out in outs} == {((12, 12, image.shape[-1]), image.dtype)}
    assert np.array_equal(outs[3], augmented(data, image, index=3))
    assert len({out.tobytes() for out in outs}) > 10


def test_a_scaled_crop_shows_its_window():
    """On a ramp in both directions a window keeps its slope: columns grow, or fall where it is mirrored."""
    ramp = np.stack([*np.indices((200, 200)), np.zeros((200, 200))], axis=-1).astype(np.uint8)
    for index in range(20):
        out = augmented(AREA, ramp, index=index).astype(int)
        assert (np.diff(out[:, 0, 0]) > 0).all()
        assert len(set(np.sign(np.diff(out[0, :, 1])))) == 1


# ---------------------------------------------------------------- a function of the user's own

ROWS = 12
IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, 4, 4, 3), np.uint8)


def noisy(rng: np.random.Generator, example: dict[str, Any]) -> dict[str, Any]:
    example["image"] += rng.integers(1, 200, example["image"].shape).astype(np.uint8)  # in place: it is its own
    return example


def steps(size: int = 1, start: int = 0, train: bool = True, **kwargs: Any) -> list[list[bytes]]:
    """Sorted images of each step up to 6, over all workers."""
    data, by_rank = Data(**{"augment": noisy, "loader": "threads", **kwargs}), []
    for rank in range(size):
        sampler = Sampler(ROWS, 4, rank, size, seed=1, shuffle=train)
        source = ArraySource(IMAGES, np.zeros(ROWS, int), 1)
        with Loader(source, sampler, data, train, start_step=start, stop_step=6 if train else 3) as loader:
            by_rank.append([[image.tobytes() for image in batch.image[batch.weight > 0]] for batch in loader])
    return [sorted(image for part in parts for image in part) for parts in zip(*by_rank, strict=True)]


class TestOwnFunction:
    @pytest.mark.parametrize("size", [2, 3])
    def test_examples_are_those_of_one_worker_after_a_resume_too(self, size):
        assert steps(size, start=2) == steps()[2:]

    def test_each_epoch_has_choices_of_its_own_and_the_source_stays_as_it_is(self):
        before, seen = IMAGES.copy(), steps()
        assert not {image for step in seen[:3] for image in step} & {image for step in seen[3:] for image in step}
        np.testing.assert_array_equal(IMAGES, before)

    def test_fields_of_a_dict_are_augmented(self):
        source = [{"a": IMAGES[i], "b": np.float32(i)} for i in range(ROWS)]
        data = Data("array", train=source, loader="threads", augment=lambda rng, row: {"b": -row["b"], "a": row["a"]})
        with Loader(open_source(data, "train"), Sampler(ROWS, ROWS, seed=1), data, True, stop_step=1) as loader:
            assert sorted(next(loader).fields["b"].tolist()) == [-float(i) for i in range(ROWS)][::-1]

    @pytest.mark.parametrize(
        ("returned", "named"),
        [(lambda rng, example: None, "NoneType"), (lambda rng, example: {"image": 0}, "a dict of image")],
    )
    def test_other_fields_are_refused(self, returned, named):
        with pytest.raises(UsageError, match=rf"array\[\d+\]: data\.augment returned {named}"):
            steps(augment=returned)

    def test_a_function_of_a_module_goes_to_loader_processes_by_its_name(self, tmp_path: Path, monkeypatch):
        (tmp_path / "own_augment.py").write_text(
            "def doubled(rng, example):\n    return example | {'image': example['image'] * 2}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        doubled = importlib.import_module("own_augment").doubled
        assert steps(augment=doubled, loader="processes", loaders=1) == steps(augment=doubled)
