"""Reports of workers on their parts of a call: one may fail while others succeed, but all must raise an error."""

import traceback
from typing import Any, NamedTuple

from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.json_tree import differences


class WorkerFailed(TrainingError):
    """A worker's part failed, with its traceback; the workers are as before the call."""


class CallReport(NamedTuple):
    """How one worker's part of a call went."""

    kind: str  # ok | missing (a program, which the process that runs the script sends) | error
    detail: Any  # JSON of what must be the same on all workers; key of the program; error message
    count: int = 0  # examples


def failure_report(error: BaseException) -> CallReport:
    """The report of what a worker's part raised; a user's mistake needs no traceback."""
    if isinstance(error, (UsageError, TrainingError)):
        return CallReport("error", str(error))
    return CallReport("error", "".join(traceback.format_exception(error)).rstrip())


def judge_reports(label: str, reports: list[CallReport], errors: dict[int, Exception]) -> None:
    """Raise one error everywhere unless all reports are well and say the same.

    An original exception of this process, by rank in `errors`, is raised if no worker did its part.
    """
    if failed := [rank for rank, report in enumerate(reports) if report.kind == "error"]:
        original = next((errors[rank] for rank in failed if rank in errors), None)
        if original and all(report.kind != "ok" for report in reports):
            raise original
        text = reports[failed[0]].detail
        raise WorkerFailed(f"{label}: worker {failed[0]} of {len(reports)} failed:\n{text}") from original
    odd = next((rank for rank, report in enumerate(reports) if report.detail != reports[0].detail), None)
    if odd is not None:
        lines = differences(odd, reports[odd].detail, 0, reports[0].detail)
        raise UsageError(f"{label} differs between workers:\n" + "\n".join(lines[:24]))
