"""Equal calls that ranks make in another order, by the places that make them."""

import random

import pytest

from jaxmpi.comm.call_places import CallPlaces


def said_at(*ranks: str) -> int | None:
    """The call at which another order is found; a rank's calls are letters."""
    places = CallPlaces()
    found = [i for i, calls in enumerate(zip(*ranks, strict=True)) if places.round_trip([c.encode() for c in calls])]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize(
    ("ranks", "at"),
    [
        (("abab", "baba"), 1),
        (("abc", "bca"), 2),
        (("ambn", "bman"), 2),  # others between them, at the same places
        (("abb", "bba"), 2),  # a place that comes twice
        (("acd", "bdc"), 2),  # behind an if rank == 0: a else: b
        (("ssab", "ssab", "ssba"), 3),
        (("ab", "ss", "ba"), 1),  # a server in between
        (("aabb", "bbaa"), 2),  # ranks that take turns look the same
    ],
)
def test_another_order_is_found_once_at_the_last_of_its_calls(ranks, at):
    assert said_at(*ranks) == at


@pytest.mark.parametrize(
    "ranks",
    [
        ("aaaa", "bbbb"),  # if rank == 0: a else: b
        ("aaaa", "bbbb", "aaaa", "bbbb"),
        ("lllzz", "lzzzz"),  # a loop that has ended on one rank, which gives zeros at z
        ("lllzlllz", "lzzzllzz"),
        ("sasb", "scsd"),
    ],
)
def test_ranks_may_make_one_call_at_several_places(ranks):
    assert said_at(*ranks) is None


def test_any_permutation_is_found():
    draw = random.Random(0)
    for _ in range(500):
        calls = draw.choices("abcde", k=draw.randrange(2, 8))
        other = draw.sample(calls, len(calls))
        assert (said_at("".join(calls), "".join(other)) is None) == (calls == other)
