/* Sums between processes: schedules, carried out with many parts of a vector under way at once.

   `schedules.py` writes the steps, and `host_engine.py` says what they are for. A part goes on whenever all its messages
   have come: it adds, begins its next messages, and so on to its end. A thread's sums are its own, so no lock is needed.

   A program's call makes a plan's sums in the program's own thread, or three kinds of calls hand them to the communication
   thread, which runs `jaxmpi_beside_run`: OPEN begins an exchange, START hands over a bucket and returns at
   once, DONE waits until the bucket holds its sum. What these three and the thread share is locked. */

#define _POSIX_C_SOURCE 200809L /* clock_gettime, nanosleep */

#include <sched.h>
#include <time.h>

#include "c_handlers.h"
#include "compiled_wires.h"

enum step { STEPS };
enum memory { MEMORIES }; /* the lowest two bits of where a step reads and writes */
enum call { CALLS };
enum track { TRACKS };
enum { FLOATS = 1024, MOST_SPANS = 4096, PLAN_LISTS = 1024 };

struct setup {
  int (*isend)(const void *, int, handle, int, int, handle, handle *);
  int (*irecv)(void *, int, handle, int, int, handle, handle *);
  int (*testsome)(int, handle *, int *, int *, void *);
  int (*iallgather)(const void *, int, handle, void *, int, handle, handle, handle *);
  int64_t status_bytes, error_at, in_status; /* of MPI_Status, of its MPI_ERROR; the code that says to look there */
  void (*failed)(int32_t engine, int32_t code); /* it ends the job */
  void (*waits)(int32_t engine, int64_t key, int64_t index, double seconds); /* likewise, if it was too long */
  void (*learn)(const char *text, int64_t length); /* adds the plan of a program that another process has traced */
  void (*differs)(int64_t call);                   /* ranks have come to other exchanges; it ends the job */
  handle byte;
};

struct pace { /* of looks that find nothing: first some that yield, then pauses. Python changes it at any time. */
  _Atomic int32_t is_woken, yields, pause_us;
};

struct record { /* the schedule of one vector's sum on this rank */
  const int64_t *steps, *parts; /* words of all steps; where each part begins */
  int64_t count, window, scratch_bytes, floats; /* parts, and how many at once; one part's memory; of the vector */
};

struct plan { /* the sums of one call in a program */
  int64_t key, count, parts, tags; /* a digest of it; vectors, and their parts; how many tags MPI has */
  const struct record *const *records;
  _Atomic int32_t is_closed; /* its communicator was freed */
  int32_t engine;            /* number of the communicator's engine in this process */
  handle comm;
  struct plan *next;
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
  handle comm;
  char *from, *to; /* operand and result, which may be the same memory */
  struct scratch *scratch;
  int64_t begun, ended; /* parts */
  int64_t first_tag, tags;
  struct part under_way[WINDOW];
};

struct span { /* of time; `index` is of a plan's vector, or -1 for all */
  int64_t track, key, index, begin_ns, end_ns;
};

static struct setup mpi;
static struct plan *_Atomic plans[PLAN_LISTS]; /* by key */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of plans that are added, and of spans */
static struct span spans[MOST_SPANS];
static int64_t noted, taken; /* spans so far */
static struct span waiting; /* a program's wait that has not ended; of track NOTHING if there is none */
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
int jaxmpi_sum_plan_bytes(void) { return sizeof(struct plan); }

static struct plan *_Atomic *list_of(int64_t key) { return &plans[(uint64_t)key % PLAN_LISTS]; }

/* Let programs find a plan, which is never forgotten. */
void jaxmpi_sum_add_plan(struct plan *plan) {
  pthread_mutex_lock(&lock);
  plan->next = *list_of(plan->key);
  *list_of(plan->key) = plan;
  pthread_mutex_unlock(&lock);
}

static const struct plan *find_plan(int64_t key) {
  struct plan *plan = *list_of(key);
  while (plan && plan->key != key) plan = plan->next;
  return plan && !plan->is_closed ? plan : NULL;
}

/* Return NULL if there is no memory. */
struct sum *jaxmpi_sum_begin(const struct record *record, const struct plan *plan, float *from, float *to,
                             int64_t first_tag) {
  int64_t size = (record->count < record->window ? record->count : record->window) * record->scratch_bytes;
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
  made->comm = plan->comm;
  made->from = (char *)from;
  made->to = (char *)to;
  made->scratch = scratch;
  made->first_tag = first_tag;
  made->tags = plan->tags;
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
  int memory = where & 3;
  return (memory == SCRATCH ? part->scratch : memory == OPERAND ? part->sum->from : part->sum->to) + (where >> 2);
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

/* ADD, where to, floats, whether 0 comes first, summands, wire and place of each: one after another, as NumPy adds. They
   are decoded by blocks, which stay in the nearest cache. */
static const int64_t *add(const struct part *part, const int64_t *at) {
  float block[FLOATS], decoded[FLOATS], *to = (float *)place(part, at[1]);
  int64_t floats = at[2], summands = at[4];
  for (int64_t from = 0; from < floats; from += FLOATS) {
    int64_t width = floats - from < FLOATS ? floats - from : FLOATS;
    decode(at[5], block, place(part, at[6]), floats, from, width);
    for (int64_t i = 0; at[3] && i < width; i++) block[i] += 0.0f;
    for (int64_t k = 1; k < summands; k++) {
      const char *encoded = place(part, at[6 + 2 * k]);
      const float *x = (const float *)encoded + from;
      if (at[5 + 2 * k] != F32) {
        decode(at[5 + 2 * k], decoded, encoded, floats, from, width);
        x = decoded;
      }
      for (int64_t i = 0; i < width; i++) block[i] += x[i];
    }
    memcpy(to + from, block, width * sizeof(float));
  }
  return at + 5 + 2 * summands;
}

/* Go on to the next messages, or the end; return MPI's error, or 0. */
static int resume(struct part *part) {
  for (;;) {
    const int64_t *at = part->at;
    handle comm = part->sum->comm;
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
        decode(at[1], (float *)place(part, at[2]), place(part, at[3]), at[4], 0, at[4]);
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
  for (int i = 0; !code && i < sum->record->window && sum->begun < sum->record->count; i++) {
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

static int64_t now_ns(void) { /* Python's time.perf_counter_ns */
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Carry sums on for `most_us`, or until one has ended or `is_woken`. Return MPI's error, or 0. */
int jaxmpi_sums_go_on(int32_t most_us, const struct pace *pace, int32_t *has_moved) {
  int64_t end_ns = now_ns() + 1000 * (int64_t)most_us;
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
    if (pace->is_woken || now_ns() >= end_ns) return 0;
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

static void note_span(int64_t track, int64_t key, int64_t index, int64_t begin_ns) {
  pthread_mutex_lock(&lock);
  spans[noted++ % MOST_SPANS] = (struct span){track, key, index, begin_ns, now_ns()};
  if (noted - taken > MOST_SPANS) taken = noted - MOST_SPANS;
  if (track == WAIT_FOR_SUM) waiting.track = NOTHING;
  pthread_mutex_unlock(&lock);
}

/* Note that a program waits from now on; return the time. */
static int64_t begin_waiting(int64_t key, int64_t index) {
  pthread_mutex_lock(&lock);
  waiting = (struct span){WAIT_FOR_SUM, key, index, now_ns(), 0};
  pthread_mutex_unlock(&lock);
  return waiting.begin_ns;
}

/* Give the spans since the last call, MOST_SPANS at most, and the wait under way; return how many have ended. */
int jaxmpi_sum_spans(struct span *to, struct span *under_way) {
  pthread_mutex_lock(&lock);
  int count = (int)(noted - taken);
  for (int i = 0; i < count; i++) to[i] = spans[taken++ % MOST_SPANS];
  *under_way = waiting;
  pthread_mutex_unlock(&lock);
  return count;
}

/* Carry out a plan's sums in the thread that calls it. Return MPI's error, or 0. */
static int sum_all(const struct plan *plan, XLA_FFI_CallFrame *frame) {
  static const struct pace pace = {.yields = YIELDS, .pause_us = PAUSE_US};
  int code = 0, i = 0;
  int64_t tag = 0;
  double waited_s = 0;
  while (!code && (sums || i < plan->count)) {
    for (; !code && i < plan->count && parts_left() < plan->records[i]->window; i++) {
      const struct record *record = plan->records[i];
      const XLA_FFI_Buffer *x = frame->args.args[i], *y = frame->rets.rets[i];
      if (!jaxmpi_sum_begin(record, plan, x->data, y->data, tag)) code = NO_MEMORY;
      tag += record->count;
    }
    int32_t has_moved = 0;
    if (!code) code = jaxmpi_sums_go_on(1000000, &pace, &has_moved);
    if (code) break;
    waited_s = has_moved ? 0 : waited_s + 1;
    if (waited_s) mpi.waits(plan->engine, plan->key, -1, waited_s);
    for (struct sum *sum = sums, *next; sum; sum = next) {
      next = sum->next;
      jaxmpi_sum_ended(sum);
    }
  }
  return code;
}

/* ---------------------------------------------------------------- beside a program */

enum state { NOT_STARTED, STARTED, UNDER_WAY, SUMMED };

struct bucket {
  char *x; /* the thread's to change from START to DONE */
  struct sum *sum;
  int64_t begin_ns;
  enum state state;
};

struct exchange { /* from OPEN until all its buckets have been waited for */
  struct exchange *next;
  const struct plan *plan; /* NULL until this process knows it */
  int64_t key, call, first_part, unwaited; /* of the plan; a digest of what ranks compare */
  uint32_t ticket; /* how many had been opened before */
  int is_compared, is_posted;
  handle request;
  int64_t *calls; /* this rank's, then those of all */
  struct bucket *buckets;
};

static pthread_mutex_t beside = PTHREAD_MUTEX_INITIALIZER; /* of all that follows */
static pthread_cond_t arrived = PTHREAD_COND_INITIALIZER, summed = PTHREAD_COND_INITIALIZER;
static struct exchange *exchanges;
static struct pace beside_pace = {.pause_us = CALM_US};
static int64_t parts_opened;
static uint32_t tickets;
static int is_ending, waiters;
static int32_t beside_engine, ranks;
static handle comparisons; /* a communicator for comparisons alone */

void jaxmpi_beside_setup(int32_t engine, int32_t size, handle comm) {
  beside_engine = engine, ranks = size, comparisons = comm;
}

static struct exchange *find_exchange(uint32_t ticket) {
  struct exchange *found = exchanges;
  while (found && found->ticket != ticket) found = found->next;
  return found;
}

static void wake(void) {
  beside_pace.is_woken = 1;
  pthread_cond_signal(&arrived);
}

/* Begin an exchange. Ranks compare which one it is first, so that those at different ones wait for nothing else. The text
   describes the plan to a process that does not know it. Return 0, or -1. */
int jaxmpi_beside_open(int64_t key, int64_t call, const char *text, int64_t length, uint32_t *ticket) {
  struct exchange *made = calloc(1, sizeof *made), **end = &exchanges;
  int64_t *calls = calloc(ranks + 1, sizeof *calls);
  if (!made || !calls) return -1;
  pthread_mutex_lock(&beside);
  *made = (struct exchange){.key = key, .call = call, .ticket = tickets++, .is_compared = !call, .calls = calls};
  *ticket = made->ticket;
  while (*end) end = &(*end)->next;
  *end = made;
  wake();
  pthread_mutex_unlock(&beside);
  const struct plan *plan = find_plan(key);
  if (!plan) {
    mpi.learn(text, length);
    plan = find_plan(key);
  }
  struct bucket *buckets = plan ? calloc(plan->count, sizeof *buckets) : NULL;
  if (!buckets) return -1;
  pthread_mutex_lock(&beside);
  made->plan = plan;
  made->buckets = buckets;
  made->unwaited = plan->count;
  made->first_part = parts_opened;
  parts_opened = (parts_opened + plan->parts) % plan->tags;
  pthread_mutex_unlock(&beside);
  return 0;
}

/* Hand over a bucket. Return 0, or -1 if there is no such exchange. */
int jaxmpi_beside_start(uint32_t ticket, int64_t index, char *x) {
  pthread_mutex_lock(&beside);
  struct exchange *exchange = find_exchange(ticket);
  int is_known = exchange && exchange->plan && index < exchange->plan->count;
  if (is_known) {
    exchange->buckets[index] = (struct bucket){.x = x, .begin_ns = now_ns(), .state = STARTED};
    wake();
  }
  pthread_mutex_unlock(&beside);
  return is_known ? 0 : -1;
}

static void let_wait(int more) {
  waiters += more;
  beside_pace.yields = waiters ? HURRY_YIELDS : 0;
  beside_pace.pause_us = waiters ? PAUSE_US : CALM_US;
}

/* Wait for a bucket. Return where it is, or NULL if there is no such exchange. */
char *jaxmpi_beside_done(uint32_t ticket, int64_t index) {
  pthread_mutex_lock(&beside);
  struct exchange *exchange = find_exchange(ticket), **at = &exchanges;
  if (!exchange || !exchange->plan || index >= exchange->plan->count) {
    pthread_mutex_unlock(&beside);
    return NULL;
  }
  int64_t key = exchange->key, begin_ns = begin_waiting(key, index);
  let_wait(1);
  while (exchange->buckets[index].state != SUMMED) pthread_cond_wait(&summed, &beside);
  let_wait(-1);
  char *x = exchange->buckets[index].x;
  if (!--exchange->unwaited) {
    while (*at != exchange) at = &(*at)->next;
    *at = exchange->next;
    free(exchange->buckets);
    free(exchange->calls);
    free(exchange);
  }
  pthread_mutex_unlock(&beside);
  note_span(WAIT_FOR_SUM, key, index, begin_ns);
  return x;
}

/* The comparison under way: its call, and how many exchanges have been opened with it; zeros if there is none. */
void jaxmpi_beside_compares(int64_t *call, int64_t *count) {
  pthread_mutex_lock(&beside);
  struct exchange *found = exchanges;
  while (found && (found->is_compared || !found->is_posted)) found = found->next;
  *call = found ? found->call : 0;
  *count = found ? found->ticket + 1 : 0;
  pthread_mutex_unlock(&beside);
}

int jaxmpi_beside_left(void) { /* exchanges of which a bucket has not been waited for */
  int count = 0;
  pthread_mutex_lock(&beside);
  for (struct exchange *each = exchanges; each; each = each->next) count++;
  pthread_mutex_unlock(&beside);
  return count;
}

void jaxmpi_beside_stop(void) {
  pthread_mutex_lock(&beside);
  is_ending = 1;
  wake();
  pthread_mutex_unlock(&beside);
}

/* Post a comparison, or look whether it has ended. Return MPI's error, or 0. */
static int compare(struct exchange *exchange, int *has_moved) {
  int found = 0, index;
  status ignored;
  if (!exchange->is_posted) {
    exchange->is_posted = *has_moved = 1;
    exchange->calls[0] = exchange->call;
    return mpi.iallgather(exchange->calls, sizeof(int64_t), mpi.byte, exchange->calls + 1, sizeof(int64_t), mpi.byte,
                          comparisons, &exchange->request);
  }
  int code = mpi.testsome(1, &exchange->request, &found, &index, ignored);
  if (found == 1) exchange->is_compared = *has_moved = 1;
  return code;
}

/* Go on with all exchanges as far as it goes now. Return MPI's error, or 0. `waits` is one that has not ended. */
static int go_on_beside(int *has_moved, int *compares, int64_t *differing, struct span *waits) {
  int code = 0;
  for (struct exchange *exchange = exchanges; !code && exchange; exchange = exchange->next) {
    if (!exchange->is_compared) {
      code = compare(exchange, has_moved);
      if (code || !exchange->is_compared) {
        *compares = 1;
        if (waits->track == NOTHING) *waits = (struct span){WAIT_FOR_SUM, exchange->call, COMPARISON, 0, 0};
        continue;
      }
      for (int i = 1; i <= ranks; i++)
        if (exchange->calls[i] != exchange->call) *differing = exchange->call;
    }
    for (int64_t i = 0, part = exchange->first_part; exchange->plan && i < exchange->plan->count; i++) {
      struct bucket *bucket = &exchange->buckets[i];
      const struct record *record = exchange->plan->records[i];
      if (bucket->state == STARTED) {
        bucket->sum = jaxmpi_sum_begin(record, exchange->plan, (float *)bucket->x, (float *)bucket->x, part);
        if (!bucket->sum) return NO_MEMORY;
        bucket->state = UNDER_WAY;
      } else if (bucket->state == UNDER_WAY && jaxmpi_sum_ended(bucket->sum)) {
        bucket->state = SUMMED;
        note_span(TRAVEL, exchange->key, i, bucket->begin_ns);
        pthread_cond_broadcast(&summed);
      }
      if (bucket->state == UNDER_WAY && waits->track == NOTHING)
        *waits = (struct span){WAIT_FOR_SUM, exchange->key, i, 0, 0};
      part += record->count;
    }
  }
  return code;
}

/* The communication thread: carry exchanges on until `jaxmpi_beside_stop`. */
void jaxmpi_beside_run(void) {
  int64_t looked_ns = now_ns();
  double waited_s = 0;
  for (int code = 0; !code;) {
    int moved = 0, compares = 0;
    int32_t sums_moved = 0;
    int64_t differing = 0;
    struct span waits = {.track = NOTHING};
    pthread_mutex_lock(&beside);
    beside_pace.is_woken = 0;
    code = go_on_beside(&moved, &compares, &differing, &waits);
    if (!code && waits.track == NOTHING) {
      int is_over = is_ending;
      if (!is_over && !beside_pace.is_woken) pthread_cond_wait(&arrived, &beside);
      pthread_mutex_unlock(&beside);
      looked_ns = now_ns();
      waited_s = 0;
      if (is_over) return;
      continue;
    }
    int32_t pause_us = beside_pace.pause_us;
    pthread_mutex_unlock(&beside);
    if (differing) mpi.differs(differing);
    if (!code && sums) {
      code = jaxmpi_sums_go_on(compares ? pause_us : MOST_IN_SUMS_US, &beside_pace, &sums_moved);
    } else if (!code && !moved) {
      nanosleep(&(struct timespec){.tv_nsec = 1000 * pause_us}, NULL);
    }
    if (code) mpi.failed(beside_engine, code);
    /* A process that was stopped finds hours gone by, and the others may have been stopped as well: it counts a second. */
    int64_t before_ns = looked_ns;
    looked_ns = now_ns();
    double passed_s = (looked_ns - before_ns) / 1e9;
    waited_s = moved || sums_moved ? 0 : waited_s + (passed_s < 1 ? passed_s : 1);
    if (waited_s > PATIENT_S) mpi.waits(beside_engine, waits.key, waits.index, waited_s);
  }
}

/* ---------------------------------------------------------------- calls of programs */

static XLA_FFI_Error *unknown(XLA_FFI_CallFrame *frame) {
  return error(frame, "jaxmpi: a program of another process, or of a communicator that was freed; compile it here");
}

static XLA_FFI_Error *failed(XLA_FFI_CallFrame *frame, int32_t engine, int code) {
  mpi.failed(engine, code);
  return error(frame, "jaxmpi: the job ends"); /* no program goes on with what it may have got */
}

static int64_t key_in(const int32_t *words) { return (int64_t)words[1] << 32 | (uint32_t)words[0]; }

/* Sum the operands. Words: the plan's key, in two halves. */
XLA_FFI_Error *jaxmpi_host_engine(XLA_FFI_CallFrame *frame) {
  if (!is_work(frame)) return NULL;
  int64_t key = key_in(words_of(frame));
  const struct plan *plan = find_plan(key);
  if (!plan) return unknown(frame);
  int64_t begin_ns = begin_waiting(key, -1);
  int code = sum_all(plan, frame);
  note_span(WAIT_FOR_SUM, key, -1, begin_ns);
  return code ? failed(frame, plan->engine, code) : NULL;
}

static void copy_to(const XLA_FFI_Buffer *to, const XLA_FFI_Buffer *from) {
  if (to->data != from->data) memcpy(to->data, from->data, numbers_in(from) * sizeof(float));
}

/* Words: which call; of OPEN the plan's key and the digest of what ranks compare, or 0, in two halves each; of the others
   the number of the bucket. OPEN gives the ticket u32[] that the others take; START and DONE pass the bucket through in one buffer. */
XLA_FFI_Error *jaxmpi_beside(XLA_FFI_CallFrame *frame) {
  if (!is_work(frame)) return NULL;
  const int32_t *words = words_of(frame);
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  if (words[0] == OPEN) {
    const XLA_FFI_ByteSpan *text = attribute(frame, XLA_FFI_AttrType_STRING);
    int code = jaxmpi_beside_open(key_in(words + 1), key_in(words + 3), text->ptr, text->len, rets[0]->data);
    return code ? unknown(frame) : NULL;
  }
  uint32_t ticket = *(uint32_t *)args[1]->data;
  *(uint32_t *)rets[1]->data = ticket;
  if (words[0] == START) {
    copy_to(rets[0], args[0]);
    return jaxmpi_beside_start(ticket, words[1], rets[0]->data) ? unknown(frame) : NULL;
  }
  char *x = jaxmpi_beside_done(ticket, words[1]);
  if (!x) return unknown(frame);
  if (x != args[0]->data) return failed(frame, beside_engine, MOVED);
  copy_to(rets[0], args[0]);
  return NULL;
}
