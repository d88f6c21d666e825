"""Commands to a worker group, in one table.

A call of a function and each method of a variable become a `Command`. If every rank runs the script, each makes the
same command; else rank 0 sends it to the processes that wait. From there on the code is the same: each process runs the
command's row of `COMMANDS` for its workers. A worker that lacks a program says so in its report, gets the program,
and the command is repeated (`MissingPrograms`). So nobody keeps a list of which worker has been sent which shapes.
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
from jaxmpi.functions.programs import Leaf, MissingPrograms, key_from_text, load_program
from jaxmpi.functions.reductions import combine, is_exchanged
from jaxmpi.functions.reports import CallReport
from jaxmpi.functions.worker import Command, Input, Leaves, Worker


def perform(group: WorkerGroup, what: str, prepare: Callable[[], Command]) -> Any:
    """Prepare a command and carry it out with all workers, those of this process included.

    Raises:
        UsageError, WorkerFailed: as `WorkerGroup.run_and_report`; another command is under way. The workers are as
            before.
    """
    with group.exclusive(what), profiling.call(what, group.worker.rank == 0):
        group.check_usable()
        try:
            command = prepare()
        except Exception as error:
            group.report_refusal(what, error)
            raise
        try:
            while True:
                with profiling.part("shuffle"):
                    group.send(command)
                try:
                    result = execute(group, command)
                    group.is_exchanging = False
                    return result
                except MissingPrograms as missing:
                    with profiling.part("compile"):
                        _send_programs(group, missing.keys)
                    command = command._replace(is_repeated=True)
        except BaseException as error:
            group.note_failure(error)
            group.release()
            raise


def execute(group: WorkerGroup, command: Command) -> Any:
    """Run a command in this process and drop its state, unless it will be repeated."""
    is_over = command.kind != "program"
    try:
        return COMMANDS[command.kind](group, command)
    except MissingPrograms:
        is_over = False
        raise
    finally:
        if is_over:
            group.release()


# ---------------------------------------------------------------- calls


def call(group: WorkerGroup, command: Command) -> tuple[tuple[Any, ...], Leaves]:
    """Compute everywhere and reduce; return structures, and leaves if results are wanted."""
    reports = group.run_and_report(
        command.name,
        lambda worker: worker.compute(command, group.size, lambda key: group.program(worker, key)),
    )
    counts = [report.count for report in reports]
    leaves = group.worker.program.leaves
    with profiling.part("reduce"):
        results = profiling.wait_if_profiling(_reduce_leaves(group, leaves, counts, command.fields["strategy"]))
    for worker in group.workers:
        worker.store(results, command.fields["locals"])
    returned = [results[i] for i, leaf in enumerate(leaves) if leaf.place == "result"] if group.leads else []
    return group.worker.program.structures, returned


def _reduce_leaves(group: WorkerGroup, leaves: Sequence[Leaf], counts: list[int], strategy: str) -> dict[int, Any]:
    """Reduce what the workers have laid out; results by leaf.

    On processes that wait, those that are gathered for the leading one alone are missing.
    """
    across = [i for i, leaf in enumerate(leaves) if leaf.place in ("result", "into")]
    sums = [i for i in across if is_exchanged(leaves[i].op, group.worker.out[i].dtype)]
    results: dict[int, Any] = {}
    for op in ("mean", "sum"):
        if chosen := [i for i in sums if leaves[i].op == op]:
            results |= zip(chosen, _sum_over_workers(group, op, chosen, counts, strategy), strict=True)
    # Integers in every bit, products and extremes: no strategy sums these, so workers gather and combine in rank order.
    if rest := [i for i in across if i not in results]:
        everywhere = any(leaves[i].place == "into" for i in rest)
        mine = {worker.rank: [np.asarray(worker.out[i]) for i in rest] for worker in group.workers}
        rows = group.gather_arrays(mine, everywhere)
        weights = [count / sum(counts) for count in counts]
        for i, parts in zip(rest, zip(*rows, strict=True), strict=True) if rows is not None else ():
            results[i] = group.worker.put(combine(leaves[i].op, parts, weights))
    return results


def _sum_over_workers(group: WorkerGroup, op: Any, chosen: list[int], counts: list[int], strategy: str) -> Leaves:
    """Means weighted by examples, or sums, of the chosen leaves over the exchange."""
    parts = {worker.rank: [worker.out[i] for i in chosen] for worker in group.workers}
    dtypes = [x.dtype for x in parts[group.worker.rank]]
    if group.size == 1:
        return parts[group.worker.rank]
    if op == "mean" and len(set(counts)) > 1:  # sum_r (n_r / n) mean_r, in 32 bits
        parts = {rank: _scale_leaves(leaves, np.float32(counts[rank] / sum(counts))) for rank, leaves in parts.items()}
        op = "sum"
    totals = group.sum_leaves(parts, op, strategy)[group.worker.rank]
    return [x.astype(dtype) if x.dtype != dtype else x for x, dtype in zip(totals, dtypes, strict=True)]


@jax.jit
def _scale_leaves(leaves: Leaves, weight: jax.Array) -> Leaves:
    """Weight * leaves, f32."""
    return [x.astype(jnp.float32) * weight for x in leaves]


# ---------------------------------------------------------------- programs


def _send_programs(group: WorkerGroup, keys: Sequence[str]) -> None:
    """Send the programs that workers lack, made here once."""
    for text in keys:
        function, form, shapes = key = key_from_text(text)
        name, *parts = group.functions[function].serialize_program(form, shapes)
        command = Command("program", name, {"key": key}, lambda rank, parts=parts: parts)
        group.send(command)
        execute(group, command)
        group.is_exchanging = False  # the next one may be refused where it is made


def program(group: WorkerGroup, command: Command) -> None:
    """Take a program from the master."""

    def load(worker: Worker) -> CallReport:
        if worker.rank != 0:
            worker.programs[command.fields["key"]] = load_program(*command.inputs(worker.rank))
        return CallReport("ok", "")

    group.run_and_report(command.name, load, part="compile", waiting="compile")


# ---------------------------------------------------------------- variables


def put(group: WorkerGroup, command: Command) -> None:
    """Give workers the leaves of a variable, whole or each its rows."""
    fields = command.fields
    ranks = range(group.size) if fields["ranks"] is None else fields["ranks"]

    def work(worker: Worker) -> CallReport:
        if worker.rank in ranks:
            given = command.inputs(worker.rank)
            worker.out = [worker.copy(x.take(0, x.rows.count) if isinstance(x, Input) else x) for x in given]
        return CallReport("ok", json.dumps([command.name, *fields["agreed"]]))

    group.run_and_report(command.name, work, part="shuffle")
    for worker in group.workers:
        if worker.rank in ranks:
            worker.variables[fields["number"]] = worker.out


def _lay_out(group: WorkerGroup, command: Command, op: str = "") -> None:
    """Let each worker lay out a variable's leaves, and check what must agree for the reduction."""

    def work(worker: Worker) -> CallReport:
        worker.out = [*worker.leaves(command.fields["number"])]
        shapes = [f"{x.dtype}{list(x.shape[op == 'gather' :])}" for x in worker.out] if op else []
        return CallReport("ok", json.dumps({"call": [command.name, command.fields], "leaf": shapes}))

    group.run_and_report(command.name, work)


def reduce(group: WorkerGroup, command: Command) -> Leaves:
    """The variable over workers, each counted once; with `keep` all workers store it."""
    number, op, keep, strategy = (command.fields[key] for key in ("number", "op", "keep", "strategy"))
    _lay_out(group, command, op)
    with profiling.part("reduce"):
        if keep and all(is_exchanged(op, x.dtype) for x in group.worker.out):
            mine = {worker.rank: worker.out for worker in group.workers}
            totals = mine if group.size == 1 else group.sum_leaves(mine, op, strategy)
        else:
            leaves = [Leaf(op, "into" if keep else "result", number)] * len(group.worker.out)
            results = _reduce_leaves(group, leaves, [1] * group.size, strategy)
            values = [results[i] for i in sorted(results)]
            totals = {worker.rank: [*map(worker.put, values)] if keep else values for worker in group.workers}
        profiling.wait_if_profiling(totals)
    if keep:
        for worker in group.workers:
            worker.variables[number] = totals[worker.rank]
    return totals[group.worker.rank]


def fetch(group: WorkerGroup, command: Command) -> list[list[np.ndarray]] | None:
    """The leaves of one worker or all; with `keep` all workers store them."""
    number, rank, keep = (command.fields[key] for key in ("number", "rank", "keep"))
    _lay_out(group, command)
    with profiling.part("shuffle"):
        mine = {w.rank: [np.asarray(x) for x in w.out] if rank in (None, w.rank) else [] for w in group.workers}
        rows = group.gather_arrays(mine, keep)
    if rows is None:
        return None
    if keep:
        whole = rows[rank] if rank is not None else [combine("gather", leaf) for leaf in zip(*rows, strict=True)]
        for worker in group.workers:
            worker.variables[number] = [worker.copy(x) for x in whole]
    return rows if rank is None else [rows[rank]]


def lengths(group: WorkerGroup, command: Command) -> list[int]:
    """The number of a variable's rows on each worker, from the reports."""

    def count(worker: Worker) -> CallReport:
        found = {x.shape[:1] for x in worker.leaves(command.fields["number"])}
        if len(found) != 1 or () in found:
            got = f"worker {worker.rank} holds leaves whose first axes are {sorted(found)}"
            raise UsageError(f"{command.name}: {got}; expected as many rows in each leaf")
        return CallReport("ok", json.dumps([command.name, command.fields]), found.pop()[0])

    return [report.count for report in group.run_and_report(command.name, count)]


def close(group: WorkerGroup, command: Command) -> None:
    """Drop all values, programs and arrays of the workers."""
    for worker in group.workers:
        worker.clear()
    shared_array.unmap()


COMMANDS: dict[str, Callable[[WorkerGroup, Command], Any]] = {
    "call": call,
    "program": program,
    "put": put,
    "reduce": reduce,
    "fetch": fetch,
    "lengths": lengths,
    "close": close,
}
