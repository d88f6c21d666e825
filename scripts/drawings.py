"""Draw the algorithms of jaxmpi as SVG, from the algorithms themselves.

    python scripts/drawings.py            writes docs/pictures/*.svg

A strategy's picture shows the messages of the schedules that C carries out, and what each rank's chunks hold after each
round. A rule's timeline comes from running the rule with an exchange that only takes notes. The rooms come from the
import contracts, what a killed rank does to the others from recorded jobs, time limits from the constants that hold
them, the papers' figures from the tables of docs/papers.md. So a picture changes when its source does;
tests/for_scripts/test_drawings.py compares the two.
"""

import argparse
import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from death_drawing import draw_death
from exchange_drawings import LEFT, STRATEGIES, column, draw_heads, draw_shm, draw_strategy, draw_zero
from paper_drawings import PAPERS, draw_paper
from svg import WIDTH, Picture, Point

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"


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
    from jaxmpi.data.shuffle import GroupSampler, place_owners, record_owners

    sampler = GroupSampler(examples, 8, seed=0, parts=workers)
    owners = place_owners(examples, 8, workers)
    before, after = (record_owners(sampler.epoch_order(epoch), owners) for epoch in (0, 1))
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
    **{f"papers-{name}": lambda name=name: draw_paper(name) for name in PAPERS},
}


def main() -> None:
    """Write all pictures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
