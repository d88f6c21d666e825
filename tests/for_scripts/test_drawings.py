"""The drawings of docs/pictures are those of the code: as many arrows as messages, and every sum is whole."""

import importlib
import re
import sys
import tomllib

import numpy as np
import pytest

from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
drawings = importlib.import_module("drawings")


def drawn(name: str, kind: str) -> int:
    """How many shapes of a kind a picture of docs/ has."""
    svg = (drawings.PICTURES / f"{name}.svg").read_text()
    return len(re.findall(rf'class="[^"]*\b{kind}"', svg))


@pytest.mark.parametrize("name", drawings.STRATEGIES)
def test_arrows_of_a_strategy_are_the_messages_of_its_schedule(name):
    course = drawings.follow(*drawings.STRATEGIES[name])
    ranks = len(drawings.STRATEGIES[name].hosts)
    assert drawn(name, "message") == sum(len(messages) for messages in course.rounds)
    assert all(len(whose) == ranks for whose in course.held[-1].values()), "a chunk lacks a summand"
    assert all(len({m.sender for m in messages}) == len({m[:2] for m in messages}) for messages in course.rounds)


def test_halves_of_a_sharded_update_are_drawn_from_the_ring():
    first, second = drawings.sharded_halves()
    assert drawn("zero", "message") == sum(len(messages) for half in (first, second) for messages in half.rounds)
    whole = [place for place, whose in first.held[-1].items() if len(whose) == 4]
    assert sorted(rank for rank, _ in whole) == sorted(chunk for _, chunk in whole) == [0, 1, 2, 3]
    assert all(len(whose) == 4 for whose in second.held[-1].values())


@pytest.mark.parametrize("name", drawings.LOCK_STEP)
def test_bars_of_a_rule_are_its_exchanges(name):
    seen = drawings.watch_rule(name)
    assert drawn(f"rule-{name}", "exchange") == len(seen)
    assert f"the {seen[0][1]}" in (drawings.PICTURES / f"rule-{name}.svg").read_text()


def test_records_of_the_shuffle_are_drawn_where_they_move():
    before, after = drawings.owners_by_epoch()
    assert drawn("shuffle", "record") == np.count_nonzero(before != after) > 0


def test_rooms_are_those_of_the_import_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["type"] == "layers")
    assert drawn("rooms", "room") == sum(len(layer.split("|")) for layer in layers)


def test_every_drawing_is_in_docs():
    assert {path.stem for path in drawings.PICTURES.glob("*.svg")} == set(drawings.DRAWINGS)
