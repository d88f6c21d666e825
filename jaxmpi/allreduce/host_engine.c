/* Sums between processes: schedules, carried out with many parts of a vector under way at once.

   `schedules.py` makes the steps, and `host_engine.py` says what they are for. A part goes on whenever all its messages have come:
   it adds, begins its next messages, and so on to its end. A thread's sums are its own, so nothing here is locked. */

#define _POSIX_C_SOURCE 200809L /* clock_gettime, nanosleep */

#include <sched.h>
#include <time.h>

#include "c_handlers.h"
#include "compiled_wires.h"

enum step { STEPS };
enum { FLOATS = 1024 };

struct setup {
  int (*isend)(const void *, int, handle, int, int, handle, handle *);
  int (*irecv)(void *, int, handle, int, int, handle, handle *);
  int (*testsome)(int, handle *, int *, int *, void *);
  int64_t status_bytes, error_at, in_status; /* of MPI_Status, of its MPI_ERROR; the code that says to look there */
  void (*failed)(int32_t number, int32_t code);  /* of a program's record; it ends the job */
  void (*waits)(int32_t number, double seconds); /* likewise, if it was too long */
  handle byte;
};

struct pace { /* of looks that find nothing: first some that yield, then pauses. Python changes it at any time. */
  _Atomic int32_t is_woken, yields, pause_us;
};

struct record {
  const int64_t *steps, *parts; /* words of all steps; where each part begins */
  int64_t count, scratch_bytes, floats, digest; /* of parts; of one part's memory; of the vector; of what is summed */
  handle comm;
};

struct part {
  struct sum *sum; /* NULL: nothing is under way here */
  const int64_t *at;
  char *scratch;
  int32_t tag, awaited; /* messages */
};

struct scratch { /* of all parts under way */
  _Alignas(LINE_BYTES) int64_t size;
  _Alignas(LINE_BYTES) char bytes[];
};

struct sum {
  struct sum *next;
  const struct record *record;
  char *x;
  struct scratch *scratch;
  int64_t begun, ended; /* parts */
  int64_t first_tag, tags;
  struct part under_way[WINDOW];
};

static struct setup mpi;
static const struct record *records[MOST_RECORDS]; /* of programs */
static _Thread_local struct sum *sums;
static struct scratch *_Atomic idle; /* of a sum that has ended: fresh memory costs page faults */
static _Thread_local int awaited, room; /* messages of all sums, and for how many there is room */
static _Thread_local handle *requests;
static _Thread_local struct part **owners; /* of requests */
static _Thread_local int *complete;        /* indices */
static _Thread_local status *statuses;

int jaxmpi_sum_setup_bytes(void) { return sizeof(struct setup); }
int jaxmpi_sum_record_bytes(void) { return sizeof(struct record); }
void jaxmpi_sum_setup(const struct setup *given) { mpi = *given; }
void jaxmpi_sum_record(int32_t number, const struct record *record) { records[number] = record; }

/* Return NULL if there is no memory. */
struct sum *jaxmpi_sum_begin(const struct record *record, float *x, int64_t first_tag, int64_t tags) {
  int64_t size = (record->count < WINDOW ? record->count : WINDOW) * record->scratch_bytes;
  struct sum *made = calloc(1, sizeof *made), **end = &sums;
  struct scratch *scratch = atomic_exchange(&idle, NULL);
  if (!scratch || scratch->size < size) {
    free(scratch);
    if ((scratch = aligned_alloc(LINE_BYTES, sizeof *scratch + size))) scratch->size = size;
  }
  if (!made || !scratch) {
    free(made);
    free(scratch);
    return NULL;
  }
  made->record = record;
  made->x = (char *)x;
  made->scratch = scratch;
  made->first_tag = first_tag;
  made->tags = tags;
  while (*end) end = &(*end)->next;
  return *end = made;
}

/* Return 1, and forget it, if a sum is there. */
int jaxmpi_sum_ended(struct sum *sum) {
  if (sum->ended < sum->record->count) return 0;
  struct sum **at = &sums;
  while (*at != sum) at = &(*at)->next;
  *at = sum->next;
  free(atomic_exchange(&idle, sum->scratch));
  free(sum);
  return 1;
}

/* ---------------------------------------------------------------- steps */

static char *place(const struct part *part, int64_t where) {
  return (where & 1 ? part->scratch : part->sum->x) + (where >> 1);
}

static int grow(void **array, size_t bytes) {
  void *grown = realloc(*array, bytes);
  if (grown) *array = grown;
  return !grown;
}

/* Make room for one more message; return NO_MEMORY, or 0. */
static int reserve(void) {
  int more = 2 * room + 64;
  if (awaited < room) return 0;
  if (grow((void **)&requests, more * sizeof *requests) || grow((void **)&owners, more * sizeof *owners) ||
      grow((void **)&complete, more * sizeof *complete) || grow((void **)&statuses, more * sizeof *statuses))
    return NO_MEMORY;
  room = more;
  return 0;
}

static handle *next_request(struct part *part) {
  owners[awaited] = part;
  part->awaited++;
  return &requests[awaited++];
}

/* ADD, where to, floats, whether 0 comes first, summands, where each is: one after another, as NumPy adds. */
static const int64_t *add(const struct part *part, const int64_t *at) {
  float block[FLOATS], *to = (float *)place(part, at[1]);
  int64_t floats = at[2], summands = at[4];
  for (int64_t from = 0; from < floats; from += FLOATS) {
    int64_t width = floats - from < FLOATS ? floats - from : FLOATS;
    const float *x = (const float *)place(part, at[5]) + from;
    for (int64_t i = 0; i < width; i++) block[i] = at[3] ? 0.0f + x[i] : x[i];
    for (int64_t k = 1; k < summands; k++) {
      x = (const float *)place(part, at[5 + k]) + from;
      for (int64_t i = 0; i < width; i++) block[i] += x[i];
    }
    memcpy(to + from, block, width * sizeof(float));
  }
  return at + 5 + summands;
}

/* Go on to the next messages, or the end; return MPI's error, or 0. */
static int resume(struct part *part) {
  for (;;) {
    const int64_t *at = part->at;
    handle comm = part->sum->record->comm;
    int code = reserve();
    if (code) return code;
    switch (at[0]) {
      case SEND: /* to whom, where, bytes */
        code = mpi.isend(place(part, at[2]), (int)at[3], mpi.byte, (int)at[1], part->tag, comm, next_request(part));
        part->at += 4;
        break;
      case RECEIVE: /* from whom, where, bytes */
        code = mpi.irecv(place(part, at[2]), (int)at[3], mpi.byte, (int)at[1], part->tag, comm, next_request(part));
        part->at += 4;
        break;
      case WAIT:
        part->at += 1;
        if (part->awaited) return 0;
        break;
      case ADD:
        part->at = add(part, at);
        break;
      case ENCODE: /* wire, where to, from where, floats */
        encode(at[1], place(part, at[2]), (const float *)place(part, at[3]), at[4]);
        part->at += 5;
        break;
      case DECODE: /* likewise */
        decode(at[1], (float *)place(part, at[2]), place(part, at[3]), at[4]);
        part->at += 5;
        break;
      default:
        part->sum->ended++;
        part->sum = NULL;
        return 0;
    }
    if (code) return code;
  }
}

static int begin_parts(struct sum *sum) {
  int code = 0;
  for (int i = 0; !code && i < WINDOW && sum->begun < sum->record->count; i++) {
    struct part *part = &sum->under_way[i];
    while (!code && !part->sum && sum->begun < sum->record->count) {
      part->sum = sum;
      part->scratch = sum->scratch->bytes + i * sum->record->scratch_bytes;
      part->tag = (int32_t)((sum->first_tag + sum->begun) % sum->tags);
      part->at = sum->record->steps + sum->record->parts[sum->begun++];
      code = resume(part);
    }
  }
  return code;
}

/* The error of one of the messages that have come. */
static int error_of_one(int found) {
  for (int i = 0; i < found && i < awaited; i++) {
    int code;
    memcpy(&code, (char *)statuses + i * mpi.status_bytes + mpi.error_at, sizeof code);
    if (code) return code;
  }
  return (int)mpi.in_status;
}

/* Look once at all messages; go on with the parts whose messages have all come. */
static int look(int32_t *has_moved) {
  int found = 0, code = 0, kept = 0, many = 0;
  if (awaited) code = mpi.testsome(awaited, requests, &found, complete, statuses);
  if (code) return code == mpi.in_status ? error_of_one(found) : code;
  if (found <= 0) return 0;
  *has_moved = 1;
  struct part **ready = malloc(found * sizeof *ready);
  if (!ready) return NO_MEMORY;
  for (int i = 0; i < found; i++) {
    struct part **owner = &owners[complete[i]];
    if (!--(*owner)->awaited) ready[many++] = *owner;
    *owner = NULL;
  }
  for (int i = 0; i < awaited; i++)
    if (owners[i]) {
      owners[kept] = owners[i];
      requests[kept++] = requests[i];
    }
  awaited = kept;
  for (int i = 0; !code && i < many; i++) code = resume(ready[i]);
  free(ready);
  return code;
}

static int64_t now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Carry sums on for `most_us`, or until one has ended or `is_woken`. Return MPI's error, or 0. */
int jaxmpi_sums_go_on(int32_t most_us, const struct pace *pace, int32_t *has_moved) {
  int64_t end_us = now_us() + most_us;
  *has_moved = 0;
  for (int idle = 0;; idle++) {
    int32_t moved = 0;
    int code = 0;
    for (struct sum *sum = sums; !code && sum; sum = sum->next) code = begin_parts(sum);
    if (!code) code = look(&moved);
    if (code) return code;
    *has_moved |= moved;
    for (struct sum *sum = sums; sum; sum = sum->next)
      if (sum->ended == sum->record->count) return 0;
    if (pace->is_woken || now_us() >= end_us) return 0;
    if (moved) {
      idle = -1;
    } else if (idle < pace->yields) {
      sched_yield();
    } else {
      nanosleep(&(struct timespec){.tv_nsec = 1000 * pace->pause_us}, NULL);
    }
  }
}

/* ---------------------------------------------------------------- in a program */

/* Parts that have not ended. */
static int64_t parts_left(void) {
  int64_t left = 0;
  for (const struct sum *sum = sums; sum; sum = sum->next) left += sum->record->count - sum->ended;
  return left;
}

/* Sum all operands in place. Words: how many, how many tags there are, each one's record, each one's digest. */
XLA_FFI_Error *jaxmpi_host_engine(XLA_FFI_CallFrame *frame) {
  static const struct pace pace = {.yields = YIELDS, .pause_us = PAUSE_US};
  if (!is_work(frame)) return NULL;
  const int32_t *words = words_of(frame), *numbers = words + 2;
  for (int i = 0; i < words[0]; i++) {
    const struct record *record = records[numbers[i]];
    int is_same = record && record->floats == numbers_in(frame->args.args[i]);
    if (!is_same || record->digest != numbers[words[0] + i])
      return error(frame, "jaxmpi: a program of another process; compile it in this one");
  }
  int code = 0, i = 0;
  int64_t tag = 0;
  double waited_s = 0;
  while (!code && (sums || i < words[0])) {
    for (; !code && i < words[0] && parts_left() < WINDOW; i++) {
      const struct record *record = records[numbers[i]];
      const XLA_FFI_Buffer *x = frame->args.args[i], *y = frame->rets.rets[i];
      if (x->data != y->data) memcpy(y->data, x->data, record->floats * sizeof(float));
      if (!jaxmpi_sum_begin(record, y->data, tag, words[1])) code = NO_MEMORY;
      tag += record->count;
    }
    int32_t has_moved = 0;
    if (!code) code = jaxmpi_sums_go_on(1000000, &pace, &has_moved);
    if (code) break;
    waited_s = has_moved ? 0 : waited_s + 1;
    if (waited_s) mpi.waits(numbers[0], waited_s);
    for (struct sum *sum = sums, *next; sum; sum = next) {
      next = sum->next;
      jaxmpi_sum_ended(sum);
    }
  }
  if (!code) return NULL;
  mpi.failed(numbers[0], code);
  return error(frame, "jaxmpi: the job ends"); /* no program goes on with what it may have got */
}
