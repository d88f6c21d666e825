"""One worker's step beside a hand-written Flax and Optax loop.

    python scripts/bench_step.py [--model googlenet | digits_cnn] [--pairs 20] [--steps 5]

Both have the same model, optimizer, batch and data. They take turns in one process, each for a few steps, batches and
progress metrics included: the trainer with its loader, the hand-written loop with NumPy indexing. It prints median
milliseconds a step of both, and the median of the ratio pair by pair with its 95 % interval.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from harness import interval, take_turns

from jaxmpi import data
from jaxmpi.comm.topology import gather_workers
from jaxmpi.config.data import Data
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim
from jaxmpi.config.schema import Experiment
from jaxmpi.models.cnn import SmallCnn, digits_cnn
from jaxmpi.models.googlenet import STARTS, GoogLeNet, googlenet, googlenet_loss
from jaxmpi.runtime import process

BATCH = 32
MEAN, STD = 0.305, 0.376
Steps = Callable[[int], None]  # runs so many steps and waits for the last


def experiment(name: str) -> Experiment:
    """Experiment of the trainer's side."""
    big = name == "googlenet"
    size = Data(source="digits", mean=(MEAN,), std=(STD,), channels=3 if big else 1, resize=64 if big else 0)
    return Experiment(
        model=googlenet(classes=10, image_size=64, init="he") if big else digits_cnn(),
        loss=googlenet_loss if big else None,
        data=size,
        optim=Optim("adam", lr=1e-3),
        exchange=ExchangeConfig("asa32"),
        local_batch=BATCH,
        train_for="1000ep",
    )


def trainer(config: Experiment) -> Steps:
    """The loop of jaxmpi.train, from its own parts."""
    workers = gather_workers(1)
    plan, functions, state = harness.build_training(config, workers)
    batches = plan.feed.batches()

    def step() -> tuple[Any, Any]:
        nonlocal state
        state, metrics = functions.train_step(state, next(batches))
        return state, metrics.loss

    loop = read_late(step)

    def run(steps: int) -> None:
        loop(steps)
        jax.block_until_ready(state)

    return run


def read_late(step: Callable[[], tuple[Any, Any]]) -> Steps:
    """A loop over a step, which reads each loss one step late."""
    late: list[Any] = []

    def run(steps: int) -> None:
        state = None
        for _ in range(steps):
            state, loss = step()
            late.append(loss)
            if len(late) > 1:
                float(late.pop(0))
        jax.block_until_ready(state)

    return run


def by_hand(config: Experiment) -> Steps:
    """The loop that a user of Flax and Optax writes."""
    source = data.open_source(config.data, "train")
    rows = [source[i] for i in range(len(source))]
    shape = config.model.input_shape
    images = np.stack([np.broadcast_to(image, shape) for image, _ in rows])
    labels = np.array([label for _, label in rows], np.int32)
    rngs = nnx.Rngs(0)
    if config.model.name == "googlenet":
        module: Any = GoogLeNet(10, 3, STARTS["he"], rngs)
        loss_of = googlenet_loss
    else:
        module = SmallCnn((32, 64, 128), 10, 0.2, rngs)
        loss_of = optax.softmax_cross_entropy_with_integer_labels
    module.train()
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    tx = optax.adam(1e-3)

    @jax.jit(donate_argnums=(0, 1, 2))
    def update(params: Any, state: Any, rest: Any, image: jax.Array, label: jax.Array) -> tuple:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            module = nnx.merge(graph, params, rest, copy=True)
            outputs = module((image.astype(jnp.float32) / 255 - MEAN) / STD, True)
            return loss_of(outputs, label).mean(), nnx.state(module, nnx.Not(nnx.Param))

        (value, new_rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, new_rest, value

    state = tx.init(params)
    order = epochs(len(labels))

    def step() -> tuple[Any, jax.Array]:
        nonlocal params, state, rest
        chosen = next(order)
        params, state, rest, loss = update(params, state, rest, images[chosen], labels[chosen])
        return params, loss

    return read_late(step)


def epochs(examples: int) -> Iterator[np.ndarray]:
    """Batches of indices, shuffled every epoch, the short last one left out."""
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(examples)
        yield from np.split(order[: examples // BATCH * BATCH], examples // BATCH)


def main() -> None:
    """Measure and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--model", choices=["googlenet", "digits_cnn"], default="googlenet")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    process.prepare()
    config, steps = experiment(options.model), options.steps
    runs = {"trainer": partial(trainer(config), steps), "by hand": partial(by_hand(config), steps)}
    times = take_turns(runs, options.pairs, warm_up=2, swap=True)
    trainer_s, hand_s = (np.array(values) / steps for values in times.values())
    print(
        f"{options.model}, batch {BATCH}, {options.pairs} pairs of {steps} steps, {jax.default_backend()}\n"
        f"trainer {1e3 * np.median(trainer_s):.2f} ms, by hand {1e3 * np.median(hand_s):.2f} ms a step\n"
        f"ratio {interval(trainer_s / hand_s, 3)}"
    )


if __name__ == "__main__":
    main()
