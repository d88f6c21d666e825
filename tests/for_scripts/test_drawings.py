"""The drawings of docs/pictures are those of the code, and what they show is a whole sum."""

import importlib
import sys

import numpy as np
import pytest

from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
drawings, exchange_drawings = (importlib.import_module(name) for name in ("drawings", "exchange_drawings"))


def test_every_drawing_is_in_docs():
    assert {path.stem for path in drawings.PICTURES.glob("*.svg")} == set(drawings.DRAWINGS)


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_in_docs_is_what_its_source_gives_today(name):
    drawn = (drawings.PICTURES / f"{name}.svg").read_text()
    assert drawn == drawings.DRAWINGS[name]().svg(), "run scripts/drawings.py, and look at the picture"


@pytest.mark.parametrize("name", exchange_drawings.STRATEGIES)
def test_arrows_of_a_strategy_sum_all_chunks_with_one_message_a_round(name):
    course = exchange_drawings.follow(*exchange_drawings.STRATEGIES[name])
    ranks = len(exchange_drawings.STRATEGIES[name].hosts)
    assert all(len(whose) == ranks for whose in course.held[-1].values()), "a chunk lacks a summand"
    assert all(len({m.sender for m in messages}) == len({m[:2] for m in messages}) for messages in course.rounds)


def test_halves_of_a_sharded_update_are_the_rings():
    first, second = exchange_drawings.sharded_halves()
    whole = [place for place, whose in first.held[-1].items() if len(whose) == 4]
    assert sorted(rank for rank, _ in whole) == sorted(chunk for _, chunk in whole) == [0, 1, 2, 3]
    assert all(len(whose) == 4 for whose in second.held[-1].values())


def test_ranks_copy_a_chunk_out_of_shared_memory_once_all_have_added_to_it():
    added, copied = dict[int, list[int]](), dict[int, list[int]]()  # ranks by chunk
    for turn in exchange_drawings.play_shared_sum():
        for rank, (kind, chunk) in turn.items():
            assert kind == "add" or added[chunk] == [0, 1, 2, 3]
            (added if kind == "add" else copied).setdefault(chunk, []).append(rank)
    assert [sorted(ranks) for ranks in copied.values()] == [[0, 1, 2, 3]] * len(added)


def test_records_of_the_shuffle_move():
    before, after = drawings.owners_by_epoch()
    assert np.count_nonzero(before != after) > 0
