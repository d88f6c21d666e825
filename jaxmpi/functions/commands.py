"""Commands to a worker group, in one table.

A call of a function and each method of a variable become an `Command`: a JSON header, with arrays beside it. If every
rank runs the script, each makes the same order; else rank 0 sends it to the processes that wait. From there on the code
is the same: each process runs the order's row of `VERBS` for its own workers. A worker does its own part first and
reports. Only if all reports are good does anything travel or change, so a failed call leaves the workers as they were.
A worker that lacks a program says so in its report, gets the program, and the order is repeated (`MissingPrograms`). So
nobody keeps a list of which worker has been sent which shapes.
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
from jaxmpi.functions import profiling
from jaxmpi.functions.import_by_name import find
from jaxmpi.functions.partitioning import RowSelection
from jaxmpi.functions.reductions import combine, travels_as_sum
from jaxmpi.functions.shared_array import from_ticket
from jaxmpi.functions.transport import CallReport
from jaxmpi.functions.worker_call import as_jax_has, compute, take
from jaxmpi.functions.worker_group import Command, Leaf, Leaves, MissingPrograms, WorkerGroup, WorkerProgram, WorkerSlot


def perform(team: WorkerGroup, what: str, prepare: Callable[[], Command]) -> Any:
    """Carry out an order with all workers: send it to those that wait, do this process's part.

    Raises:
        UsageError, WorkerFailed: as `WorkerGroup.attempt`; another order is under way. The workers are as before.
    """
    with team.alone(what), profiling.call(what, team.mine.rank == 0):
        return performed(team, what, prepare)


def performed(team: WorkerGroup, what: str, prepare: Callable[[], Command]) -> Any:
    """The order prepared, sent and done; programs that workers lack are sent, and the order again."""
    team.check_usable()
    try:
        order = prepare()
    except Exception as error:
        team.refuse(what, error)
        raise
    try:
        while True:
            with profiling.part("shuffle"):
                team.tell(order)
            try:
                result = VERBS[order.verb](team, order)
                team.is_exchanging = False
                return result
            except MissingPrograms as missing:
                with profiling.part("compile"):
                    send_programs(team, missing.wanted)
                order = order._replace(header=order.header | {"again": True})
    except BaseException as error:
        team.note(error)
        team.rest()
        raise


def rests(verb: Callable[[WorkerGroup, Command], Any]) -> Callable[[WorkerGroup, Command], Any]:
    """The command, after which workers hold nothing of it, unless the order comes again."""

    @functools.wraps(verb)
    def resting(team: WorkerGroup, order: Command) -> Any:
        is_over = True
        try:
            return verb(team, order)
        except MissingPrograms:
            is_over = False
            raise
        finally:
            if is_over:
                team.rest()

    return resting


# ---------------------------------------------------------------- call


@rests
def call(team: WorkerGroup, order: Command) -> tuple[tuple[Any, ...], Leaves]:
    """Compute everywhere, then reduce: structures and leaves of what is returned, if results are wanted."""
    reports = team.attempt(order.header["name"], lambda station: compute(station, order, team))
    counts = [report.count for report in reports]
    leaves = team.mine.program.leaves
    with profiling.part("reduce"):
        out = {station.rank: station.out for station in team.stations}
        results = profiling.settled(reduce_leaves(team, leaves, out, counts, order.header["strategy"]))
    for station in team.stations:
        settle(station, leaves, results, order.header["locals"])
    returned = [results[i] for i, leaf in enumerate(leaves) if leaf.place == "result"] if team.leads else []
    return team.mine.program.structures, returned


def settle(station: WorkerSlot, leaves: Sequence[Leaf], results: dict[int, Any], made: dict[str, int]) -> None:
    """Store what stays with the worker."""
    new: dict[int, Leaves] = {number: [] for number in made.values()}
    for i, leaf in enumerate(leaves):
        value = station.out[i]
        if leaf.place == "local":
            new[made[str(leaf.target)]].append(value)
        elif leaf.place == "into":
            new.setdefault(leaf.target, []).append(station.put(results[i]))
        elif leaf.place == "update":
            new.setdefault(leaf.target, []).append(value)
    station.values.update(new)


def reduce_leaves(
    team: WorkerGroup, leaves: Sequence[Leaf], out: dict[int, Leaves], counts: list[int], strategy: str
) -> dict[int, Any]:
    """Results over workers, by leaf."""
    across = [i for i, leaf in enumerate(leaves) if leaf.place in ("result", "into")]
    first = out[team.mine.rank]
    sums = [i for i in across if travels_as_sum(leaves[i].op, first[i].dtype)]
    results: dict[int, Any] = {}
    for op in ("mean", "sum"):
        if chosen := [i for i in sums if leaves[i].op == op]:
            parts = {rank: [leaves_of[i] for i in chosen] for rank, leaves_of in out.items()}
            results |= zip(chosen, over_workers(team, op, parts, counts, strategy), strict=True)
    if rest := [i for i in across if i not in results]:
        everywhere = any(leaves[i].place == "into" for i in rest)
        rows = team.gathered({rank: [np.asarray(out[rank][i]) for i in rest] for rank in out}, everywhere)
        shares = [count / sum(counts) for count in counts]
        for place, i in enumerate(rest if rows is not None else []):
            results[i] = team.mine.put(combine(leaves[i].op, [row[place] for row in rows or []], shares))
    return results


def over_workers(team: WorkerGroup, op: str, parts: dict[int, Leaves], counts: list[int], strategy: str) -> Leaves:
    """Means weighted by examples, or sums, over the exchange."""
    if team.size == 1:
        return parts[team.mine.rank]
    dtypes = [x.dtype for x in parts[team.mine.rank]]
    uneven = op == "mean" and len(set(counts)) > 1
    if uneven:  # sum_r (n_r / n) mean_r, in 32 bits
        parts = {rank: weighed(leaves, np.float32(counts[rank] / sum(counts))) for rank, leaves in parts.items()}
    totals = team.summed(parts, "sum" if uneven or op == "sum" else "mean", strategy)[team.mine.rank]
    return [x.astype(dtype) if x.dtype != dtype else x for x, dtype in zip(totals, dtypes, strict=True)]


@jax.jit
def weighed(leaves: Leaves, weight: jax.Array) -> Leaves:
    """Weight * leaves, f32."""
    return [x.astype(jnp.float32) * weight for x in leaves]


# ---------------------------------------------------------------- programs


def send_programs(team: WorkerGroup, missing: list[str]) -> None:
    """The programs that workers lack, made here once."""
    for text in missing:
        function, form, shapes = json.loads(text)
        header, body = team.functions[function].travelling(  # pyright: ignore[reportAttributeAccessIssue]
            form, tuple((tuple(shape), jnp.dtype(dtype)) for shape, dtype in shapes)
        )
        data = np.frombuffer(body, np.uint8)
        order = Command("program", {"key": text, **header}, arrays_for=lambda rank, data=data: [data])
        team.tell(order)
        program(team, order)
        team.is_exchanging = False  # the next one may be refused where it is made


def program(team: WorkerGroup, order: Command) -> None:
    """Take a program from the master."""

    def load(station: WorkerSlot) -> CallReport:
        if station.rank != 0:
            station.programs[order.header["key"]] = loaded(order.header, next(order.received).tobytes())
        return CallReport("ok", "")

    team.attempt(order.header["name"], load, part="compile", waiting="compile")


def loaded(header: dict[str, Any], body: bytes) -> WorkerProgram:
    """A program that travelled as StableHLO, or by the name of its function."""
    leaves = tuple(Leaf(*leaf) for leaf in header["leaves"])
    if header["module"]:
        function, form, picked = find(header), pickle.loads(body), header["picked"]

        def computed(*flat: jax.Array) -> Leaves:
            leaves = jax.tree.leaves(packed(form.call(function, flat)))
            return [leaves[i] for i in picked]

        run = jax.jit(computed)
    else:
        run = jax.jit(jax.export.deserialize(bytearray(body)).call)
    return WorkerProgram(run, leaves, header["says"])


# ---------------------------------------------------------------- variables


@rests
def put(team: WorkerGroup, order: Command) -> None:
    """Give workers the leaves of a variable: the whole, or each its rows."""

    def work(station: WorkerSlot) -> CallReport:
        header = order.header
        if header["ranks"] is not None and station.rank not in header["ranks"]:
            return CallReport("ok", json.dumps(header["says"]))
        station.out = [station.own(value) for value in values_of(station, order)]
        return CallReport("ok", json.dumps(header["says"]))

    team.attempt(order.header["name"], work, part="shuffle")
    for station in team.stations:
        if order.header["ranks"] is None or station.rank in order.header["ranks"]:
            station.values[order.header["number"]] = station.out


def values_of(station: WorkerSlot, order: Command) -> list[Any]:
    """Inputs of a worker: from here, from the master, or out of shared memory."""
    if order.given is not None:
        return order.given(station.rank)
    if "tickets" not in order.header:
        return list(order.received)
    rows, (begin, end) = order.header["rows"], order.header["spans"][station.rank]
    picked = next(order.received) if rows == "indices" else RowSelection(0, *rows).of(begin, end)
    arrays = [from_ticket(ticket, station.arrays) for ticket in order.header["tickets"]]
    return [as_jax_has(name, take(x, picked)) for name, x in zip(order.header["names"], arrays, strict=True)]


def signed(station: WorkerSlot, order: Command, op: str = "") -> CallReport:
    """A variable's leaves laid out for reading; what must agree between workers."""
    station.out = list(station.held(order.header["number"]))
    shapes = [f"{x.dtype}{list(x.shape[1:] if op == 'gather' else x.shape)}" for x in station.out]
    return CallReport("ok", json.dumps({"call": order.header, "leaf": shapes if op else []}))


@rests
def reduce(team: WorkerGroup, order: Command) -> Leaves:
    """The variable over workers, each counted once; kept by all if asked."""
    team.attempt(order.header["name"], functools.partial(signed, order=order, op=order.header["op"]))
    with profiling.part("reduce"):
        return profiling.settled(reduced(team, order.header))


def reduced(team: WorkerGroup, header: dict[str, Any]) -> Leaves:
    """Results of a reduction whose leaves are laid out."""
    mine = {station.rank: station.out for station in team.stations}
    if header["keep"] and all(travels_as_sum(header["op"], x.dtype) for x in mine[team.mine.rank]):
        totals = mine if team.size == 1 else team.summed(mine, header["op"], header["strategy"])
        for station in team.stations:
            station.values[header["number"]] = totals[station.rank]
        return totals[team.mine.rank]
    place = "into" if header["keep"] else "result"
    leaves = [Leaf(header["op"], place, header["number"], i, header["name"]) for i in range(len(mine[team.mine.rank]))]
    results = reduce_leaves(team, leaves, mine, [1] * team.size, header["strategy"])
    if header["keep"]:
        for station in team.stations:
            station.values[header["number"]] = [station.put(results[i]) for i in range(len(leaves))]
    return [results[i] for i in range(len(leaves))] if team.leads else []


@rests
def fetch(team: WorkerGroup, order: Command) -> list[list[np.ndarray]] | None:
    """The leaves of some workers, all of them or one; kept by all if asked."""
    header = order.header
    team.attempt(header["name"], functools.partial(signed, order=order))
    wanted = range(team.size) if header["rank"] is None else [header["rank"]]
    with profiling.part("shuffle"):
        mine = {s.rank: [np.asarray(x) for x in s.out] if s.rank in wanted else [] for s in team.stations}
        rows = team.gathered(mine, header["keep"])
    if header["keep"] and rows is not None:
        every = len(wanted) > 1
        kept = [combine("gather", leaf, ()) for leaf in zip(*rows, strict=True)] if every else rows[wanted[0]]
        for station in team.stations:
            station.values[header["number"]] = [station.own(x) for x in kept]
    return None if rows is None else [rows[rank] for rank in wanted]


@rests
def lengths(team: WorkerGroup, order: Command) -> list[int]:
    """How many rows of a variable each worker holds; they travel in the reports."""

    def count(station: WorkerSlot) -> CallReport:
        found = {x.shape[:1] for x in station.held(order.header["number"])}
        got = f"worker {station.rank} holds leaves whose first axes are {sorted(found)}"
        check(len(found) == 1 and () not in found, f"{order.header['name']}: {got}; expected as many rows in each leaf")
        return CallReport("ok", json.dumps(order.header), found.pop()[0])

    return [report.count for report in team.attempt(order.header["name"], count)]


def close(team: WorkerGroup, order: Command) -> None:
    """Drop all values, programs and arrays of the workers."""
    for station in team.stations:
        station.values.clear()
        station.kept.clear()
        station.programs.clear()
        station.known.clear()
        station.arrays.clear()


VERBS: dict[str, Callable[[WorkerGroup, Command], Any]] = {
    "call": call,
    "program": program,
    "put": put,
    "reduce": reduce,
    "fetch": fetch,
    "lengths": lengths,
    "close": close,
}
