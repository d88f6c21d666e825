"""A job's folder in shared memory, with marks that outlive a process.

Open MPI leaves 16 MiB a rank in shared memory if its launcher is killed, and at times when the launcher kills ranks. So
`jaxmpi train` gives each job a folder of its own, which goes with the job, and the ranks of a host leave files there
that tell the supervisor how far they have come.
"""

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SEGMENTS = "OMPI_MCA_btl_sm_backing_directory"  # Open MPI's setting of the folder of what ranks of a host share
OWN = f"jaxmpi-{os.getuid()}-"  # how names of these folders begin
WORDS = "words"  # a folder in it, for marks
BEGAN, FINISHED = "began", "finished"  # marks: a rank of this host has done so
MPI_RUNS = "mpi runs"  # MPI has started, so all ranks have come that far
ENDING = "ending"  # a rank of this host has asked the launcher to end the job
ENDED_WITH = "ended with "  # and a code: a rank of this host has said why it ends the job, and then ended by SIGKILL
ALIVE = "alive"  # a FIFO beside the marks, which the supervisor holds open for writing
# A shell that removes the folder if this process is killed, and what its ranks still make on their way out; a word on
# its input means that all is done.
JANITOR = 'read -r word; [ "$word" ] || for _ in 1 2 3 4 5; do sleep 1; rm -rf "$1"; done'


@contextmanager
def shared_memory_folder(root: Path = Path("/dev/shm")) -> Iterator[dict[str, str]]:
    """Yield Open MPI's setting of a new folder, which is removed even if this process is killed."""
    if SEGMENTS in os.environ or not os.access(root, os.W_OK):
        yield {}
        return
    remove_stale_folders(root)
    folder = Path(tempfile.mkdtemp(prefix=OWN, dir=root))
    handle, line, silent = lock_folder(folder), ["/bin/sh", "-c", JANITOR, "sh", str(folder)], subprocess.DEVNULL
    (folder / WORDS).mkdir()  # once no other job's start can sweep it away
    os.mkfifo(folder / WORDS / ALIVE)
    alive = os.open(folder / WORDS / ALIVE, os.O_RDWR)
    janitor = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True)
    try:
        yield {SEGMENTS: str(folder)}
    finally:
        os.close(alive)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)
        janitor.communicate(b"done\n")


def lock_folder(folder: Path) -> int:
    """Keep a folder, made if absent, from `remove_stale_folders` while the returned handle or this process lives."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # swept in between
            handle, is_locked = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), False
            try:
                fcntl.flock(handle, fcntl.LOCK_SH)
                is_locked = os.path.samestat(os.fstat(handle), folder.stat())
            finally:
                if not is_locked:
                    os.close(handle)
            if is_locked:
                return handle


def remove_stale_folders(root: Path) -> None:
    """Remove folders of `shared_memory_folder` that no process holds any more."""
    for folder in root.glob(OWN + "*"):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def marks_folder(setting: Mapping[str, str]) -> Path:
    """The folder of this host's marks, by the setting of `shared_memory_folder`."""
    return Path(setting.get(SEGMENTS, os.devnull)) / WORDS


def mark(name: str) -> None:
    """Leave a mark, if this job has a folder on this host."""
    with suppress(OSError):  # on another host, gone, or full: then there is none
        (marks_folder(os.environ) / name).touch()


def is_marked(name: str) -> bool:
    """Return True if a rank of this host has called `mark(name)`."""
    return (marks_folder(os.environ) / name).exists()


def end_with_supervisor() -> None:
    """Have Linux kill this process when the supervisor of its job on this host ends, however it ends.

    The kernel sends the signal when the last writer closes the FIFO. A thread that watches would not do: Python code
    cannot run while a module in C is imported or MPI starts. PR_SET_PDEATHSIG would not do either: it reports the end
    of the thread that has started this process, and a launcher's threads may end at any time.
    """
    try:
        pipe = os.open(marks_folder(os.environ) / ALIVE, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # no supervisor on this host
        return
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    with suppress(BlockingIOError):  # while there is a writer
        if not os.read(pipe, 1):
            os._exit(128 + signal.SIGKILL)


def remove_leftovers_first(line: Sequence[str]) -> list[str]:
    """The line in a shell that first removes a killed launcher's folder.

    A launcher refuses to start if one with the same process id has left its temporary folder. The line gets the process
    id of the shell that is run here.
    """
    folder = shlex.quote(f"{tempfile.gettempdir()}/ompi.")
    return ["/bin/sh", "-c", f'rm -rf {folder}$$; exec "$@"', "sh", *line]


def pid_space() -> int:
    """Identify the namespace of this process's number; 0 if it is unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
