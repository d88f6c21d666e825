"""Data in memory for a loop of one's own, with one worker; several ranks are in tests/ranks/."""

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

import jaxmpi
from jaxmpi.config import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, command, memory_source
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.shuffle import MemoryShuffle

N = 23


def numbered() -> ArraySource:
    return ArraySource(np.zeros((N, 2, 2, 3), np.uint8), np.arange(N))


def labels_of(data: jaxmpi.InMemory, batches: int) -> list[int]:
    """Labels of the next batches, without those that only fill one."""
    return [
        n for b in (data.batch() for _ in range(batches)) for n in np.asarray(b["label"])[np.asarray(b["weight"]) > 0]
    ]


def test_each_example_comes_once_an_epoch_and_in_another_order_after_a_shuffle():
    with jaxmpi.InMemory(numbered(), 5) as data:
        assert (len(data), data.steps_per_epoch, data.group_size) == (N, 5, 1)
        epochs = [labels_of(data, 5), labels_of(data, 5)]
        data.shuffle()
        epochs.append(labels_of(data, 5))
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("done", [3, 13])
def test_a_loop_goes_on_from_a_state_bit_for_bit(done):
    """In the first reading, and behind a shuffle; crops are random."""
    source = ArraySource(np.random.default_rng(0).integers(0, 256, (N, 6, 6, 3), np.uint8), np.arange(N))
    settings = Data("array", train=source, crop=4, mirror=True)

    def loop(data: jaxmpi.InMemory, first: int, last: int) -> list[bytes]:
        seen = []
        for step in range(first, last):
            if step == 10:
                data.shuffle()
            seen.append(b"".join(np.asarray(value).tobytes() for value in data.batch().values()))
        return seen

    with jaxmpi.InMemory(settings, 4, seed=3) as whole:
        expected = loop(whole, 0, 16)
    with jaxmpi.InMemory(settings, 4, seed=3) as first:
        assert loop(first, 0, done) == expected[:done]
        state = json.loads(json.dumps(first.state()))
    with jaxmpi.InMemory(settings, 4, seed=np.int64(3), state=state) as second:  # pyright: ignore[reportArgumentType]
        assert loop(second, done, 16) == expected[done:]


def with_one_damaged(folder: Path, on_error: Literal["stop", "skip"]) -> Data:
    """Four images, of which one is none."""
    for split in ("train", "validation"):
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            for i in range(2):
                Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / split / label / f"{i}.png")
    (folder / "train" / "b" / "1.png").write_bytes(b"no image")
    return Data("imagefolder", dir=str(folder), on_error=on_error)


def test_a_damaged_image_is_named_by_every_call_that_comes_to_it(tmp_path):
    with jaxmpi.InMemory(with_one_damaged(tmp_path, "stop"), 4) as data:
        for _ in range(2):
            with pytest.raises(CorruptExample, match=r"1\.png"):
                data.batch()


def test_damaged_images_that_are_left_out_are_counted(tmp_path):
    with jaxmpi.InMemory(with_one_damaged(tmp_path, "skip"), 4) as data:
        assert (np.asarray(data.batch()["weight"]) > 0).sum() == 3
        assert data.skipped == 1


def test_the_folder_of_a_packed_data_set_will_do(tmp_path):
    command.main(["pack", "digits", str(tmp_path), "--quality", "0"])
    with jaxmpi.InMemory(tmp_path, 8) as data:
        assert data.batch()["image"].shape == (8, 8, 8, 3)
        shards = sum(path.stat().st_size for path in (tmp_path / "train").glob("shard-*"))
        assert data.held_bytes == shards


def test_what_all_ranks_refuse_gives_the_memory_back(monkeypatch):
    closed, close = [], MemoryShuffle.close
    monkeypatch.setattr(MemoryShuffle, "close", lambda memory: (closed.append(memory), close(memory)))
    with jaxmpi.InMemory(numbered(), 5) as data:
        state = data.state()
    with pytest.raises(UsageError, match="state is that of another order"):
        jaxmpi.InMemory(numbered(), 6, state=state)
    with pytest.raises(UsageError, match=r"data\.loader"):
        jaxmpi.InMemory(Data("array", train=numbered(), loader="processes"), 5)
    monkeypatch.setattr(memory_source, "available_bytes", lambda: 0)
    with pytest.raises(UsageError, match="more are needed"):
        jaxmpi.InMemory(numbered(), 5)
    assert len(closed) == len(set(map(id, closed))) == 4


def test_what_cannot_be_is_refused():
    with jaxmpi.InMemory(numbered(), 5) as data:
        data.batch()
        state = data.state()
    with pytest.raises(UsageError, match=r"got batch\(\) after close\(\); make another one"):
        data.batch()
    with pytest.raises(UsageError, match=r"local_batch: got 8\.0; expected a whole number >= 1"):
        jaxmpi.InMemory(numbered(), 8.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match=r"seed: got -1; expected a whole number >= 0"):
        jaxmpi.InMemory(numbered(), 5, seed=-1)
    with pytest.raises(UsageError, match=r"InMemory: got int; expected a Data, the folder of a packed data set"):
        jaxmpi.InMemory(7, 5)  # pyright: ignore[reportArgumentType]
    without = {name: value for name, value in state.items() if name != "group_size"}
    with pytest.raises(UsageError, match=r"InMemory: state: got no group_size; expected what state\(\) has given"):
        jaxmpi.InMemory(numbered(), 5, state=without)


def test_the_size_of_a_group_is_that_of_the_data_or_of_the_call():
    """With one worker only 1 can be, so another number shows that it counts."""
    of_data = Data("array", train=numbered(), group_size=3)
    with pytest.raises(UsageError, match=r"data\.group_size: got 3 with 1 workers"):
        jaxmpi.InMemory(of_data, 5)
    with pytest.raises(UsageError, match=r"group_size: got 1, and 3 in the Data; give one of the two"):
        jaxmpi.InMemory(of_data, 5, group_size=1)
    with jaxmpi.InMemory(Data("array", train=numbered(), group_size=1), 5, group_size=1) as data:
        assert data.group_size == 1
