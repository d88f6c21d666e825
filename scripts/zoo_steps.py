"""Three steps of every model under mpirun, and a step's memory.

    python scripts/zoo_steps.py [-n 2] [--local-batch 8] [--models vgg16 resnet50] [--json FILE]

Every model has a job of its own, one after the other: on made-up images, the tiny variants on digits. The losses must
be finite, and losses and params the same on all ranks after every step, bit for bit; else the job ends with an error.
It prints the mean losses of the steps, seconds of the last one, and memory:

- step: XLA's plan for the step of one worker alone, in one program: params, optimizer state, model state and batch,
  and temporaries (activations, gradients, scratch). No other load changes it.
- peak of a rank: the most memory that the process held, with Python, MPI, compiler and the buffers of the exchange.
"""

import math
import resource
import time
from typing import Any, NamedTuple

import harness
import jax
import numpy as np

from jaxmpi.comm.base import SoloComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers, gather_workers
from jaxmpi.config.data import Data
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.pytrees import tree_digest
from jaxmpi.core.train_state import create
from jaxmpi.model.contract import Model
from jaxmpi.models import MODELS
from jaxmpi.models.googlenet import googlenet_loss
from jaxmpi.runtime import failures, process
from jaxmpi.trainer import build
from jaxmpi.trainer.plan import make_plan

FULL = [name for name in MODELS if not name.endswith("_tiny")]
ALONE = Workers(SoloComm(), SoloProcesses(), (0,), None)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # channel means and standard deviations of ImageNet


def images(model: Model) -> Data:
    """Made-up images of a model's size."""
    size, _, channels = model.input_shape
    source = "synthetic" if model.classes == 1000 else "digits"
    return Data(source, resize=size, channels=channels, mean=MEAN[:channels], std=STD[:channels])


def recipe(name: str, **fields: Any) -> Experiment:
    """Experiment of a model, with momentum, on images, digits or text.

    Made-up images have 1000 classes, digits 10.
    """
    model = MODELS[name]()
    data = Data("stdlib", window=model.input_shape[0]) if model.takes_tokens else images(model)
    loss = googlenet_loss if name.startswith("googlenet") else None
    optim, exchange = Optim("momentum"), ExchangeConfig("asa32")
    return Experiment(model=model, loss=loss, data=data, optim=optim, exchange=exchange, **fields)


# ---------------------------------------------------------------- inside a job


def first_steps(name: str, local_batch: int, steps: int) -> list[dict[str, Any]]:
    """Be a rank: train a model; return every rank's results."""
    process.prepare()
    workers = gather_workers(1)
    with failures.at_work():
        rows = workers.processes.allgather_object(steps_of(name, local_batch, steps, workers))
        workers.processes.barrier()
    return rows


def steps_of(name: str, local_batch: int, steps: int, workers: Workers) -> dict[str, Any]:
    """Run a model's first steps: losses, seconds, and hashes of params.

    Raises:
        TrainingError: a loss is not finite.
        UsageError: the params of ranks differ.
    """
    config = recipe(name, local_batch=local_batch, train_for=f"{steps}st")
    plan, functions, state = harness.build_training(config, workers)
    digests, losses, seconds = [tree_digest(state.params)], [], []
    for batch in plan.feed.batches(0, steps):
        begin = time.perf_counter()
        state, metrics = functions.train_step(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begin)
        loss, count = workers.processes.allreduce_sum(np.array([metrics.loss, metrics.count]))
        losses.append(float(loss / count))
        digests.append(tree_digest(state.params))
        if not math.isfinite(losses[-1]):
            raise TrainingError(f"{name}: got loss {losses[-1]} at step {len(losses)}; expected a finite one")
        workers.processes.assert_same(f"{name} after step {len(losses)}", {"loss": losses[-1], "params": digests[-1]})
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"losses": losses, "seconds": seconds, "params": digests, "peak_rss": peak_bytes}


# ---------------------------------------------------------------- outside


class StepMemory(NamedTuple):
    """Bytes of one worker's step."""

    params: int
    kept: int  # params, optimizer state, model state and batch
    temporary: int  # activations, gradients, scratch

    @property
    def total(self) -> int:
        """Sum of both."""
        return self.kept + self.temporary


def step_memory(config: Experiment) -> StepMemory:
    """XLA's memory plan for one worker's step; compiles, but allocates nothing."""
    plan = make_plan(config, ALONE)
    config, functions = plan.experiment, build.build_functions(plan)
    params, model_state = jax.eval_shape(config.model.init, jax.random.key(0), config.model.example())
    rule_state = jax.eval_shape(functions.rule.init, params)
    state = create(params, model_state, rule_state, seed=0, worker=0)
    step: Any = functions.train_step
    planned = step.lower(state, next(plan.feed.batches())).compile().memory_analysis()
    output_bytes = planned.output_size_in_bytes - planned.alias_size_in_bytes  # outputs that take no argument's place
    return StepMemory(
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)),
        planned.argument_size_in_bytes,
        planned.temp_size_in_bytes + output_bytes,
    )


HEADINGS = ("model", "losses", "s a step", "params MB", "kept MB", "temporary MB", "step MB", "peak of a rank MB")


def main() -> None:
    """Run every model in turn; print its line of a Markdown table."""
    parser = harness.parser(__doc__, json=None)
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--local-batch", type=int, default=8, help="examples of a rank in a step; fewer need less memory"
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=FULL, help="default: all of full size")
    options = parser.parse_args()
    process.prepare()
    result: dict[str, Any] = {}
    print(f"{options.n} ranks, local batch {options.local_batch}, jax {jax.__version__}, {jax.default_backend()}")
    print(harness.table(HEADINGS), flush=True)
    for name in options.models:
        ranks = harness.on_ranks(first_steps, name, options.local_batch, options.steps, ranks=options.n)
        memory = step_memory(recipe(name, local_batch=options.local_batch))
        losses = " ".join(f"{loss:.3f}" for loss in ranks[0]["losses"])
        sizes = memory.params, memory.kept, memory.temporary, memory.total, max(row["peak_rss"] for row in ranks)
        cells = [name, losses, f"{ranks[0]['seconds'][-1]:.2f}", *(f"{size / 1e6:,.0f}" for size in sizes)]
        print(harness.row(cells), flush=True)
        result[name] = {"ranks": ranks, "memory": memory._asdict()}
    harness.save(options.json, result)


if __name__ == "__main__":
    main()
