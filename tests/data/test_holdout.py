"""Examples held out of the training split for validation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import jaxmpi
from jaxmpi.config import Data, Experiment
from jaxmpi.config.data import validation_sets
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, open_source
from jaxmpi.data.sources.registry import hold_out
from jaxmpi.models.cnn import digits_cnn_tiny
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
    (tmp_path / "a" / "notes.txt").touch()
    config = Data("imagefolder", dir=str(tmp_path), holdout=0.2, channels=1)
    train, held = (open_source(config, split) for split in ("train", "validation"))
    assert (len(train), len(held), held.classes) == (16, 4, 2)
    assert [len(getattr(part, "notes", ())) for part in (train, held)] == [1, 0]  # the entry that is no image, once
    assert sorted(held[i][1] for i in range(4)) == [0, 0, 1, 1]
    assert sorted({int(part[i][0][0, 0, 0]) for part in (train, held) for i in range(len(part))}) == [*range(20)]


def test_a_run_validates_on_what_is_held_out(tmp_path):
    data = Data("array", train=line(40), holdout=0.25, loader="threads")
    assert jaxmpi.Trainer(lines(tmp_path, data=data, devices=3)).fit()["eval_count"] == 10


@pytest.mark.parametrize(
    ("source", "holdout", "named", "sizes"),
    [
        ("numpy", 0.0, True, {"eval_noisy_": 3, "eval_rows_": 4}),
        ("numpy", 0.25, True, {"eval_holdout_": 5, "eval_noisy_": 3, "eval_rows_": 4}),
        ("array", 0.25, True, {"eval_holdout_": 10, "eval_noisy_": 3, "eval_rows_": 4}),
        ("numpy", 0.0, False, {"eval_": 3}),
    ],
)
def test_validation_sets_may_be_of_other_sources(source, holdout, named, sizes, tmp_path):
    for folder, n in (("own/train", 20), ("own/validation", 2), ("other/validation", 3)):
        (tmp_path / folder).mkdir(parents=True)
        np.savez(tmp_path / folder / "all.npz", image=np.zeros((n, 4, 4, 1), np.uint8), label=np.zeros(n, np.int32))
    noisy = Data("numpy", dir=str(tmp_path / "other"))
    validation = {"noisy": noisy, "rows": line(4)} if named else noisy
    config = Data(source, dir=str(tmp_path / "own"), train=line(40), holdout=holdout, validation=validation)
    got = {prefix: len(open_source(part, "validation")) for prefix, part in validation_sets(config).items()}
    assert list(got.items()) == list(sizes.items())


def test_a_validation_set_of_other_classes_is_refused(tmp_path):
    for file in ("train/cat/1.png", "train/dog/1.png", "noisy/ant/1.png", "noisy/cat/1.png"):
        (tmp_path / file).parent.mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / file)
    noisy = Data("imagefolder", dir=str(tmp_path), train_split="none", validation_split="noisy")
    data = Data("imagefolder", dir=str(tmp_path), channels=1, loader="threads", validation=noisy)
    experiment = Experiment(digits_cnn_tiny(), data=data, effective_batch=2, run_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"data\.validation: .*got the classes ant, cat; expected .*cat, dog"):
        jaxmpi.Trainer(experiment).fit()


@pytest.mark.parametrize("more", [{"validation_split": "validation,train"}, {"validation": line(4)}])
def test_another_validation_set_without_a_name_is_refused(more):
    with pytest.raises(UsageError, match=r"data\.holdout: got 0\.25 beside data\.validation"):
        Data("array", train=line(40), holdout=0.25, **more)


def test_what_leaves_a_part_empty_is_refused():
    with pytest.raises(UsageError, match=r"data\.holdout"):
        hold_out(ArraySource(np.arange(4), np.arange(4)), 0.1, "train")
