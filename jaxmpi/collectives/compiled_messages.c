/* Messages between two ranks, each behind its header, as a handler that XLA calls.

   `messages.py` says what a header is for, and has the same messages in Python: the other end may be either. MPI waits
   here without a limit, so a call leaves a note while it waits. The thread that names absent ranks reads notes, and has
   the limit. Nothing here needs Python unless a header is not the expected one, or MPI fails. */

#include "c_handlers.h"

enum { LOOKED_AT = 4, HEARD_EVERY = 16 };
enum word { CALL, SENT_ITEM_BYTES, RECEIVED_ITEM_BYTES }; /* of a call's attribute */

struct call {
  int (*isend)(const void *, int, handle, int, int, handle, handle *);
  int (*issend)(const void *, int, handle, int, int, handle, handle *);
  int (*irecv)(void *, int, handle, int, int, handle, handle *);
  int (*wait)(handle *, void *);
  int (*test)(handle *, int *, void *);
  void (*unexpected)(int32_t call, const char *header); /* it ends the job */
  void (*failed)(int32_t call, int32_t code);           /* likewise */
  handle headers, arrays, byte; /* two communicators, and MPI_BYTE */
  int32_t number, sends, receives, source, dest, sendtag, recvtag;
  int32_t is_synchronous;     /* its sender knows when headers are received: of short messages every HEARD_EVERYth */
  _Atomic uint32_t has_sent; /* short messages */
  int32_t most_inline_bytes, most_ahead, tags; /* arrays in the header's message; such messages that nobody has received */
  char header[HEADER_BYTES], type[TYPE_BYTES]; /* that it sends; of the header that it expects */
};

static struct call *calls[MOST_CALLS];

int jaxmpi_call_bytes(void) { return sizeof(struct call); }

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

/* Forget those of the first `most` that are received; the others go to the end. */
static void look_at(int most) {
  for (int i = most < ahead ? most : ahead; i > 0; i--) {
    struct sent *sent = first;
    if (!(first = sent->next)) last = &first;
    ahead--;
    int flag = 0;
    status ignored;
    if (!sent->call->test(&sent->request, &flag, ignored) && flag) {
      free(sent);
    } else {
      keep(sent);
    }
  }
}

/* The number of a call, that of `call` if it is among them, whose header nobody has received; -1 if there is none. */
int jaxmpi_unreceived(int32_t call) {
  pthread_mutex_lock(&lock);
  look_at(ahead);
  int found = first ? first->call->number : -1;
  for (struct sent *sent = first; sent; sent = sent->next)
    if (sent->call->number == call) found = call;
  pthread_mutex_unlock(&lock);
  return found;
}

/* ---------------------------------------------------------------- a call */

static _Atomic uint32_t numbered; /* arrays behind their headers; Python's numbers are even, these are odd */

static int32_t next_number(const struct call *call) {
  return (int32_t)((2 * (int64_t)numbered++ + 1) % (call->tags & ~1));
}

/* What a call has begun and must wait for. */
struct begun {
  struct sent *header; /* of a sendrecv, which MPI sends as it likes */
  handle array;        /* behind a header */
  int has_array;
};

static int send(struct call *call, const void *x, int64_t n, struct begun *begun) {
  /* MPI copies a short message, so it needs no memory here. To hear of each costs a tenth; to hear of some bounds how
     many nobody has received. */
  int is_short = HEADER_BYTES + n <= EAGER_BYTES, hears = call->is_synchronous, is_inline = 1;
  if (hears && is_short) hears = call->has_sent++ % HEARD_EVERY == 0;
  if (hears || !is_short) {
    pthread_mutex_lock(&lock);
    look_at(LOOKED_AT);
    is_inline = n <= call->most_inline_bytes && ahead < call->most_ahead;
    pthread_mutex_unlock(&lock);
  }
  int32_t number = is_inline ? INLINE : next_number(call);
  int behind = is_inline ? (int)n : 0;
  struct sent *sent = malloc(sizeof *sent + HEADER_BYTES + behind);
  sent->call = call;
  memcpy(sent->bytes, call->header, HEADER_BYTES);
  memcpy(sent->bytes + NUMBER_AT, &number, sizeof number);
  if (behind) memcpy(sent->bytes + HEADER_BYTES, x, behind);
  int (*start)(const void *, int, handle, int, int, handle, handle *) = hears ? call->issend : call->isend;
  int code =
      start(sent->bytes, HEADER_BYTES + behind, call->byte, call->dest, call->sendtag, call->headers, &sent->request);
  if (code) return code;
  if (hears) {
    pthread_mutex_lock(&lock);
    keep(sent);
    pthread_mutex_unlock(&lock);
  } else {
    begun->header = sent;
  }
  begun->has_array = !is_inline;
  return is_inline ? 0 : call->isend(x, (int)n, call->byte, call->dest, number, call->arrays, &begun->array);
}

/* Take the array of a header that has come; return MPI's error, or 0; -1 if it announces another array. */
static int unpack(const struct call *call, const char *message, void *y, int64_t n) {
  int64_t size;
  int32_t number, sender;
  memcpy(&size, message + SIZE_AT, sizeof size);
  if (size != n || memcmp(message + TYPE_AT, call->type, TYPE_BYTES)) return -1;
  memcpy(&number, message + NUMBER_AT, sizeof number);
  memcpy(&sender, message + SENDER_AT, sizeof sender);
  if (number == INLINE) {
    if (n) memcpy(y, message + HEADER_BYTES, n);
    return 0;
  }
  handle array;
  status ignored;
  int code = call->irecv(y, (int)n, call->byte, sender, number, call->arrays, &array);
  return code ? code : call->wait(&array, ignored);
}

static int exchange(struct call *call, const void *x, int64_t x_bytes, char *message, void *y, int64_t y_bytes) {
  struct begun begun = {0};
  handle header;
  status ignored;
  int code = 0;
  if (call->receives)
    code = call->irecv(message, HEADER_BYTES + INLINE_BYTES, call->byte, call->source, call->recvtag, call->headers,
                       &header);
  if (!code && call->sends) code = send(call, x, x_bytes, &begun);
  if (!code && call->receives) code = call->wait(&header, ignored);
  if (!code && call->receives) code = unpack(call, message, y, y_bytes);
  if (!code && begun.header) code = call->wait(&begun.header->request, ignored);
  if (!code) free(begun.header);
  if (!code && begun.has_array) code = call->wait(&begun.array, ignored);
  return code;
}

XLA_FFI_Error *jaxmpi_compiled_messages(XLA_FFI_CallFrame *frame) {
  static _Thread_local char message[HEADER_BYTES + INLINE_BYTES];
  if (!is_work(frame)) return NULL;
  const int32_t *words = words_of(frame);
  struct call *call = calls[words[CALL]];
  if (!call) return error(frame, "jaxmpi: a program of another process; compile it in this one");
  const XLA_FFI_Buffer *x = call->sends ? frame->args.args[0] : NULL, *y = call->receives ? frame->rets.rets[0] : NULL;
  _Atomic int64_t *note = leave_note(call->number);
  int code = exchange(call, x ? x->data : NULL, x ? numbers_in(x) * words[SENT_ITEM_BYTES] : 0, message,
                      y ? y->data : NULL, y ? numbers_in(y) * words[RECEIVED_ITEM_BYTES] : 0);
  if (note) *note = 0; /* also before an error: the thread that looks for absent ranks must not speak first */
  if (!code) return NULL;
  if (code < 0)
    call->unexpected(call->number, message);
  else
    call->failed(call->number, code);
  return error(frame, "jaxmpi: the job ends"); /* no program goes on with what it may have got */
}
