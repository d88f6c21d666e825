"""Messages between two ranks, by a handler in C.

Where programs cannot call it, `messages` does the work. Header and array are the same, so one end may be in C and the
other in Python. `compiled_messages.c` sends, receives and compares; Python is called only to raise an error. Through
Python a message takes 90 microseconds more, ten times what it takes itself.

A program that waits in MPI can say nothing. It leaves a note in the process's memory, which the thread that looks for
absent ranks reads; that thread has the time limit (`exchange_watch`).

A `send` knows when its header was received (`MPI_Issend`); if it is short, of the first message, the 17th, and so on. A
`sendrecv` sends as MPI's own does, before anybody receives, and may never know. So each rank looks for messages that
nobody has received there, when all scripts have ended.
"""

import ctypes
import functools
import itertools
import threading
from ctypes import c_char, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.collectives import messages
from jaxmpi.collectives.call import NOBODY, MpiCall, at_least_8_bits, from_mpi_dtype, shape_of, type_of
from jaxmpi.comm import c_handlers
from jaxmpi.comm.diagnosis import Note
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.runtime import failures
from jaxmpi.runtime.failures import call_before_finalize

MOST_CALLS, NOTES = 1 << 20, 64  # that the source has room for
EAGER_BYTES = 2048  # bytes of messages that any MPI copies, so that their sender waits for no receiver
SOURCE = c_handlers.CSource(
    Path(__file__).with_suffix(".c"),
    HEADER_BYTES=messages.HEADER.size,
    TYPE_BYTES=messages.TYPE_BYTES,
    **{name: getattr(messages, name) for name in ("SENDER_AT", "NUMBER_AT", "SIZE_AT", "TYPE_AT")},
    INLINE=messages.INLINE,
    INLINE_BYTES=messages.INLINE_BYTES,
    MOST_CALLS=MOST_CALLS,
    NOTES=NOTES,
    EAGER_BYTES=EAGER_BYTES,
)
_message_p = SOURCE.primitive()
SENDRECV_INLINE_BYTES = 4096  # above, two messages take less time than two copies
FUNCTIONS = "Isend", "Issend", "Irecv", "Wait", "Test"  # in the order of `struct call`
Unexpected = ctypes.CFUNCTYPE(None, c_int32, c_void_p)
_numbers, _opening = itertools.count(), threading.Lock()


class Opened(NamedTuple):
    """A call that the handler knows."""

    comm: MpiComm
    what: str
    dest: int
    received_bytes: int
    received: str  # dtype and shape
    partners: tuple[int, ...]  # for which it waits


_opened: dict[int, Opened] = {}  # by number


def run(call: MpiCall, *operands: jax.Array) -> list[jax.Array]:
    """Send, receive, or both, in the order of the program's MPI calls."""
    is_countable = all(at_least_8_bits(x).nbytes <= messages.MAX_BYTES for x in operands)
    may = is_countable and not call.status and call.comm.processes.roll.may_watch
    why = SOURCE.unavailable_reason()
    if why and why.startswith(c_handlers.TROUBLE):
        c_handlers.say_once("send and receive", why)
    if not may or why:
        return messages.run(call, *operands)
    what, dtype, sent = call.describe(*operands), operands[-1].dtype, tuple(map(at_least_8_bits, operands))
    is_sent = call.operation != "recv" and call.dest != NOBODY
    is_received = call.operation != "send" and call.source != NOBODY
    given = [] if call.operation == "send" or is_received else [operands[-1]]
    if not is_sent and not is_received:
        return given
    number = _open(call, what, sent[0] if is_sent else None, sent[-1] if is_received else None)
    if number >= MOST_CALLS:
        return messages.run(call, *operands)
    words = number, sent[0].dtype.itemsize, sent[-1].dtype.itemsize
    results = c_handlers.shaped(shape_of(sent[-1])) if is_received else ()
    came = _message_p.bind(*sent[: int(is_sent)], results=results, effect=call.comm.effect, words=words)
    return [from_mpi_dtype(y, dtype) for y in came] or given


@functools.cache
def _call_type() -> type[ctypes.Structure]:
    """`struct call`."""
    handle = c_handlers.handle_type()
    numbers = "number", "sends", "receives", "source", "dest", "sendtag", "recvtag", "is_synchronous", "has_sent"

    class Call(ctypes.Structure):
        _fields_ = (
            ("functions", c_void_p * len(FUNCTIONS)),
            ("unexpected", Unexpected),
            ("failed", c_handlers.Failed),
            *((name, handle) for name in ("headers", "arrays", "byte")),
            *((name, c_int32) for name in (*numbers, "most_inline_bytes", "most_ahead", "tags")),
            ("header", c_char * messages.HEADER.size),
            ("type", c_char * messages.TYPE_BYTES),
        )

    assert ctypes.sizeof(Call) == SOURCE.library().jaxmpi_call_bytes()
    return Call


def _open(call: MpiCall, what: str, sent: Any, received: Any) -> int:
    """Tell the handler of a call; return its number for programs."""
    from mpi4py import MPI

    made, comm = _call_type()(), call.comm
    with _opening:  # several threads may lower programs; callbacks of theirs that nobody keeps would be freed
        unexpected, failed = _callbacks()
        made.number = number = next(_numbers)
    if number >= MOST_CALLS:
        return number
    made.functions[:] = c_handlers.addresses(FUNCTIONS)
    made.unexpected, made.failed = unexpected, failed
    made.headers, made.arrays, made.byte = map(MPI._handleof, (comm.headers, comm.arrays, MPI.BYTE))
    made.sends, made.receives = sent is not None, received is not None
    made.source = MPI.ANY_SOURCE if call.source is None else call.source
    made.recvtag = MPI.ANY_TAG if call.recvtag is None else call.recvtag
    made.dest, made.sendtag, made.is_synchronous = call.dest, call.sendtag, call.operation == "send"
    made.most_inline_bytes = messages.INLINE_BYTES if call.operation == "send" else SENDRECV_INLINE_BYTES
    made.most_ahead, made.tags = messages.MOST_AHEAD, min(comm.processes.tags, np.iinfo(np.int32).max)
    sent_type, received_type = ("" if x is None else type_of(x) for x in (sent, received))
    sent_bytes, received_bytes = (0 if x is None else x.nbytes for x in (sent, received))
    place = messages.call_site(call)
    header = messages.header_of(comm.rank, call.sendtag, messages.INLINE, sent_bytes, sent_type, place)
    _fill(made, "header", header)
    _fill(made, "type", messages.pack_type(received_type))
    is_waited_for = sent is not None and (received is None or messages.HEADER.size + sent.nbytes > EAGER_BYTES)
    sources = set() if received is None else set(comm.processes.roll.others) if call.source is None else {call.source}
    partners = (sources | ({call.dest} if is_waited_for else set())) - {comm.rank} or {comm.rank}
    _opened[number] = Opened(
        comm=comm,
        what=what,
        dest=call.dest,
        received_bytes=received_bytes,
        received=received_type,
        partners=tuple(sorted(partners)),
    )
    comm.processes.roll.notes = notes_for(comm).found
    SOURCE.library().jaxmpi_open_message(ctypes.byref(made))
    return number


def _fill(made: Any, field: str, text: bytes) -> None:
    """Copy bytes, zeros among them, to a field of characters."""
    place = getattr(type(made), field)
    ctypes.memmove(ctypes.addressof(made) + place.offset, text.ljust(place.size, b"\0"), place.size)


@functools.cache
def _callbacks() -> tuple[Any, Any]:
    """Functions by which the handler ends the job."""
    from mpi4py import MPI

    def unexpected(number: int, header: int) -> None:
        opened, message = _opened[number], ctypes.string_at(header, messages.HEADER.size)
        try:
            messages.check_type(opened.comm, message, opened.received_bytes, opened.received, opened.what)
        except UsageError as error:
            failures.fail(error, None)

    def failed(number: int, code: int) -> None:
        error = TrainingError(f"{_opened[number].what}: {MPI.Get_error_string(code)}")
        failures.fail(error, None)

    call_before_finalize(_check_all_received)
    return Unexpected(unexpected), c_handlers.Failed(failed)


class MessageNotes:
    """A communicator's calls that wait in MPI now."""

    def __init__(self, comm: MpiComm) -> None:
        """None is known yet."""
        self._comm, self._known = comm, set[int]()

    def found(self) -> list[Note]:
        """The present notes; those of the last look are known."""
        library, notes = SOURCE.library(), (c_int64 * NOTES)()
        library.jaxmpi_message_notes(notes)
        known, self._known = self._known, set(notes)
        numbered = {note: note & 0xFFFFFFFF for note in self._known if note}
        return [
            Note(number=number, is_known=note in known, what=_opened[number].what, partners=_opened[number].partners)
            for note, number in numbered.items()
            if _opened[number].comm is self._comm
        ]


@functools.cache
def notes_for(comm: MpiComm) -> MessageNotes:
    """The notes of this communicator."""
    return MessageNotes(comm)


def _check_all_received() -> None:
    """Wait until this process's messages are received, or end the job."""
    jax.effects_barrier()
    unreceived = SOURCE.library().jaxmpi_unreceived
    while (number := unreceived(-1)) >= 0:
        comm, what, dest, *_ = _opened[number]
        messages.check_received(lambda number=number: unreceived(number) != number, what, comm, dest)
