"""Augmentation by a function of the user's own, of a random generator and an example."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, Loader, Sampler

ROWS = 12
IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, 4, 4, 3), np.uint8)


def noisy(rng: np.random.Generator, example: dict[str, Any]) -> dict[str, Any]:
    example["image"] += rng.integers(1, 200, example["image"].shape).astype(np.uint8)  # in place: it is its own
    return example


def images(size: int = 1, start: int = 0, train: bool = True, **kwargs: Any) -> list[list[bytes]]:
    """Sorted images of each step up to 6, over all workers."""
    data, steps = Data(**{"augment": noisy, "loader": "threads", **kwargs}), []
    for rank in range(size):
        sampler = Sampler(ROWS, 4, rank, size, seed=1, shuffle=train)
        source = ArraySource(IMAGES, np.zeros(ROWS, int), 1)
        with Loader(source, sampler, data, train, start_step=start, stop_step=6 if train else 3) as loader:
            steps.append([[image.tobytes() for image in batch.image[batch.weight > 0]] for batch in loader])
    return [sorted(image for part in parts for image in part) for parts in zip(*steps, strict=True)]


@pytest.mark.parametrize("size", [2, 3])
def test_examples_are_those_of_one_worker_after_a_resume_too(size):
    assert images(size, start=2) == images()[2:]


def test_each_epoch_has_choices_of_its_own_and_the_source_stays_as_it_is():
    before = IMAGES.copy()
    steps = images()
    assert not {image for step in steps[:3] for image in step} & {image for step in steps[3:] for image in step}
    np.testing.assert_array_equal(IMAGES, before)


def test_an_evaluation_is_not_augmented():
    assert images(train=False) == images(train=False, augment=None)


def test_fields_of_a_dict_are_augmented():
    class Pairs:
        name, classes = "pairs", 0

        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"a": IMAGES[index], "b": np.float32(index)}

    def turned(rng: np.random.Generator, example: dict[str, Any]) -> dict[str, Any]:
        return {"b": -example["b"], "a": example["a"]}

    data = Data(augment=turned, loader="threads")
    with Loader(Pairs(), Sampler(ROWS, ROWS, seed=1), data, True, stop_step=1) as loader:
        assert sorted(next(loader).fields["b"].tolist()) == [-float(i) for i in range(ROWS)][::-1]


@pytest.mark.parametrize(
    ("returned", "said"),
    [(lambda rng, example: None, "NoneType"), (lambda rng, example: {"image": 0}, "a dict of image")],
)
def test_other_fields_are_refused(returned, said):
    with pytest.raises(UsageError, match=rf"array\[\d+\]: data\.augment returned {said}"):
        images(augment=returned)


def test_a_function_of_a_module_goes_to_loader_processes_by_its_name(tmp_path: Path, monkeypatch):
    (tmp_path / "own_augment.py").write_text(
        "def doubled(rng, example):\n    return example | {'image': example['image'] * 2}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    doubled = importlib.import_module("own_augment").doubled
    found = images(augment=doubled, loader="processes", loaders=1)
    assert found == images(augment=doubled)


def test_a_function_that_cannot_be_sent_asks_for_threads():
    with pytest.raises(UsageError, match=r"data\.augment: .*data\.loader = threads"):
        images(augment=lambda rng, example: example, loader="processes", loaders=1)
