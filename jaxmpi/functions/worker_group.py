"""Workers of a function, which carry out commands together.

Every call is a command that all workers carry out: a part of each worker's own, then reports, then what travels.
Nothing is changed and nothing travels before all have reported well; so a failure leaves all workers as they were.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from jaxmpi.allreduce.api import Op
from jaxmpi.core.errors import UsageError, check
from jaxmpi.functions import profiling
from jaxmpi.functions.transport import CallReport, OutOfStep, WorkerDied
from jaxmpi.functions.worker import (
    Command,
    Leaves,
    Library,
    Missing,
    WorkerFailed,
    WorkerProgram,
    WorkerSlot,
    error_text,
    failure_report,
    judge_reports,
    program_key,
    try_work,
    wait_for_outputs,
)


class WorkerGroup:
    """Workers that compute together; some or all of them in this process."""

    size: int
    slots: list[WorkerSlot]  # this process's workers
    is_the_world = False  # True if its workers are the job's ranks, each of which runs the script
    leads = True  # True if results are wanted in this process
    is_serial = False  # True if one process leads and the others wait for its commands
    is_one_process = False  # True if all its workers are in this process, which are always in step
    default_strategy = "asa32"
    way_out = "the ranks of a job cannot meet again: end it"  # if they are out of step

    def __init__(self) -> None:
        self.made = 0  # variables so far, which are numbered alike in all processes
        self.functions: weakref.WeakValueDictionary[int, Library] = weakref.WeakValueDictionary()
        self.is_used = False  # True once functions have been bound to it
        self.dropped: list[int] = []  # variables that nobody asks for any more; functions as -1 - number
        self.gone = ""  # why it can do no more
        self.is_exchanging = False  # past the reports of a call: what fails now leaves workers at different places
        self.busy = threading.Lock()

    # ------------------------------------------------------------ what differs between kinds of groups

    def gather_reports(self, mine: list[CallReport]) -> list[CallReport]:
        """Every worker's report, by rank."""
        raise NotImplementedError

    def sum_leaves(self, mine: dict[int, Leaves], op: Op, strategy: str) -> dict[int, Leaves]:
        """`exchange` of every worker's list of floats."""
        raise NotImplementedError

    def gather_arrays(self, mine: dict[int, list[np.ndarray]], everywhere: bool) -> list[list[np.ndarray]] | None:
        """Every worker's arrays by rank, on the leading process or on all."""
        raise NotImplementedError

    def send(self, command: Command) -> None:
        """Send a command to the workers that wait, if any do."""
        self.forget(self.take_dropped())

    def end(self) -> None:
        """End the workers that wait."""

    # ------------------------------------------------------------ what is the same

    @property
    def is_on_one_host(self) -> bool:
        """Return True if all workers see the same memory."""
        return len(set(getattr(getattr(self, "comm", None), "hosts", (0,)))) == 1

    def forget(self, numbers: list[int]) -> None:
        """Let go of what has been dropped."""
        for slot in self.slots:
            for number in numbers:
                slot.forget(number)

    def take_dropped(self) -> list[int]:
        """Numbers of objects dropped since the last call; more may follow meanwhile."""
        numbers, self.dropped = self.dropped, []
        return numbers

    @property
    def own_slot(self) -> WorkerSlot:
        """This process's first worker."""
        return self.slots[0]

    def release_slots(self) -> None:
        """Drop what workers hold of the command that was carried out."""
        for slot in self.slots:
            slot.release()

    def next_variable_number(self) -> int:
        """A number for a new variable."""
        self.made += 1
        return self.made

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Refuse a second command meanwhile: a nested one would wait for ever."""
        check(
            self.busy.acquire(blocking=False),
            f"{what}: called while another call is under way, from inside of a function or from another thread; calls "
            "go one after another",
        )
        try:
            yield
        finally:
            self.busy.release()

    def check_usable(self) -> None:
        """Refuse a group that has been closed or broken."""
        check(not self.gone, self.gone)

    def program(self, slot: WorkerSlot, function: int, form: int, shapes: tuple) -> WorkerProgram:
        """The function's program for these shapes.

        Raises:
            Missing: this process waits for it.
        """
        if function in self.functions:
            return self.functions[function].program(form, shapes)
        key = function, form, shapes
        if key not in slot.known:
            text = program_key(function, form, shapes)
            if text not in slot.programs:
                raise Missing(text)
            slot.known[key] = slot.programs[text]
        return slot.known[key]

    def run_and_report(
        self, what: str, work: Callable[[WorkerSlot], CallReport], part: str = "function", waiting: str = "straggler"
    ) -> list[CallReport]:
        """Do this process's part of a command; all raise if one fails.

        All processes call this together. Each learns of every worker's report, and then all raise or all go on.

        Args:
            what: for messages.
            work: of one worker.
            part: of a profile, for this process's first worker; `waiting`: for the others after that.

        Raises:
            UsageError: what was asked cannot be, or workers disagree. WorkerFailed: some workers failed.
            MissingPrograms: workers lack programs.
        """
        self.is_exchanging = False
        reports, errors = [], {}
        with profiling.part(part):
            for slot in self.slots:  # all begin before any is waited for
                report, error = try_work(slot, work)
                reports.append(report)
                errors[slot.rank] = error
        for i, slot in enumerate(self.slots):
            if errors[slot.rank] is None:
                with profiling.part(waiting if i else part):
                    _, errors[slot.rank] = try_work(slot, wait_for_outputs)
                reports[i] = reports[i] if errors[slot.rank] is None else failure_report(errors[slot.rank])
        with profiling.part(waiting):
            reports = self.exchange_reports(reports)
        judge = judge_reports(what, reports, {r: e for r, e in errors.items() if e is not None})
        self.is_exchanging = True
        return judge

    def exchange_reports(self, mine: list[CallReport]) -> list[CallReport]:
        """`all_reports`, after whose failure the workers may be out of step.

        Raises:
            OutOfStep: whatever failed.
        """
        try:
            return self.gather_reports(mine)
        except OutOfStep:
            raise
        except Exception as error:
            raise OutOfStep(f"the workers' reports could not be had: {error_text(error)}") from error

    def note(self, error: BaseException) -> None:
        """Note after a failed call if another one is possible."""
        agreed = isinstance(error, (UsageError, WorkerFailed)) or not (
            self.is_exchanging or isinstance(error, OutOfStep) or not isinstance(error, Exception)
        )
        self.is_exchanging = False
        if not agreed and self.size > 1 and not self.is_one_process:
            way_out = "" if isinstance(error, WorkerDied) else f"; {self.way_out}"
            self.gone = f"the workers are no longer in step: {error_text(error):.500}{way_out}"

    def report_refusal(self, what: str, error: Exception) -> None:
        """Report that this rank cannot begin, if every rank runs the script."""
        if self.is_serial:
            return
        try:
            reports = self.exchange_reports([failure_report(error)] * len(self.slots))
        except BaseException as late:  # Ctrl-C included
            self.note(late)
            raise
        judge_reports(what, reports, {slot.rank: error for slot in self.slots})
