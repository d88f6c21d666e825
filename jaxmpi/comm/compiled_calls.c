/* The comparison of programs' calls, and collectives through shared memory, as a handler that XLA calls.

   `call_comparison.py` compiles this file for the MPI and the XLA that the process has, fills in `struct setup`, and says what
   is compared and why. There are four kinds of calls:

   - RUN, at the top of a program: note the first run of a program that has the exchange;
   - BEGIN, first in an exchange: take this process's turn, and publish the number of the call;
   - an operation on an array through shared memory (`compiled_slots.h`), which is its own END;
   - END: compare the numbers that the other ranks have published, and give the turn away.

   On one host numbers are published in shared memory, with short arrays behind them (`compiled_slots.h`). A rank has two
   places for them, of even and of odd calls. Each call waits until all others have published theirs. So a rank that
   writes a place again has seen all at the call between, and they had read that place before. Between hosts a number is a
   message of 4 bytes to each other rank, of which MPI keeps as many as there are.

   A rank may skip an exchange, as in a `lax.cond` that only some ranks take. At the next one its number is the same as
   the others' though they are a step behind. So an exchange also has a turn: how often its program has run, modulo
   MOST_TURNS, in the upper bits of the number. XLA counts the runs: a run's id is one more than that of the run before of
   the same executable, and those of two executables are far apart. A branch may skip the exchange in the program's first
   run, too: RUN is outside of all branches.

   Nothing here needs Python unless ranks differ or MPI fails. */

#include <sched.h>

#include "c_handlers.h"

enum kind { KINDS };
enum word { COMPARISON, NUMBER, KIND, OP, ROOT };      /* of a call's attribute */
enum { HAS_TURN = ROOT, IS_PUBLISHED_LATER = OP }; /* of BEGIN: by the operation, behind whose array the number is */
enum { SPINS = 64, LOOKS_WITHOUT_MPI = 4 };

struct setup {
  int (*send)(const void *, int, handle, int, int, handle);
  int (*recv)(void *, int, handle, int, int, handle, void *);
  int (*iprobe)(int, int, handle, int *, void *);
  int (*reduce_local)(const void *, void *, int, handle, handle);
  void (*differs)(int32_t number, const int32_t *theirs); /* it ends the job */
  void (*failed)(int32_t number, int32_t code);           /* likewise */
  _Atomic int64_t *board;                                 /* NULL: numbers are messages */
  char *slots;                                            /* behind it, for operations */
  handle messages, int32; /* of the comparison: its communicator and dtype */
  handle types[TYPES], ops[OPS]; /* by XLA's number, by OP */
  int64_t item_bytes[TYPES], slot_bytes, part_bytes;
  int32_t rank, size;
  int32_t place_words; /* of each of a rank's two places on the board; behind them are ROUNDS_WORDS */
};

struct turn {
  int32_t number, run, turn;
};

struct comparison {
  struct setup mpi;
  pthread_mutex_t lock;
  pthread_cond_t given;
  _Atomic uint32_t ticket, served; /* the next ticket for the turn, and the one that has the turn */
  _Atomic int64_t held;            /* number << 32 | how many have begun; 0 if nobody has the turn */
  _Atomic int32_t begun, waits;    /* waits: the number of a call that waits for the turn, or 0 */
  struct turn turns[NUMBERS_WITH_TURNS];
  int64_t rounds, chunks;          /* through slots, so far */
  int32_t mine, theirs[];          /* numbers of calls, by rank; 0 of those that are not known */
};

static struct comparison *comparisons[MOST_COMPARISONS];

/* ---------------------------------------------------------------- for Python */

void jaxmpi_open(int32_t index, const struct setup *mpi) {
  struct comparison *made = calloc(1, sizeof *made + mpi->size * sizeof(int32_t));
  made->mpi = *mpi;
  pthread_mutex_init(&made->lock, NULL);
  pthread_cond_init(&made->given, NULL);
  comparisons[index] = made;
}

void jaxmpi_close(int32_t index) {
  free(comparisons[index]);
  comparisons[index] = NULL;
}

int64_t jaxmpi_held(int32_t index) { return comparisons[index]->held; }
int32_t jaxmpi_waits(int32_t index) { return comparisons[index]->waits; }

/* ---------------------------------------------------------------- the turn */

/* Who comes first is served first. Nearly always the turn is free, so no lock is taken. A call that waits has its ticket
   before it looks, and `give` serves the next ticket before it looks whether there is one: one of them sees the other. */
static void take(struct comparison *c, int32_t number) {
  uint32_t mine = c->ticket++;
  if (c->served == mine) return;
  pthread_mutex_lock(&c->lock);
  while (c->served != mine) {
    c->waits = number;
    pthread_cond_wait(&c->given, &c->lock);
  }
  c->waits = 0;
  pthread_cond_broadcast(&c->given); /* others that wait set it anew */
  pthread_mutex_unlock(&c->lock);
}

static void give(struct comparison *c) {
  c->held = 0;
  if (++c->served == c->ticket) return;
  pthread_mutex_lock(&c->lock);
  pthread_cond_broadcast(&c->given);
  pthread_mutex_unlock(&c->lock);
}

/* ---------------------------------------------------------------- the comparison */

/* The i-th other rank, of size - 1. */
static int other(const struct comparison *c, int i) { return (c->mpi.rank + i) % c->mpi.size; }

static _Atomic int64_t *words_of_rank(struct comparison *c, int rank) {
  return c->mpi.board + rank * (2 * c->mpi.place_words + ROUNDS_WORDS);
}

/* Where a rank publishes the number of its present call; a short array may be behind it. */
static _Atomic int64_t *place(struct comparison *c, int rank) {
  return words_of_rank(c, rank) + c->begun % 2 * c->mpi.place_words;
}

/* Between two looks at a rank's word: let MPI go on, as what this rank has sent may not have left yet, and others run. */
static int between_looks(struct comparison *c, int rank, int64_t looks) {
  if (looks < SPINS) return 0;
  int flag, code = 0;
  status ignored;
  if (looks % LOOKS_WITHOUT_MPI == 0) code = c->mpi.iprobe(rank, 0, c->mpi.messages, &flag, ignored);
  sched_yield();
  return code;
}

/* Wait until a rank has published its call of this rank's count. */
static int read_board(struct comparison *c, int rank, int32_t *number) {
  _Atomic int64_t *at = place(c, rank);
  int64_t found = atomic_load_explicit(at, memory_order_acquire);
  for (int64_t looks = 0; (int32_t)found != c->begun; looks++) {
    int code = between_looks(c, rank, looks);
    if (code) return code;
    found = atomic_load_explicit(at, memory_order_acquire);
  }
  *number = (int32_t)(found >> 32);
  return 0;
}

static void publish(struct comparison *c) {
  atomic_store_explicit(place(c, c->mpi.rank), c->held, memory_order_release);
}

static int32_t id_of_run(XLA_FFI_CallFrame *frame) {
  XLA_FFI_RunId_Get_Args args = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, frame->ctx, 0};
  frame->api->XLA_FFI_RunId_Get(&args);
  return (int32_t)args.run_id;
}

/* Count turns from this run on, unless they are counted. XLA may call it beside another program's exchange. */
static void note_run(struct comparison *c, int32_t number, int32_t run) {
  struct turn *t = &c->turns[number % NUMBERS_WITH_TURNS];
  pthread_mutex_lock(&c->lock);
  if (!t->number) *t = (struct turn){number, run, 1};
  pthread_mutex_unlock(&c->lock);
}

/* The number with its turn. A run of another executable with this exchange counts as the next. */
static int32_t with_turn(struct comparison *c, int32_t number, int32_t run) {
  struct turn *t = &c->turns[number % NUMBERS_WITH_TURNS];
  pthread_mutex_lock(&c->lock);
  uint32_t passed = (uint32_t)run - (uint32_t)t->run;
  if (t->number != number) *t = (struct turn){number, run, 1};
  else t->turn += passed < MOST_PASSED ? passed : 1; /* none in a loop of one run */
  t->run = run;
  int32_t turn = t->turn % MOST_TURNS;
  pthread_mutex_unlock(&c->lock);
  return number | turn << TURN_BIT;
}

/* A frame if the number is sent with its turn. */
static int begin(struct comparison *c, int32_t number, int is_published_later, XLA_FFI_CallFrame *frame) {
  struct setup *mpi = &c->mpi;
  take(c, number);
  if (frame) number = with_turn(c, number, id_of_run(frame));
  int32_t count = (c->begun + 1u) & INT32_MAX; /* loops of hours come to 2^31 */
  c->begun = count;
  atomic_store_explicit(&c->held, (int64_t)number << 32 | (uint32_t)count, memory_order_release);
  if (mpi->board && !is_published_later) publish(c);
  if (mpi->board) return 0;
  int code = 0;
  for (int i = 1; !code && i < mpi->size; i++) code = mpi->send(&number, 1, mpi->int32, other(c, i), 0, mpi->messages);
  return code;
}

/* Compare with all others. Return MPI's error, or 0; -1 if ranks differ. */
static int compare(struct comparison *c) {
  struct setup *mpi = &c->mpi;
  int code = 0, is_same = 1;
  c->mine = (int32_t)(c->held >> 32);
  for (int i = 1; !code && i < mpi->size; i++) {
    int rank = other(c, i);
    status ignored;
    code = mpi->board ? read_board(c, rank, &c->theirs[rank])
                      : mpi->recv(&c->theirs[rank], 1, mpi->int32, rank, 0, mpi->messages, ignored);
    is_same = is_same && c->theirs[rank] == c->mine;
  }
  return code || is_same ? code : -1;
}

/* ---------------------------------------------------------------- a call */

#include "compiled_slots.h"

/* Give the turn away at the end of a call; an error ends the job. False then: no program goes on with what it may have. */
static int finish(struct comparison *c, int32_t number, int is_end, int code) {
  if (!code && is_end) give(c);
  if (code < 0) c->mpi.differs(c->mine, c->theirs);
  if (code > 0) c->mpi.failed(number, code);
  return !code;
}

XLA_FFI_Error *jaxmpi_compiled_calls(XLA_FFI_CallFrame *frame) {
  if (!is_work(frame)) return NULL;
  const int32_t *words = words_of(frame);
  struct comparison *c = comparisons[words[COMPARISON]];
  if (!c) return error(frame, "jaxmpi: a program of another process, or of a communicator that was freed; compile it for this one");
  int code = 0;
  int kind = words[KIND];
  if (kind == RUN) {
    note_run(c, words[NUMBER], id_of_run(frame));
    return NULL;
  }
  if (kind == BEGIN) code = begin(c, words[NUMBER], words[IS_PUBLISHED_LATER], words[HAS_TURN] ? frame : NULL);
  else if (kind == END) code = compare(c);
  else code = through_slots(c, words, frame->args.args[0], frame->rets.rets[0]);
  return finish(c, words[NUMBER], kind != BEGIN, code) ? NULL : error(frame, "jaxmpi: the job ends");
}

/* For Python, on which programs call that have their arrays on a GPU. */

void jaxmpi_begin_call(int32_t index, int32_t number) {
  finish(comparisons[index], number, 0, begin(comparisons[index], number, 0, NULL));
}

void jaxmpi_end_call(int32_t index, int32_t number) {
  struct comparison *c = comparisons[index];
  finish(c, number, 1, compare(c));
}
