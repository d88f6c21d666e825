"""The contract of a sink; its errors and delays harm no run.

A sink is a function that takes each line of the record, on rank 0. It may be slow or fail, since it may send to a
server or a database. `send` therefore catches its errors, reports them and drops the sink. `Background` gives a sink a
thread and a bounded queue, so training does not wait for it. A sink that is 10,000 lines behind is dropped. Closing all
background sinks takes about 60 seconds at most.
"""

import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxmpi.core.files import write_whole

Row = dict[str, Any]
# Takes a line of the record, on rank 0. `close()`, if any, is called last, or `fail()`, if any, of a run that failed.
Sink = Callable[[Row], None]
MOST_WAITING = 10_000  # lines; a sink that is further behind gets no more
GATHER_S = 5.0  # in which lines come together for one `flush`; eight lines take MLflow less than twice as long as two
CLOSE_S = 60.0  # for the last lines, of all sinks together
# Packages change Python's filter of warnings while they are imported; threads that import undo each other's changes.
# Later imports of a package are not covered. An import that hangs holds up the other background sinks, not the run.
importing = threading.Lock()
_writing_state = threading.Lock()  # two sinks may open at once
_reported: set[tuple[str, str]] = set()  # a library may start a thread for every line
_scope, _start = threading.local(), threading.Thread.start


def send(sinks: list[Sink], row: Row) -> None:
    """Send a line to each sink; drop and report one that fails."""
    for sink in list(sinks):
        failure = f"failed at a line of kind {row.get('kind')} and gets no more lines"
        if not attempt(sink_name(sink), failure, lambda sink=sink: sink(dict(row))):
            sinks.remove(sink)


def close(sinks: list[Sink], has_failed: bool) -> None:
    """End the sinks; those in the background all at once."""
    for sink in sinks:
        if isinstance(sink, Background):
            sink.begin_to_close(has_failed)
    for sink in sinks:
        failure = "failed while it was closed, and may lack its last lines"
        attempt(sink_name(sink), failure, lambda sink=sink: end(sink, has_failed))


def end(sink: Sink, has_failed: bool) -> None:
    """Call what a sink has for the end of a run."""
    close = getattr(sink, "close", lambda: None)
    (getattr(sink, "fail", close) if has_failed else close)()


def attempt(name: str, failure: str, call: Callable[[], Any]) -> bool:
    """Call a sink's code, which is other people's: an error is reported, and the run is worth more than a sink."""
    try:
        with name_threads(name):
            call()
    except (Exception, SystemExit) as error:
        report_failure(name, failure, error)
        return False
    return True


class Background:
    """A sink in its own thread, for which training does not wait.

    An error of the sink is raised at the next line, or at the end. `flush()` of the sink, if any, is called after all
    lines that wait, at most every GATHER_S seconds.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        """Begin to open the sink of this name."""
        self.__name__, self._open, self._error = name, open_sink, None
        self._rows: queue.Queue[Row] = queue.Queue(MOST_WAITING)
        self._is_closing, self._has_failed, self._deadline = threading.Event(), False, 0.0
        self._thread = threading.Thread(target=self._run, name=f"jaxmpi sink {name}", daemon=True)
        self._thread.start()

    def __call__(self, row: Row) -> None:
        """Hand over a line.

        Raises:
            TimeoutError: the sink is MOST_WAITING lines behind.
            Exception: what the sink has raised.
        """
        if self._error:
            raise self._error
        try:
            self._rows.put_nowait(row)
        except queue.Full as error:
            raise TimeoutError(f"{MOST_WAITING} lines wait for it") from error

    def begin_to_close(self, has_failed: bool) -> None:
        """Have the sink write its last lines and end, within CLOSE_S seconds."""
        self._has_failed, self._deadline = has_failed, time.monotonic() + CLOSE_S
        self._is_closing.set()

    def close(self) -> None:
        """Wait for the sink's end, until CLOSE_S seconds after `begin_to_close`.

        Raises:
            TimeoutError: it takes longer.
            Exception: what the sink has raised.
        """
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            raise TimeoutError(f"{self._rows.qsize()} lines or its end wait after {CLOSE_S:.0f} s")
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            with name_threads(self.__name__):
                sink, is_closing = self._open(), False
                while not is_closing:
                    is_closing = self._is_closing.wait(GATHER_S)
                    while not self._rows.empty():
                        sink(self._rows.get_nowait())
                    getattr(sink, "flush", lambda: None)()
                end(sink, self._has_failed)
        except (Exception, SystemExit) as error:  # other people's code, as in `send`
            self._error = error


@contextmanager
def name_threads(name: str) -> Iterator[None]:
    """Report each error of threads that this thread starts in the block, and of their children, once; end no run."""

    def report(error: BaseException) -> None:
        if (name, repr(error)) not in _reported:
            _reported.add((name, repr(error)))
            report_failure(name, "failed in a thread of its own, and may lack lines", error)

    def start(thread: threading.Thread) -> None:  # Python does not keep who has started a thread
        starter = threading.current_thread()
        thread.jaxmpi_report = getattr(_scope, "report", None) or getattr(starter, "jaxmpi_report", None)  # pyright: ignore
        _start(thread)

    threading.Thread.start = start  # pyright: ignore[reportAttributeAccessIssue] - by its own name for self
    before, _scope.report = getattr(_scope, "report", None), report
    try:
        yield
    finally:
        _scope.report = before


def sink_name(sink: Sink) -> str:
    """The name of a sink, for messages."""
    return getattr(sink, "__name__", type(sink).__name__)


def report_failure(name: str, failure: str, error: BaseException) -> None:
    """Report on standard error that a sink failed."""
    message = f"jaxmpi: sink {name} {failure}; the run goes on, and its record has all of them"
    print(f"{message}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- what sinks share


def numbers(row: Row) -> dict[str, Any]:
    """Numbers of a line as `train/loss`, medians of parts as `train/anatomy/compute`."""
    values = {name: v for name, v in row.items() if name not in ("kind", "step") and isinstance(v, (int, float))}
    return {f"{row['kind']}/{name}": v for name, v in (values | medians(row)).items() if v is not None}


def medians(row: Row) -> dict[str, Any]:
    """Medians over ranks, as `anatomy/compute`, of the trainer's own lines only."""
    parts = row.get("anatomy", {}) if row["kind"] == "train" else {}
    return {f"anatomy/{part}": spread[1] for part, spread in parts.items()}


def read_state(run_dir: Path) -> dict[str, Any]:
    """Identities of this run at services, by sink; empty at first."""
    file = run_dir / "sinks.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write_state(run_dir: Path, name: str, identity: Any) -> None:
    """Write this run's identity at a service, for a resumed run."""
    with _writing_state:
        state = read_state(run_dir) | {name: identity}
        write_whole(run_dir / "sinks.json", (json.dumps(state, indent=2) + "\n").encode())
