"""Durations such as `3ep` and `500st`, turned into steps, and `2h`, which no number of steps stands for."""

import re

from jaxmpi.core.errors import UsageError

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ep|st|ex|%)\s*", re.ASCII)
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(h|min|s)\s*", re.ASCII)
UNLIMITED = 1 << 40  # steps of a run that ends by the clock
_UNITS_S = {"h": 3600.0, "min": 60.0, "s": 1.0}


def duration_seconds(duration: str) -> float | None:
    """Seconds of `2h`, `30min` or `45s`; None of a duration in another unit."""
    match = _TIME.fullmatch(duration)
    return float(match[1]) * _UNITS_S[match[2]] if match else None


def duration_steps(
    duration: str, steps_per_epoch: int, effective_batch: int, total_steps: int = 0, name: str = "duration"
) -> int:
    """A duration in steps, rounded; at least one if it is positive.

    Args:
        duration: a number and a unit: `90ep` epochs, `125st` steps, `20000ex` examples, `10%` of the run.
        steps_per_epoch: steps in one epoch, >= 1.
        effective_batch: examples of one step over all workers.
        total_steps: steps of the run; needed by `%` only.
        name: of the field, for the error.

    Raises:
        UsageError: the text is no duration.
    """
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise UsageError(
            f"{name}: got {duration!r}; expected a number and a unit: 90ep (epochs), 125st (steps), "
            "20000ex (examples), 10% (of the run), or, of train_for and what is done every so often, 2h, 30min, 45s"
        )
    assert match is not None
    number, unit = float(match[1]), match[2]
    per_unit = {
        "ep": steps_per_epoch,
        "st": 1,
        "ex": 1 / effective_batch,
        "%": total_steps / 100,
    }
    return max(round(number * per_unit[unit]), int(number > 0))


def step_range(text: str, name: str) -> tuple[int, int]:
    """First and last step of `10:20`; (0, 0) if nothing is given.

    Raises:
        UsageError: no two steps in this order.
    """
    if not text:
        return 0, 0
    match = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(f"{name}: got {text!r}; expected the first and the last step, as 10:20")
    return first, last


def check_divides(label: str, total: int, parts: int, parts_name: str) -> None:
    """Raise `UsageError`, with the nearest totals that divide, unless `parts` divides `total`."""
    below = total // parts * parts
    close = f"{below} or {below + parts}" if below else f"{parts}"
    if total % parts != 0:
        raise UsageError(f"{label} {total} is not divisible by {parts} {parts_name}; nearest that are: {close}")
