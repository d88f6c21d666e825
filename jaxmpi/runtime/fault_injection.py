"""Fault injection, to test before a big run: `--inject kill:rank=1,step=20`.

    --inject KIND[:key=value,...]     repeatable; KINDS below is the table of kinds

Every fault takes `rank` (default 0, or all), `step` (default 1: the first at which it can happen) and `times` (default
1: how often in the life of a run directory, restarts included; 0 means always).
"""

import errno
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.core.errors import UsageError, check, lookup, nearest
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.core.train_state import TrainState
from jaxmpi.runtime import failures, process

Batch = dict[str, Any]
Values = dict[str, str]


class InjectedError(RuntimeError):
    """The error of the fault `raise`."""


class Kind(NamedTuple):
    """A kind of fault: its place, its own keys and its action."""

    where: str  # step: before an update; save: while a checkpoint is written; saved: once it is whole
    defaults: Values
    act: Callable[..., Any]  # (values, subject) -> subject or None; the subject is (state, batch), None or a path
    does: str


class Fault(NamedTuple):
    """A requested fault."""

    text: str
    kind: Kind
    values: Values
    rank: int  # -1: all
    step: int
    times: int


# ---------------------------------------------------------------- what faults do


def _send_signal(number: int) -> Callable[..., None]:
    return lambda values, subject: os.kill(os.getpid(), number)


def _raise(values: Values, subject: Any) -> None:
    def fail() -> None:
        raise InjectedError(f"injected, with step {values['step']} to come")

    if values["thread"] == "0":
        fail()
    threading.Thread(target=fail, name="injected").start()


def _exit(values: Values, subject: Any) -> None:
    if values["hard"] != "0":
        os._exit(int(values["code"]))
    sys.exit(int(values["code"]))


def _poison_batch(values: Values, subject: tuple[TrainState, Batch]) -> tuple[TrainState, Batch]:
    """Give the batch's first example an infinite weight, for non-finite gradients."""
    state, batch = subject

    def change(weight: np.ndarray) -> None:
        weight[..., 0] = np.inf

    return state, {**batch, "weight": _changed_copy(batch["weight"], change)}


def _changed_copy(array: Any, change: Callable[[np.ndarray], None]) -> Any:
    """A copy with `change` applied, in the first local shard if sharded."""
    if not isinstance(array, jax.Array):
        copy = np.array(array)
        change(copy)
        return copy
    first, *others = [shard.data for shard in array.addressable_shards]
    copy = np.array(first)
    change(copy)
    shards = [jax.device_put(copy, first.sharding), *others]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _flip_bit(values: Values, subject: tuple[TrainState, Batch]) -> tuple[TrainState, Batch]:
    """Flip one bit of the first number of a leaf of params.

    Raises:
        UsageError: no such leaf, or no such bit in its first number.
    """
    state, batch = subject
    leaves = dict(named_leaves(state.params))
    name = values["leaf"] or next(iter(leaves))
    leaf = lookup(leaves, name, "leaf of params")
    bit, bits = int(values["bit"]), 8 * leaf.dtype.itemsize
    check(0 <= bit < bits, f"bitflip: bit: got {bit}; expected 0 to {bits - 1}")

    def change(raw: np.ndarray) -> None:
        raw.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8

    flipped, names = _changed_copy(leaf, change), iter(leaves)
    params = jax.tree.map(lambda old: flipped if next(names) == name else old, state.params)
    return state._replace(params=params), batch


def _fail_as_on_a_full_disk(values: Values, subject: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC) + " (injected)")


def _damage_checkpoint(values: Values, subject: Path) -> None:
    """Flip one bit in a file of the checkpoint just written."""
    with (subject / values["file"]).open("r+b") as opened:
        byte = opened.read(1)
        opened.seek(0)
        opened.write(bytes([byte[0] ^ 1]))
        opened.flush()
        os.fsync(opened.fileno())


def _drop_link(values: Values, subject: Any) -> None:
    """Shut this process's TCP connections to other hosts.

    Raises:
        UsageError: it has none.
    """
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own descriptor, which is closed by now, or a socket that listens
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as link:
                is_tcp = link.family in (socket.AF_INET, socket.AF_INET6) and link.type == socket.SOCK_STREAM
                if is_tcp and link.getpeername()[0] != link.getsockname()[0]:
                    link.shutdown(socket.SHUT_RDWR)
                    count += 1
    check(count > 0, "drop_link: this rank has no TCP connection to another host; there is no link to drop")
    print(f"jaxmpi: {failures.describe_rank()}: cut {count} connections", file=sys.stderr, flush=True)


KINDS: dict[str, Kind] = {
    "kill": Kind("step", {"at": "step"}, _send_signal(signal.SIGKILL), "SIGKILL"),
    "raise": Kind("step", {"at": "step", "thread": "0"}, _raise, "an exception; thread=1: in another thread"),
    "exit": Kind(
        "step", {"at": "step", "code": "3", "hard": "0"}, _exit, "leaves with code; hard=1: without a goodbye"
    ),
    "stop": Kind(
        "step", {"at": "step"}, _send_signal(signal.SIGSTOP), "SIGSTOP: the process is there and does nothing"
    ),
    "slow": Kind(
        "step",
        {"at": "step", "seconds": "1"},
        lambda values, subject: time.sleep(float(values["seconds"])),
        "sleeps for seconds; with times=0 at every step",
    ),
    "nan": Kind("step", {}, _poison_batch, "gradients that are not finite"),
    "bitflip": Kind("step", {"leaf": "", "bit": "3"}, _flip_bit, "one bit of the first number of a leaf of params"),
    "sigterm": Kind("step", {"at": "step"}, _send_signal(signal.SIGTERM), "SIGTERM to this rank alone"),
    "disk_full": Kind("save", {}, _fail_as_on_a_full_disk, "the disk is full while the checkpoint is written"),
    "corrupt_checkpoint": Kind(
        "saved", {"file": "common.bin"}, _damage_checkpoint, "a bit of a checkpoint flips once it is whole"
    ),
    "drop_link": Kind("step", {"at": "step"}, _drop_link, "TCP connections to other hosts are cut"),
}
PLACES = ("step", "save", "eval")  # values that `at` takes


# ---------------------------------------------------------------- as they are spelled


def parse(text: str, workers: int, last_step: int = 0) -> Fault:
    """A fault as it is spelled on the command line.

    Args:
        workers: of the run, or that it began with if these were more.
        last_step: of the run; 0: not known.

    Raises:
        UsageError: an unknown kind or key, or a value out of range.
    """
    name, _, rest = text.partition(":")
    kind = lookup(KINDS, name, "fault")
    keys = [part.partition("=")[0] for part in rest.split(",") if part]
    values = {"rank": "0", "step": "1", "times": "1", **kind.defaults}
    for key in keys:
        if key not in values:
            raise UsageError(f"--inject {text}: unknown key {key!r}; {nearest(key, values)}")
        check(keys.count(key) == 1, f"--inject {text}: {key}: given twice")
    values |= {part.partition("=")[0]: part.partition("=")[2] for part in rest.split(",") if part}
    step, times = (_number(text, key, values[key]) for key in ("step", "times"))
    rank = -1 if values["rank"] == "all" else _number(text, "rank", values["rank"])
    check(
        not last_step or step <= last_step,
        f"--inject {text}: step: got {step}; no worker comes beyond step {last_step}, so nothing would happen",
    )
    check(rank < workers, f"--inject {text}: rank: got {rank}; expected all, or 0 to {workers - 1}")
    lookup(dict.fromkeys(PLACES), values.get("at", "step"), "place of a fault (at)")
    _check_values(text, values, workers)
    return Fault(text=text, kind=kind, values=values, rank=rank, step=step, times=times)


MOST = {"code": 255, "bit": 63, "hard": 1, "thread": 1}
MOST_S = 1e8  # to sleep


def _check_values(text: str, values: Values, workers: int) -> None:
    """Raise `UsageError` if what only some kinds take is out of range."""
    for key, most in MOST.items():
        got = values.get(key, "0")
        expected = "0 or 1" if most == 1 else f"0 to {most}"
        check(most > 1 or got in ("0", "1"), f"--inject {text}: {key}: got {got!r}; expected {expected}")
        check(_number(text, key, got) <= most, f"--inject {text}: {key}: got {got}; expected {expected}")
    got = values.get("seconds", "0")
    try:
        is_time = 0 <= float(got) <= MOST_S
    except ValueError:
        is_time = False
    check(is_time, f"--inject {text}: seconds: got {got!r}; expected seconds from 0 to {MOST_S:g}")
    got = values.get("file", "common.bin")
    worker = re.fullmatch(r"worker_(\d{5,9})\.bin", got, re.ASCII)
    check(
        got in ("manifest.json", "common.bin") or (worker is not None and int(worker[1]) < workers),
        f"--inject {text}: file: got {got!r}; expected manifest.json, common.bin or worker_{workers - 1:05d}.bin at "
        "most",
    )


def _number(text: str, key: str, value: str) -> int:
    """A whole number >= 0, of 18 digits at most."""
    holds = value.isdigit() and value.isascii() and len(value) <= 18
    check(holds, f"--inject {text:.80}: {key}: got {value!r:.80}; expected a whole number >= 0")
    return int(value)


# ---------------------------------------------------------------- at their places


class RequestedFaults:
    """The requested faults of this rank, and how often each has happened."""

    def __init__(self, faults: Sequence[tuple[int, Fault]], folder: Path) -> None:
        """Take faults with their command-line positions, and a folder that is kept over restarts."""
        self._faults, self._folder = faults, folder
        self._happened: set[int] = set()  # positions of those that have happened in this process
        if faults:
            folder.mkdir(parents=True, exist_ok=True)

    def inject_at(self, where: str, step: int, subject: Any) -> Any:
        """Do what is due here; return what becomes of the subject."""
        for position, fault in self._faults:
            at = fault.kind.where if fault.kind.where != "step" else fault.values.get("at", "step")
            if at == where and step >= fault.step and self._count(position, fault):
                self._happened.add(position)
                text = f"jaxmpi: {failures.describe_rank()}: injecting {fault.text} at {where} {step}"
                print(text, file=sys.stderr, flush=True)
                changed = fault.kind.act({**fault.values, "step": str(step)}, subject)
                subject = subject if changed is None else changed
        return subject

    def missed(self) -> list[str]:
        """Faults that have never happened, over restarts, as they were spelled."""
        before = {int(path.name.partition("-")[0]) for path in self._folder.glob(f"*-rank{process.my_rank()}-*")}
        return [fault.text for position, fault in self._faults if position not in self._happened | before]

    def _count(self, position: int, fault: Fault) -> bool:
        """Count a fault before it happens; False if it happened often enough."""
        for time_ in range(fault.times):
            with suppress(FileExistsError):
                (self._folder / f"{position}-rank{process.my_rank()}-{time_}").touch(exist_ok=False)
                return True
        return fault.times == 0


_requested: RequestedFaults | None = None


def request(texts: Sequence[str], workers: int, mine: Sequence[int], folder: Path) -> None:
    """Request those faults in this process whose rank is in `mine`.

    Args:
        folder: the run directory, which remembers what has happened.

    Raises:
        UsageError: a text is no fault.
    """
    global _requested
    faults = [(position, parse(text, workers)) for position, text in enumerate(texts)]
    _requested = RequestedFaults([(p, f) for p, f in faults if f.rank == -1 or f.rank in mine], folder / "injected")


def inject_at(where: str, step: int, subject: Any = None) -> Any:
    """Do the faults requested for this place; return the new subject."""
    return subject if _requested is None else _requested.inject_at(where, step, subject)


def missed() -> list[str]:
    """Faults requested for this rank that have not happened, as spelled."""
    return [] if _requested is None else _requested.missed()
