"""Start and end of the workers: ranks, forked processes, or devices.

`fork` takes what there is: ranks under a launcher, else devices, else a process a core. Ranks other than 0 then wait in
`serve` for rank 0's commands and never return to the script. Without `fork` all ranks run the script and make each call
together. A forked worker is a fresh Python process (`forked_main`) with a socket to the master, which never runs the
user's script: functions come to it as programs (docs/decisions.md, 17).
"""

import atexit
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import jax

from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import processes
from jaxmpi.comm.mpi import MpiComm, world
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.functions.commands import execute
from jaxmpi.functions.groups import ForkedGroup, ProcessGroup, RankGroup, WorkerGroup
from jaxmpi.functions.transport import MpiTransport, OutOfStep, SocketTransport, WorkerDied
from jaxmpi.functions.worker import Command
from jaxmpi.runtime import compile_cache, failures, process
from jaxmpi.runtime.failures import call_before_finalize

START_TIMEOUT_S = 120.0  # for a forked worker to import JAX and call back
KINDS = ("auto", "devices", "processes")
_group: WorkerGroup | None = None
_led: MpiTransport | None = None  # to ranks that rank 0 leads, from the first fork to the end of the job
_lost_reason = ""  # why they no longer listen
_is_worker = False  # True if this process waits for a master's commands
_forks = itertools.count()


def current_group() -> WorkerGroup:
    """The workers of this process's functions; without `fork`, made at first use."""
    global _group
    if _is_worker:
        raise UsageError("this process is a worker already, and runs what its master sends; only the master goes on")
    if _group is None:
        _group = group_of_ranks(is_serial=False) if process.launched_workers() > 1 else WorkerGroup(jax.local_devices())
    return _group


def fork(n: int | None = None, kind: str = "auto") -> int:
    """Let this script lead `n` workers from here on, itself the first.

    The other workers wait for what this script calls. Under a launcher with several ranks: rank 0 continues, the others
    wait in this call and end with it. Without one: local devices if there are several, else processes on this host, one
    a core.

    Args:
        n: workers; None: all ranks, devices or cores.
        kind: auto; devices of this process; processes on this host, on CPUs.

    Returns:
        the number of workers.

    Raises:
        UsageError: fork in a worker, a second fork before `close`, or a first one after functions or variables have
            been used. It is raised too for another number of workers than there can be, no shared memory, or no device.
    """
    global _group
    if kind not in KINDS:
        raise UsageError(f"fork: kind: got {kind!r}; expected one of {', '.join(KINDS)}")
    if n is not None and not (isinstance(n, int) and n >= 1):
        raise UsageError(f"fork: got {n} workers; expected a whole number >= 1, or None")
    if _is_worker:
        current_group()
    if _group is not None and (_group.is_serial or _group.is_used):
        raise UsageError(
            f"fork: there are {_group.size} workers already, and functions or variables on them; fork first, or "
            "jaxmpi.close() before"
        )
    _group = make_group(n, kind)
    atexit.register(close)
    return _group.size


def make_group(n: int | None, kind: str) -> WorkerGroup:
    """The workers that `fork` makes."""
    if (ranks := process.launched_workers()) > 1:
        if n not in (None, ranks):
            raise UsageError(f"fork: got {n} workers; the launcher started {ranks} ranks: fork()")
        group = group_of_ranks(is_serial=True)
        if group.transport.rank != 0:
            serve(group)
            sys.exit(0)
        return group
    devices, has_gpus = 1, bool(process.visible_gpus())
    if kind != "processes":
        is_several = getattr(jax.config, "jax_num_cpu_devices", 1) > 1 or "device_count" in os.getenv("XLA_FLAGS", "")
        if is_several or has_gpus:  # else a CPU's single device is not started here
            devices, has_gpus = jax.local_device_count(), jax.default_backend() != "cpu"
    is_one_a_core = kind == "processes" or (kind == "auto" and devices == 1 and not has_gpus)
    n = n or (process.cores() if is_one_a_core else devices)
    if kind != "devices" and n > devices:
        return start_forked_group(n)
    if n > len(every := jax.local_devices()):
        raise UsageError(f"fork: got {n} workers; this process has {len(every)} devices")
    return WorkerGroup(every[:n])


def close() -> None:
    """Release the workers; their functions and variables can no longer be used.

    Another `fork` may follow.
    """
    global _group, _lost_reason
    closing, _group = _group, None
    atexit.unregister(close)
    if closing is not None:
        if closing.is_serial and isinstance(closing, RankGroup):
            _lost_reason = closing.unusable
        try:
            closing.end()
        finally:
            closing.unusable = "the workers have been closed; jaxmpi.fork() and make functions and variables anew"
            execute(closing, Command("close", "close", {}))


# ---------------------------------------------------------------- ranks of MPI


def group_of_ranks(is_serial: bool) -> RankGroup:
    """All ranks of the job, which call it together; rank 0 leads, again at a second fork, or each runs the script."""
    global _led
    comm, control = world(), processes()
    assert isinstance(comm, MpiComm)
    assert isinstance(control, MpiProcesses)
    if _lost_reason:
        raise UsageError(f"fork: {_lost_reason}; start the job anew")
    if not is_serial:
        return RankGroup(MpiTransport(control, is_led=False), comm, is_serial)
    if _led is None:
        _led = MpiTransport(control, is_led=True)
        if _led.rank == 0:
            call_before_finalize(end_ranks)
    return RankGroup(_led, comm, is_serial)


def end_ranks() -> None:
    """End waiting ranks, or the job if they are out of step."""
    close()
    if _lost_reason:
        failures.end_job(1)
    group_of_ranks(is_serial=True).send(Command("end", "end", {}))


# ---------------------------------------------------------------- processes on this host


def start_forked_group(n: int) -> WorkerGroup:
    """Start n - 1 processes and take part as the first."""
    if process.visible_gpus() and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise UsageError(
            f"fork: got {n} workers for {len(process.visible_gpus())} GPUs; forked processes are for CPUs. fork() "
            "takes all GPUs, mpirun shares them; JAX_PLATFORMS=cpu leaves them alone"
        )
    process.prepare()
    number = next(_forks)
    pipes = {rank: Pipe() for rank in range(1, n)}
    jobs = {rank: start_worker({"rank": rank, "size": n, "fork": number}, *ends) for rank, ends in pipes.items()}
    transport = SocketTransport(0, n, {rank: ours for rank, (ours, _) in pipes.items()}, jobs)
    try:
        for rank, connection in transport.connections.items():
            if not connection.poll(START_TIMEOUT_S):
                raise TrainingError(f"fork: worker {rank} did not start within {START_TIMEOUT_S:.0f} s")
        before = process.core_mask()
        process.pin_cores(0, n)  # now that the others have started, which would inherit it
        group = ForkedGroup(transport, number)
        group.cores = before
        return group
    except BaseException:  # Ctrl-C too: else the processes that have started would wait for a master for ever
        for job in jobs.values():
            job.kill()
            job.wait()
        transport.stop_watching()
        raise


def start_worker(setup: dict[str, Any], ours: Connection, theirs: Connection) -> subprocess.Popen:
    """Start a worker; the socket carries import path, arguments and JAX settings, too long for a command line."""
    setup |= {"path": sys.path, "argv": sys.argv, "x64": bool(jax.config.jax_enable_x64)}  # pyright: ignore[reportAttributeAccessIssue]
    # With a launcher's variables the worker would take itself for a rank of MPI.
    env = {name: value for name, value in os.environ.items() if name not in process.VARIABLES}
    code = f"from jaxmpi.functions.lifecycle import forked_main; forked_main({theirs.fileno()})"
    job = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**env, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "JAX_PLATFORMS": "cpu"},
    )
    theirs.close()
    with contextlib.suppress(OSError):  # it has ended already, which the wait for its connection notices
        ours.send(setup)
    return job


def forked_main(socket: int) -> None:
    """The main function of a forked worker: receive its setup, then carry out the master's commands."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the master's to answer
    master = Connection(socket)
    setup: dict[str, Any] = master.recv()
    sys.path[:], sys.argv[:] = setup["path"], setup["argv"]  # modules that it imports may read its arguments
    jax.config.update("jax_enable_x64", setup["x64"])
    process.keep_freed_memory()
    process.pin_cores(setup["rank"], setup["size"])
    compile_cache.use_compilation_cache()
    code = 0
    try:
        serve(ForkedGroup(SocketTransport(setup["rank"], setup["size"], {0: master}, {}), setup["fork"]))
    except WorkerDied:
        pass
    except Exception:  # alone, after the reports
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: there is nothing to wait for


# ---------------------------------------------------------------- waiting for commands


def serve(waiting: ProcessGroup) -> None:
    """Carry out the master's commands until it ends.

    Raises what failed in this process alone, after the reports: the others wait for this worker, and notice only its
    end.
    """
    global _is_worker
    _is_worker = True
    while True:
        command = waiting.receive()
        if command.kind == "end":
            return
        try:
            execute(waiting, command)
        except WorkerDied:
            return
        except Exception as error:  # failures of workers' parts are in the reports
            waiting.note_failure(error)
            # After a sum that failed a forked worker waits for its master to close.
            if waiting.unusable and not (isinstance(error, OutOfStep) and isinstance(waiting, ForkedGroup)):
                raise
