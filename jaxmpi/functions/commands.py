"""Commands to a worker group, in one table.

A call of a function and each method of a variable become a `Command`: a JSON header, with arrays beside it. If every
rank runs the script, each makes the same command; else rank 0 sends it to the processes that wait. From there on the
code is the same: each process runs the command's row of `COMMANDS` for its own workers. A worker does its own part
first and reports. Only if all reports are good does anything travel or change. So a failed call leaves the workers as
they were. A worker that lacks a program says so in its report, gets the program, and the command is repeated
(`MissingPrograms`). So nobody keeps a list of which worker has been sent which shapes.
"""

import functools
import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import check
from jaxmpi.core.random_keys import packed
from jaxmpi.core.to_jax import in_jax_dtype
from jaxmpi.functions import profiling
from jaxmpi.functions.import_by_name import import_function
from jaxmpi.functions.partitioning import RowSelection
from jaxmpi.functions.reductions import combine, is_exchanged
from jaxmpi.functions.shared_array import from_ticket
from jaxmpi.functions.transport import CallReport
from jaxmpi.functions.worker import Command, Leaf, Leaves, MissingPrograms, WorkerProgram, WorkerSlot
from jaxmpi.functions.worker_call import compute, take_rows
from jaxmpi.functions.worker_group import WorkerGroup


def perform(group: WorkerGroup, what: str, prepare: Callable[[], Command]) -> Any:
    """Carry out a command with all workers, this process's own among them.

    Raises:
        UsageError, WorkerFailed: as `WorkerGroup.run_and_report`; another command is under way. The workers are as
            before.
    """
    with group.alone(what), profiling.call(what, group.own_slot.rank == 0):
        return send_and_run(group, what, prepare)


def send_and_run(group: WorkerGroup, what: str, prepare: Callable[[], Command]) -> Any:
    """Prepare, send and run a command; send missing programs and repeat it."""
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
                result = COMMANDS[command.kind](group, command)
                group.is_exchanging = False
                return result
            except MissingPrograms as missing:
                with profiling.part("compile"):
                    send_programs(group, missing.wanted)
                command = command._replace(header=command.header | {"again": True})
    except BaseException as error:
        group.note(error)
        group.release_slots()
        raise


def releases_slots(handler: Callable[[WorkerGroup, Command], Any]) -> Callable[[WorkerGroup, Command], Any]:
    """Make a handler drop its command's state, unless the command comes again."""

    @functools.wraps(handler)
    def resting(group: WorkerGroup, command: Command) -> Any:
        is_over = True
        try:
            return handler(group, command)
        except MissingPrograms:
            is_over = False
            raise
        finally:
            if is_over:
                group.release_slots()

    return resting


# ---------------------------------------------------------------- call


@releases_slots
def call(group: WorkerGroup, command: Command) -> tuple[tuple[Any, ...], Leaves]:
    """Compute everywhere and reduce; return structures, and leaves if results are wanted."""
    reports = group.run_and_report(command.header["name"], lambda slot: compute(slot, command, group))
    counts = [report.count for report in reports]
    leaves = group.own_slot.program.leaves
    with profiling.part("reduce"):
        out = {slot.rank: slot.out for slot in group.slots}
        results = profiling.wait_if_profiling(reduce_leaves(group, leaves, out, counts, command.header["strategy"]))
    for slot in group.slots:
        store_results(slot, leaves, results, command.header["locals"])
    returned = [results[i] for i, leaf in enumerate(leaves) if leaf.place == "result"] if group.leads else []
    return group.own_slot.program.structures, returned


def store_results(slot: WorkerSlot, leaves: Sequence[Leaf], results: dict[int, Any], made: dict[str, int]) -> None:
    """Store what stays with the worker."""
    new: dict[int, Leaves] = {number: [] for number in made.values()}
    for i, leaf in enumerate(leaves):
        value = slot.out[i]
        if leaf.place == "local":
            new[made[str(leaf.target)]].append(value)
        elif leaf.place == "into":
            new.setdefault(leaf.target, []).append(slot.put(results[i]))
        elif leaf.place == "update":
            new.setdefault(leaf.target, []).append(value)
    slot.values.update(new)


def reduce_leaves(
    group: WorkerGroup, leaves: Sequence[Leaf], out: dict[int, Leaves], counts: list[int], strategy: str
) -> dict[int, Any]:
    """Results over workers, by leaf."""
    across = [i for i, leaf in enumerate(leaves) if leaf.place in ("result", "into")]
    first = out[group.own_slot.rank]
    sums = [i for i in across if is_exchanged(leaves[i].op, first[i].dtype)]
    results: dict[int, Any] = {}
    for op in ("mean", "sum"):
        if chosen := [i for i in sums if leaves[i].op == op]:
            parts = {rank: [leaves_of[i] for i in chosen] for rank, leaves_of in out.items()}
            results |= zip(chosen, sum_over_workers(group, op, parts, counts, strategy), strict=True)
    if rest := [i for i in across if i not in results]:
        everywhere = any(leaves[i].place == "into" for i in rest)
        rows = group.gather_arrays({rank: [np.asarray(out[rank][i]) for i in rest] for rank in out}, everywhere)
        shares = [count / sum(counts) for count in counts]
        for place, i in enumerate(rest if rows is not None else []):
            results[i] = group.own_slot.put(combine(leaves[i].op, [row[place] for row in rows or []], shares))
    return results


def sum_over_workers(group: WorkerGroup, op: str, parts: dict[int, Leaves], counts: list[int], strategy: str) -> Leaves:
    """Means weighted by examples, or sums, over the exchange."""
    if group.size == 1:
        return parts[group.own_slot.rank]
    dtypes = [x.dtype for x in parts[group.own_slot.rank]]
    uneven = op == "mean" and len(set(counts)) > 1
    if uneven:  # sum_r (n_r / n) mean_r, in 32 bits
        parts = {rank: scale_leaves(leaves, np.float32(counts[rank] / sum(counts))) for rank, leaves in parts.items()}
    totals = group.sum_leaves(parts, "sum" if uneven or op == "sum" else "mean", strategy)[group.own_slot.rank]
    return [x.astype(dtype) if x.dtype != dtype else x for x, dtype in zip(totals, dtypes, strict=True)]


@jax.jit
def scale_leaves(leaves: Leaves, weight: jax.Array) -> Leaves:
    """Weight * leaves, f32."""
    return [x.astype(jnp.float32) * weight for x in leaves]


# ---------------------------------------------------------------- programs


def send_programs(group: WorkerGroup, missing: list[str]) -> None:
    """The programs that workers lack, made here once."""
    for text in missing:
        function, form, shapes = json.loads(text)
        header, body = group.functions[function].serialize_program(  # pyright: ignore[reportAttributeAccessIssue]
            form, tuple((tuple(shape), jnp.dtype(dtype)) for shape, dtype in shapes)
        )
        data = np.frombuffer(body, np.uint8)
        command = Command("program", {"key": text, **header}, arrays_for=lambda rank, data=data: [data])
        group.send(command)
        program(group, command)
        group.is_exchanging = False  # the next one may be refused where it is made


def program(group: WorkerGroup, command: Command) -> None:
    """Take a program from the master."""

    def load(slot: WorkerSlot) -> CallReport:
        if slot.rank != 0:
            slot.programs[command.header["key"]] = load_program(command.header, next(command.received).tobytes())
        return CallReport("ok", "")

    group.run_and_report(command.header["name"], load, part="compile", waiting="compile")


def load_program(header: dict[str, Any], body: bytes) -> WorkerProgram:
    """A program that came as StableHLO, or by its function's name."""
    leaves = tuple(Leaf(*leaf) for leaf in header["leaves"])
    if header["module"]:
        function, form, picked = import_function(header), pickle.loads(body), header["picked"]

        def computed(*flat: jax.Array) -> Leaves:
            leaves = jax.tree.leaves(packed(form.call(function, flat)))
            return [leaves[i] for i in picked]

        run = jax.jit(computed)
    else:
        run = jax.jit(jax.export.deserialize(bytearray(body)).call)
    return WorkerProgram(run, leaves, header["says"])


# ---------------------------------------------------------------- variables


@releases_slots
def put(group: WorkerGroup, command: Command) -> None:
    """Give workers the leaves of a variable, whole or each its rows."""

    def work(slot: WorkerSlot) -> CallReport:
        header = command.header
        if header["ranks"] is not None and slot.rank not in header["ranks"]:
            return CallReport("ok", json.dumps(header["says"]))
        slot.out = [slot.own(value) for value in worker_inputs(slot, command)]
        return CallReport("ok", json.dumps(header["says"]))

    group.run_and_report(command.header["name"], work, part="shuffle")
    for slot in group.slots:
        if command.header["ranks"] is None or slot.rank in command.header["ranks"]:
            slot.values[command.header["number"]] = slot.out


def worker_inputs(slot: WorkerSlot, command: Command) -> list[Any]:
    """Inputs of a worker, from here, the master or shared memory."""
    if command.given is not None:
        return command.given(slot.rank)
    if "tickets" not in command.header:
        return list(command.received)
    rows, (begin, end) = command.header["rows"], command.header["spans"][slot.rank]
    picked = next(command.received) if rows == "indices" else RowSelection(0, *rows).of(begin, end)
    arrays = [from_ticket(ticket, slot.arrays) for ticket in command.header["tickets"]]
    return [in_jax_dtype(name, take_rows(x, picked)) for name, x in zip(command.header["names"], arrays, strict=True)]


def report_variable(slot: WorkerSlot, command: Command, op: str = "") -> CallReport:
    """A variable's leaves laid out for reading; what must agree between workers."""
    slot.out = list(slot.held(command.header["number"]))
    shapes = [f"{x.dtype}{list(x.shape[1:] if op == 'gather' else x.shape)}" for x in slot.out]
    return CallReport("ok", json.dumps({"call": command.header, "leaf": shapes if op else []}))


@releases_slots
def reduce(group: WorkerGroup, command: Command) -> Leaves:
    """The variable over workers, each counted once; kept by all if asked."""
    group.run_and_report(
        command.header["name"], functools.partial(report_variable, command=command, op=command.header["op"])
    )
    with profiling.part("reduce"):
        return profiling.wait_if_profiling(reduce_reported(group, command.header))


def reduce_reported(group: WorkerGroup, header: dict[str, Any]) -> Leaves:
    """Results of a reduction whose leaves are laid out."""
    mine = {slot.rank: slot.out for slot in group.slots}
    if header["keep"] and all(is_exchanged(header["op"], x.dtype) for x in mine[group.own_slot.rank]):
        totals = mine if group.size == 1 else group.sum_leaves(mine, header["op"], header["strategy"])
        for slot in group.slots:
            slot.values[header["number"]] = totals[slot.rank]
        return totals[group.own_slot.rank]
    place = "into" if header["keep"] else "result"
    leaves = [
        Leaf(op=header["op"], place=place, target=header["number"], index=i, name=header["name"])
        for i in range(len(mine[group.own_slot.rank]))
    ]
    results = reduce_leaves(group, leaves, mine, [1] * group.size, header["strategy"])
    if header["keep"]:
        for slot in group.slots:
            slot.values[header["number"]] = [slot.put(results[i]) for i in range(len(leaves))]
    return [results[i] for i in range(len(leaves))] if group.leads else []


@releases_slots
def fetch(group: WorkerGroup, command: Command) -> list[list[np.ndarray]] | None:
    """The leaves of one worker or all, kept by all if asked."""
    header = command.header
    group.run_and_report(header["name"], functools.partial(report_variable, command=command))
    wanted = range(group.size) if header["rank"] is None else [header["rank"]]
    with profiling.part("shuffle"):
        mine = {s.rank: [np.asarray(x) for x in s.out] if s.rank in wanted else [] for s in group.slots}
        rows = group.gather_arrays(mine, header["keep"])
    if header["keep"] and rows is not None:
        every = len(wanted) > 1
        kept = [combine("gather", leaf, ()) for leaf in zip(*rows, strict=True)] if every else rows[wanted[0]]
        for slot in group.slots:
            slot.values[header["number"]] = [slot.own(x) for x in kept]
    return None if rows is None else [rows[rank] for rank in wanted]


@releases_slots
def lengths(group: WorkerGroup, command: Command) -> list[int]:
    """The number of a variable's rows on each worker, from the reports."""

    def count(slot: WorkerSlot) -> CallReport:
        found = {x.shape[:1] for x in slot.held(command.header["number"])}
        got = f"worker {slot.rank} holds leaves whose first axes are {sorted(found)}"
        name, expected = command.header["name"], "expected as many rows in each leaf"
        check(len(found) == 1 and () not in found, f"{name}: {got}; {expected}")
        return CallReport("ok", json.dumps(command.header), found.pop()[0])

    return [report.count for report in group.run_and_report(command.header["name"], count)]


def close(group: WorkerGroup, command: Command) -> None:
    """Drop all values, programs and arrays of the workers."""
    for slot in group.slots:
        slot.values.clear()
        slot.kept.clear()
        slot.programs.clear()
        slot.known.clear()
        slot.arrays.clear()


COMMANDS: dict[str, Callable[[WorkerGroup, Command], Any]] = {
    "call": call,
    "program": program,
    "put": put,
    "reduce": reduce,
    "fetch": fetch,
    "lengths": lengths,
    "close": close,
}
