"""Supervise a job: forward signals, name the failed rank, restart from checkpoints.

A launcher does not always end when a rank dies, and its exit code need not be the rank's. So ranks leave files in the
job's folder, which the supervisor polls, and it kills a launcher that hangs. It restarts a job only if the newest
checkpoint has advanced since the last restart.
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from jaxmpi.checkpoint import manifests, run_directory
from jaxmpi.checkpoint.held_folder import HeldFolder
from jaxmpi.config.schema import Experiment
from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import UsageError
from jaxmpi.launch.experiment_facts import ExperimentFacts
from jaxmpi.launch.options import Options, is_number
from jaxmpi.launch.postmortem import HOST_GONE, KILLED, LAUNCHER, TAIL_BYTES, Exits, culprit, ranks_under
from jaxmpi.runtime import failures, job_folder, process

# Exit codes after which a restart is pointless: done, error of usage, to be resumed later, interrupted.
FINAL = (0, failures.MISUSED, failures.PREEMPTED, failures.INTERRUPTED)
HOST, HOSTFILE = ("--host", "-H"), ("--hostfile", "--machinefile")  # flags of mpirun
UNLOCK_S = 30.0  # for the last process of an ended job to exit
PROBE_S = 20.0  # for a host to answer
LOOK_S = 1.0  # between looks at a job's ranks and the files that they leave
FIRST_LOOK_S = 0.05  # in the first looks: a rank that leaves at once lives only as long as Python takes to start
FIRST_LOOKS = 20  # from the one that finds a rank
ENDS_S = seconds_from("JAXMPI_LAUNCHER_TIMEOUT_S", 15)  # for a launcher to end a job; longer for a host that vanishes
# By default Open MPI takes eight minutes to notice that a host has vanished; with these settings 25 s.
KEEPALIVE = {"time": "10", "intvl": "5", "probes": "3"}
SETTINGS = {f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in KEEPALIVE.items()}
# Ranks set it themselves, but too late if their script starts MPI first (runtime/process.py).
ONE_ARENA = {} if os.environ.get("JAXMPI_ALLOCATOR") == "system" else {"MALLOC_ARENA_MAX": "1"}


# ---------------------------------------------------------------- one job


class JobRunner:
    """Runs one job after another, and forwards this process's signals to the job."""

    def __init__(self) -> None:
        """Install handlers that forward signals as requests to leave."""
        self._job: subprocess.Popen | None = None
        self.exits = Exits({})
        self._requests = failures.Requests()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                signal.signal(number, self._request_leave)
        signal.signal(signal.SIGTSTP, self._pause)

    @property
    def requests(self) -> int:
        """Number of requests to leave so far."""
        return len(self._requests.heard)

    def _request_leave(self, number: int, frame: FrameType | None) -> None:
        if not self._requests.add(number):
            return
        if number == signal.SIGINT and self.requests == 1:
            failures.write_error(f"jaxmpi: {failures.INTERRUPT_NOTE}\n")
        if self.requests == 2:
            failures.write_error("jaxmpi: asked twice to leave: the job ends at once\n")
        self._send(self._signal_for_job())

    def _signal_for_job(self) -> int:
        """To save and leave; to end; then SIGKILL."""
        return (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL)[min(self.requests, 3) - 1]

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Forward Ctrl-Z to the launcher, which is in another process group."""
        self._send(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGSTOP)  # returns after SIGCONT, as from `fg`
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        if self._job is not None and self._job.poll() is None:
            self._job.send_signal(number)

    def exit_code(self, code: int) -> int:
        """The exit code of a job that was asked to leave, given its launcher's."""
        if self.requests == 1 and code == 128 + signal.SIGUSR1:  # Python's default action before handlers are installed
            say("asked to leave before the ranks could save: what is saved stays")
            code = failures.PREEMPTED
        if code == failures.PREEMPTED:
            return failures.INTERRUPTED if signal.SIGINT in self._requests.heard else code
        return 128 + self._requests.heard[1] if code and self.requests > 1 else code

    def run(self, line: Sequence[str], local_ranks: int = 0) -> tuple[int, str]:
        """Run a job; return its shell exit code and standard error's end.

        The text includes mpirun's notice of a lost host, which may be on standard output.

        Args:
            local_ranks: how many ranks this host gets; 0 if it is not known.
        """
        stdout, stderr = Relay(sys.stdout), Relay(sys.stderr)
        with job_folder.shared_memory_folder() as setting:
            marks = job_folder.marks_folder(setting)
            self._job = job = subprocess.Popen(
                job_folder.remove_leftovers_first(line),
                stdout=stdout.end,
                stderr=stderr.end,
                # A process group in the background is stopped if it reads from the terminal.
                stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
                preexec_fn=partial(process.end_with_parent, os.getpid()),
                env=SETTINGS | ONE_ARENA | os.environ | setting,
                # On signals to its group mpirun would kill the ranks 0.25 s later. In a session of its own the kernel
                # would ignore SIGTSTP for it.
                process_group=0,
            )
            if self.requests:  # since the last job
                self._send(self._signal_for_job())
            stdout.start()
            stderr.start()
            self.exits = exits = Exits({LAUNCHER: job.pid})
            code = wait_for_end(job, marks, outlives_ranks="--with-ft" in line, local_ranks=local_ranks, exits=exits)
            exits.close()
            text = stderr.tail()
            # If all ranks are killed, mpirun --with-ft returns 0.
            if code == 0 and (marks / job_folder.BEGAN).exists() and not (marks / job_folder.FINISHED).exists():
                code = 128 + signal.SIGKILL
                say("all ranks of this host ended before their time")
            # A rank that has ended the job, and then itself by SIGKILL, leaves its code: the launcher reports a signal.
            codes = [int(p.name.removeprefix(job_folder.ENDED_WITH)) for p in marks.glob(job_folder.ENDED_WITH + "*")]
            if code and codes:
                code, text = min(codes), KILLED.sub("", text)
        if lost := HOST_GONE.search(stdout.tail() + text):
            text, code = text + lost[0], code or 1
        return (code if code >= 0 else 128 - code), text


def wait_for_end(job: subprocess.Popen, marks: Path, *, outlives_ranks: bool, local_ranks: int, exits: Exits) -> int:
    """Wait for a launcher's exit code; kill a launcher that hangs.

    A launcher hangs if it does not end a job that a rank has ended or left. Open MPI's launcher blocks forever if a
    rank exits with code 0 before it starts MPI, while the others wait there. A launcher that hangs would delay a
    restart as long.

    No job goes on without a rank that ends before MPI has started: the others wait for it in MPI_Init for ever.

    Args:
        marks: folder in which ranks leave marks.
        outlives_ranks: the job goes on without ranks that end once MPI has started.
        local_ranks: how many ranks this host gets; 0 if it is not known. One that is killed at once is never seen.
        exits: notes which rank ends first.
    """
    ending_s, looks, pids, alive = 0.0, 0, dict[int, int](), dict[int, int]()
    while ending_s < ENDS_S:
        look_s = FIRST_LOOK_S if looks < FIRST_LOOKS else LOOK_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.wait(exits.wait(look_s))
        alive = ranks_under(job.pid)
        exits.watch(alive)
        pids |= alive
        looks += bool(pids)
        may_leave = (marks / job_folder.FINISHED).exists()
        if outlives_ranks:
            # Where there is no folder for marks, nobody knows: then the survivors of a death must not be killed.
            may_leave = may_leave or (marks / job_folder.MPI_RUNS).exists() or not marks.is_dir()
            pids |= dict.fromkeys(set(range(local_ranks)) - pids.keys(), 0) if pids else {}
        has_left = pids.keys() > alive.keys() and not may_leave
        ending_s = ending_s + look_s if has_left or (marks / job_folder.ENDING).exists() else 0.0
    departure = f" after rank {sorted(pids.keys() - alive.keys())} had left it" if pids.keys() > alive.keys() else ""
    say(f"killing the launcher, which has not ended the job for {ENDS_S:.0f} s{departure}")
    job.kill()
    for pid in alive.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return job.wait()


# Open MPI's notices of what is said in a sentence: that a rank has ended the job, or that another met a dead one. And
# the begin of one.
TEXT = rb"-{70,}\r?\n(?:MPI_ABORT was invoked|prterun has exited due to|prterun detected that one)(?:(?!-{70}).)*"
NOTICE = re.compile(TEXT + rb"-{70,}\r?\n|NBC_Progress: an error 75 [^\n]*\n", re.DOTALL)
FIRST_PART = re.compile(TEXT + rb"\Z|-{70,}\r?\n\Z", re.DOTALL)


class Relay(threading.Thread):
    """Thread that copies a job's output, without Open MPI's NUL bytes and notices."""

    def __init__(self, to: TextIO) -> None:
        """Open the job's `end`: a pseudo-terminal with `to`'s size, or a pipe."""
        super().__init__(daemon=True)
        self._to, self._tail = to, b""
        if not to.isatty():
            self._mine, self.end = os.pipe()
            return
        self._mine, self.end = os.openpty()
        tty.setraw(self.end)
        termios.tcsetwinsize(self.end, termios.tcgetwinsize(to.fileno()))

    def start(self) -> None:
        """Close this process's copy of `end`, which the job has, and start."""
        os.close(self.end)
        super().start()

    def run(self) -> None:
        """Copy until no process holds the other end."""
        with contextlib.suppress(OSError):  # end of file of a pseudo-terminal
            unwritten = b""  # a notice that may come in several pieces
            while chunk := os.read(self._mine, 65536):
                chunk = chunk.replace(b"\0", b"")
                self._tail = (self._tail + chunk)[-TAIL_BYTES:]
                text = NOTICE.sub(b"", unwritten + chunk)
                cut = FIRST_PART.search(text)
                text, unwritten = (text[: cut.start()], cut[0]) if cut else (text, b"")
                self._write(text)
            self._write(unwritten)
        os.close(self._mine)

    def _write(self, text: bytes) -> None:
        try:
            self._to.buffer.write(text)
            self._to.buffer.flush()
        except OSError:
            failures.drop_unread_stream(self._to)

    def tail(self) -> str:
        """Return the end of the job's output; called after the job."""
        self.join(5.0)  # a process that outlives the job may hold the other end
        return self._tail.decode(errors="replace")


def relay(line: Sequence[str]) -> NoReturn:
    """Run a launcher's line in this process's group, on its terminal, without those notices; exit with its code."""
    stderr = Relay(sys.stderr)
    job = subprocess.Popen(
        job_folder.remove_leftovers_first(line),
        stderr=stderr.end,
        preexec_fn=partial(process.end_with_parent, os.getpid()),
    )

    def forward(number: int, frame: FrameType | None) -> None:
        is_from_terminal = number == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty()
        if not is_from_terminal:  # which sends Ctrl-C to the launcher, too
            job.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, forward)
    stderr.start()
    code = job.wait()
    stderr.tail()
    raise SystemExit(code if code >= 0 else 128 - code)


# ---------------------------------------------------------------- again


def supervise(
    job: Options, facts: ExperimentFacts, line: Callable[[Options], list[str]], probe: Callable[[str], bool]
) -> int:
    """Run a job to its end, and restart it if it dies.

    Args:
        job: with the number of restarts, and of workers with which one may go on.
        facts: of its experiment.
        line: the command of a start.
        probe: whether a host answers.

    Returns: the exit code of the last start.
    """
    runner, folder, home = JobRunner(), None, None
    first, slots = job, hosts_of(job.launcher_args) if job.min_workers else {}
    if job.restarts:
        with run_directory.as_usage_errors():
            folder = run_dir(facts, Path(job.train_args[0]).stem)
            home = HeldFolder(folder)
        if not facts.run_dir:
            job = job._replace(train_args=(*job.train_args, "--run-dir", str(folder)))
    step_before, first_record, first_args = None, record_in(folder), job.train_args
    for start in range(job.restarts + 1):
        code, text = runner.run(line(job), 0 if job.launcher_args else job.workers)
        if runner.requests:
            code = runner.exit_code(code)
        if runner.requests < 2 and code not in FINAL and (rank := culprit(text) or runner.exits.culprit()):
            say(str(rank))
        if runner.requests:
            return code
        if code in FINAL or folder is None or home is None:
            if folder:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # if no run has come to it
            return code
        manifest = manifests.newest_manifest(folder / "checkpoints")
        step = manifest["step"] if manifest else 0
        why = ""
        if fate := home.fate():
            why = f"run directory {str(folder)!r} {fate}"
        elif start == job.restarts:
            why = f"no restart is left of {job.restarts}"
        elif start and step == step_before:
            why = f"no progress since the last restart: still at step {step}"
        else:
            step_before, job = step, with_those_left(job, first, slots, probe)
            if job.workers < job.min_workers:
                why = f"{job.workers} workers are left, --elastic asks for {job.min_workers}"
        if why:
            say(f"not started again: {why}")
            return code
        wait_for_lock(folder)
        if runner.requests:
            say("asked to leave between two starts: what is saved stays")
            return runner.exit_code(failures.PREEMPTED)
        record = record_in(folder)
        # With --from-start the record that was there before is another run's, until the ranks rename it.
        if record and not (facts.from_start and record == first_record):
            job = job._replace(train_args=(*first_args, "--resume", "--no-from-start"))  # the last flag counts
        say(f"restart {start + 1} of {job.restarts} from step {step}, with {job.workers} workers")
    raise AssertionError  # the last start returns


def say(text: str) -> None:
    """Print a line on standard error, among those of the ranks."""
    try:
        print(f"jaxmpi: {text}", file=sys.stderr, flush=True)
    except OSError:
        failures.drop_unread_stream(sys.stderr)


def run_dir(facts: ExperimentFacts, name: str) -> Path:
    """The run directory: as requested, the newest to resume, or fresh.

    Raises:
        UsageError: there is none to resume.
    """
    if facts.run_dir:
        return run_directory.make_folder(facts.run_dir)
    return (
        run_directory.find_run_to_resume(Experiment(resume=True), name)
        if facts.resume
        else run_directory.make_new_folder(name)
    )


def record_in(folder: Path | None) -> int:
    """Identity of a run directory's record, its inode; 0 without one."""
    try:
        return (folder / "record.jsonl").stat().st_ino if folder else 0
    except OSError:
        return 0


def wait_for_lock(folder: Path) -> None:
    """Wait up to UNLOCK_S until the last job releases the run directory."""
    deadline = time.monotonic() + UNLOCK_S
    while time.monotonic() < deadline:
        try:
            with run_directory.locked(folder):
                return
        except (UsageError, OSError):  # still held, or not visible for a moment
            time.sleep(0.2)


def with_those_left(
    job: Options, first: Options, slots_before: dict[str, int], probe: Callable[[str], bool]
) -> Options:
    """Take the first start's hosts that answer, its hostfile read again; one worker fewer without a list of hosts.

    Args:
        slots_before: of the first start's hosts.
    """
    if not job.min_workers:
        return job
    if not slots_before:
        return job._replace(workers=max(job.workers - 1, job.min_workers))
    slots = hosts_of(first.launcher_args)
    reachable_slots = {host: count for host, count in slots.items() if probe(host)}
    if reachable_slots == slots_before:
        return job._replace(workers=first.workers, launcher_args=first.launcher_args)
    if absent := sorted(set(slots) - set(reachable_slots)):
        say(f"no answer from {', '.join(absent)}")
    hosts = ",".join(f"{host}:{count}" for host, count in reachable_slots.items())
    args = ("--host", hosts, *without_hosts(first.launcher_args))
    return job._replace(workers=min(first.workers, sum(reachable_slots.values())), launcher_args=args)


def hosts_of(launcher_args: Sequence[str]) -> dict[str, int]:
    """Host to slots, from mpirun's --host or its hostfile; empty if neither is given.

    Raises:
        UsageError: the hostfile cannot be read.
    """
    entries: list[str] = []
    for arg, following in itertools.pairwise([*launcher_args, ""]):
        flag, equals, text = arg.partition("=")
        text = text if equals else following
        if flag in HOST:
            entries += text.split(",")
        elif flag in HOSTFILE:
            try:
                lines = [line.partition("#")[0].strip() for line in Path(text).read_text().splitlines()]
            except OSError as error:
                raise UsageError(
                    f"{flag} {text}: {error.strerror}; expected a line `host slots=N` for each host"
                ) from error
            entries += [re.sub(r"\s.*?(?<![\w-])slots\s*=\s*(\d+).*|\s.*", r":\1", line) for line in lines]
    slots: dict[str, int] = {}
    for host, _, count in (entry.partition(":") for entry in entries if entry):
        slots[host] = slots.get(host, 0) + (int(count) if is_number(count) else 1)
    return slots


def without_hosts(launcher_args: Sequence[str]) -> list[str]:
    """The launcher's arguments without the hosts that it is given."""
    flags = {*HOST, *HOSTFILE}
    pairs = zip(launcher_args, ("", *launcher_args), strict=False)
    return [arg for arg, before in pairs if not ({arg, before} & flags or arg.partition("=")[0] in flags)]
