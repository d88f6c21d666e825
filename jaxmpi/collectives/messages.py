"""Point-to-point messages, each after a header that its receiver checks.

MPI's messages have no names. One of another shape or dtype than its receiver expects may be cut off, or be read as
other numbers. Or it leaves a part of the receiver's array undefined. And a rank waits for ever if nobody sends. So a
header goes before each message, with its dtype, shape and the sender's line. A rank that waits looks for messages, has
a time limit, and names the call.

A header has 64 bytes, so one with a few numbers behind it is still short for MPI. A small array travels in its header's
message. Else headers and arrays have communicators of their own. Then the sender numbers its headers, and the number is
the tag of the array behind a header. Several receives may wait at once for headers of one source and tag, as started
messages do. MPI gives them headers in the order in which they began, and each takes the array of its own header.

A header is sent such that its sender knows when it was received (`MPI_Issend`). The sender does not wait for that: two
ranks may both send first. It looks again at its next message, and before the process ends. A `sendrecv` in C sends its
header without that. So do most short messages in C.

Programs call a handler in C (`compiled_messages`) where they can. Else they call one in Python, which calls mpi4py and
sees arrays of a GPU as copies on the host. Without handlers programs call mpi4jax instead, unchecked.
"""

import functools
import itertools
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.collectives.call import NOBODY, MpiCall, at_least_8_bits, from_mpi_dtype, shape_of, to_mpi_dtype, type_of
from jaxmpi.comm.diagnosis import PARTNER, PROBES, message_lost
from jaxmpi.comm.mpi import MpiComm, made
from jaxmpi.comm.polling import survives_losses, wait
from jaxmpi.comm.shared_sync import TIMEOUT_S
from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.runtime import failures, host_callbacks
from jaxmpi.runtime.failures import call_after_all_scripts, call_before_finalize

MESSAGE = "jaxmpi: a message between two ranks"
TYPE_BYTES, PLACE_BYTES = 24, 20
# Bytes of the array, sender's rank, tag, tag of the array, its dtype and shape, the sender's file and line.
HEADER = struct.Struct(f"qiii{TYPE_BYTES}s{PLACE_BYTES}s")
SIZE_AT, SENDER_AT, NUMBER_AT, TYPE_AT = 0, 8, 16, 20  # in a header, for C
ANY = -2  # source or tag
INLINE, INLINE_BYTES = -1, 32768  # in place of a number: the array, of so many bytes at most, is behind its header
MOST_AHEAD = 1024  # messages of that kind that nobody has received: they are copies, and their sender goes on
MAX_BYTES = 1 << 30  # bytes of one MPI message; counts are C ints
Requests = list[Any]  # requests of mpi4py


# ---------------------------------------------------------------- in a program


def run(call: MpiCall, *operands: jax.Array) -> list[jax.Array]:
    """Send, receive, or both, in the order of the program's MPI calls."""
    if host_callbacks.unavailable_reason():
        return _by_mpi4jax(call, *operands)
    what, dtype, operands = call.describe(*operands), operands[-1].dtype, tuple(map(at_least_8_bits, operands))
    results = [shape_of(operands[-1])] if call.operation != "send" else []
    sent = operands[:1] if call.operation != "recv" else ()
    rest = operands[-1:] if results and call.source == NOBODY else ()
    register_handlers()
    effect, number = call.comm.effect, register_call(call, what)
    came = host_callbacks.call(MESSAGE, [*sent, *rest], results, effect=effect, call=number)
    return [from_mpi_dtype(y, dtype) for y in came]


_calls: list[tuple[MpiComm, dict[str, Any]]] = []


def register_call(call: MpiCall, what: str) -> int:
    """Keep a call for good; return its number.

    A program holds that number alone.
    """
    # XLA gives a handler its attributes one by one, several microseconds each.
    with _lock:
        _calls.append((call.comm, step_options(call, what)))
        return len(_calls) - 1


def step_options(call: MpiCall, what: str) -> dict[str, Any]:
    """Arguments of `exchange_steps`, which are numbers and a text."""
    places = {"source": ANY if call.source is None else call.source, "dest": call.dest}
    tags = {"sendtag": call.sendtag, "recvtag": ANY if call.recvtag is None else call.recvtag}
    return {**places, **tags, "status": call.status, "line": what, "place": call_site(call)}


def call_site(call: MpiCall) -> str:
    """File and line of a call, of a long name the end."""
    return call.line.rpartition(" in ")[0].encode()[-PLACE_BYTES:].decode(errors="ignore")


def _by_mpi4jax(call: MpiCall, *operands: jax.Array) -> list[jax.Array]:
    import mpi4jax
    from mpi4py import MPI

    tag = MPI.ANY_TAG if call.recvtag is None else call.recvtag
    source = MPI.ANY_SOURCE if call.source is None else call.source
    status, comm = _statuses.get(call.status), call.comm.mpi
    x, place = to_mpi_dtype(operands[0]), to_mpi_dtype(operands[-1])
    if call.operation == "send":
        mpi4jax.send(x, call.dest, tag=call.sendtag, comm=comm)
        return []
    if call.operation == "recv":
        received = mpi4jax.recv(place, source, tag=tag, comm=comm, status=status)
        return [from_mpi_dtype(received, operands[-1].dtype)]
    dest = MPI.PROC_NULL if call.dest == NOBODY else call.dest
    if call.source == NOBODY:
        mpi4jax.send(x, dest, tag=call.sendtag, comm=comm)
        return [operands[-1]]
    tags = {"sendtag": call.sendtag, "recvtag": tag}
    received = mpi4jax.sendrecv(x, place, source, dest, **tags, comm=comm, status=status)
    return [from_mpi_dtype(received, operands[-1].dtype)]


def refuse_one_rank(call: MpiCall, *operands: jax.Array) -> Any:
    """Refuse a message if there is one worker."""
    raise UsageError(f"{call.operation}: got one worker, which has nobody to exchange messages with; start several")


def sendrecv_to_self(call: MpiCall, x: jax.Array, place: jax.Array) -> jax.Array:
    """A sendrecv of one worker, which sends to itself or to nobody."""
    if call.source == NOBODY:
        fill_in_program(call.status, NOBODY, None, 0)
        return place
    check(call.dest != NOBODY, "sendrecv: one worker receives from itself and sends to nobody; give dest=0 as well")
    check(
        type_of(x) == type_of(place),
        f"sendrecv: one worker, rank 0, expects {type_of(place)}, but got {type_of(x)} from itself; give both the same "
        "shape and dtype",
    )
    check(
        call.recvtag in (None, call.sendtag),
        f"sendrecv: one worker, rank 0, waits for tag {call.recvtag}, but sends itself tag {call.sendtag}",
    )
    fill_in_program(call.status, 0, call.sendtag, place.nbytes)
    return x


_statuses: dict[int, Any] = {}
_status_numbers = itertools.count(1)


def status_number(status: Any) -> int:
    """Number of a status that programs fill; 0 for none."""
    if not status:
        return 0
    for number, known in _statuses.items():
        if known is status:
            return number
    _statuses[number := next(_status_numbers)] = status
    return number


def fill_in_program(status: int, source: int, tag: int | None, size_bytes: int) -> None:
    """Have the program fill a status, if any, without a message."""
    if status:
        tag = ANY if tag is None else tag
        name = register_status_handler()
        host_callbacks.call(name, [], [], status=status, source=source, tag=tag, size_bytes=size_bytes)


def fill_status(status: int, source: int, tag: int, size_bytes: int) -> None:
    """Fill a status, if any, as MPI does, also when nobody sends."""
    from mpi4py import MPI

    if status:
        given = _statuses[status]
        given.Set_source(MPI.PROC_NULL if source == NOBODY else source)
        given.Set_tag(MPI.ANY_TAG if tag == ANY else tag)
        given.Set_elements(MPI.BYTE, size_bytes)


# ---------------------------------------------------------------- in the process


class Unreceived(NamedTuple):
    """A header that was sent, and which call sent it."""

    request: Any
    what: str
    comm: MpiComm
    dest: int


_unreceived: deque[Unreceived] = deque()
ALMOST_S = 1.0  # for what is left at the end to be received
LOOKED_AT = 4  # headers at a send: all would take time quadratic in the number of messages sent ahead
_lock = threading.Lock()  # lock of the headers: programs send from several threads
_sent_numbers = itertools.count()


@functools.cache
def register_handlers() -> None:
    """Register the handlers of programs, at the first use."""
    host_callbacks.register(MESSAGE, _handle, ends_job=True)
    call_before_finalize(check_all_received)


@functools.cache
def register_status_handler() -> str:
    """Name of the handler that fills a status, registered at first use."""
    name = f"{MESSAGE}, its status"
    host_callbacks.register(name, lambda _operands, _results, **options: fill_status(**options))
    return name


def check_all_received() -> None:
    """Wait until this process's messages are received, or end the job."""
    jax.effects_barrier()
    for request, what, comm, dest in _unreceived:
        check_received(request.Test, what, comm, dest)


def check_received(is_received: Callable[[], bool], what: str, comm: MpiComm, dest: int) -> None:
    """Wait until a message is received, or end the job."""
    limit_s = min(TIMEOUT_S, failures.EXIT_TIMEOUT_S)
    with comm.processes.roll.waiting(PARTNER, what, limit_s, dest):
        if wait(is_received, limit_s):
            return
    expected = "nobody has received it; expected a recv of that rank, source and tag"
    rank, partner = comm.processes.in_job([comm.rank, dest])
    where = comm.processes.roll.where([partner])
    failures.fail(TrainingError(f"rank {rank}: {what}: {expected}{where}"), None)


def check_no_message_left() -> None:
    """End the job if another rank's message to this one is left."""
    for comm in [] if survives_losses() else made:
        if any(comm.headers.Iprobe() for _ in range(PROBES)):
            time.sleep(ALMOST_S)  # a program of another thread may be about to receive it
        if found := comm.headers.Improbe():
            message = np.zeros(HEADER.size + INLINE_BYTES, np.uint8)
            found.Recv(message)
            _, sender, tag, *_ = HEADER.unpack_from(message.data)
            receiver, partner = comm.processes.in_job([comm.rank, sender])
            what = f"rank {partner}: a message of {describe_message(message.data)}: rank {receiver} has not received it"
            expected = f"expected a recv or sendrecv there, of that rank and tag {tag}"
            failures.fail(TrainingError(f"{what}; {expected}"), None)


call_after_all_scripts(check_no_message_left)


def _handle(operands: Sequence[np.ndarray], results: Sequence[np.ndarray], call: int) -> None:
    """Handler of programs: send, receive or both, each step with a limit."""
    comm, options = _calls[call]
    for requests in exchange_steps(comm, operands, results, **options):
        for request in requests:
            if not wait(request.Test, TIMEOUT_S):
                raise lost_message(comm, **options)


def lost_message(comm: MpiComm, source: int, dest: int, line: str, **_: Any) -> TrainingError:
    """The error of a message not received or sent in time."""
    partners = comm.processes.in_job(sorted({source, dest} - {ANY, NOBODY}))
    return message_lost(line, comm.processes.roll.where(partners))


def exchange_steps(
    comm: MpiComm,
    operands: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    source: int,
    dest: int,
    sendtag: int,
    recvtag: int,
    status: int,
    line: str,
    place: str,
) -> Iterator[Requests]:
    """Send the first operand, fill the result; yield requests to wait for."""
    sending = _start_send(comm, operands[0], dest, sendtag, line, place) if dest != NOBODY else []
    if results and source == NOBODY:
        np.copyto(results[0], operands[-1])
        fill_status(status, NOBODY, ANY, 0)
    elif results:
        yield from _receive(comm, results[0], source, recvtag, status, line)
    if sending:
        with comm.processes.roll.waiting(PARTNER, line, partner=dest):
            yield sending


def _start_send(comm: MpiComm, x: np.ndarray, dest: int, tag: int, line: str, place: str) -> Requests:
    """Begin to send header and array; x is free after these requests."""
    is_small = x.nbytes <= INLINE_BYTES and len(_unreceived) < MOST_AHEAD
    number = INLINE if is_small else 2 * next(_sent_numbers) % (comm.processes.tags & ~1)  # C's are odd
    header = header_of(comm.rank, tag, number, x.nbytes, type_of(x), place)
    message = np.frombuffer(header + x.tobytes() if is_small else header, np.uint8)
    with _lock:
        for sent in [_unreceived.popleft() for _ in range(min(LOOKED_AT, len(_unreceived)))]:
            if not sent.request.Test():
                _unreceived.append(sent)
        _unreceived.append(Unreceived(comm.headers.Issend(message, dest, tag), line, comm, dest))
    return [] if is_small else [comm.arrays.Isend(part, dest, number) for part in _parts(x)]


@functools.lru_cache(1024)  # small messages of a program have the same one at each run
def header_of(rank: int, tag: int, number: int, size_bytes: int, type_text: str, place: str) -> bytes:
    """The bytes of a header."""
    return HEADER.pack(size_bytes, rank, tag, number, pack_type(type_text), place.encode())


def pack_type(text: str) -> bytes:
    """Dtype and shape; a long text ends with a digest."""
    if len(text) <= TYPE_BYTES:
        return text.encode()
    return f"{text[: TYPE_BYTES - 9]}~{zlib.crc32(text.encode()):08x}".encode()


def describe_message(message: Any) -> str:
    """Describe a message by its header."""
    size_bytes, *_, packed, place = HEADER.unpack_from(message)
    size = f" of {size_bytes} bytes" if b"~" in packed else ""
    return f"{_text(packed)}{size}, sent at {_text(place) or 'no line of a script'}"


def _receive(comm: MpiComm, y: np.ndarray, source: int, tag: int, status: int, line: str) -> Iterator[Requests]:
    """Receive a message, and the array that it announces."""
    from mpi4py import MPI

    message = np.empty(HEADER.size + INLINE_BYTES, np.uint8)
    ranks, tags = MPI.ANY_SOURCE if source == ANY else source, MPI.ANY_TAG if tag == ANY else tag
    with comm.processes.roll.waiting(PARTNER, line, partner=None if source == ANY else source):
        yield [comm.headers.Irecv(message, ranks, tags)]
    yield from _unpack(comm, message, y, status, line)


def _unpack(comm: MpiComm, message: np.ndarray, y: np.ndarray, status: int, line: str) -> Iterator[Requests]:
    """Compare a header; copy the array in its message, or receive it."""
    rank, its_tag, number = check_type(comm, message.data, y.nbytes, type_of(y), line)
    if number == INLINE:
        y.reshape(-1).view(np.uint8)[:] = message[HEADER.size : HEADER.size + y.nbytes]
    else:
        yield [comm.arrays.Irecv(part, rank, number) for part in _parts(y)]
    fill_status(status, rank, its_tag, y.nbytes)


def check_type(comm: MpiComm, message: Any, size_bytes: int, expected: str, line: str) -> tuple[int, int, int]:
    """Return sender, tag and number of an expected header.

    Raises:
        UsageError: the array has another shape or dtype: this call, and the other's line.
    """
    its_bytes, rank, tag, number, type_text, _ = HEADER.unpack_from(message)
    if its_bytes != size_bytes or type_text.rstrip(b"\0") != pack_type(expected):
        numbers = comm.processes.numbers
        raise UsageError(
            f"{line}: rank {numbers[comm.rank]} expects {expected}, but got a message of rank {numbers[rank]}: "
            f"{describe_message(message)}; give both the same shape and dtype, or tell the messages apart by tags"
        )
    return rank, tag, number


def _text(field: bytes) -> str:
    """A text of a header."""
    return field.rstrip(b"\0").decode(errors="replace")


def _parts(x: np.ndarray) -> list[np.ndarray]:
    """Bytes of an array, in one or more messages of countable size."""
    flat = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return [flat[start : start + MAX_BYTES] for start in range(0, max(flat.size, 1), MAX_BYTES)]
