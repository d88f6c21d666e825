"""Profile of calls by function (Stooke and Abbeel 2017, table 1).

Parts exclude each other: one that begins inside another stops the other's clock, so that they add up to the total.
Without a profile a part is one comparison and reads no clock. Spans (`runtime/progress.py`) overlap and are of a
trainer's step.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.monitoring

from jaxmpi.core.errors import UsageError

PARTS = (
    "function",  # this worker computes
    "shuffle",  # rows are chosen, copied and sent to workers; variables are filled and read
    "straggler",  # this worker is done and waits for the slowest
    "reduce",  # results of all workers combine or are gathered
    "compile",  # programs are traced, compiled and sent
    "other",  # the rest of a call
)
COMPILES = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")
Key = tuple[str, int | None]  # name and number of a function; a variable's methods have no number


class Profile:
    """Seconds of calls of functions and variables' methods, in this process."""

    def __init__(self) -> None:
        self._totals: dict[Key, Counter[str]] = {}
        self._call: Counter[str] = Counter()  # figures of the call under way, by name
        self._open: list[str] = []  # its parts, the innermost last
        self._since_s, self._thread = 0.0, 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dict a function, with `function`, `calls`, `total_s`, `<part>_s` of PARTS, `sent_bytes`."""
        names = [name for name, _ in self._totals]
        numbers: Counter[str] = Counter()
        rows = []
        for (name, _), spent in self._totals.items():
            numbers[name] += 1
            label = f"{name} #{numbers[name]}" if names.count(name) > 1 else name
            rows.append({"function": label, **as_row(spent)})
        return rows

    def __str__(self) -> str:
        """A table in seconds, a row a function, and their sum."""
        everything: Counter[str] = sum(self._totals.values(), Counter())
        rows = [*self.rows, {"function": "all", **as_row(everything)}]
        width = max(len(row["function"]) for row in rows)
        lines = [" " * width + "".join(f"{name:>11}" for name in ("calls", "total s", *PARTS, "sent MB"))]
        for row in rows:
            seconds = "".join(f"{row[f'{name}_s']:11.3f}" for name in ("total", *PARTS))
            lines.append(f"{row['function']:<{width}}{row['calls']:11}{seconds}{row['sent_bytes'] / 1e6:11.1f}")
        return "\n".join(lines)

    @contextlib.contextmanager
    def call(self, key: Key) -> Iterator[None]:
        """A call, from its beginning to its results."""
        self._call, self._open = Counter(calls=1), ["other"]
        self._since_s, self._thread = time.perf_counter(), threading.get_ident()
        try:
            yield
        finally:
            self._lap()
            self._open = []
            self._totals.setdefault(key, Counter()).update(self._call)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Clock a part of the call, without the parts inside it."""
        self._lap()
        self._open.append(name)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    def _lap(self) -> None:
        now_s = time.perf_counter()
        self._call[self._open[-1]] += now_s - self._since_s  # pyright: ignore[reportArgumentType]
        self._since_s = now_s

    @property
    def is_in_call(self) -> bool:
        """Return True if this thread's call is under way."""
        return bool(self._open) and threading.get_ident() == self._thread

    def count(self, **figures: Any) -> None:
        """Add figures to the call under way; the command that ends workers is in no call."""
        if self.is_in_call:
            self._call.update(figures)


def as_row(spent: Counter[str]) -> dict[str, Any]:
    """Counters by the names that users see."""
    seconds = {name: float(spent[name]) for name in PARTS}
    figures = {"calls": spent["calls"], "total_s": sum(seconds.values())}
    return figures | {f"{name}_s": s for name, s in seconds.items()} | {"sent_bytes": spent["sent_bytes"]}


_running: Profile | None = None
_listens = False
OFF = nullcontext()


@contextlib.contextmanager
def profile() -> Iterator[Profile]:
    """Profile the calls inside the `with` block.

    Printed it is a table. Seconds are those of this process's first worker: of a script that leads, the master's; of
    ranks that all run the script, each rank's. Calls wait for their results meanwhile. No communication.

    Raises:
        UsageError: another profile is under way.
    """
    global _running, _listens
    if _running is not None:
        raise UsageError("profile: another one is under way; expected one at a time: end it first")
    if not _listens:
        jax.monitoring.register_event_duration_secs_listener(count_compilation)
        _listens = True
    _running = Profile()
    try:
        yield _running
    finally:
        _running = None


def call(name: str, number: int | None) -> AbstractContextManager[None]:
    """Profile a call of a function with this number, or of a variable's method, if a profile is under way."""
    return OFF if _running is None else _running.call((name, number))


def part(name: str) -> AbstractContextManager[None]:
    """Profile a part of the call."""
    return OFF if _running is None or not _running.is_in_call else _running.part(name)


def count_sent_bytes(size: int) -> None:
    """Count what goes to a worker."""
    if _running is not None:
        _running.count(sent_bytes=size)


def wait_if_profiling(arrays: Any) -> Any:
    """Return the arrays, waited for if a profile is under way.

    Their time then counts in the part that calls this.
    """
    return arrays if _running is None else jax.block_until_ready(arrays)


def count_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """JAX has just spent these seconds; they count as compilation, not in the part that is open."""
    if event in COMPILES and _running is not None and _running.is_in_call:
        _running.count(**{_running._open[-1]: -duration_secs})
        _running.count(compile=duration_secs)
