"""One worker of a function: what it holds, and its report.

One worker may fail in a call while the others succeed, but all must raise an error. Each worker therefore catches its
error and returns a report. `judge_reports` decides from the reports of all workers which error, if any, they raise. An
original exception is raised if no worker did its part; otherwise `WorkerFailed` has the text. A worker without a
program reports it as missing, so that the master sends it and repeats the command.
"""

import json
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.core.json_tree import differences
from jaxmpi.functions.shared_array import SharedArray
from jaxmpi.functions.transport import CallReport

Leaves = list[jax.Array]
Device = Any  # a device of JAX


class WorkerFailed(TrainingError):
    """A worker's part failed; the message has its traceback.

    The workers are as before the call.
    """


class Missing(Exception):
    """This worker has no program for these shapes; the text names it."""


class MissingPrograms(Exception):
    """Workers lack programs; the master sends these and repeats the command."""

    def __init__(self, wanted: list[str]) -> None:
        super().__init__(wanted)
        self.wanted = wanted


# ---------------------------------------------------------------- commands and what workers hold


class Command(NamedTuple):
    """A command to all workers."""

    kind: str  # a key of COMMANDS in `commands`
    header: dict[str, Any]  # plain JSON values
    given: Any = None  # inputs that the caller's own workers take directly
    arrays_for: Callable[[int], list[Any]] = lambda rank: []  # arrays that travel to a worker of another process
    received: Iterator[np.ndarray] = iter(())  # in such a worker: those arrays


class Leaf(NamedTuple):
    """One array that a program returns, and what becomes of it."""

    op: str  # a row of OPS, or empty
    place: str  # result | into | local | update
    target: int  # number of the output, or of the variable
    index: int  # among the leaves of the target
    name: str  # name of the target, for messages


class WorkerProgram(NamedTuple):
    """A user's function for arguments of certain shapes, over flat leaves."""

    run: Callable[..., Leaves]
    leaves: tuple[Leaf, ...]
    says: str  # dtypes and shapes that must be the same on all workers
    structures: tuple[Any, ...] = ()  # tree structures of the outputs, then the updates, if the function is in Python


NO_PROGRAM = WorkerProgram(lambda: [], (), "")


class WorkerSlot:
    """One worker: its rank, its device, and what it holds."""

    def __init__(self, rank: int, device: Device) -> None:
        self.rank, self.device = rank, device
        self.values: dict[int, Leaves] = {}  # leaves of variables, by number
        self.kept: dict[tuple[int, int], jax.Array] = {}  # broadcast inputs, by function and leaf
        self.programs: dict[str, WorkerProgram] = {}  # that have come from the master
        self.known: dict[tuple, WorkerProgram] = {}  # the same, by function, form and shapes
        self.arrays: dict[str, SharedArray] = {}  # mapped, by key
        self.release()

    def release(self) -> None:
        """Let go of the command that was carried out."""
        self.out: Leaves = []  # leaves that the command under way has made
        self.program = NO_PROGRAM  # program of the call under way
        self.count = 0  # examples of the call that is going on
        self.done: CallReport | None = None  # report of the call under way, if this worker has done its part

    def put(self, array: Any) -> jax.Array:
        """On this worker's device."""
        return jax.device_put(array, self.device)

    def given(self, array: Any) -> Any:
        """Convert to a program's argument; calls place NumPy's arrays faster than `put`."""
        is_default = self.device is jax.local_devices()[0] and jax.config.jax_default_device is None  # pyright: ignore[reportAttributeAccessIssue]
        return array if is_default and isinstance(array, np.ndarray) else self.put(array)

    def own(self, array: Any) -> jax.Array:
        """The same, in memory that nobody else writes."""
        return jax.device_put(jnp.array(array) if isinstance(array, jax.Array) else np.array(array), self.device)

    def forget(self, number: int) -> None:
        """Drop a variable, or what function -1 - number has left here."""
        if number >= 0:
            self.values.pop(number, None)
            return
        self.kept = {key: value for key, value in self.kept.items() if key[0] != -1 - number}
        self.known = {key: value for key, value in self.known.items() if key[0] != -1 - number}
        self.programs = {key: value for key, value in self.programs.items() if json.loads(key)[0] != -1 - number}

    def held(self, number: int) -> Leaves:
        """The leaves of a variable."""
        check(number in self.values, f"worker {self.rank} holds no variable {number}; it was closed, or never made")
        return self.values[number]


class Library(Protocol):
    """Registry of the functions that this process has in Python."""

    def program(self, form: int, shapes: tuple) -> WorkerProgram:
        """The program for one structure of arguments.

        `shapes` holds (shape, dtype) of each leaf.
        """
        ...

    def serialize_program(self, form: int, shapes: tuple) -> tuple[dict[str, Any], bytes]:
        """The same for a process without the function: header and body."""
        ...


# ---------------------------------------------------------------- reports


def try_work(slot: WorkerSlot, work: Callable[[WorkerSlot], CallReport]) -> tuple[CallReport, Exception | None]:
    """A worker's report, and the error if there was one."""
    try:
        return work(slot), None
    except Missing as error:
        return CallReport("missing", str(error)), error
    except Exception as error:
        return failure_report(error), error


def wait_for_outputs(slot: WorkerSlot) -> CallReport:
    """Wait for what the worker computes."""
    jax.block_until_ready(slot.out)
    return CallReport("ok", "")


def error_text(error: BaseException) -> str:
    """Its text, or its kind if it has none."""
    return str(error) or type(error).__name__


def failure_report(error: BaseException | None) -> CallReport:
    """Text of an error; a user's mistake needs no traceback."""
    if isinstance(error, (UsageError, TrainingError)):
        return CallReport("error", str(error))
    return CallReport("error", "".join(traceback.format_exception(error)).rstrip())


def judge_reports(what: str, reports: list[CallReport], errors: dict[int, Exception]) -> list[CallReport]:
    """The reports, if all are well and say the same."""
    failed = [rank for rank, report in enumerate(reports) if report.kind == "error"]
    if failed:
        raise_failure(what, reports, failed, errors)
    lacking = sorted({report.text for report in reports if report.kind == "missing"})
    if lacking:
        raise MissingPrograms(lacking)
    odd = [rank for rank, report in enumerate(reports) if report.text != reports[0].text][:8]
    lines = [line for rank in odd for line in differences(rank, reports[rank].text, 0, reports[0].text)]
    check(not odd, f"{what} differs between workers:\n" + "\n".join(lines[:24]))
    return reports


def raise_failure(what: str, reports: list[CallReport], failed: list[int], errors: dict[int, Exception]) -> None:
    """Raise one error everywhere, the original if no worker did its part."""
    own = [error for rank, error in errors.items() if rank in failed]
    if own and not any(report.kind == "ok" for report in reports):
        raise own[0]
    rank = failed[0]
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    error = WorkerFailed(f"{what}: worker {rank} of {len(reports)}{more} failed:\n{reports[rank].text}")
    raise error from (own[0] if own else None)


def program_key(function: int, form: int, shapes: Iterable[tuple]) -> str:
    """The name of a program in messages."""
    return json.dumps([function, form, [[list(shape), str(dtype)] for shape, dtype in shapes]])
