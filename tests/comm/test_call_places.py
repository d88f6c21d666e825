"""Equal calls that ranks make in another order, by the places that make them."""

import random

import pytest

from jaxmpi.comm.call_places import CallPlaces


def permuted_at(*ranks: str) -> int | None:
    """The call at which an order is found to differ; ranks' calls are letters, `.` for none of interest."""
    places = CallPlaces()
    for i, calls in enumerate(zip(*ranks, strict=True)):
        if places.permuted([call.encode() for call in calls]):
            return i
    return None


@pytest.mark.parametrize(
    ("ranks", "at"),
    [
        (("ab", "ba"), 1),
        (("abc", "bca"), 2),
        (("ambn", "bman"), 2),  # others between them, at the same places
        (("sasb", "aasb", "bbsa"), None),  # what differs so far: the last has been at b twice
        (("ssab", "ssab", "ssba"), 3),
        (("ababab", "abbaab"), 3),
    ],
)
def test_calls_in_another_order_are_found_at_the_last_of_them(ranks, at):
    assert permuted_at(*ranks) == at


@pytest.mark.parametrize(
    "ranks",
    [
        ("aaaa", "bbbb"),  # if rank == 0: a else: b
        ("lllzz", "lzzzz"),  # a loop that has ended on one rank, which gives zeros at z
        ("lllzlll", "lzzzlll"),
        ("lllzmlzz", "lzzzmlll"),  # the next epoch, in which the other has less
    ],
)
def test_ranks_may_make_one_call_at_several_places(ranks):
    assert permuted_at(*ranks) is None


def test_any_permutation_is_found_before_the_next_call_that_follows():
    draw = random.Random(0)
    for _ in range(500):
        calls = [chr(ord("a") + i) for i in range(draw.randrange(2, 8))]
        other = draw.sample(calls, len(calls))
        at = permuted_at("".join(calls), "".join(other))
        assert (at is None) == (calls == other)
