"""Small `sendrecv`s in the program itself, by mpi4jax.

A program that calls Python for a message takes 90 microseconds, ten times what the message takes. So a program makes
the message of `messages`, header and array in one, from a constant and x. mpi4jax exchanges it, and the program
compares the header that came with the expected one. It calls Python only if they differ: to receive an array that
travels behind its header, or to raise the error. The message is the same as Python's, so the other end may be either.

A program that waits in MPI can say nothing. It sends a note to its own process before, and receives it afterwards. The
thread that looks for absent ranks finds a note that stays, and has the time limit (`exchange_watch`).

`MPI_Sendrecv` may send before anybody receives, and its sender never learns. So each rank looks for messages that
nobody has received there, when all scripts have ended.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi.collectives import messages
from jaxmpi.collectives.call import NOBODY, MpiCall, like, type_of
from jaxmpi.collectives.dtypes import as_was, in_bytes
from jaxmpi.collectives.messages import HEADER, INLINE, INLINE_BYTES
from jaxmpi.comm.exchange_watch import PROBES, Note
from jaxmpi.comm.mpi import MpiComm
from jaxmpi.comm.polling import wait
from jaxmpi.runtime import host_callbacks

KEPT_S = 2.0  # for MPI to copy a note, so that its sender goes on
COMPARED_BYTES = 16, 104  # of a header: whether the array is inside, and its dtype and shape
EAGER_BYTES = 2048  # of messages that any MPI copies, so that their sender waits for no receiver


def run(call: MpiCall, x: jax.Array, place: jax.Array) -> list[jax.Array]:
    """A `sendrecv` in the program, if it fits, or by Python."""
    is_between_two = call.source not in (None, NOBODY) and call.dest != NOBODY and not call.status
    is_to_itself = call.source == call.dest == call.comm.rank  # a message under another tag would never come
    is_small = all(in_bytes(a).nbytes <= INLINE_BYTES and _has_words(a.dtype) for a in (x, place))
    may = is_between_two and is_small and not is_to_itself and not host_callbacks.why_copies()
    if may and notes_of(call.comm).can_be_left:
        return [_in_program(call, x, place)]
    return messages.run(call, x, place)


def _has_words(dtype: Any) -> bool:
    """Return True if `_words` can keep all bits of this dtype here."""
    return dtype.kind != "c" and jax.dtypes.canonicalize_dtype(f"uint{8 * dtype.itemsize}").itemsize == dtype.itemsize


def _in_program(call: MpiCall, x: jax.Array, place: jax.Array) -> jax.Array:
    """Send x and receive an array like `place`, each behind its header.

    Communicates: `MPI_Sendrecv`; a note to this process, sent before it and received after it.
    """
    import mpi4jax
    from mpi4py import MPI

    assert call.source is not None
    what, comm, sent, kind = call.what(x, place), call.comm, in_bytes(x), in_bytes(place)
    messages.registered()
    number, words, word = messages.kept(call, what), _words(sent), _words(kind).dtype
    header = messages.header_of(comm.rank, call.sendtag, INLINE, type_of(sent), what)
    message = jnp.concatenate([np.frombuffer(header, words.dtype), words])
    room = jnp.zeros((HEADER.size + INLINE_BYTES) // word.itemsize, word)  # the longest that may come
    tags = {"sendtag": call.sendtag, "recvtag": MPI.ANY_TAG if call.recvtag is None else call.recvtag}

    waits_for = {call.source} if message.nbytes <= EAGER_BYTES else {call.source, call.dest}
    partners = tuple(sorted(waits_for - {comm.rank})) or (call.dest,)
    note = Note(number=number, is_known=False, what=what, partners=partners)
    with notes_of(comm).left(note, message):
        came = mpi4jax.sendrecv(message, room, call.source, call.dest, comm=comm.headers, **tags)

    expected = np.frombuffer(messages.header_of(0, 0, INLINE, type_of(kind), ""), word)
    compared = slice(*(byte // word.itemsize for byte in COMPARED_BYTES))
    start = HEADER.size // word.itemsize

    def inside() -> jax.Array:
        return _from_words(came[start : start + kind.size], kind)

    def behind() -> jax.Array:
        return host_callbacks.call(messages.RECEIVED, [came], [like(kind)], effect=comm.effect, call=number)[0]

    return as_was(lax.cond((came[compared] == expected[compared]).all(), inside, behind), place.dtype)


def _words(x: jax.Array) -> jax.Array:
    """An array's bits, flat, as unsigned integers of its item size."""
    if x.dtype == bool:
        return x.reshape(-1).astype(jnp.uint8)
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").reshape(-1)


def _from_words(words: jax.Array, kind: jax.Array) -> jax.Array:
    """The inverse of `_words`."""
    bits = words.astype(bool) if kind.dtype == bool else lax.bitcast_convert_type(words, kind.dtype)
    return bits.reshape(kind.shape)


class MessageNotes:
    """Notes by which a process sees the messages that its programs exchange.

    A note is i32[3]: the number of its call, the watching thread's last look that found it, and a number of the data.
    """

    def __init__(self, comm: MpiComm) -> None:
        """Have the watching thread look at notes, if MPI can keep them."""
        self._comm, self._notes, self._looks = comm, dict[int, Note](), 0
        self.can_be_left = comm.processes.roll.may_watch and self._try()
        if self.can_be_left:
            comm.processes.roll.notes = self.found

    def _try(self) -> bool:
        message, me, notes = np.zeros(3, np.int32), self._comm.rank, self._comm.notes
        request = notes.Isend(message, me)
        is_copied = wait(request.Test, KEPT_S)
        notes.Recv(message, me)
        request.Wait()
        return is_copied

    @contextmanager
    def left(self, note: Note, message: jax.Array) -> Iterator[None]:
        """Put a note around the MPI calls that the block traces."""
        import mpi4jax

        self._notes[note.number] = note
        comm, tag = self._comm.notes, note.number % self._comm.processes.tags
        # XLA runs what needs nothing first. A note without data would say of the computation before that it waits.
        left = jnp.stack([jnp.int32(note.number), jnp.int32(0), message[-1].astype(jnp.int32)])
        mpi4jax.send(left, self._comm.rank, tag=tag, comm=comm)
        yield
        mpi4jax.recv(left, self._comm.rank, tag=tag, comm=comm)

    def found(self) -> list[Note]:
        """The present notes, which go back with the number of this look."""
        me, notes, misses = self._comm.rank, self._comm.notes, 0
        self._looks += 1
        found: list[Note] = []
        while misses < PROBES:
            if (message := notes.Improbe(me)) is None:
                misses += 1
                continue
            message.Recv(note := np.zeros(3, np.int32))
            number, look, _ = note.tolist()
            note[1] = self._looks
            notes.Send(note, me, number % self._comm.processes.tags)  # at once: the program may be waiting for it
            if look == self._looks:
                break
            found.append(self._notes[number]._replace(is_known=look > 0))
        return found


_making = threading.Lock()
_notes_by_comm: dict[MpiComm, MessageNotes] = {}


def notes_of(comm: MpiComm) -> MessageNotes:
    """The notes of this communicator, made at the first use."""
    with _making:
        if comm not in _notes_by_comm:
            _notes_by_comm[comm] = MessageNotes(comm)
        return _notes_by_comm[comm]
