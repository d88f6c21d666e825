"""Commands to a worker group, in one table.

A call of a function and each method of a variable become a `Command`. If every rank runs the script, each makes the
same command; else rank 0 sends it to the processes that wait. From there on the code is the same: each process runs the
command's row of `COMMANDS` for its workers.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.functions import profiling, shared_array
from jaxmpi.functions.groups import WorkerGroup
from jaxmpi.functions.program import Leaf
from jaxmpi.functions.reductions import combine, is_exchanged
from jaxmpi.functions.reports import CallReport
from jaxmpi.functions.worker import Command, Input, Leaves, Worker


def perform(group: WorkerGroup, label: str, prepare: Callable[[], Command], number: int | None = None) -> Any:
    """Prepare a command and carry it out with all workers, those of this process included.

    Args:
        number: of the function that is called, for the profile.
    """
    # A nested command would wait for ever.
    if not group.busy.acquire(blocking=False):
        raise UsageError(f"{label}: called while another call is under way; calls go one after another")
    try:
        with profiling.call(label, number):
            group.check_usable()
            try:
                command = prepare()
            except Exception as error:  # of the user's arguments, whose own methods may raise anything
                if group.is_serial:
                    raise
                command = Command("refuse", label, {"error": error})  # if every rank runs the script, the others learn
            try:
                with profiling.part("shuffle"):
                    group.send(command)
                return execute(group, command)
            except BaseException as error:  # Ctrl-C too: it may have stopped this process between two messages
                group.note_failure(error)
                raise
    finally:
        group.busy.release()


def execute(group: WorkerGroup, command: Command) -> Any:
    """Run a command in this process and drop its state."""
    try:
        return COMMANDS[command.kind](group, command)
    finally:
        group.release()


def refuse(group: WorkerGroup, command: Command) -> None:
    """Report that this rank cannot begin."""

    def fail(worker: Worker) -> CallReport:
        raise command.fields["error"]

    group.run_and_report(command.name, fail)


# ---------------------------------------------------------------- calls


def call(group: WorkerGroup, command: Command) -> tuple[tuple[Any, ...], Leaves]:
    """Compute everywhere and reduce; return structures, and leaves if results are wanted."""
    reports = group.run_and_report(
        command.name,
        lambda worker: worker.compute(command, group.size, lambda key: group.program(worker, key)),
    )
    leaves = group.worker.program.leaves
    with profiling.part("reduce"):
        results = _reduce_leaves(group, leaves, [report.count for report in reports], command.fields["strategy"])
        results = profiling.wait_if_profiling(results)
    for worker in group.workers:
        worker.store({i: result[worker.rank] for i, result in results.items()}, command.fields["locals"])
    wanted = [i for i, leaf in enumerate(leaves) if leaf.place == "result"] if group.leads else []
    returned = [results[i][group.worker.rank] for i in wanted]
    # Sums are on the device already, where a placement of each costs as much as the bare call.
    placed = [x if isinstance(x, jax.Array) else group.worker.put(x) for x in returned]
    return group.worker.program.structures, placed


def _reduce_leaves(
    group: WorkerGroup, leaves: Sequence[Leaf], counts: list[int], strategy: str
) -> dict[int, dict[int, Any]]:
    """Results by leaf and rank; processes that wait lack those that are gathered for the leading one alone."""
    across = [i for i, leaf in enumerate(leaves) if leaf.place in ("result", "into")]
    results: dict[int, dict[int, Any]] = {}
    for op in ("mean", "sum"):
        chosen = [i for i in across if leaves[i].op == op and is_exchanged(op, group.worker.out[i])]
        if chosen:
            totals = _sum_over_workers(group, op, chosen, counts, strategy)
            results |= {i: {rank: of_rank[k] for rank, of_rank in totals.items()} for k, i in enumerate(chosen)}
    # Integers in every bit, products and extremes: no strategy sums these, so workers gather and combine in rank order.
    if rest := [i for i in across if i not in results]:
        everywhere = any(leaves[i].place == "into" for i in rest)
        mine = {worker.rank: [np.asarray(worker.out[i]) for i in rest] for worker in group.workers}
        rows = group.gather_arrays(mine, everywhere)
        weights = [count / sum(counts) for count in counts]
        for i, parts in zip(rest, zip(*rows, strict=True), strict=True) if rows is not None else ():
            results[i] = dict.fromkeys(mine, combine(leaves[i].op, parts, weights))
    return results


def _sum_over_workers(
    group: WorkerGroup, op: Any, chosen: list[int], counts: list[int], strategy: str
) -> dict[int, Leaves]:
    """Means weighted by examples, or sums, of the chosen leaves over the exchange, by rank."""
    parts = {worker.rank: [worker.out[i] for i in chosen] for worker in group.workers}
    if group.size == 1:
        return parts
    dtypes = [x.dtype for x in parts[group.worker.rank]]
    # sum_r (n_r / n) mean_r, in 32 bits. With equal counts the exchange divides once, which rounds once less.
    if op == "mean" and len(set(counts)) > 1:
        parts = {rank: _scale_leaves(leaves, np.float32(counts[rank] / sum(counts))) for rank, leaves in parts.items()}
        op = "sum"
    totals = group.sum_leaves(parts, op, strategy)
    return {
        rank: [x.astype(dtype) if x.dtype != dtype else x for x, dtype in zip(leaves, dtypes, strict=True)]
        for rank, leaves in totals.items()
    }


@jax.jit
def _scale_leaves(leaves: Leaves, weight: jax.Array) -> Leaves:
    """Weight * leaves, f32."""
    return [x.astype(jnp.float32) * weight for x in leaves]


# ---------------------------------------------------------------- variables


def put(group: WorkerGroup, command: Command) -> None:
    """Give workers the leaves of a variable, whole or each its rows."""
    fields = command.fields
    ranks = range(group.size) if fields["ranks"] is None else fields["ranks"]

    def work(worker: Worker) -> CallReport:
        if worker.rank in ranks:
            inputs = command.inputs(worker.rank)
            worker.out = [worker.copy(x.take(0, len(x.rows)) if isinstance(x, Input) else x) for x in inputs]
        return CallReport("ok", json.dumps([command.name, *fields["agreed"]]))

    group.run_and_report(command.name, work, part="shuffle")
    for worker in group.workers:
        if worker.rank in ranks:
            worker.variables[fields["number"]] = worker.out


def collect(group: WorkerGroup, command: Command) -> Leaves:
    """A variable reduced over workers, each counted once, or one worker's; with `keep` all workers store it."""
    number, op, root, keep = (command.fields[key] for key in ("number", "op", "root", "keep"))

    def lay_out(worker: Worker) -> CallReport:
        worker.out = [*worker.leaves(number)]
        shapes = [f"{x.dtype}{list(x.shape)}" for x in worker.out] if op not in ("", "gather") else []
        return CallReport("ok", json.dumps({"call": [command.name, command.fields], "leaf": shapes}))

    group.run_and_report(command.name, lay_out)
    with profiling.part("reduce" if op not in ("", "gather") else "shuffle"):
        if op:
            leaves = [Leaf(op, "into" if keep else "result", number)] * len(group.worker.out)
            results = _reduce_leaves(group, leaves, [1] * group.size, command.fields["strategy"])
            totals = [results[i] for i in sorted(results)]
        else:
            mine = {w.rank: [np.asarray(x) for x in w.out] if w.rank == root else [] for w in group.workers}
            rows = group.gather_arrays(mine, keep)
            totals = [dict.fromkeys(mine, x) for x in rows[root]] if rows is not None else []
        profiling.wait_if_profiling(totals)
    if keep:
        for worker in group.workers:
            worker.variables[number] = [worker.put(total[worker.rank]) for total in totals]
    rank = group.worker.rank
    return [total[rank] for total in totals]  # pyright: ignore[reportReturnType] - each has what was gathered


def lengths(group: WorkerGroup, command: Command) -> list[int]:
    """The number of a variable's rows on each worker, from the reports."""

    def count(worker: Worker) -> CallReport:
        lengths_seen = {x.shape[:1] for x in worker.leaves(command.fields["number"])}
        if len(lengths_seen) != 1 or () in lengths_seen:
            got = f"worker {worker.rank} holds leaves whose first axes are {sorted(lengths_seen)}"
            raise UsageError(f"{command.name}: {got}; expected as many rows in each leaf")
        return CallReport("ok", json.dumps([command.name, command.fields]), lengths_seen.pop()[0])

    return [report.count for report in group.run_and_report(command.name, count)]


def close(group: WorkerGroup, command: Command) -> None:
    """Drop all values, programs and arrays of the workers."""
    group.workers = [Worker(worker.rank, worker.device) for worker in group.workers]
    shared_array.unmap()


COMMANDS: dict[str, Callable[[WorkerGroup, Command], Any]] = {
    "call": call,
    "refuse": refuse,
    "put": put,
    "collect": collect,
    "lengths": lengths,
    "close": close,
}
