"""Errors with a message for the user, and checks that raise them."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
# Characters that move a terminal's cursor, change its colours or title, or turn the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text safe for a terminal: a stranger's file names hold any bytes."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class UsageError(ValueError):
    """A user's error: got, expected, way out; shown without a traceback."""

    def __str__(self) -> str:
        return printable(super().__str__())


class TrainingError(RuntimeError):
    """A run that cannot go on; its full message replaces a traceback."""

    def __str__(self) -> str:
        return printable(super().__str__())


class AgreedError(TrainingError):
    """An error that all ranks raise together; rank 0 prints it."""


class NotFinite(AgreedError):
    """A loss or gradients that are not finite: the run has diverged."""


def lookup(table: Mapping[str, T], name: str, kind: str) -> T:
    """`table[name]`, or a `UsageError` that lists what exists and suggests the nearest."""
    if isinstance(name, str) and name in table:
        return table[name]
    raise UsageError(f"unknown {kind} {name!r}; {nearest(str(name), table)}")


# Words of other libraries, and the parts of an experiment, for fields of ours, which no spelling leads to.
WORDS = {
    "run-dir": "out output output-dir save-dir log-dir logdir default-root-dir base-output-directory",
    "train-for": "epochs num-epochs max-epochs num-train-epochs steps max-steps total-steps",
    "local-batch": "batch-size train-batch-size per-device-batch-size per-device-train-batch-size",
    "effective-batch": "global-batch-size",
    "micro-batch": "accumulate-grad-batches gradient-accumulation-steps",
    "eval-every": "eval-steps val-check-interval",
    "checkpoint-every": "save-steps checkpoint-period",
    "keep-checkpoints": "save-total-limit",
    "log-every": "logging-steps log-every-n-steps",
    "monitor": "metric-for-best-model",
    "resume": "resume-from-checkpoint ckpt-path",
    "params": "pretrained",
    "sinks": "report-to logger wandb",
    "dry-run": "fast-dev-run",
    "quiet": "silent",
    "seed": "seed-everything",
    "devices": "gpus num-gpus",
    "compute-dtype": "precision bf16 fp16",
    "optim.name": "optim optimizer",
    "optim.lr": "learning-rate optim.learning-rate",
    "optim.momentum": "momentum",
    "optim.b1": "beta1 adam-beta1",
    "optim.b2": "beta2 adam-beta2",
    "optim.clip-norm": "max-grad-norm gradient-clip-val",
    "schedule.decay": "schedule lr-scheduler lr-scheduler-type",
    "schedule.warmup": "warmup-steps warmup-ratio",
    "data.source": "data dataset",
    "data.dir": "data-path dataset-path train-dir",
    "data.window": "block-size seq-len max-seq-length context-length",
    "data.crop": "image-size img-size",
    "data.loaders": "num-workers dataloader-num-workers",
    "rule.name": "rule",
    "exchange.strategy": "strategy exchange",
}
ELSEWHERE = {word: field for field, words in WORDS.items() for word in words.split()}


def nearest(name: str, known: Mapping[str, Any]) -> str:
    """The tail of an error: the nearest known name, and all names."""
    return f"{hint(name, known)}there are: {', '.join(sorted(known))}"


def hint(name: str, known: Mapping[str, Any]) -> str:
    """The nearest known name as a question, whatever the case; empty if none is near."""
    name = name.lower()
    own = {other.rpartition(".")[2].lower(): other for other in reversed([*known])}  # `weight-decay` alone
    own |= {other.lower(): other for other in known}
    pairs = ((dashes + other, dashes + field) for other, field in ELSEWHERE.items() for dashes in ("", "--"))
    elsewhere = {other: field for other, field in pairs if field in known}
    swapped = [other for other in own if sorted(other) == sorted(name)]  # two edits to difflib
    close = [name] * (name in elsewhere) or swapped or difflib.get_close_matches(name, own, n=1)
    close = close or difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.8)
    return f"did you mean {(own | elsewhere)[close[0]]!r}? " if close else ""


def check(holds: bool, message: str) -> None:
    """Raise `UsageError(message)` unless `holds`."""
    if not holds:
        raise UsageError(message)
