"""The choice of a run's folder, and its lock against other jobs.

It imports no JAX: the supervisor of a job chooses the folder, too.
"""

import contextlib
import datetime
import fcntl
import itertools
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.files import NO_LOCKS, HeldFolder


def new(experiment: Experiment, name: str) -> Path:
    """The requested run directory, or a fresh one."""
    return named(experiment.run_dir) if experiment.run_dir else fresh(name)


def named(run_dir: str) -> Path:
    """The requested run directory, made if absent."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fresh(name: str) -> Path:
    """Make a new run directory: runs/<name>-<time>, with a number if taken."""
    stem = f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        folder = Path(stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise AssertionError  # numbers do not end


def resumed(experiment: Experiment, name: str) -> Path:
    """The requested run directory, or the newest of that name."""
    found = [m for m in map(stamped(name).fullmatch, runs()) if m and Path("runs", m[0], "record.jsonl").is_file()]
    made = {tuple(map(int, m.groups(default="1"))): m[0] for m in found}
    folder = Path(experiment.run_dir or Path("runs", made[max(made)] if made else f"{name}-"))
    check(
        (folder / "record.jsonl").is_file(),
        f"--resume: {str(folder)!r} is no run directory, it has no record.jsonl; name one with --run-dir",
    )
    return folder


def runs() -> list[str]:
    """Names in the folder of run directories."""
    return os.listdir("runs") if os.path.isdir("runs") else []


def stamped(name: str) -> re.Pattern[str]:
    """Pattern of the names of `fresh`, with groups day, time and number."""
    return re.compile(rf"{re.escape(name)}-(\d{{8}})-(\d{{6}})(?:-(\d+))?")


@contextlib.contextmanager
def usable() -> Iterator[None]:
    """Turn an OSError into a `UsageError` that names the way out.

    Raises:
        UsageError: in place of OSError.
    """
    try:
        yield
    except OSError as error:
        is_file = isinstance(error, FileExistsError)  # a folder that exists is no error
        why = f"{str(error.filename)!r} is a file, not a folder" if is_file else error
        raise UsageError(f"the run directory cannot be used: {why}; name another with --run-dir") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[HeldFolder]:
    """Hold and lock a run directory; see `lock`."""
    with contextlib.ExitStack() as held:
        home = HeldFolder(folder)
        held.callback(home.close)
        lock(home, held)
        yield home


def lock(home: HeldFolder, held: contextlib.ExitStack) -> None:
    """Lock the run directory against other jobs, if possible on all hosts.

    Both the folder and its file `lock` are locked: NFS locks no folders, and a file can be removed. The file names the
    holder. The lock ends with the process.

    Args:
        home: the run directory.
        held: closes the file `lock`.

    Raises:
        UsageError: another job has it: its host and process.
    """
    folder = home.path
    try:
        is_locked = home.try_lock()
        file = held.enter_context((folder / "lock").open("a+"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        home.lock = None if is_locked else file.fileno()
    except BlockingIOError:
        raise UsageError(
            f"run directory {str(folder)!r} is in use by {holder(folder)}; wait for its end, or name another with "
            "--run-dir"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    file.truncate(0)
    try:
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode(errors="backslashreplace"))
    except OSError as error:  # as on a full disk; it does not name the file
        raise OSError(error.errno, error.strerror, str(folder / "lock")) from error


def holder(folder: Path) -> str:
    """The job that has locked a run directory, by its file `lock`."""
    try:
        with (folder / "lock").open(errors="backslashreplace") as file:
            return file.read(200).strip() or "another job"
    except OSError:  # the file has been removed
        return "another job"
