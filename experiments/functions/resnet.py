"""ResNet-50 by synchronous SGD: batch statistics, dropout, figures beside the loss.

python experiments/functions/resnet.py                      # a tiny variant: an eighth of the channels, a block a stage
python experiments/functions/resnet.py --full --batch 128   # ResNet-50
mpirun -n 2 python experiments/functions/resnet.py

The workload of Stooke and Abbeel 2017, section 6, on handwritten digits in 32 x 32 px. Each worker normalises with the
statistics of its own share. Their running values are averaged over workers after every step, weighted by examples, so
all workers stay equal. A share's dropout depends on the step and on the number of its first example.

Asserts what one process gives that computes the shares one after another. A minute on 2 cores.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from jaxmpi import functions as jm
from jaxmpi.model import nnx_model
from jaxmpi.models.resnet import STAGES, TINY_STAGES, WIDTH, ResNet, bottleneck

PX, CLASSES, DROPOUT = 32, 10, 0.25
RATE = 0.01  # at 0.05 with momentum, one process that starts 1e-7 apart has other losses in the 2nd digit after 6 steps
BOUND = 1e-3  # share of a leaf's largest value, for roundings


class Dropped(nnx.Module):
    """Logits of features of which some are left out in training."""

    def __init__(self, logits, rngs):
        self.drop, self.logits = nnx.Dropout(DROPOUT, rngs=rngs), logits

    def __call__(self, x):
        """f32[batch, features] -> f32[batch, classes]."""
        return self.logits(self.drop(x))


def build(full):
    """ResNet-50, or its tiny variant, with dropout before the logits."""
    stages, width = (STAGES[50], WIDTH) if full else (TINY_STAGES, WIDTH // 8)

    def make(rngs):
        net = ResNet(CLASSES, 1, bottleneck("v1.5"), stages, width, rngs)
        net.logits = Dropped(net.logits, rngs)  # pyright: ignore[reportAttributeAccessIssue] - called as a Dense
        return net

    return nnx_model(make, name="resnet50", input_shape=(PX, PX, 1), classes=CLASSES)


def digits():
    """Images f32[1797, 32, 32, 1], their labels, their numbers."""
    pixels, labels = load_digits(return_X_y=True)
    images = np.asarray(pixels, np.float32).reshape(-1, 8, 8) / 16
    return np.kron(images, np.ones((4, 4), np.float32))[..., None], np.asarray(labels, np.int32), np.arange(len(labels))


def loss_of(net):
    """The loss of a share, with its model state and figures."""

    def loss(params, stats, x, y, number, key):
        logits, stats = net.apply(params, stats, x, jax.random.fold_in(key, number[0]), True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean(), (stats, {"right": (logits.argmax(-1) == y).sum(), "losses": losses})

    return loss


def train(net, tx, data, batches):
    """Train with all workers; return results of steps, params and batch statistics."""
    x, y, numbers = map(jm.shared, data)
    params, stats = net.init(jax.random.key(0), jnp.zeros((1, PX, PX, 1)))
    step = jm.optimizer(
        loss_of(net),
        params,
        tx,
        inputs=(jm.scatter, jm.scatter, jm.scatter, jm.broadcast),
        model_state=stats,
        model_state_outputs=jm.mean,
        aux={"right": jm.sum, "losses": jm.gather},
    )
    steps = [step(x, y, numbers, key=jax.random.key(i), batch=batch) for i, batch in enumerate(batches)]

    def evaluate(params, stats, x, y):
        logits, _ = net.apply(params, stats, x, jax.random.key(0), False)
        return (logits.argmax(-1) == y).sum()

    right = jm.function(evaluate, (step.params, step.model_state, jm.scatter, jm.scatter), jm.sum)(x, y, slices=4)
    print(f"right with the running statistics: {int(right)} of {len(y)}")
    return steps, step.params.get(0), step.model_state.get(0)


def train_alone(net, tx, data, batches, workers):
    """The same in one process, share by share."""
    params, stats = net.init(jax.random.key(0), jnp.zeros((1, PX, PX, 1)))
    state, steps = tx.init(params), []
    compute, update = jax.jit(jax.value_and_grad(loss_of(net), has_aux=True)), jax.jit(tx.update)
    for i, batch in enumerate(batches):
        edges = [worker * len(batch) // workers for worker in range(workers + 1)]
        shares = [batch[begin:end] for begin, end in itertools.pairwise(edges)]
        found = [compute(params, stats, *(array[share] for array in data), jax.random.key(i)) for share in shares]
        (values, grads, new), figures = (
            mean([(v, g, s) for (v, (s, _)), g in found], shares),
            [f for (_, (_, f)), _ in found],
        )
        updates, state = update(grads, state, params)
        params, stats = optax.apply_updates(params, updates), new
        joined = {"right": sum(f["right"] for f in figures), "losses": np.concatenate([f["losses"] for f in figures])}
        steps.append((values, joined))
    return steps, params, stats


def mean(trees, shares):
    """Trees of shares, weighted by their lengths."""
    weights = [len(share) / sum(map(len, shares)) for share in shares]
    return jax.tree.map(lambda *xs: sum(w * x for w, x in zip(weights, xs, strict=True)), *trees)


def assert_close(ours, alone):
    """Each leaf differs by BOUND of its largest value at most."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=BOUND * max(np.abs(b).max(), 1e-2)), ours, alone
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="ResNet-50: 23.5 M params")
    parser.add_argument("--batch", type=int, default=32, help="examples of a step, over all workers")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    workers = jm.fork()
    net, tx, data = build(options.full), optax.sgd(RATE), digits()
    rng = np.random.default_rng(1)
    batches = [rng.permutation(len(data[0]))[: options.batch] for _ in range(options.steps)]
    with jm.profile() as profile:
        steps, params, stats = train(net, tx, data, batches)
    print(profile)
    for i in (0, -1):
        value, figures = steps[i]
        hardest = batches[i][np.argmax(figures["losses"])]
        print(f"loss {float(value):.4f}, right {int(figures['right'])} of {options.batch}, hardest image {hardest}")

    assert_close((steps, params, stats), train_alone(net, tx, data, batches, workers))
    print(f"{workers} workers did what one does")
