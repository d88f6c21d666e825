"""Examples held out of the training split for validation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import jaxmpi
from jaxmpi.config import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, open_source
from jaxmpi.data.sources.holdout import hold_out
from line_task import line, lines


@given(st.lists(st.integers(0, 4), min_size=10, max_size=200), st.sampled_from([0.1, 0.2, 0.5, 0.75]))
def test_each_class_gives_its_share_once(labels, share):
    source = ArraySource(np.arange(len(labels)), np.array(labels))
    train, held = (hold_out(source, share, split) for split in ("train", "validation"))
    assert sorted(int(part[i][0]) for part in (train, held) for i in range(len(part))) == [*range(len(labels))]
    assert len(held) == np.floor(len(labels) * share)
    for label in set(labels):
        count = sum(int(held[i][1]) == label for i in range(len(held)))
        assert abs(count - share * labels.count(label)) < 1


def test_a_folder_of_classes_needs_no_split(tmp_path):
    for k in range(20):
        folder = tmp_path / "ab"[k % 2]
        folder.mkdir(exist_ok=True)
        Image.new("L", (4, 4), k).save(folder / f"{k:02}.png")
    config = Data("imagefolder", dir=str(tmp_path), holdout=0.2, channels=1)
    train, held = (open_source(config, split) for split in ("train", "validation"))
    assert (len(train), len(held), held.classes) == (16, 4, 2)
    assert sorted(held[i][1] for i in range(4)) == [0, 0, 1, 1]
    assert sorted({int(part[i][0][0, 0, 0]) for part in (train, held) for i in range(len(part))}) == [*range(20)]


@pytest.mark.parametrize("devices", [1, 3])
def test_a_run_validates_on_what_is_held_out(devices, tmp_path):
    data = Data("array", train=line(40), holdout=0.25, loader="threads")
    assert jaxmpi.Trainer(lines(tmp_path, data=data, devices=devices)).fit()["eval_count"] == 10


def test_what_leaves_a_part_empty_is_refused():
    with pytest.raises(UsageError, match=r"data\.holdout"):
        hold_out(ArraySource(np.arange(4), np.arange(4)), 0.1, "train")
