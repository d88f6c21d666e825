"""Draw the algorithms of jaxmpi as SVG, from the algorithms themselves.

    python scripts/drawings.py            writes docs/pictures/*.svg

A strategy's picture shows the messages of the schedules that C carries out, and what each rank's chunks hold after each
round. A rule's timeline comes from running the rule with an exchange that only takes notes. The rooms come from the
import contracts. So a picture changes when the code does; tests/for_scripts/test_drawings.py compares the two.
"""

import argparse
import inspect
import tomllib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from svg import WIDTH, Picture, Point

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
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


def draw_shm(ranks: int = 4, chunks: int = 5) -> Picture:
    """The chain of ranks over chunks in shared memory, as `comm.shared_sum` has it."""
    picture = Picture("shm: ranks add to chunks of shared memory, one after another")
    y = draw_heads(picture, [f"rank {rank}" for rank in range(ranks)])
    width = (WIDTH - LEFT) / ranks * 0.43
    for turn in range(chunks + 2 * ranks - 1):
        picture.text((0, y + 16), turn + 1)
        for rank in range(ranks):
            x, added = column(rank, ranks), turn - rank
            copied = added - ranks  # when a rank has come to chunk j, all ranks have added to chunk j - w
            if 0 <= added < chunks:
                opacity = 0.12 + 0.35 * (rank + 1) / ranks
                picture.box((x, y), (width, 22), f"fill c{added}", "add" if rank else "copy in", opacity)
            if 0 <= copied < chunks:
                picture.box((x + width + 1, y), (width, 22), f"fill c{copied}", "out")
        y += 26
    picture.text((LEFT, y + 14), "a colour is a chunk of 512 KiB at most, which stays in the processor's caches")
    return picture


# ---------------------------------------------------------------- timelines of rules

PERIOD, STEPS, WORKERS = 2, 4, 3
LOCK_STEP = "gradients", "subgd", "awagd", "local_sgd", "diloco", "easgd_sync"
FREE_RUNNING = "easgd", "asgd", "gosgd"


def find_rule(name: str) -> Callable[..., Any]:
    """The function that builds a rule."""
    from jaxmpi.rules import gradients, synchronous
    from jaxmpi.rules.asynchronous import rules

    return next(vars(module)[name] for module in (gradients, synchronous, rules) if name in vars(module))


def draw_equations(picture: Picture, y: float, name: str) -> None:
    """Write the equations of the rule's docstring."""
    equations = (inspect.getdoc(find_rule(name)) or "").split("\n\n")[1].replace("\n", " ;  ")
    for i, line in enumerate(equations.split(" ;  ")):
        picture.text((64, y + 17 * i), line)


def watch_rule(name: str) -> list[tuple[int, str]]:
    """Run a rule for some steps: at which it exchanges, and what, as `mean of gradients`."""
    import optax

    from jaxmpi.config import RuleConfig
    from jaxmpi.rules import registry
    from jaxmpi.rules.base import Exchange

    calls, step, rate = list[tuple[int, str]](), 0, 0.25
    grads, params = np.float32(8), np.float32(64)

    def note(operation: str) -> Callable[[Any], Any]:
        def exchange(tree: Any) -> Any:
            names = {
                float(grads): "gradients",
                -rate * float(grads): "updates",
                float(params - rate * grads): "weights",
            }
            calls.append((step, f"{operation} of {names.get(float(tree), 'changes')}"))
            return tree

        return exchange

    config = RuleConfig(name, local_steps=PERIOD, tau=PERIOD, alpha=0.25, noise_scale=False)
    exchange = Exchange(note("mean"), note("sum"), jit=lambda function, **options: function)
    rule = registry.build(config, optax.sgd(rate), exchange, optimizer="sgd", linear=True)
    state = rule.init(params)
    while step < STEPS:
        step += 1
        params, state = rule.update(grads, state, params)
    return calls


def draw_lock_step(name: str) -> Picture:
    """A rule whose workers meet: boxes are work of a step, bars are exchanges."""
    calls = watch_rule(name)
    picture = Picture(f"{name}: {STEPS} steps of {WORKERS} workers, and what they exchange")
    is_before = "gradients" in calls[0][1] or "updates" in calls[0][1]
    pitch = (WIDTH - 64) / STEPS
    for worker in range(WORKERS):
        picture.text((0, 20 + 34 * worker), f"worker {worker}")
        for x in (64 + step * pitch for step in range(STEPS)):
            picture.box((x, 2 + 34 * worker), (44, 26), "fill c0", "grad", 0.25)
            picture.box((x + (60 if is_before else 46), 2 + 34 * worker), (38, 26), "box", "step")
    for step, _ in calls:
        x = 64 + (step - 1) * pitch + (48 if is_before else 91)
        picture.box((x, 0), (8, 34 * WORKERS - 4), "fill c1 exchange")
    when = "every step" if len(calls) == STEPS else f"every {PERIOD} steps"
    picture.text((64, 34 * WORKERS + 14), f"{name}: the {calls[0][1]}, {when} (bars)", "small head")
    draw_equations(picture, 34 * WORKERS + 33, name)
    return picture


def draw_free_running(name: str) -> Picture:
    """A rule whose workers wait for nobody: worker 2 is half as fast as the others."""
    import optax

    from jaxmpi.config import RuleConfig
    from jaxmpi.rules.base import Exchange

    unused = Exchange(lambda tree: tree, lambda tree: tree)
    rule = find_rule(name)(optax.sgd(0.1), unused, RuleConfig(name, tau=PERIOD, p=0.5, alpha=0.3)).asynchronous
    picture = Picture(f"{name}: workers step at their own pace")
    lanes = [2 + 34 * worker for worker in range(WORKERS)]
    bottom = lanes[-1] + (0 if rule.is_gossip else 54)
    if not rule.is_gossip:
        picture.box((64, bottom), (WIDTH - 66, 24), "fill c1", "center", 0.3)
    for worker, y in enumerate(lanes):
        picture.text((0, y + 17), f"worker {worker}")
        gossip, length = rule.is_gossip and rule.gossip(worker, WORKERS, 2, 0.0), (50, 56, 110)[worker]
        for x in range(64, WIDTH - length, length):
            picture.box((x, y), (length - 6, 24), "fill c0", "step", 0.25)
            end, is_due = x + length - 3, (x - 64) // length % PERIOD == PERIOD - 1
            if gossip and (push := gossip.draw()):
                to = lanes[push[0]]
                picture.arrow((end, y + 12), (end + 4, to - 1 if to > y else to + 25), 1, "push")
            elif not gossip and is_due:
                picture.arrow((end - 3, y + 25), (end - 3, bottom - 1), 1, "push")
                picture.arrow((end + 3, bottom - 1), (end + 3, y + 25), 0, "answer")
    pushed = "weights" if rule.push(np.float32(5), np.float32(2)) == 5 else "updates"
    to = "a random other worker" if rule.is_gossip else f"the center, every {PERIOD} steps"
    picture.text((64, bottom + 44), f"{name}: a worker pushes its {pushed} to {to}", "small head")
    draw_equations(picture, bottom + 63, name)
    return picture


# ---------------------------------------------------------------- a step, the shuffle, a death, the rooms


def draw_step() -> Picture:
    """A training step without and with overlap; buckets are those of `allreduce.buckets`."""
    from jaxmpi.allreduce.buckets import assign_buckets

    sizes = [30, 90, 90, 60, 30]  # floats of layers 1 to 5
    backward = list(reversed(range(len(sizes))))
    buckets = assign_buckets(sizes, 480, backward)
    picture = Picture("A training step: forward, backward, exchange of buckets, update")
    for title, y in (("without overlap", 0), ("with overlap", 104)):
        for words, at, kind in ((title, 14, "small head"), ("compute", 40, "small"), ("links", 72, "small")):
            picture.text((0, y + at), words, kind)
        x, link = 64.0, 0.0
        for layer, size in enumerate(sizes):
            picture.box((x, y + 24), (size / 4 - 1, 24), "box", layer + 1 if size > 40 else "")
            x += size / 4
        ends = [x + sum(sizes[i] for i in backward[: backward.index(bucket[-1]) + 1]) / 2 for bucket in buckets]
        for number, bucket in enumerate(buckets):
            for layer in bucket:
                picture.box((x, y + 24), (sizes[layer] / 2 - 1, 24), f"fill c{number}", layer + 1, 0.45)
                x += sizes[layer] / 2
        for number, bucket in enumerate(buckets):
            link = max(link, ends[number] if y else ends[-1])
            width = sum(sizes[layer] for layer in bucket) / 1.8
            picture.box((link, y + 56), (width - 1, 24), f"fill c{number} bucket", "bucket" if width > 46 else "")
            link += width
        picture.box((link, y + 24), (46, 24), "box", "update")
    picture.text((0, 210), "grey: forward; coloured: backward, last layer first; a colour is a bucket of gradients")
    return picture


def owners_by_epoch(examples: int = 24, workers: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """i[n]: the worker that reads each record in epoch 0 and in epoch 1, all workers being a group."""
    from jaxmpi.data.group_order import GroupSampler, record_owners

    sampler = GroupSampler(examples, 8, seed=0, parts=workers)
    before, after = (record_owners(*sampler.shuffled_records(sampler.shuffle_of_turn(epoch))) for epoch in (0, 1))
    return before, after


def draw_shuffle(workers: int = 4) -> Picture:
    """Records before and after a shuffle over a group."""
    owners = owners_by_epoch(workers=workers)
    picture = Picture("A shuffle in memory: records move to the workers that read them in the next epoch")
    top = draw_heads(picture, [f"worker {worker}" for worker in range(workers)])
    begins: dict[int, Point] = {}
    for epoch, y in enumerate((top, top + 150)):
        picture.text((0, y + 13), f"epoch {epoch}")
        for worker in range(workers):
            for i, record in enumerate(np.flatnonzero(owners[epoch] == worker).tolist()):
                x, colour = column(worker, workers) + 6 + 18 * i, int(owners[0][record])
                picture.box((x, y), (17, 18), f"fill c{colour}", opacity=0.85)
                if epoch and colour != worker:
                    picture.arrow(begins[record], (x + 9, y - 2), colour, "record")
                begins[record] = x + 9, y + 20
    picture.text((LEFT, top + 192), "moved by MPI_Alltoallv while epoch 0 is read; a colour: who had the record")
    return picture


def draw_death() -> Picture:
    """What happens to the others when rank 2 is killed at step 23, the last checkpoint being of step 20."""
    picture = Picture("A rank is killed: restart from the checkpoint, go on without it, or not notice")
    cases = (  # what the others do; their next step, after how long; whether rank 2 is back
        ("--restarts 3: all start again, from the checkpoint", 21, 64, True),
        ("--on-rank-loss shrink: the others do step 23 again", 23, 26, False),
        ("asynchronous rules: nobody waits for rank 2", 24, 0, False),
    )
    for y, (title, resume_step, pause, is_back) in zip(range(0, 400, 132), cases, strict=False):
        picture.text((0, y + 14), title, "small head")
        for rank in range(4):
            top = y + 22 + 24 * rank
            picture.text((0, top + 15), f"rank {rank}")
            steps = [*range(20, 24), *(range(resume_step, resume_step + 5) if rank != 2 or is_back else ())]
            for i, step in enumerate(steps):
                x, is_killed = 52 + i * 44 + pause * (i > 3), (rank, i) == (2, 3)
                picture.box((x, top), (40, 20), "fill c4" if is_killed else "box", "killed" if is_killed else step)
        picture.add(f'<line x1="94" y1="{y + 20}" x2="94" y2="{y + 116}" class="line"/>', y + 116)
    picture.text((0, 400), "a box is a step, the green line the checkpoint of step 20")
    return picture


def draw_rooms() -> Picture:
    """The layers of the import contract: a room imports only rooms below it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = next(entry for entry in project["tool"]["importlinter"]["contracts"] if entry["type"] == "layers")
    picture = Picture("The rooms of the source: a room imports only rooms below it, and none beside it")
    for row, layer in enumerate(contract["layers"]):
        rooms = layer.split(" | ")
        for i, room in enumerate(rooms):
            width = WIDTH / len(rooms)
            picture.box((i * width + 1, row * 34), (width - 3, 28), f"fill c{row % 5} room", room, 0.25)
    return picture


DRAWINGS: dict[str, Callable[[], Picture]] = {
    **{name: lambda name=name: draw_strategy(name) for name in STRATEGIES},
    **{f"rule-{name}": lambda name=name: draw_lock_step(name) for name in LOCK_STEP},
    **{f"rule-{name}": lambda name=name: draw_free_running(name) for name in FREE_RUNNING},
    **{"shm": draw_shm, "zero": draw_zero, "step": draw_step},
    **{"shuffle": draw_shuffle, "death": draw_death, "rooms": draw_rooms},
}


def main() -> None:
    """Write all pictures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
