"""Draw how strategies sum: messages of the schedules that C carries out, and shared memory."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from svg import WIDTH, Picture

LEFT = 44  # margin for names of rows


# ---------------------------------------------------------------- the messages of a strategy


class Message(NamedTuple):
    """Floats of a chunk that travel in a round."""

    sender: int
    receiver: int
    chunk: int
    floats: int


class Course(NamedTuple):
    """A sum over ranks, round by round."""

    rounds: list[list[Message]]
    # Before each round and at the end, by (rank, chunk): whose summands it has.
    held: list[dict[tuple[int, int], frozenset[int]]]
    chunks: int


# ("send" or "receive", rank, (memory, floats)), ("add", memory, summands) or ("wait", 0, 0)
Action = tuple[str, Any, Any]


def read_schedule(strategy: str, rank: int, hosts: Sequence[int], floats: int, half: str) -> list[list[Action]]:
    """What a rank does for each part of a sum: all that this script knows of the format of schedules.

    Memory is a number of the vector's first float, or a word for the scratch memory.
    """
    from jaxmpi.allreduce import schedules as s
    from jaxmpi.allreduce.algorithms import parse

    def memory(place: int) -> int | str:
        return f"scratch {place}" if place % 4 == s.SCRATCH else place // 16

    schedule = parse(strategy).schedule(floats, s.Group(rank, range(len(hosts)), hosts), half)
    words, begins = (array.tolist() for array in schedule.arrays())
    parts = []
    for at in begins:
        actions: list[Action] = []
        while words[at] != s.END:
            if words[at] == s.WAIT:
                actions.append(("wait", 0, 0))
                at += 1
            elif words[at] == s.ADD:
                end = at + 5 + 2 * words[at + 4]
                actions.append(("add", memory(words[at + 1]), [memory(place) for place in words[at + 6 : end : 2]]))
                at = end
            else:  # wire 32 encodes and decodes nothing
                kind = "send" if words[at] == s.SEND else "receive"
                actions.append((kind, words[at + 1], (memory(words[at + 2]), words[at + 3] // 4)))
                at += 4
        parts.append(actions)
    return parts


def follow(strategy: str, hosts: Sequence[int], floats: int, half: str = "", begin: Mapping | None = None) -> Course:
    """Play a sum on all ranks: in a round a rank sends to one other at most, and receives from one.

    `begin` is what chunks hold before, as the first half of a sum leaves it; default: each rank's own summand.
    """
    ranks = range(len(hosts))
    programs = [read_schedule(strategy, rank, hosts, floats, half) for rank in ranks]
    part_of = {
        place: number for parts in programs for number, part in enumerate(parts) for place in vector_places(part)
    }
    places = sorted(part_of)
    memory = {
        (rank, part_of[places[chunk]], places[chunk]): contributors
        for (rank, chunk), contributors in (begin or {}).items()
    }
    waiting = {(rank, number): deque(part) for rank in ranks for number, part in enumerate(programs[rank])}
    sends: dict[tuple[int, int, int], deque] = defaultdict(deque)  # by part, sender and receiver: (memory, floats)
    receives: dict[tuple[int, int, int], deque] = defaultdict(deque)
    course = Course([], [], len(places))

    def contributors(rank: int, part: int, place: Any) -> frozenset[int]:
        return memory.get((rank, part, place), frozenset([rank]))

    def advance(rank: int, part: int) -> None:
        """Do what needs no message that is still to come."""
        actions = waiting[rank, part]
        while actions:
            kind, first, second = actions[0]
            if kind == "wait" and (
                any(sends[part, rank, other] for other in ranks) or any(receives[part, other, rank] for other in ranks)
            ):
                return
            actions.popleft()
            if kind == "send":
                sends[part, rank, first].append(second)
            elif kind == "receive":
                receives[part, first, rank].append(second)
            elif kind == "add":
                memory[rank, part, first] = frozenset().union(*(contributors(rank, part, source) for source in second))

    while True:
        for rank, part in waiting:
            advance(rank, part)
        course.held.append(
            {(rank, c): contributors(rank, part_of[p], p) for rank in ranks for c, p in enumerate(places)}
        )
        messages, arrivals, sending, receiving = list[Message](), {}, {}, {}
        for key in sorted(sends):  # the first part first
            part, sender, receiver = key
            is_free = sending.get(sender, key) == key and receiving.get(receiver, key) == key
            while is_free and sends[key] and receives[key]:
                (source, count), (target, _) = sends[key].popleft(), receives[key].popleft()
                messages.append(Message(sender, receiver, places.index(source), count))
                arrivals[receiver, part, target] = contributors(sender, part, source)
                sending[sender] = receiving[receiver] = key
        if not messages:
            assert not any(waiting.values()), f"{strategy}: ranks wait for each other"
            return course
        memory |= arrivals
        course.rounds.append(messages)


def vector_places(part: Sequence[Action]) -> set[int]:
    """First floats of all chunks that a part sends or sums."""
    used = [first if kind == "add" else second[0] for kind, first, second in part if kind in ("add", "send")]
    return {place for place in used if isinstance(place, int)}


# ---------------------------------------------------------------- pictures of strategies


class Example(NamedTuple):
    """A strategy as it is drawn."""

    strategy: str
    hosts: tuple[int, ...] = (0, 1, 2, 3)
    floats: int = 16


STRATEGIES = {
    "asa": Example("asa:32"),
    "ring": Example("ring:32"),
    "tree": Example("tree:32"),
    "color2": Example("color2:32"),
    "pipering": Example("pipering:32", floats=12288),  # which makes three packets
    "hier-ring": Example("hier-ring:32", hosts=(0, 0, 1, 1)),
}


def column(rank: int, ranks: int) -> float:
    """The left edge of a rank's column."""
    return LEFT + rank * (WIDTH - LEFT) / ranks


def draw_heads(picture: Picture, names: Sequence[str]) -> float:
    """Names above the columns of ranks; return where the picture goes on."""
    for rank, name in enumerate(names):
        picture.text((column(rank, len(names)), 14), name, "small head")
    return 22


def draw_rounds(picture: Picture, y: float, course: Course, ranks: int) -> float:
    """What chunks hold, as numbers of summands, with the messages between; return where the picture goes on."""
    cell = (WIDTH - LEFT) / ranks * 0.86 / course.chunks
    for number, held in enumerate(course.held):
        for (rank, chunk), contributors in held.items():
            x, share = column(rank, ranks) + chunk * cell, len(contributors) / ranks
            opacity = 1 if share == 1 else 0.12 + 0.35 * share
            picture.box((x, y), (cell - 1, 22), f"fill c{chunk % 5}", len(contributors), opacity)
        y += 66
        for message in course.rounds[number] if number < len(course.rounds) else ():
            ends = [column(rank, ranks) + (message.chunk + 0.5) * cell for rank in message[:2]]
            picture.arrow((ends[0], y - 42), (ends[1], y - 2), message.chunk, "message")
        if number < len(course.rounds):
            picture.text((0, y - 18), number + 1)
    return y - 44


def draw_strategy(name: str) -> Picture:
    """Who sends which chunk to whom in which round, and what that costs, counted in the messages."""
    strategy, hosts, floats = STRATEGIES[name]
    course, ranks = follow(strategy, hosts, floats), len(hosts)
    picture = Picture(f"{name}: messages between {ranks} ranks, and how many summands each chunk holds")
    is_shared = len(set(hosts)) < ranks
    heads = [f"rank {rank}" + f", host {host}" * is_shared for rank, host in enumerate(hosts)]
    y = draw_rounds(picture, draw_heads(picture, heads), course, ranks)
    sent_floats = Counter[int]()
    for message in (each for messages in course.rounds for each in messages):
        sent_floats[message.sender] += message.floats
    cost = f"{len(course.rounds)} rounds; the busiest rank sends {max(sent_floats.values()) / floats:.3g} n of n floats"
    picture.text((LEFT, y + 20), f"{name}, {cost}")
    return picture


def sharded_halves() -> tuple[Course, Course]:
    """The ring's reduce-scatter of gradients, and the all-gather of the params that ranks then update."""
    strategy, hosts, floats = STRATEGIES["ring"]
    first = follow(strategy, hosts, floats, "scatter")
    updated = {
        place: contributors if len(contributors) == len(hosts) else frozenset()
        for place, contributors in first.held[-1].items()
    }
    return first, follow(strategy, hosts, floats, "gather", updated)


def draw_zero() -> Picture:
    """A sharded update: the ring's first half, the optimizer on a chunk, the second half."""
    picture = Picture("ZeRO: reduce-scatter of gradients, update of a shard, all-gather of params")
    first, second = sharded_halves()
    y = draw_rounds(picture, draw_heads(picture, [f"rank {rank}" for rank in range(4)]), first, 4)
    picture.text((LEFT, y + 22), "each rank has the sum of one chunk: it updates this shard of the params,")
    picture.text((LEFT, y + 40), "and keeps the optimizer's state of this shard alone")
    draw_rounds(picture, y + 54, second, 4)
    return picture


# ---------------------------------------------------------------- shared memory


class Notes:
    """Takes the place of the counters in shared memory: what a rank waits for before each of its steps."""

    def __init__(self, ranks: int) -> None:
        """Begin with no step."""
        self.call, self.ranks = 1, ranks
        self.waits = list[tuple[int, int, int]]()  # (rank, counter, value) before the next step
        self.steps = deque[tuple[int, int, list[tuple[int, int, int]]]]()  # (counter, value, what it waited for)

    def meet(self, rank: int, counter: int, value: int) -> None:
        """Wait until a rank's counter has a value."""
        self.waits.append((rank, counter, value))

    def wait_for_all(self, counter: int, value: int) -> int:
        """Wait until all ranks' counters have a value."""
        self.waits += [(rank, counter, value) for rank in range(self.ranks)]
        return value

    def post(self, counter: int, value: int) -> None:
        """Tell the others that a step is done."""
        self.steps.append((counter, value, self.waits))
        self.waits = []


def play_shared_sum(ranks: int = 4, chunks: int = 5) -> list[dict[int, tuple[str, int]]]:
    """Steps of a sum turn by turn, as (what, chunk) by rank: `comm.shared_sum` run with counters that take notes."""
    from jaxmpi.comm import shared_sum as s

    vector = np.zeros(chunks * s.SHORT, np.float32)
    programs = list[Notes]()
    for rank in range(ranks):
        part = object.__new__(s.SharedSum)  # without memory to share
        part.rank, part.size, part.slots, part.free, part.small = rank, ranks, chunks, chunks, 0
        part.chunk, part.chunk_count, part.each_divides = s.CHUNK, 0, True
        part.ring, notes = np.zeros((chunks, s.CHUNK), np.float32), Notes(ranks)
        part.board = cast(Any, notes)
        part._run([vector], [vector.copy()], (vector.size,), np.float32(1), "")
        notes.steps.popleft()  # to say that it has come
        programs.append(notes)
    told, turns = defaultdict[tuple[int, int], int](int), list[dict[int, tuple[str, int]]]()
    while any(notes.steps for notes in programs):
        ready = {
            rank: notes.steps.popleft()
            for rank, notes in enumerate(programs)
            if notes.steps and all(told[peer, counter] >= value for peer, counter, value in notes.steps[0][2])
        }
        assert ready, "ranks wait for each other"
        told |= {(rank, counter): value for rank, (counter, value, _) in ready.items()}
        kinds = {s.SUMMED: "add", s.COPIED: "copy out"}
        turns.append({rank: (kinds[counter], value - 1) for rank, (counter, value, _) in ready.items()})
    return turns


def draw_shm(ranks: int = 4) -> Picture:
    """The chain of ranks over chunks in shared memory."""
    from jaxmpi.comm.shared_sum import CHUNK

    picture = Picture("shm: ranks add to chunks of shared memory, one after another")
    y = draw_heads(picture, [f"rank {rank}" for rank in range(ranks)])
    for number, turn in enumerate(play_shared_sum(ranks), 1):
        picture.text((0, y + 16), number)
        for rank, (kind, chunk) in turn.items():
            opacity = 1 if kind == "copy out" else 0.12 + 0.35 * (rank + 1) / ranks
            words = "copy in" if kind == "add" and not rank else kind
            picture.box((column(rank, ranks), y), (WIDTH / ranks - 24, 22), f"fill c{chunk}", words, opacity)
        y += 26
    caches = f"a colour is a chunk of {CHUNK * 4 >> 10} KiB at most, which stays in the processor's caches"
    picture.text((LEFT, y + 14), caches)
    return picture
