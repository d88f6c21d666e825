"""Grain's MapDataset: any example by its index, and epochs that go on."""

import itertools
import sys
from typing import Any

import numpy as np
import pytest

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import Loader, Sampler, kind_for, open_source
from jaxmpi.data.memory_source import MemorySource

grain = pytest.importorskip("grain")

ROWS = 10


def noisy(x: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"image": np.array([x, rng.integers(1000)], np.float32), "label": x % 3}


def maps() -> Any:
    return grain.MapDataset.range(ROWS).seed(4).random_map(noisy)


def data(**kwargs: Any) -> Data:
    return Data("grain", train=maps(), validation=maps(), **kwargs)


def batches(size: int, start: int) -> list[list[tuple[float, ...]]]:
    """Steps `start` to 5 of batches of 4, sorted."""
    steps = []
    for rank in range(size):
        source, sampler = open_source(data(), "train"), Sampler(ROWS, 4, rank, size, seed=1)
        with Loader(source, sampler, data(), train=True, start_step=start, stop_step=6) as loader:
            steps.append([[*map(tuple, batch.image[batch.weight > 0].tolist())] for batch in loader])
    return [sorted(itertools.chain(*parts)) for parts in zip(*steps, strict=True)]


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_workers_sees_the_examples_of_one_after_a_resume_too(size):
    assert batches(size, start=2) == batches(1, start=0)[2:]


def test_each_epoch_has_random_choices_of_its_own():
    steps = batches(1, start=0)
    first, second = (sorted(itertools.chain(*steps[begin : begin + 3])) for begin in (0, 3))
    assert [x for x, _ in first] == [x for x, _ in second] == [*range(ROWS)]
    assert first == sorted(tuple(maps()[i]["image"].tolist()) for i in range(ROWS))
    assert second == sorted(tuple(maps()[i]["image"].tolist()) for i in range(ROWS, 2 * ROWS))


def test_it_is_read_by_threads_since_it_imports_jax():
    source = open_source(data(), "train")
    assert kind_for(data(), source) == "threads"
    with pytest.raises(UsageError, match=r"data.loader: got processes; data.train can only be read by threads"):
        kind_for(data(loader="processes"), source)


@pytest.mark.parametrize("examples", [lambda: maps().repeat(), lambda: [1, 2]], ids=["repeat", "list"])
def test_what_is_no_map_of_one_epoch_is_refused(examples):
    with pytest.raises(UsageError, match=r"data\.train: got"):
        open_source(Data("grain", train=examples()), "train")


def test_examples_that_were_filtered_out_are_named_and_none_is_kept_in_memory():
    source = open_source(Data("grain", train=maps().filter(lambda x: x["label"] == 0)), "train")
    with pytest.raises(UsageError, match=r"data.train\[1\], epoch 2: got None"):
        source[2 * ROWS + 1]
    with pytest.raises(UsageError, match=r"data\.memory"):
        MemorySource(open_source(data(), "train"), data())


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(UsageError, match=r"grain: .*pip install 'jaxmpi\[grain\]'"):
        open_source(data(), "train")
