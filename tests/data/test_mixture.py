"""Mixtures: shares by weight in every epoch, all examples in time, the same on any number of workers."""

import collections
import dataclasses
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, Loader, Sampler, open_source
from jaxmpi.data.sources.registry import Mixture, split_by_weight


def part(first: int, rows: int, classes: int = 10, name: str = "array") -> ArraySource:
    numbers = np.arange(first, first + rows)
    return ArraySource(numbers[:, None].astype(np.float32), numbers % classes, classes, name)


def number(example: Any) -> int:
    return int(example[0][0])


def opened(*pairs: Any, **kwargs: Any) -> Mixture:
    source = open_source(Data("mixture", train=pairs, **kwargs), "train")
    assert isinstance(source, Mixture)
    return source


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 100)), min_size=1, max_size=4), st.integers(0, 5))
def test_each_epoch_has_shares_by_weight(pairs, epoch):
    counts = split_by_weight(sum(rows for rows, _ in pairs), [weight for _, weight in pairs])
    if min(counts) == 0:
        return
    source = opened(*((part(100 * k, rows), weight) for k, (rows, weight) in enumerate(pairs)))
    total, weights = len(source), sum(weight for _, weight in pairs)
    assert total == sum(rows for rows, _ in pairs)
    found = collections.Counter(number(source[epoch * total + i]) // 100 for i in range(total))
    for k, (_, weight) in enumerate(pairs):
        assert abs(found[k] - total * weight / weights) < 1


def test_over_epochs_all_examples_of_a_part_are_visited_equally_often():
    source = opened((part(0, 7), 5), (part(100, 9), 1))
    for epochs in range(1, 12):
        visits = collections.Counter(number(source[i]) for i in range(epochs * len(source)))
        for examples in (range(7), range(100, 109)):
            times = [visits[i] for i in examples]
            assert max(times) - min(times) <= 1


def steps(size: int, start: int) -> list[list[int]]:
    pairs = (part(0, 7), 5), (part(100, 9), 1)
    found = []
    for rank in range(size):
        sampler = Sampler(16, 6, rank, size, seed=1)
        with Loader(opened(*pairs), sampler, Data(loader="threads"), True, start_step=start, stop_step=8) as loader:
            found.append([batch.image[batch.weight > 0, 0].astype(int).tolist() for batch in loader])
    return [sorted(itertools.chain(*parts)) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_workers_sees_the_examples_of_one_after_a_resume_too(size):
    assert steps(size, start=4) == steps(1, start=0)[4:]


def test_held_out_is_every_example_of_all_parts_once():
    half = Data("digits")
    source = open_source(Data("mixture", train=((half, 3), (half, 1))), "validation")
    assert len(source) == 720
    labels = collections.Counter(source[i][1] for i in range(720))
    held_out = open_source(half, "validation")
    assert labels == {label: 2 * n for label, n in collections.Counter(held_out[i][1] for i in range(360)).items()}


def test_images_stay_compressed_if_they_are_in_all_parts(tmp_path):
    from PIL import Image

    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "train" / "a" / "b.png")
    folder = Data("imagefolder", dir=str(tmp_path))
    source = opened((folder, 1), (folder, 2))
    assert source.encoded is not None
    assert pickle.loads(pickle.dumps(source)).encoded(1)[0] == (tmp_path / "train" / "a" / "b.png").read_bytes()
    assert opened((folder, 1), (ArraySource(np.zeros((1, 4, 4, 3), np.uint8), [0], 1), 1)).encoded is None


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ((), r"data.train: got \(\) for a mixture; expected \(\(Data"),
        ((part(0, 3),), "data.train: got .* for a mixture; expected"),
        (((part(0, 3), 0),), r"got the weights \[0\]; expected a number > 0 a part"),
        (((part(0, 3), 1), (part(0, 3), 1e-9)), r"which give \[6, 0\] .*raise the smallest"),
        (((part(0, 3), 1), (part(0, 3, 7), 1)), r"got \[10, 7\] classes; expected one number"),
        (((part(0, 3), 1), (part(0, 0), 1)), r"got parts of \[3, 0\] examples"),
    ],
)
def test_what_is_no_mixture_is_refused(pairs, said):
    with pytest.raises(UsageError, match=said):
        opened(*pairs)


def test_objects_without_a_validation_ask_for_one():
    data = Data("mixture", train=((part(0, 3), 1),))
    with pytest.raises(UsageError, match=r"data\.validation"):
        open_source(data, "validation")
    given = dataclasses.replace(data, validation=part(50, 2))
    assert number(open_source(given, "validation")[0]) == 50
