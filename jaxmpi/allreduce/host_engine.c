/* The engine of sums between processes: plans of programs, the handlers that programs call, and the thread.

   A program's call makes a plan's sums in the program's own thread, or three kinds of calls hand them to the communication
   thread, which runs `jaxmpi_beside_run`: OPEN begins an exchange, START hands over a bucket and returns at once, DONE
   waits until the bucket holds its sum. How sums are made: `scheduled_sums.h`. What Python adds: `host_engine.py`. */

#define _POSIX_C_SOURCE 200809L /* clock_gettime, nanosleep */

#include <sched.h>
#include <time.h>

#include "c_handlers.h"
#include "compiled_wires.h"
#include "scheduled_sums.h"

enum call { CALLS };
enum track { TRACKS };
enum { PLAN_LISTS = 1024 };

/* ---------------------------------------------------------------- plans */

struct plan { /* the sums of one call in a program */
  struct plan *next;
  const struct record *records;
  int64_t key, count, parts, tags; /* a digest of it; vectors, and their parts; how many tags MPI has */
  handle comm;
  int32_t engine; /* number of the communicator's engine in this process */
  _Atomic int32_t is_closed;
};

static struct plan *_Atomic plans[PLAN_LISTS]; /* by key; programs read them without a lock */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of plans that are added, and of spans */

/* Let programs find a plan. It is never forgotten, since a program may call it at any time. */
void jaxmpi_sum_add_plan(int64_t key, int32_t engine, handle comm, int64_t tags, int64_t count, const struct record *records) {
  struct plan *made = calloc(1, sizeof *made), *_Atomic *list = &plans[(uint64_t)key % PLAN_LISTS];
  if (!made) return; /* programs will not find it, and say so */
  *made = (struct plan){.records = records, .key = key, .count = count, .tags = tags, .comm = comm, .engine = engine};
  for (int64_t i = 0; i < count; i++) made->parts += records[i].count;
  pthread_mutex_lock(&lock);
  made->next = *list;
  *list = made;
  pthread_mutex_unlock(&lock);
}

/* Have programs that use a communicator which was freed get an error. */
void jaxmpi_sum_close(int32_t engine) {
  for (int i = 0; i < PLAN_LISTS; i++)
    for (struct plan *plan = plans[i]; plan; plan = plan->next)
      if (plan->engine == engine) plan->is_closed = 1;
}

static const struct plan *find_plan(int64_t key) {
  struct plan *plan = plans[(uint64_t)key % PLAN_LISTS];
  while (plan && plan->key != key) plan = plan->next;
  return plan && !plan->is_closed ? plan : NULL;
}

/* ---------------------------------------------------------------- spans of time, for traces and the screen */

struct span { /* `index` is of a plan's vector, or WHOLE */
  int64_t track, key, index, begin_ns, end_ns;
};

static struct span spans[MOST_SPANS]; /* a ring: the oldest are lost if nobody takes them */
static int64_t noted, taken;
static struct span waiting; /* a program's wait that has not ended; of track NOTHING if there is none */

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

/* ---------------------------------------------------------------- in the thread of a program */

/* Carry out a plan's sums. The next vector's begin when the window is no longer filled by those before. Return MPI's
   error, or 0. */
static int sum_all(const struct plan *plan, XLA_FFI_CallFrame *frame) {
  static const struct pace pace = {.yields = YIELDS, .pause_us = PAUSE_US};
  int64_t tag = 0, i = 0, left = 0; /* parts begun and not ended */
  double waited_s = 0;
  while (sums || i < plan->count) {
    for (; i < plan->count && left < plan->records[i].window; i++) {
      const struct record *record = &plan->records[i];
      const XLA_FFI_Buffer *x = frame->args.args[i], *y = frame->rets.rets[i];
      if (!jaxmpi_sum_begin(record, plan->comm, plan->tags, x->data, y->data, tag)) return NO_MEMORY;
      tag += record->count;
      left += record->count;
    }
    int32_t has_moved = 0;
    int code = jaxmpi_sums_go_on(1000000, &pace, &has_moved);
    if (code) return code;
    waited_s = has_moved ? 0 : waited_s + 1;
    if (waited_s) mpi.waits(plan->engine, plan->key, WHOLE, waited_s);
    left = 0;
    for (struct sum *sum = sums, *next; sum; sum = next) {
      next = sum->next;
      left += sum->record->count - sum->ended;
      jaxmpi_sum_ended(sum);
    }
  }
  return 0;
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
  const struct plan *plan;
  int64_t first_part, unwaited; /* buckets */
  uint32_t ticket;              /* how many had been opened before */
  struct bucket buckets[];
};

static pthread_mutex_t beside = PTHREAD_MUTEX_INITIALIZER; /* of all that follows */
static pthread_cond_t arrived = PTHREAD_COND_INITIALIZER, summed = PTHREAD_COND_INITIALIZER;
static struct exchange *exchanges;
static struct pace beside_pace = {.pause_us = CALM_US};
static int64_t parts_opened;
static uint32_t tickets;
static int is_ending, waiters;
static int32_t beside_engine;

/* The exchange of this ticket, if it has this bucket. */
static struct exchange *find_exchange(uint32_t ticket, int64_t index) {
  struct exchange *found = exchanges;
  while (found && found->ticket != ticket) found = found->next;
  return found && index < found->plan->count ? found : NULL;
}

static void wake(void) {
  beside_pace.is_woken = 1;
  pthread_cond_signal(&arrived);
}

/* Begin an exchange. The text describes the plan to a process that has not traced the program. Return 0 if there is no
   such plan. */
static int open_exchange(int64_t key, const XLA_FFI_ByteSpan *text, uint32_t *ticket) {
  if (!find_plan(key)) mpi.learn(beside_engine, text->ptr, text->len);
  const struct plan *plan = find_plan(key);
  struct exchange *made = plan ? calloc(1, sizeof *made + plan->count * sizeof *made->buckets) : NULL, **end = &exchanges;
  if (!made) return 0;
  pthread_mutex_lock(&beside);
  made->plan = plan;
  made->unwaited = plan->count;
  made->first_part = parts_opened;
  parts_opened = (parts_opened + plan->parts) % plan->tags;
  *ticket = made->ticket = tickets++;
  while (*end) end = &(*end)->next;
  *end = made;
  pthread_mutex_unlock(&beside);
  return 1;
}

/* Hand over a bucket. Return 0 if there is no such exchange. */
static int start_bucket(uint32_t ticket, int64_t index, char *x) {
  pthread_mutex_lock(&beside);
  struct exchange *exchange = find_exchange(ticket, index);
  if (exchange) {
    exchange->buckets[index] = (struct bucket){.x = x, .begin_ns = now_ns(), .state = STARTED};
    wake();
  }
  pthread_mutex_unlock(&beside);
  return exchange != NULL;
}

/* While somebody waits the thread looks often; else a look takes time from the computation beside it. */
static void let_wait(int more) {
  waiters += more;
  beside_pace.yields = waiters ? HURRY_YIELDS : 0;
  beside_pace.pause_us = waiters ? PAUSE_US : CALM_US;
}

/* Wait for a bucket. Return where it is, or NULL if there is no such exchange. */
static char *wait_for_bucket(uint32_t ticket, int64_t index) {
  pthread_mutex_lock(&beside);
  struct exchange *exchange = find_exchange(ticket, index), **at = &exchanges;
  char *x = NULL;
  if (exchange) {
    int64_t key = exchange->plan->key, begin_ns = begin_waiting(key, index);
    let_wait(1);
    while (exchange->buckets[index].state != SUMMED) pthread_cond_wait(&summed, &beside);
    let_wait(-1);
    x = exchange->buckets[index].x;
    if (!--exchange->unwaited) {
      while (*at != exchange) at = &(*at)->next;
      *at = exchange->next;
      free(exchange);
    }
    note_span(WAIT_FOR_SUM, key, index, begin_ns);
  }
  pthread_mutex_unlock(&beside);
  return x;
}

void jaxmpi_beside_stop(void) {
  pthread_mutex_lock(&beside);
  is_ending = 1;
  wake();
  pthread_mutex_unlock(&beside);
}

/* ---------------------------------------------------------------- the communication thread */

/* Begin the sums of buckets that have come, and hand out those that are there. Return MPI's error, or 0. `waits` is the
   first that is under way. */
static int advance_exchanges(struct span *waits) {
  for (struct exchange *exchange = exchanges; exchange; exchange = exchange->next) {
    const struct plan *plan = exchange->plan;
    for (int64_t i = 0, part = exchange->first_part; i < plan->count; part += plan->records[i++].count) {
      struct bucket *bucket = &exchange->buckets[i];
      if (bucket->state == STARTED) {
        bucket->sum = jaxmpi_sum_begin(&plan->records[i], plan->comm, plan->tags, bucket->x, bucket->x, part);
        if (!bucket->sum) return NO_MEMORY;
        bucket->state = UNDER_WAY;
      } else if (bucket->state == UNDER_WAY && jaxmpi_sum_ended(bucket->sum)) {
        bucket->state = SUMMED;
        note_span(TRAVEL, plan->key, i, bucket->begin_ns);
        pthread_cond_broadcast(&summed);
      }
      if (bucket->state == UNDER_WAY && waits->track == NOTHING) *waits = (struct span){WAIT_FOR_SUM, plan->key, i, 0, 0};
    }
  }
  return 0;
}

/* Carry exchanges on until `jaxmpi_beside_stop`; `engine` is that of their plans. */
void jaxmpi_beside_run(int32_t engine) {
  int64_t looked_ns = now_ns();
  double waited_s = 0;
  beside_engine = engine;
  for (;;) {
    struct span waits = {.track = NOTHING};
    pthread_mutex_lock(&beside);
    beside_pace.is_woken = 0;
    int code = advance_exchanges(&waits), has_work = code || waits.track != NOTHING, is_over = !has_work && is_ending;
    if (!has_work && !is_over) pthread_cond_wait(&arrived, &beside);
    pthread_mutex_unlock(&beside);
    if (is_over) return;
    if (!has_work) {
      looked_ns = now_ns();
      waited_s = 0;
      continue;
    }
    int32_t has_moved = 0;
    if (!code) code = jaxmpi_sums_go_on(MOST_IN_SUMS_US, &beside_pace, &has_moved);
    if (code) {
      mpi.failed(engine, code);
      return;
    }
    /* A process that was stopped finds hours gone by, and the others may have been stopped as well: it counts a second. */
    int64_t before_ns = looked_ns;
    looked_ns = now_ns();
    double passed_s = (looked_ns - before_ns) / 1e9;
    waited_s = has_moved ? 0 : waited_s + (passed_s < 1 ? passed_s : 1);
    if (waited_s > PATIENT_S) mpi.waits(engine, waits.key, waits.index, waited_s);
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
  const struct plan *plan = find_plan(key_in(words_of(frame)));
  if (!plan) return unknown(frame);
  int64_t begin_ns = begin_waiting(plan->key, WHOLE);
  int code = sum_all(plan, frame);
  note_span(WAIT_FOR_SUM, plan->key, WHOLE, begin_ns);
  return code ? failed(frame, plan->engine, code) : NULL;
}

static void copy_to(const XLA_FFI_Buffer *to, const XLA_FFI_Buffer *from) {
  if (to->data != from->data) memcpy(to->data, from->data, numbers_in(from) * sizeof(float));
}

/* Words: which call; of OPEN the plan's key in two halves, of the others the number of the bucket. OPEN gives the ticket
   u32[] that the others take; START and DONE pass the bucket through in one buffer. */
XLA_FFI_Error *jaxmpi_beside(XLA_FFI_CallFrame *frame) {
  if (!is_work(frame)) return NULL;
  const int32_t *words = words_of(frame);
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  if (words[0] == OPEN) {
    const XLA_FFI_ByteSpan *text = attribute(frame, XLA_FFI_AttrType_STRING);
    return open_exchange(key_in(words + 1), text, rets[0]->data) ? NULL : unknown(frame);
  }
  uint32_t ticket = *(uint32_t *)args[1]->data;
  *(uint32_t *)rets[1]->data = ticket;
  if (words[0] == START) {
    copy_to(rets[0], args[0]);
    return start_bucket(ticket, words[1], rets[0]->data) ? NULL : unknown(frame);
  }
  char *x = wait_for_bucket(ticket, words[1]);
  if (!x) return unknown(frame);
  if (x != args[0]->data) return failed(frame, beside_engine, MOVED);
  copy_to(rets[0], args[0]);
  return NULL;
}
