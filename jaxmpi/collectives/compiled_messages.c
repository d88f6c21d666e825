/* Messages between two ranks, each behind its header, as a handler that XLA calls.

   `messages.py` says what a header is for, and has the same messages in Python: the other end may be either. MPI waits
   here without a limit, so a call leaves a note while it waits. The thread that names absent ranks reads notes, and has
   the limit. Nothing here needs Python unless a header is not the expected one, or MPI fails. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

typedef HANDLE handle; /* of MPI: an int in MPICH, a pointer in Open MPI and in MPI's own binary interface */

enum { HEADER_BYTES = 256, TYPE_BYTES = 80, INLINE_BYTES = 32768, STATUS_BYTES = 256 };
enum { SENDER_AT = 0, NUMBER_AT = 16, TYPE_AT = 24 }; /* of a header; its number is INLINE if the array is behind it */
enum { INLINE = -1, LOOKED_AT = 4, MOST_CALLS = 1 << 20, NOTES = 64 };

struct call {
  int (*isend)(const void *, int, handle, int, int, handle, handle *);
  int (*issend)(const void *, int, handle, int, int, handle, handle *);
  int (*irecv)(void *, int, handle, int, int, handle, handle *);
  int (*wait)(handle *, void *);
  int (*test)(handle *, int *, void *);
  void (*unexpected)(int32_t call, const char *header);
  void (*failed)(int32_t call, int32_t code);
  handle headers, arrays, byte; /* two communicators, and MPI_BYTE */
  int32_t number, sends, receives, source, dest, sendtag, recvtag;
  int32_t is_synchronous; /* its sender knows when a header was received */
  int32_t inline_bytes, most_ahead, tags; /* arrays in the header's message; such messages that nobody has received */
  char header[HEADER_BYTES], type[TYPE_BYTES]; /* that it sends; of the header that it expects */
};

static struct call *calls[MOST_CALLS];

void jaxmpi_open_message(const struct call *call) {
  struct call *made = malloc(sizeof *made);
  *made = *call;
  calls[call->number] = made;
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
  return NULL; /* so many threads wait already */
}

void jaxmpi_message_notes(int64_t *found) {
  for (int i = 0; i < NOTES; i++) found[i] = notes[i];
}

/* ---------------------------------------------------------------- headers that nobody has received yet */

struct sent {
  struct sent *next;
  const struct call *call;
  handle request;
  char bytes[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list */
static struct sent *first, **last = &first;
static int ahead; /* its length */

static void keep(struct sent *sent) {
  sent->next = NULL;
  *last = sent;
  last = &sent->next;
  ahead++;
}

static int is_done(struct sent *sent) {
  int flag = 0;
  int64_t status[STATUS_BYTES / 8];
  return !sent->call->test(&sent->request, &flag, status) && flag;
}

/* Forget those of the first `most` that are received; the others go to the end. */
static void look_at(int most) {
  for (int i = most < ahead ? most : ahead; i > 0; i--) {
    struct sent *sent = first;
    if (!(first = sent->next)) last = &first;
    ahead--;
    if (is_done(sent)) free(sent);
    else keep(sent);
  }
}

/* The calls, by their numbers, of at most so many headers that nobody has received; return how many. */
int jaxmpi_unreceived(int32_t *numbers, int most) {
  int found = 0;
  pthread_mutex_lock(&lock);
  look_at(ahead);
  for (struct sent *sent = first; sent && found < most; sent = sent->next) numbers[found++] = sent->call->number;
  pthread_mutex_unlock(&lock);
  return found;
}

/* ---------------------------------------------------------------- a call */

static _Atomic uint32_t numbered; /* arrays behind their headers; Python's numbers are even, these are odd */

static int64_t next_number(const struct call *call) {
  return (2 * (int64_t)numbered++ + 1) % (call->tags & ~1);
}

/* Send header and array. An array that travels behind its header is free after `array`. */
static int send(const struct call *call, const void *x, int64_t n, handle *array, int *has_array) {
  pthread_mutex_lock(&lock);
  look_at(LOOKED_AT);
  int is_inline = n <= call->inline_bytes && ahead < call->most_ahead;
  pthread_mutex_unlock(&lock);
  int64_t number = is_inline ? INLINE : next_number(call);
  int behind = is_inline ? (int)n : 0;
  struct sent *sent = malloc(sizeof *sent + HEADER_BYTES + behind);
  sent->call = call;
  memcpy(sent->bytes, call->header, HEADER_BYTES);
  memcpy(sent->bytes + NUMBER_AT, &number, sizeof number);
  if (behind) memcpy(sent->bytes + HEADER_BYTES, x, behind);
  int (*start)(const void *, int, handle, int, int, handle, handle *) = call->is_synchronous ? call->issend : call->isend;
  int code =
      start(sent->bytes, HEADER_BYTES + behind, call->byte, call->dest, call->sendtag, call->headers, &sent->request);
  if (code) return code;
  if (!call->is_synchronous && is_done(sent)) {
    free(sent);
  } else {
    pthread_mutex_lock(&lock);
    keep(sent);
    pthread_mutex_unlock(&lock);
  }
  *has_array = !is_inline;
  return is_inline ? 0 : call->isend(x, (int)n, call->byte, call->dest, (int)number, call->arrays, array);
}

/* Take the array of a header that has come. */
static int unpack(const struct call *call, const char *message, void *y, int64_t n, _Atomic int64_t *note) {
  if (memcmp(message + TYPE_AT, call->type, TYPE_BYTES)) {
    if (note) *note = 0; /* it no longer waits: the thread that looks for absent ranks must not speak first */
    call->unexpected(call->number, message); /* it ends the job */
    return 0;
  }
  int64_t number, sender, status[STATUS_BYTES / 8];
  memcpy(&number, message + NUMBER_AT, sizeof number);
  memcpy(&sender, message + SENDER_AT, sizeof sender);
  if (number == INLINE) {
    if (n) memcpy(y, message + HEADER_BYTES, n);
    return 0;
  }
  handle array;
  int code = call->irecv(y, (int)n, call->byte, (int)sender, (int)number, call->arrays, &array);
  return code ? code : call->wait(&array, status);
}

static int exchange(const struct call *call, const void *x, int64_t sent_bytes, void *y, int64_t received_bytes,
                    _Atomic int64_t *note) {
  static _Thread_local char message[HEADER_BYTES + INLINE_BYTES];
  handle header, array;
  int64_t status[STATUS_BYTES / 8];
  int code = 0, has_array = 0;
  if (call->receives)
    code = call->irecv(message, sizeof message, call->byte, call->source, call->recvtag, call->headers, &header);
  if (!code && call->sends) code = send(call, x, sent_bytes, &array, &has_array);
  if (!code && call->receives) code = call->wait(&header, status);
  if (!code && call->receives) code = unpack(call, message, y, received_bytes, note);
  if (!code && has_array) code = call->wait(&array, status);
  return code;
}

static int64_t bytes_of(const XLA_FFI_Buffer *x, int64_t item_bytes) {
  int64_t bytes = item_bytes;
  for (int64_t i = 0; i < x->rank; i++) bytes *= x->dims[i];
  return bytes;
}

XLA_FFI_Error *jaxmpi_compiled_messages(XLA_FFI_CallFrame *frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return NULL;
  }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  const int32_t *words = ((XLA_FFI_Array *)frame->attrs.attrs[0])->data; /* number, bytes of an item sent, received */
  const struct call *call = calls[words[0]];
  const XLA_FFI_Buffer *x = call->sends ? frame->args.args[0] : NULL, *y = call->receives ? frame->rets.rets[0] : NULL;
  _Atomic int64_t *note = leave_note(call->number);
  int code = exchange(call, x ? x->data : NULL, x ? bytes_of(x, words[1]) : 0, y ? y->data : NULL,
                      y ? bytes_of(y, words[2]) : 0, note);
  if (note) *note = 0;
  if (code) call->failed(call->number, code); /* it ends the job */
  return NULL;
}
