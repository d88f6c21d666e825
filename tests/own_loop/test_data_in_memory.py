"""Data in memory for a custom training loop, with one worker; several ranks are in tests/ranks/."""

import dataclasses
import json

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


@pytest.mark.parametrize("done", [3, 13])
def test_a_loop_resumes_from_a_state_bit_for_bit(done):
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


def test_a_damaged_image_is_named_by_every_call_that_comes_to_it_or_left_out_and_counted(tmp_path):
    for split in ("train", "validation"):
        for label in ("a", "b"):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(2):
                Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / split / label / f"{i}.png")
    (tmp_path / "train" / "b" / "1.png").write_bytes(b"no image")
    stop = Data("imagefolder", dir=str(tmp_path))
    with jaxmpi.InMemory(stop, 4) as data:
        for _ in range(2):
            with pytest.raises(CorruptExample, match=r"1\.png"):
                data.batch()
    with jaxmpi.InMemory(dataclasses.replace(stop, on_error="skip"), 4) as data:
        assert (np.asarray(data.batch()["weight"]) > 0).sum() == 3
        assert data.skipped == 1


def test_the_folder_of_a_packed_data_set_will_do(tmp_path):
    command.main(["pack", "digits", str(tmp_path), "--quality", "0"])
    with jaxmpi.InMemory(tmp_path, 8) as data:
        assert data.batch()["image"].shape == (8, 8, 8, 3)
        shards = sum(path.stat().st_size for path in (tmp_path / "train").glob("shard-*"))
        assert data.held_bytes == shards


def test_a_refusal_frees_the_memory(monkeypatch):
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


def test_invalid_settings_are_refused():
    """With one worker the size of a group can only be 1, so that another number shows whose it is."""
    of_data = Data("array", train=numbered(), group_size=3)
    with jaxmpi.InMemory(Data("array", train=numbered(), group_size=1), 5, group_size=1) as data:
        assert data.group_size == 1
        state = {name: value for name, value in data.state().items() if name != "group_size"}
    with pytest.raises(UsageError, match=r"after close\(\)"):
        data.batch()
    refused: list[tuple[tuple, dict, str]] = [
        ((numbered(), 8.0), {}, "local_batch"),
        ((numbered(), 5), {"seed": -1}, "seed"),
        ((7, 5), {}, "InMemory: got int"),
        ((numbered(), 5), {"state": state}, "group_size"),
        ((of_data, 5), {}, r"data\.group_size: got 3"),
        ((of_data, 5), {"group_size": 1}, "group_size: got 1, and 3 in the Data"),
    ]
    for arguments, options, message in refused:
        with pytest.raises(UsageError, match=message):
            jaxmpi.InMemory(*arguments, **options)
