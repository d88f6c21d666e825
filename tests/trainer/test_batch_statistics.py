"""Batch statistics by one word, in whole runs: losses, params, statistics and evaluation beside a computation by hand.

By hand a run is a loop of plain JAX in one process over the examples that the sampler names. The loop in 64 bits gives
the exact answer. Synchronised workers are there a single worker that has the whole batch. The same loop in 32 bits
measures by its error e what rounding costs. Workers add the same terms in other orders. Let n be the number of terms
in the longest sum. So, as in tests/twins.py, a run is within sqrt(n) max(e, 2^-24 |exact|) of the exact answer.
"""

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxmpi.allreduce.api import exchange
from jaxmpi.comm.axis import AxisComm
from jaxmpi.config import experiment_file
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.data import Sampler
from jaxmpi.model.adapters.nnx import nnx_model
from jaxmpi.models.norm import BatchNorm
from jaxmpi.tasks import classes
from jaxmpi.tasks.registry import TASKS
from jaxmpi.tasks.supervised import Supervised
from jaxmpi.trainer import step
from launching import train, train_here
from runs import column, saved_leaves
from tolerances import U

NET = """
import jax
import numpy as np
from flax import nnx

from jaxmpi.model.adapters.nnx import nnx_model
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.config.optim import Optim
from jaxmpi.data import ArraySource
from jaxmpi.models.layers import Conv, Dense
from jaxmpi.models.norm import BatchNorm


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = Conv((2, 4), 3, rngs=rngs)
        self.norm = BatchNorm(4, eps=1e-3, momentum=0.2)  # so that three steps are enough to tell the words apart
        self.logits = Dense((4, 5), rngs=rngs)

    def __call__(self, x, train):
        return self.logits(jax.nn.relu(self.norm(self.conv(x), train)).mean((1, 2)))


def source(examples, seed):
    rng = np.random.default_rng(seed)
    spread = rng.uniform(0.3, 3, (2, examples, 1, 1, 1)).astype(np.float32)  # so that every share has other statistics
    images = spread[0] * rng.standard_normal((examples, 6, 6, 2), np.float32) + spread[1]
    return ArraySource(images, rng.integers(0, 5, examples), classes=5)


experiment = Experiment(
    model=nnx_model(Net, name="net", input_shape=(6, 6, 2), classes=5),
    data=Data("array", train=source(30, 0), validation=source(14, 1), channels=2),
    optim=Optim("sgd", lr=0.5),
    effective_batch=12,
    train_for="1ep",  # two whole steps and one of 6 examples
    log_every=1,
)
"""
BATCH, STEPS = 12, 3
LONGEST_SUM = BATCH * 6 * 6  # over the places where the kernel is used
SIX_DIGITS = 5e-6  # of the record
WORDS = ("local", "averaged", "synchronised")
CASES = [  # word, workers, micro-batch, ranks, further arguments
    ("synchronised", 2, 0, 1, ("--devices", "2"))
]
SLOW = [
    ("synchronised", 2, 0, 2, ()),
    ("averaged", 2, 0, 2, ()),
    ("local", 2, 0, 2, ()),
    ("synchronised", 2, 3, 2, ()),
    ("synchronised", 3, 0, 3, ()),
    ("synchronised", 4, 3, 1, ("--devices", "4")),
]


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> Path:
    """The experiment file."""
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(NET)
    return path


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("word", "workers", "micro", "ranks", "args"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_batch_statistics_by_one_word(word, workers, micro, ranks, args, net, tmp_path):
    sizes = ("--micro-batch", str(micro), "--batch-statistics", word, "--run-dir", str(tmp_path / "run"))
    line = (str(net), *sizes, *args)
    ended = train(ranks, *line, timeout_s=280) if ranks > 1 else train_here(*line)
    assert ended.code == 0, ended.out
    got = run_of(tmp_path / "run", workers)
    exact, rounded = (by_hand(net, word, workers, micro, precision) for precision in ("float64", "float32"))
    assert got.keys() == exact.keys()
    bound = {name: bound_of(name, exact[name], rounded[name]) for name in exact}
    for name, want in exact.items():
        assert np.linalg.norm(got[name] - want) <= bound[name], name
    if word == "synchronised":
        for name in (name for name in got if name.endswith(" of 0")):
            for worker in range(1, workers):  # in every bit
                np.testing.assert_array_equal(got[name.replace(" of 0", f" of {worker}")], got[name])
    for other in set(WORDS) - {word}:  # which differ in training, or in evaluation alone
        elsewhere = by_hand(net, other, workers, micro, "float64")
        far = [np.linalg.norm(got[name] - elsewhere[name]) > 100 * bound[name] for name in ("losses", "evaluation")]
        assert far[1] if "synchronised" not in (word, other) else any(far), other


def bound_of(name: str, exact: np.ndarray, rounded: np.ndarray) -> float:
    """How far a run may be from the exact answer, in the 2-norm."""
    size = float(np.linalg.norm(exact))
    recorded = SIX_DIGITS * size if name in ("losses", "evaluation") else 0.0
    return math.sqrt(LONGEST_SUM) * max(float(np.linalg.norm(rounded - exact)), U * size) + recorded


def run_of(run_dir: Path, workers: int) -> dict[str, np.ndarray]:
    """The record's losses, and params and every worker's statistics from the checkpoint."""
    found = {
        "losses": np.array(column(run_dir, "train", "loss")),
        "evaluation": np.array(column(run_dir, "eval", "eval_loss")),
    }
    saved = saved_leaves(run_dir, STEPS)
    for file, place in {"common.bin": "", **{f"worker_{i:05d}.bin": f" of {i}" for i in range(workers)}}.items():
        for path, leaf in saved[file].items():
            if path.startswith(("params/", "model_state/")):
                found[path + place] = leaf.astype(np.float64)
    return found


class Mixed(nnx.Module):
    """A layer of another library's before one that takes its means by `batch_mean`."""

    def __init__(self, rngs: nnx.Rngs):
        self.theirs = nnx.BatchNorm(2, rngs=rngs)
        self.ours = BatchNorm(2, eps=1e-3)

    def __call__(self, x, train):
        return self.ours(self.theirs(x, use_running_average=not train), train).mean((1, 2))


def test_of_a_mixed_model_only_layers_that_ask_are_synchronised():
    model = nnx_model(Mixed, name="mixed", input_shape=(6, 6, 2), classes=2)
    params, state = model.init(jax.random.key(0), jnp.zeros((1, 6, 6, 2)))
    mean = functools.partial(exchange, strategy="asa32", comm=AxisComm("workers", 2))
    task = TASKS["classification"].build(Supervised(model, classes.cross_entropy, Data("array", channels=2)))
    forward = step.Forward(task, batch_mean=mean)

    def state_after(image: jax.Array) -> Any:
        batch = {"image": image, "label": jnp.zeros(len(image), jnp.int32), "weight": jnp.ones(len(image))}
        return forward.losses(params, state, batch, jax.random.key(0), True)[1]

    images = np.random.default_rng(0).standard_normal((2, 4, 6, 6, 2), np.float32)
    after = jax.jit(jax.vmap(state_after, axis_name="workers"))(images)
    for name in ("mean", "var"):
        assert np.array_equal(*after["ours"][name])
        assert not np.isclose(*after["theirs"][name]).any()


# ---------------------------------------------------------------- by hand


@functools.cache
def by_hand(net: Path, word: str, workers: int, micro: int, precision: str) -> dict[str, np.ndarray]:
    """Return what `run_of` must find; a domain is what has statistics in common: all workers, or each."""
    experiment = experiment_file.load(net)
    domains = [range(workers)] if word == "synchronised" else [[worker] for worker in range(workers)]
    with jax.enable_x64(precision == "float64"), jax.default_matmul_precision("highest"):
        losses, params, states = trained(experiment, domains, workers, micro, precision)
        evaluation = evaluated(experiment, params, states, word)
    found = {"losses": losses, "evaluation": evaluation}
    found |= {f"params/{name}": leaf for name, leaf in named_leaves(params)}
    for worker in range(workers):
        state = states[worker if len(states) > 1 else 0]
        found |= {f"model_state/{name} of {worker}": leaf for name, leaf in named_leaves(state)}
    return {name: np.asarray(leaf, np.float64) for name, leaf in found.items()}


def trained(experiment: Experiment, domains: Any, workers: int, micro: int, precision: str) -> tuple[Any, Any, list]:
    """Mean losses of the steps, the params after, and the statistics of every domain."""
    model, source = experiment.model, experiment.data.train
    start = model.init(jax.random.key(experiment.seed), jnp.zeros((1, *model.input_shape)))
    params, state = jax.tree.map(lambda x: jnp.asarray(x, precision), start)
    states, losses = [state for _ in domains], []

    def loss_of(params: Any, state: Any, image: Any, label: Any, weight: Any) -> Any:
        logits, after = model.apply(params, state, image, jax.random.key(0), True)
        loss = weight * optax.softmax_cross_entropy_with_integer_labels(logits, label).sum()
        return loss, after

    gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    for k in range(STEPS):
        total, mean = jax.tree.map(jnp.zeros_like, params), 0.0
        for domain, rows, weight in pieces_of(k, domains, workers, micro):
            image, label = jnp.asarray(source.images[rows], precision), source.labels[rows]
            (loss, states[domain]), grads = gradient(
                params, states[domain], image, label, np.dtype(precision).type(weight)
            )
            total, mean = jax.tree.map(jnp.add, total, grads), mean + float(loss)
        params = jax.tree.map(lambda p, g: p - experiment.optim.lr * g, params, total)
        losses.append(mean)
    return np.array(losses), params, states


def pieces_of(step: int, domains: Any, workers: int, micro: int) -> list[tuple[int, np.ndarray, float]]:
    """(domain, its examples that are normalised together, their weight in the loss), micro-step by micro-step."""
    shares = [Sampler(30, BATCH, worker, workers).indices(step) for worker in range(workers)]
    local = BATCH // workers
    rows = np.stack([np.resize(share.indices, local) for share in shares])  # what fills up repeats the share
    is_real = np.stack([np.arange(local) < len(share.indices) for share in shares])
    found = []
    for begin in range(0, local, micro or local):
        piece = slice(begin, begin + (micro or local))
        for i, domain in enumerate(domains):
            together, real = rows[list(domain), piece].ravel(), is_real[list(domain), piece].ravel()
            found.append((i, together[real], 1 / shares[0].count) if real.any() else (i, together, 0.0))
    return found


def evaluated(experiment: Experiment, params: Any, states: list, word: str) -> np.ndarray:
    """The mean loss of the validation examples: worker i has every i-th, under `local` with statistics of its own."""
    source, losses = experiment.data.validation, []
    apply = jax.jit(lambda *args: experiment.model.apply(*args, jax.random.key(0), False)[0])
    if word == "averaged":
        states = [jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *states)]
    for worker, state in enumerate(states):
        image = jnp.asarray(source.images[worker :: len(states)], jax.tree.leaves(params)[0].dtype)
        label = source.labels[worker :: len(states)]
        losses.append(optax.softmax_cross_entropy_with_integer_labels(apply(params, state, image), label))
    return np.array([np.concatenate(losses).mean()])
