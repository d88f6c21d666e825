/* Messages between two ranks, each behind its header: a handler that XLA calls, and for Python the same by ctypes.

   `messages.py` says what a header is for. `begin` starts what a call sends and receives, and `advance`
   finishes it in four stages. XLA's handler waits in each (MPI's own wait is faster than to look again and again); Python
   polls, for programs on GPUs and for started messages. MPI waits without a limit, so a call leaves a note
   meanwhile: the thread that names absent ranks reads notes, and has the limit. Nothing here needs Python unless a header
   is not the expected one, or MPI fails. */

#include "c_handlers.h"

enum { UNEXPECTED = -1, PENDING = -2 };                   /* besides MPI's errors, which are above 0 */

static struct {
  int (*isend)(const void *, int, handle, int, int, handle, handle *);
  int (*irecv)(void *, int, handle, int, int, handle, handle *);
  int (*wait)(handle *, void *);
  int (*test)(handle *, int *, void *);
  int (*set_elements)(void *, handle, int);
  void (*unexpected)(int32_t call, const char *header); /* it ends the job */
  void (*failed)(int32_t call, int32_t code);           /* likewise */
} mpi; /* of the process, in this order */

static handle byte; /* MPI_BYTE */

void jaxmpi_set_up(const void *functions, handle mpi_byte) {
  memcpy(&mpi, functions, sizeof mpi);
  byte = mpi_byte;
}

struct call {
  int32_t sends, receives, sent_bytes, received_bytes, source, dest, sendtag, recvtag;
  int32_t most_inline_bytes, tags; /* of arrays in their header's message */
  handle headers, arrays;          /* two communicators */
  void *status;                    /* MPI's, to fill; or NULL */
  char header[HEADER_BYTES], type[TYPE_BYTES]; /* that it sends; of the header that it expects */
  int32_t number;
};

enum { NUMBERS = 10 }; /* first in a call, as Python gives them */

static struct call *calls[MOST_CALLS];
static _Atomic int32_t opened;

/* The call's number, or -1 if there is no room. */
int32_t jaxmpi_open_message(const int32_t *numbers, handle headers, handle arrays, void *status, const char *header,
                            const char *type) {
  int32_t number = opened++;
  if (number >= MOST_CALLS) return opened--, -1;
  struct call *call = calloc(1, sizeof *call);
  memcpy(call, numbers, NUMBERS * sizeof *numbers);
  call->headers = headers;
  call->arrays = arrays;
  call->status = status;
  memcpy(call->header, header, HEADER_BYTES);
  memcpy(call->type, type, TYPE_BYTES);
  call->number = number;
  calls[number] = call;
  return number;
}

void jaxmpi_close_message(int32_t number) {
  free(calls[number]);
  calls[number] = NULL;
}

/* ---------------------------------------------------------------- notes */

static _Atomic int64_t notes[NOTES]; /* a count << 32 | the call's number, or 0 */
static _Atomic uint32_t noted;

static _Atomic int64_t *leave_note(int32_t number) {
  int64_t note = (int64_t)(++noted & INT32_MAX) << 32 | (uint32_t)number;
  for (int i = 0; i < NOTES; i++) {
    int64_t nothing = 0;
    if (atomic_compare_exchange_strong(&notes[i], &nothing, note)) return &notes[i];
  }
  return NULL; /* so many calls wait already */
}

void jaxmpi_message_notes(int64_t *found) {
  for (int i = 0; i < NOTES; i++) found[i] = notes[i];
}

/* ---------------------------------------------------------------- an exchange */

enum stage { HEADER, ARRAY, SENT_HEADER, SENT_ARRAY, DONE };

struct exchange {
  struct call *call;
  _Atomic int64_t *note;
  enum stage stage;
  int is_blocking;
  handle header;
  handle sent_header;
  char *sent_message; /* a header, and the array if it is short */
  handle array, sent_array; /* behind their headers, if they are */
  int has_array, has_sent_array;
  void *y;
  char *message; /* likewise, that comes */
};

static _Atomic uint32_t numbered; /* arrays behind their headers, by which the receiver finds them */

/* A short message is copied by MPI, so that its sender need not wait. */
static int start_send(struct exchange *e, void *x) {
  struct call *call = e->call;
  int n = call->sent_bytes, is_inline = n <= call->most_inline_bytes, behind = is_inline ? n : 0;
  int32_t number = is_inline ? INLINE : (int32_t)(numbered++ % (uint32_t)call->tags);
  e->sent_message = malloc(HEADER_BYTES + behind);
  memcpy(e->sent_message, call->header, HEADER_BYTES);
  memcpy(e->sent_message + NUMBER_AT, &number, sizeof number);
  if (behind) memcpy(e->sent_message + HEADER_BYTES, x, behind);
  int code = mpi.isend(e->sent_message, HEADER_BYTES + behind, byte, call->dest, call->sendtag, call->headers,
                       &e->sent_header);
  e->has_sent_array = !is_inline;
  return code || is_inline ? code : mpi.isend(x, n, byte, call->dest, number, call->arrays, &e->sent_array);
}

static int begin(struct exchange *e, void *x) {
  struct call *call = e->call;
  int code = 0;
  e->note = leave_note(call->number);
  if (call->receives)
    code = mpi.irecv(e->message, HEADER_BYTES + INLINE_BYTES, byte, call->source, call->recvtag, call->headers,
                       &e->header);
  return !code && call->sends ? start_send(e, x) : code;
}

/* 0 once a request is complete. */
static int complete(const struct exchange *e, handle *request, void *status) {
  if (e->is_blocking) return mpi.wait(request, status);
  int flag = 0, code = mpi.test(request, &flag, status);
  return code || flag ? code : PENDING;
}

/* Take the array of a header that has come, or start to receive it. */
static int unpack(struct exchange *e) {
  struct call *call = e->call;
  int64_t size;
  int32_t number, sender;
  memcpy(&size, e->message + SIZE_AT, sizeof size);
  if (size != call->received_bytes || memcmp(e->message + TYPE_AT, call->type, TYPE_BYTES)) return UNEXPECTED;
  memcpy(&number, e->message + NUMBER_AT, sizeof number);
  memcpy(&sender, e->message + SENDER_AT, sizeof sender);
  int code = call->status ? mpi.set_elements(call->status, byte, (int)size) : 0;
  e->has_array = number != INLINE;
  if (!code && e->has_array) return mpi.irecv(e->y, (int)size, byte, sender, number, call->arrays, &e->array);
  if (!code && size) memcpy(e->y, e->message + HEADER_BYTES, size);
  return code;
}

/* Go on as far as messages have come; 0 at the end. An error ends the job. */
static int advance(struct exchange *e) {
  struct call *call = e->call;
  status ignored;
  int code = 0;
  while (!code && e->stage != DONE) {
    if (e->stage == HEADER && call->receives) {
      code = complete(e, &e->header, call->status ? call->status : ignored);
      if (!code) code = unpack(e);
    } else if (e->stage == ARRAY && e->has_array) {
      code = complete(e, &e->array, ignored);
    } else if (e->stage == SENT_HEADER && e->sent_message) {
      code = complete(e, &e->sent_header, ignored);
      if (!code) free(e->sent_message);
    } else if (e->stage == SENT_ARRAY && e->has_sent_array) {
      code = complete(e, &e->sent_array, ignored);
    }
    if (!code) e->stage++;
  }
  if (code == PENDING) return code;
  if (e->note) *e->note = 0; /* also before an error: the thread that looks for absent ranks must not speak first */
  if (code == UNEXPECTED) mpi.unexpected(call->number, e->message);
  if (code > 0) mpi.failed(call->number, code);
  return code;
}

XLA_FFI_Error *jaxmpi_messages(XLA_FFI_CallFrame *frame) {
  static _Thread_local char message[HEADER_BYTES + INLINE_BYTES];
  if (!is_work(frame)) return NULL;
  struct call *call = calls[words_of(frame)[0]];
  if (!call) return error(frame, "jaxmpi: a program of another process, or of a communicator that was freed; compile it for this one");
  const XLA_FFI_Buffer *x = call->sends ? frame->args.args[0] : NULL, *y = call->receives ? frame->rets.rets[0] : NULL;
  struct exchange e = {.call = call, .is_blocking = 1, .message = message, .y = y ? y->data : NULL};
  int code = begin(&e, x ? x->data : NULL);
  if (code) mpi.failed(call->number, code);
  if (!code) code = advance(&e);
  return code ? error(frame, "jaxmpi: the job ends") : NULL; /* no program goes on with what it may have got */
}

/* ---------------------------------------------------------------- for Python */

struct exchange *jaxmpi_begin(int32_t number, void *x, void *y) {
  struct exchange *e = calloc(1, sizeof *e + HEADER_BYTES + INLINE_BYTES);
  e->call = calls[number];
  e->y = y;
  e->message = (char *)(e + 1);
  int code = begin(e, x);
  if (code) mpi.failed(number, code);
  return e;
}

/* Whether it has ended, and is freed. */
int jaxmpi_advance(struct exchange *e) {
  int code = advance(e);
  if (!code) free(e);
  return !code;
}
