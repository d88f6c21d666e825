"""Messages between two ranks, each behind a header that its receiver checks.

MPI's messages have no names. One of another shape or dtype than its receiver expects may be cut off or be read as other
numbers, and a rank waits for ever if nobody sends. So a header goes before each message, with its dtype, its shape and
the sender's line, and a rank that waits is named after a while.

A header has 64 bytes, so a few numbers behind it are still a short message for MPI: a small array is sent in its
header's message. A larger one is sent separately, on a communicator of its own, under a number that its header
announces. So several receives of one source and tag may wait at once, as started ones do: MPI gives them headers in the
order in which they began, and each takes the array of its own header.

A `send` waits as MPI's own does: a short one for nobody, so two ranks may both send first. So when all scripts have
ended, each rank looks for messages that nobody has received.

`messages.c` does all of this. Programs on CPUs call it directly, which takes a tenth of the time of a message through
Python. Programs on GPUs, and started messages, call it from Python. Where it cannot be compiled, and while mpi4jax
prints its calls, mpi4jax sends instead, without headers.
"""

import ctypes
import functools
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.collectives.call import NOBODY, MpiCall, from_mpi_dtype, is_logged, to_mpi_dtype, type_of
from jaxmpi.comm import c_handlers
from jaxmpi.comm.diagnosis import PARTNER, CallId, Wait, message_lost, watch
from jaxmpi.comm.mpi import MpiComm, open_comms
from jaxmpi.comm.mpi_calls import mpi_calls
from jaxmpi.comm.polling import PROBES, survives_losses, wait
from jaxmpi.comm.shared_sync import TIMEOUT_S
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.runtime import failures, host_callbacks
from jaxmpi.runtime.failures import call_after_all_scripts

MESSAGE = "jaxmpi: a message between two ranks"
TYPE_BYTES, PLACE_BYTES = 24, 20
# Bytes of the array, sender's rank, tag, number of the array, its dtype and shape, the sender's file and line.
HEADER = struct.Struct(f"qiii{TYPE_BYTES}s{PLACE_BYTES}s")
INLINE, INLINE_BYTES = -1, 32768  # in place of a number: the array, of so many bytes at most, is behind its header
SENDRECV_INLINE_BYTES = 4096  # above, two messages take less time than two copies
EAGER_BYTES = 2048  # bytes of messages that any MPI copies, so that their sender waits for no receiver
MOST_CALLS, NOTES = 1 << 20, 64  # that the source has room for
ALMOST_S = 1.0  # for what is left at the end to be received
SOURCE = c_handlers.CSource(
    Path(__file__).with_suffix(".c"),
    HEADER_BYTES=HEADER.size,
    **dict[str, Any](SIZE_AT=0, SENDER_AT=8, NUMBER_AT=16, TYPE_AT=20),  # in a header
    **dict[str, Any](TYPE_BYTES=TYPE_BYTES, INLINE=INLINE, INLINE_BYTES=INLINE_BYTES),
    **dict[str, Any](MOST_CALLS=MOST_CALLS, NOTES=NOTES),
)
_message_p = SOURCE.primitive()
FUNCTIONS = "Isend", "Irecv", "Wait", "Test", "Status_set_elements"  # in the order of the source
Unexpected = ctypes.CFUNCTYPE(None, c_int32, c_void_p)


# ---------------------------------------------------------------- in a program


def run(call: MpiCall, *operands: jax.Array) -> list[jax.Array]:
    """Send, receive, or both, in the order of the program's MPI calls."""
    if unavailable_reason():
        return _by_mpi4jax(call, *operands)
    receiver = [operands[-1]] if call.operation == "sendrecv" and not call.receives else []
    if receiver:
        fill_status(call.status, NOBODY, -1, 0)
    if not call.sends and not call.receives:
        return receiver
    number, effect = open_message(call, call.describe(*operands), *map(jax.typeof, operands)), call.comm.effect
    results: Any = c_handlers.shaped(operands[-1]) if call.receives else ()
    operands = operands[: int(call.sends)]
    # Beside a program that waits in MPI nothing else could call an MPI below THREAD_MULTIPLE.
    if SOURCE.unavailable_reason() or not call.comm.processes.waits.may_watch:
        came = host_callbacks.call(MESSAGE, operands, results, effect=effect, call=number)
    else:
        came = _message_p.bind(*operands, results=results, effect=effect, words=(number,))
    return came or receiver


def unavailable_reason() -> str:
    """Why messages are mpi4jax's own; empty if they have headers."""
    return "mpi4jax prints its calls" if is_logged() else _compile_error()


@functools.cache
def _compile_error() -> str:
    """Compile the source and tell it of this process; why it cannot be, or empty."""
    from mpi4py import MPI

    if trouble := SOURCE.trouble():
        c_handlers.print_once(f"messages are mpi4jax's own, unchecked, since {trouble}; all ranks need a C compiler")
        return trouble
    handle, library = c_handlers.handle_type(), SOURCE.library()
    callbacks = (ctypes.cast(callback, c_void_p).value for callback in (_unexpected, _failed))
    functions = [*c_handlers.addresses(FUNCTIONS), *callbacks]
    library.jaxmpi_set_up.argtypes = c_void_p, handle
    library.jaxmpi_open_message.argtypes = c_void_p, handle, handle, c_void_p, c_char_p, c_char_p
    library.jaxmpi_begin.restype = c_void_p
    library.jaxmpi_begin.argtypes = c_int32, c_void_p, c_void_p
    library.jaxmpi_advance.argtypes = (c_void_p,)
    library.jaxmpi_set_up((c_void_p * len(functions))(*functions), MPI._handleof(MPI.BYTE))
    return ""


def _by_mpi4jax(call: MpiCall, *operands: jax.Array) -> list[jax.Array]:
    from mpi4py import MPI

    calls = mpi_calls()
    tag = MPI.ANY_TAG if call.recvtag is None else call.recvtag
    source = MPI.ANY_SOURCE if call.source is None else call.source
    options = {"comm": call.comm.mpi, "status": _statuses.get(call.status)}
    x, place = to_mpi_dtype(operands[0]), to_mpi_dtype(operands[-1])
    if call.operation == "sendrecv" and call.sends and call.receives:
        received = calls.sendrecv(x, place, source, call.dest, sendtag=call.sendtag, recvtag=tag, **options)
        return [from_mpi_dtype(received, operands[-1].dtype)]
    if call.sends:
        calls.send(x, call.dest, tag=call.sendtag, comm=call.comm.mpi)
    if call.receives:
        return [from_mpi_dtype(calls.recv(place, source, tag=tag, **options), operands[-1].dtype)]
    return [] if call.operation == "send" else [operands[-1]]


def on_one_rank(call: MpiCall, x: jax.Array, place: Any = None) -> jax.Array:
    """A message of one worker: a sendrecv with itself, or from nobody."""
    if call.operation != "sendrecv":
        raise UsageError(f"{call.operation}: got one worker, which has nobody to exchange messages with; start several")
    if call.source == NOBODY:
        fill_status(call.status, NOBODY, -1, 0)
        return place
    if call.dest == NOBODY or type_of(x) != type_of(place) or call.recvtag not in (None, call.sendtag):
        raise UsageError(
            f"sendrecv: one worker expects {type_of(place)} and tag {call.recvtag} from itself, but got {type_of(x)} "
            f"and tag {call.sendtag} for {'nobody' if call.dest == NOBODY else 'itself'}; give both alike, and dest=0"
        )
    fill_status(call.status, 0, call.sendtag, place.nbytes)
    return x


# ---------------------------------------------------------------- statuses

_statuses: dict[int, Any] = {}  # by `id`; a program fills one for good


def status_number(status: Any) -> int:
    """Number of a status that programs fill; 0 for none."""
    if not status:
        return 0
    _statuses[id(status)] = status
    return id(status)


def fill_status(status: int, source: int, tag: int, size_bytes: int) -> None:
    """Fill a status, if any, as MPI does; C does it for what comes, this for messages that are known when traced."""
    from mpi4py import MPI

    if status:
        mpi_status = _statuses[status]
        mpi_status.Set_source(MPI.PROC_NULL if source == NOBODY else source)
        mpi_status.Set_tag(MPI.ANY_TAG if tag == -1 else tag)
        mpi_status.Set_elements(MPI.BYTE, size_bytes)


# ---------------------------------------------------------------- calls that C knows


class Opened(NamedTuple):
    """A call that C knows by number until its communicator is freed: a program holds that number alone."""

    call: MpiCall
    what: str
    received: Any  # dtype and shape, or None
    partners: tuple[int, ...]  # for which it waits, by their numbers in the job


_opened: dict[int, Opened] = {}


def _close_message(number: int) -> None:
    """Forget a call of a communicator that is freed; a program that makes it gets an error."""
    SOURCE.library().jaxmpi_close_message(number)
    del _opened[number]


def open_message(call: MpiCall, text: str, x: Any, place: Any = None) -> int:
    """Tell C of a call; return its number.

    Args:
        x: shape and dtype of the array that it sends, or of the only one that it receives.
        place: of the one that a sendrecv receives.
    """
    from mpi4py import MPI

    comm, waits = call.comm, call.comm.processes.waits
    outgoing = x if call.sends else None
    received = (x if place is None else place) if call.receives else None
    sizes = [0 if array is None else array.size * array.dtype.itemsize for array in (outgoing, received)]
    if max(sizes) >= 1 << 31:
        raise UsageError(f"{text}: got {max(sizes):,} bytes; expected fewer than 2^31, to which MPI counts: cut it up")
    source = MPI.ANY_SOURCE if call.source is None else call.source
    recvtag = MPI.ANY_TAG if call.recvtag is None else call.recvtag
    most_inline_bytes = INLINE_BYTES if call.operation == "send" else SENDRECV_INLINE_BYTES
    numbers = (  # in the order of `struct call`
        *(outgoing is not None, received is not None, *sizes, source, call.dest, call.sendtag, recvtag),
        *(most_inline_bytes, min(comm.processes.tags, np.iinfo(np.int32).max)),
    )
    sent_type, received_type = (pack_type("" if array is None else type_of(array)) for array in (outgoing, received))
    # Of a long name the end: file and line of the call.
    place_text = call.line.rpartition(" in ")[0].encode()[-PLACE_BYTES:].decode(errors="ignore").encode()
    header = HEADER.pack(sizes[0], comm.rank, call.sendtag, INLINE, sent_type, place_text)
    communicators = map(MPI._handleof, (comm.headers, comm.arrays))
    status = MPI._addressof(_statuses[call.status]) if call.status else None
    packed, expected = (c_int32 * len(numbers))(*numbers), received_type.ljust(TYPE_BYTES, b"\0")
    number = SOURCE.library().jaxmpi_open_message(packed, *communicators, status, header, expected)
    if number < 0:
        raise UsageError(f"{text}: got {MOST_CALLS} messages that were compiled before; compile fewer programs")
    is_waited_for = outgoing is not None and (received is None or HEADER.size + sizes[0] > EAGER_BYTES)
    sources = set() if received is None else set(range(comm.size)) if call.source is None else {call.source}
    partners = (sources | ({call.dest} if is_waited_for else set())) - {comm.rank} or {comm.rank}
    comm.cached("messages", ExitStack).callback(_close_message, number)
    _opened[number] = Opened(call, text, received, tuple(comm.processes.in_job(sorted(partners))))
    waits.messages = functools.partial(_waits, comm)
    return number


def pack_type(text: str) -> bytes:
    """Dtype and shape; a long text ends with a digest."""
    if len(text) <= TYPE_BYTES:
        return text.encode()
    return f"{text[: TYPE_BYTES - 9]}~{zlib.crc32(text.encode()):08x}".encode()


def describe_message(message: Any) -> str:
    """Describe a message by its header."""
    size_bytes, *_, packed, place = HEADER.unpack_from(message)
    size = f" of {size_bytes} bytes" if b"~" in packed else ""
    text, at = (field.rstrip(b"\0").decode(errors="replace") for field in (packed, place))
    return f"{text}{size}, sent at {at or 'no line of a script'}"


@Unexpected
def _unexpected(number: int, header: int) -> None:
    """End the job: a message is not the one that a call expects."""
    call, text, received, _ = _opened[number]
    message = ctypes.string_at(header, HEADER.size)
    mine, sender = call.comm.processes.in_job([call.comm.rank, HEADER.unpack_from(message)[1]])
    error = UsageError(
        f"{text}: rank {mine} expects {type_of(received)}, but got a message of rank {sender}: "
        f"{describe_message(message)}; give both the same shape and dtype, or tell the messages apart by tags"
    )
    failures.fail(error, None)


@c_handlers.Failed
def _failed(number: int, code: int) -> None:
    """End the job with MPI's error."""
    from mpi4py import MPI

    failures.fail(TrainingError(f"{_opened[number].what}: {MPI.Get_error_string(code)}"), None)


# ---------------------------------------------------------------- through Python


class MessageRequest:
    """A message under way, to be tested as mpi4py's requests are."""

    def __init__(self, number: int, x: np.ndarray | None, y: np.ndarray | None) -> None:
        """Begin call `number` with what it sends, and the array to receive into."""
        self._arrays = x, y  # C has their addresses until the message has come
        pointers = [None if array is None else array.ctypes.data for array in (x, y)]
        self._exchange = SOURCE.library().jaxmpi_begin(number, *pointers)

    def Test(self) -> bool:
        """Go on; True once all has come and gone."""
        if self._exchange is not None and SOURCE.library().jaxmpi_advance(self._exchange):
            self._exchange = None
        return self._exchange is None


def _exchange(operands: Sequence[np.ndarray], results: Sequence[np.ndarray], call: int) -> None:
    """Called by programs: send, receive or both, with a limit."""
    request = MessageRequest(call, *(next(iter(arrays), None) for arrays in (operands, results)))
    if not wait(request.Test, TIMEOUT_S):
        raise lost_message(call)


host_callbacks.register(MESSAGE, _exchange, ends_job=True)


def lost_message(number: int) -> TrainingError:
    """The error of a message not received or sent in time."""
    opened = _opened[number]
    return message_lost(opened.what, watch().where(opened.partners))


# ---------------------------------------------------------------- who waits, and what is left at the end


def _waits(comm: MpiComm) -> dict[int, Wait]:
    """A communicator's calls that wait in MPI now, by note."""
    note_ids = (c_int64 * NOTES)()
    SOURCE.library().jaxmpi_message_notes(note_ids)
    opened = [(note, _opened[note & 0xFFFFFFFF]) for note in note_ids if note]
    return {
        note: Wait(way=PARTNER, call=CallId(0, 0), what=message.what, partners=message.partners, is_in_program=True)
        for note, message in opened
        if message.call.comm is comm
    }


def _check_no_message_left() -> None:
    """End the job if another rank's message to this one is left."""
    for comm in [] if survives_losses() else open_comms:
        if any(comm.headers.Iprobe() for _ in range(PROBES)):
            time.sleep(ALMOST_S)  # a program of another thread may be about to receive it
        if probe := comm.headers.Improbe():
            message = np.zeros(HEADER.size + INLINE_BYTES, np.uint8)
            probe.Recv(message)
            _, sender, tag, *_ = HEADER.unpack_from(message.data)
            receiver, partner = comm.processes.in_job([comm.rank, sender])
            text = f"rank {partner}: a message of {describe_message(message.data)}: rank {receiver} has not received it"
            expected = f"expected a recv or sendrecv there, of that rank and tag {tag}"
            failures.fail(TrainingError(f"{text}; {expected}"), None)


call_after_all_scripts(_check_no_message_left)
