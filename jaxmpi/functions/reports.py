"""Reports of workers on their parts of a call, from which all decide whether to go on.

One worker may fail while the others succeed, but all must raise an error. Mostly all reports are alike and well, so 48
bytes of each are sent, a hash of its text among them; whole texts follow if they differ or one has failed.
"""

import hashlib
import pickle
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.json_tree import differences

SHORT_BYTES = 48


class WorkerFailed(TrainingError):
    """A worker's part failed; the message has its traceback.

    The workers are as before the call.
    """


class MissingPrograms(Exception):
    """Workers lack the programs of these keys; the master sends them and repeats the command."""

    def __init__(self, keys: Sequence[Any]) -> None:
        super().__init__(keys)
        self.keys = keys


class CallReport(NamedTuple):
    """How one worker's part of a call went."""

    kind: str  # ok | missing (a program) | error
    text: str  # values that must be the same on all workers; key of the program, pickled, as hex; error message
    count: int = 0  # examples


def pack_report(report: CallReport) -> bytes:
    """A report as its text's hash, its count and a not-ok flag."""
    count, is_bad = report.count.to_bytes(8, "little"), bytes([report.kind != "ok"])
    text = report.text.encode(errors="surrogatepass")  # an error may name a file that is no UTF-8
    return (hashlib.sha256(text).digest() + count + is_bad).ljust(SHORT_BYTES, b"\0")


def unpack_reports(rows: bytes) -> list[CallReport] | None:
    """Every worker's report without its text; None if their texts are needed."""
    each = [rows[i : i + SHORT_BYTES] for i in range(0, len(rows), SHORT_BYTES)]
    if any(row[40] for row in each) or len({row[:32] for row in each}) > 1:
        return None
    return [CallReport("ok", "", int.from_bytes(row[32:40], "little")) for row in each]


def failure_report(error: BaseException) -> CallReport:
    """The report of what a worker's part raised; a user's mistake needs no traceback."""
    if isinstance(error, MissingPrograms):
        return CallReport("missing", pickle.dumps(error.keys[0]).hex())
    if isinstance(error, (UsageError, TrainingError)):
        return CallReport("error", str(error))
    return CallReport("error", "".join(traceback.format_exception(error)).rstrip())


def judge_reports(what: str, reports: list[CallReport], errors: dict[int, Exception]) -> None:
    """Raise one error everywhere unless all reports are well and say the same.

    An original exception of this process, by rank in `errors`, is raised if no worker did its part.
    """
    if failed := [rank for rank, report in enumerate(reports) if report.kind == "error"]:
        original = next((errors[rank] for rank in failed if rank in errors), None)
        if original and all(report.kind != "ok" for report in reports):
            raise original
        text = reports[failed[0]].text
        raise WorkerFailed(f"{what}: worker {failed[0]} of {len(reports)} failed:\n{text}") from original
    if missing := {report.text for report in reports if report.kind == "missing"}:
        raise MissingPrograms([pickle.loads(bytes.fromhex(key)) for key in sorted(missing)])
    odd = next((rank for rank, report in enumerate(reports) if report.text != reports[0].text), None)
    if odd is not None:
        lines = differences(odd, reports[odd].text, 0, reports[0].text)
        raise UsageError(f"{what} differs between workers:\n" + "\n".join(lines[:24]))
