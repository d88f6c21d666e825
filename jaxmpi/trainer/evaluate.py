"""Evaluation over all workers, exact for uneven last batches."""

from typing import Any

import numpy as np

from jaxmpi.comm.topology import rows
from jaxmpi.core.train_state import TrainState
from jaxmpi.runtime import failures, fault_injection
from jaxmpi.trainer import step as steps
from jaxmpi.trainer.run import Run


def distance(run: Run, state: TrainState) -> float | None:
    """L2 of this process's workers from the mean or center that they met last, summed; None if no rule keeps it."""
    of = run.functions.rule.distance
    return rows(of(state.rule_state), run.workers).sum().item() if of else None


def evaluate(run: Run, state: TrainState, step: int) -> dict[str, float]:
    """Every validation example once, over all workers; model state as `batch_statistics` says, params as the rule."""
    failures.doing(f"evaluation after step {step}", failures.LONG)
    model_state = run.functions.mean_state(state.model_state)
    params = run.functions.eval_params(state.params, state.rule_state)
    sums = np.zeros(len(steps.EvalMetrics._fields))
    for batch in run.plan.validation.batches():
        failures.doing(f"evaluation after step {step}", failures.LONG)  # another batch, so it gets on
        fault_injection.reach("eval", step)
        metrics = run.functions.eval_step(params, model_state, batch)
        sums += np.array([rows(value, run.workers).sum(dtype=np.float64) for value in metrics])
    loss, top1, top5, count = run.workers.processes.allreduce_sum(sums).tolist()
    means: dict[str, Any] = {"eval_count": int(count)}
    if count:
        means |= {"eval_loss": loss / count, "eval_top1": top1 / count, "eval_top5": top5 / count}
    run.recorder.evaluation(step=step, epoch=run.plan.epoch(step), examples=run.plan.examples(step), **means)
    return means
