"""Fault injection, to test before a big run: `--inject kill:rank=1,step=20`.

    --inject KIND[:key=value,...]     repeatable; KINDS below is the table of kinds

Every fault takes `rank` (default 0, or all), `step` (default 1: the first at which it can happen) and `times` (default
1: how often in the life of a run directory, restarts included; 0 means always).
"""

import errno
import os
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
from jaxmpi.runtime.failures import describe_rank
from jaxmpi.runtime.process import my_rank

Values = dict[str, Any]


class InjectedError(RuntimeError):
    """The error of the fault `raise`."""


# ---------------------------------------------------------------- what faults do
# (values, subject) -> subject or None, which leaves it; the subject of a step is (state, batch), of a saved checkpoint
# its path.


def _signal(number: int) -> Callable[..., None]:
    return lambda values, subject: os.kill(os.getpid(), number)


def _raise(values: Values, subject: Any) -> None:
    def fail() -> None:
        raise InjectedError(f"injected, with step {values['step']} to come")

    if not values["thread"]:
        fail()
    threading.Thread(target=fail, name="injected").start()


def _exit(values: Values, subject: Any) -> None:
    if values["hard"]:
        os._exit(values["code"])
    sys.exit(values["code"])


def _sleep(values: Values, subject: Any) -> None:
    time.sleep(values["seconds"])


def _poison_batch(values: Values, subject: Any) -> Any:
    """Give the batch's first example an infinite weight, for non-finite gradients."""
    state, batch = subject

    def change(weight: np.ndarray) -> None:
        weight[..., 0] = np.inf

    return state, {**batch, "weight": _changed_copy(batch["weight"], change)}


def _flip_bit(values: Values, subject: Any) -> Any:
    """Flip one bit of the first number of a leaf of params.

    Raises:
        UsageError: no such leaf, or no such bit in its first number.
    """
    state, batch = subject
    leaves = dict(named_leaves(state.params))
    name = values["leaf"] or next(iter(leaves))
    leaf, bit = lookup(leaves, name, "leaf of params"), values["bit"]
    check(bit < 8 * leaf.dtype.itemsize, f"bitflip: bit: got {bit}; expected 0 to {8 * leaf.dtype.itemsize - 1}")

    def change(raw: np.ndarray) -> None:
        raw.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8

    leaves[name] = _changed_copy(leaf, change)
    params = jax.tree.unflatten(jax.tree.structure(state.params), [*leaves.values()])
    return state._replace(params=params), batch


def _changed_copy(array: Any, change: Callable[[np.ndarray], None]) -> Any:
    """A copy with `change` applied, in the first local shard if sharded."""
    if not isinstance(array, jax.Array):
        change(copy := np.array(array))
        return copy
    first, *others = [shard.data for shard in array.addressable_shards]
    change(copy := np.array(first))
    shards = [jax.device_put(copy, first.sharding), *others]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _fill_disk(values: Values, subject: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC) + " (injected)")


def _damage_checkpoint(values: Values, subject: Path) -> None:
    """Flip one bit in a file of the checkpoint just written."""
    with (subject / Path(values["file"]).name).open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
        file.flush()
        os.fsync(file.fileno())


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
    print(f"jaxmpi: {describe_rank()}: cut {count} connections", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- kinds, and how they are spelled


class Kind(NamedTuple):
    """A kind of fault; docs/reliability.md says what each does."""

    where: str  # step: before an update; save: while a checkpoint is written; saved: once it is whole
    act: Callable[..., Any]
    defaults: Values = {}  # noqa: RUF012 # of its own keys; nobody changes them


_AT = {"at": "step"}
PLACES = ("step", "save", "eval")  # values that `at` takes
KINDS: dict[str, Kind] = {
    "kill": Kind("step", _signal(signal.SIGKILL), _AT),
    "raise": Kind("step", _raise, {**_AT, "thread": 0}),
    "exit": Kind("step", _exit, {**_AT, "code": 3, "hard": 0}),
    "stop": Kind("step", _signal(signal.SIGSTOP), _AT),
    "slow": Kind("step", _sleep, {**_AT, "seconds": 1.0}),
    "nan": Kind("step", _poison_batch),
    "bitflip": Kind("step", _flip_bit, {"leaf": "", "bit": 3}),
    "sigterm": Kind("step", _signal(signal.SIGTERM), _AT),
    "disk_full": Kind("save", _fill_disk),
    "corrupt_checkpoint": Kind("saved", _damage_checkpoint, {"file": "common.bin"}),
    "drop_link": Kind("step", _drop_link, _AT),
}


class Fault(NamedTuple):
    """A requested fault."""

    text: str
    kind: Kind
    values: Values
    rank: int  # -1: all
    step: int
    times: int


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
    values: Values = {"rank": 0, "step": 1, "times": 1, **kind.defaults}
    for part in filter(None, rest.split(",")):
        key, _, got = part.partition("=")
        if key not in values:
            raise UsageError(f"--inject {text:.80}: unknown key {key!r:.80}; {nearest(key, values)}")
        try:
            values[key] = -1 if (key, got) == ("rank", "all") else type(values[key])(got)
            is_fine = (key, got) == ("rank", "all") or isinstance(values[key], str) or 0 <= values[key] < 1e9
        except ValueError:
            is_fine = False
        check(is_fine, f"--inject {text:.80}: {key}: got {got!r:.80}; expected a number >= 0")
    lookup(dict.fromkeys(PLACES), values.get("at", "step"), "place of a fault (at)")
    rank, step = values["rank"], values["step"]
    check(rank < workers, f"--inject {text:.80}: rank: got {rank}; expected all, or 0 to {workers - 1}")
    if last_step and step > last_step:
        raise UsageError(
            f"--inject {text}: step: got {step}; no worker comes beyond step {last_step}, so nothing would happen"
        )
    return Fault(text, kind, values, rank, step, values["times"])


# ---------------------------------------------------------------- at their places


_faults: list[tuple[int, Fault]] = []  # of this rank, with their positions on the command line
_folder = Path()  # which is kept over restarts
_happened: set[int] = set()  # positions of those that have happened in this process


def request(texts: Sequence[str], workers: int, mine: Sequence[int], run_dir: Path) -> None:
    """Request those faults in this process whose rank is in `mine`; the run directory remembers what has happened.

    Raises:
        UsageError: a text is no fault.
    """
    global _faults, _folder
    faults = [(position, parse(text, workers)) for position, text in enumerate(texts)]
    _faults, _folder = [(p, fault) for p, fault in faults if fault.rank in (-1, *mine)], run_dir / "injected"
    _happened.clear()
    if _faults:
        _folder.mkdir(parents=True, exist_ok=True)


def inject_at(where: str, step: int, subject: Any = None) -> Any:
    """Inject the faults requested for this place; return what becomes of the subject."""
    for position, fault in _faults:
        at = fault.kind.where if fault.kind.where != "step" else fault.values.get("at", "step")
        if at == where and step >= fault.step and _count(position, fault):
            _happened.add(position)
            print(f"jaxmpi: {describe_rank()}: injecting {fault.text} at {where} {step}", file=sys.stderr, flush=True)
            changed = fault.kind.act({**fault.values, "step": step}, subject)
            subject = subject if changed is None else changed
    return subject


def _count(position: int, fault: Fault) -> bool:
    """Count a fault before it happens; False if it happened often enough."""
    for time_ in range(fault.times):
        with suppress(FileExistsError):
            (_folder / f"{position}-rank{my_rank()}-{time_}").touch(exist_ok=False)
            return True
    return fault.times == 0


def missed() -> list[str]:
    """Faults requested for this rank that have never happened, over restarts, as they were spelled."""
    before = {int(path.name.partition("-")[0]) for path in _folder.glob(f"*-rank{my_rank()}-*")} if _faults else set()
    return [fault.text for position, fault in _faults if position not in _happened | before]
