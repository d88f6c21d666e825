"""Profile of calls by function (Stooke and Abbeel 2017, table 1).

Parts exclude each other: one that begins inside another stops the other's clock, so that they add up to the total.
Without a profile a part is one comparison and reads no clock. Spans (`runtime/progress.py`) overlap and are of a
trainer's step.
"""

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.monitoring

from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import write_all
from jaxmpi.runtime.process import launched

PARTS = {
    "function": "this worker computes",
    "shuffle": "rows are chosen, copied and sent to workers; variables are filled and read",
    "straggler": "this worker is done and waits for the slowest",
    "reduce": "results of all workers combine or are gathered",
    "compile": "programs are traced, compiled and sent",
    "other": "the rest of a call",
}
COMPILES = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")
Key = tuple[str, int | None]  # name and number of a function; a variable's methods have no number


class Profile:
    """Seconds of calls of functions and variables' methods, in this process."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._totals: dict[Key, dict[str, float]] = {}
        self._file: TextIO | None = None
        self._call: dict[str, float] = {}  # figures of the call under way, by name
        self._open: list[str] = []  # its parts, the innermost last
        self._is_first = False  # True if this process has worker 0
        self._key: Key = "", None
        self._since_s, self._thread = 0.0, 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dict a function, with `function`, `calls`, `total_s`, `<part>_s` of PARTS, `sent_bytes`."""
        names = [name for name, _ in self._totals]
        numbers: dict[str, int] = defaultdict(int)
        rows = []
        for (name, _), spent in self._totals.items():
            numbers[name] += 1
            label = f"{name} #{numbers[name]}" if names.count(name) > 1 else name
            rows.append({"function": label, **as_row(spent)})
        return rows

    def __str__(self) -> str:
        """A table in seconds, a row a function, and their sum."""
        everything: dict[str, float] = defaultdict(float)
        for spent in self._totals.values():
            for name, value in spent.items():
                everything[name] += value
        rows = [*self.rows, {"function": "all", **as_row(everything)}]
        width = max(len(row["function"]) for row in rows)
        lines = [" " * width + "".join(f"{name:>11}" for name in ("calls", "total s", *PARTS, "sent MB"))]
        for row in rows:
            seconds = "".join(f"{row[f'{name}_s']:11.3f}" for name in ("total", *PARTS))
            lines.append(f"{row['function']:<{width}}{row['calls']:11}{seconds}{row['sent_bytes'] / 1e6:11.1f}")
        return "\n".join(lines)

    @contextlib.contextmanager
    def call(self, name: str, is_first: bool) -> Iterator[None]:
        """A call, from its beginning to its results."""
        self._call, self._key, self._is_first = defaultdict(float, calls=1), (name, None), is_first
        self._since_s, self._thread = time.perf_counter(), threading.get_ident()
        self._open = ["other"]
        try:
            yield
        finally:
            self._lap()
            self._open = []
            total = self._totals.setdefault(self._key, defaultdict(float))
            for part_name, value in self._call.items():
                total[part_name] += value
            if self.path is not None and is_first:
                self._file = self._file or self.path.open("w", buffering=1)
                name, number = self._key
                self._file.write(json.dumps({"function": name, "number": number, **as_row(self._call)}) + "\n")

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
        self._call[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s

    @property
    def is_in_call(self) -> bool:
        """Return True if this thread's call is under way."""
        return bool(self._open) and threading.get_ident() == self._thread

    def save(self, folder: str | Path) -> None:
        """Append the table to a folder's record, for `jaxmpi report`.

        The folder may be a run directory; it is made if it is not there. Worker 0's process writes; others do nothing.
        No communication.

        Raises:
            UsageError: it cannot be written.
        """
        path = Path(folder) / "record.jsonl"
        if not self._is_first:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                write_all(file, (json.dumps({"kind": "functions", "functions": self.rows}) + "\n").encode())
        except OSError as error:
            raise UsageError(f"profile: cannot write {str(path)!r}: {error.strerror}; name another folder") from error


def as_row(spent: dict[str, float]) -> dict[str, Any]:
    """Counters by the names that users see."""
    seconds = {name: spent.get(name, 0.0) for name in PARTS}
    figures = {"calls": int(spent.get("calls", 0)), "total_s": sum(seconds.values())}
    return figures | {f"{name}_s": s for name, s in seconds.items()} | {"sent_bytes": int(spent.get("sent_bytes", 0))}


_running: Profile | None = None
_listens = False
OFF = nullcontext()


@contextlib.contextmanager
def profile(path: str | Path | None = None) -> Iterator[Profile]:
    """Profile the calls inside the `with` block.

    Printed it is a table. Seconds are those of this process's first worker: of a script that leads, the master's; of
    ranks that all run the script, each rank's. Calls wait for their results meanwhile. No communication.

    Args:
        path: a file for a JSON line a call, with its `function`, `number` among functions, and the figures of `rows`;
            written by worker 0, from the start.

    Raises:
        UsageError: another profile is under way, or there is no folder for the file.
    """
    global _running, _listens
    if _running is not None:
        raise UsageError("profile: another one is under way; expected one at a time: end it first")
    file, rank = None if path is None else Path(path), launched()
    is_writer = rank is None or rank.rank == 0  # worker 0 alone
    if file is not None and is_writer and not file.parent.is_dir():
        raise UsageError(f"profile: got {path}; expected a file in a folder that is there")
    if not _listens:
        jax.monitoring.register_event_duration_secs_listener(count_compilation)
        _listens = True
    _running = Profile(file)
    try:
        yield _running
    finally:
        if _running._file is not None:
            _running._file.close()
        _running = None


def call(name: str, is_first: bool) -> AbstractContextManager[None]:
    """Profile a call, if a profile is under way."""
    return OFF if _running is None else _running.call(name, is_first)


def part(name: str) -> AbstractContextManager[None]:
    """Profile a part of the call."""
    return OFF if _running is None or not _running.is_in_call else _running.part(name)


def identify(number: int) -> None:
    """Say which function the call is of."""
    if _running is not None:
        _running._key = _running._key[0], number


def count_sent_bytes(size: int) -> None:
    """Count what goes to a worker; the command that ends workers is in no call."""
    if _running is not None and _running.is_in_call:
        _running._call["sent_bytes"] += size


def wait_if_profiling(arrays: Any) -> Any:
    """Return the arrays, waited for if a profile is under way.

    Their time then counts in the part that calls this.
    """
    return arrays if _running is None else jax.block_until_ready(arrays)


def count_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """JAX has just spent these seconds; they count as compilation, not in the part that is open."""
    if event in COMPILES and _running is not None and _running.is_in_call:
        _running._call[_running._open[-1]] -= duration_secs
        _running._call["compile"] += duration_secs
