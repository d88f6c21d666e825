/* Collectives of programs and their comparison, as handlers that XLA calls.

   `compiled_calls.py` compiles this file for the MPI and the XLA that the process has, and fills in `struct setup`.
   `call_comparison.py` says what is compared and why. There are three kinds of calls:

   - BEGIN, first in a program: take this process's turn, and publish the number of the call;
   - END: compare the numbers that the other ranks have published, and give the turn away;
   - an operation of MPI's, between the two or with the END in the same call.

   On one host numbers are published in shared memory, a cache line for each rank. It has two places, for even and for
   odd calls. No more are needed: a rank leaves END only when all have begun the call, so all have read the numbers of
   the call before. Between hosts a number is a message of 8 bytes.

   Nothing here needs Python unless ranks differ or MPI fails. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

typedef HANDLE handle; /* of MPI: an int in MPICH, a pointer in Open MPI and in MPI's own binary interface */

enum { MOST_DISTANCES = 32, MOST_COMPARISONS = 1 << 16, LINE_WORDS = 8, SPINS = 64 };
enum kind { BEGIN, END, BARRIER, ALLREDUCE, REDUCE, SCAN, BCAST, ALLGATHER, GATHER, SCATTER, ALLTOALL };
enum word { COMPARISON, NUMBER, KIND, OP, ROOT, ENDS, WORDS }; /* of a call's attribute, s32[WORDS] */

struct setup {
  int (*send)(const void *, int, handle, int, int, handle);
  int (*recv)(void *, int, handle, int, int, handle, void *);
  int (*iprobe)(int, int, handle, int *, void *);
  int (*barrier)(handle);
  int (*allreduce)(const void *, void *, int, handle, handle, handle);
  int (*reduce)(const void *, void *, int, handle, handle, int, handle);
  int (*scan)(const void *, void *, int, handle, handle, handle);
  int (*bcast)(void *, int, handle, int, handle);
  int (*allgather)(const void *, int, handle, void *, int, handle, handle);
  int (*gather)(const void *, int, handle, void *, int, handle, int, handle);
  int (*scatter)(const void *, int, handle, void *, int, handle, int, handle);
  int (*alltoall)(const void *, int, handle, void *, int, handle, handle);
  void (*differs)(int32_t comparison, int32_t number, const int32_t *theirs);
  void (*failed)(int32_t kind, int32_t code);
  _Atomic int64_t *board; /* NULL: numbers are messages */
  handle comm, others, int32; /* of the operations, of the comparison's messages; its dtype */
  handle types[64], ops[8]; /* by XLA's number, by OP */
  int32_t rank, size, distances, distance[MOST_DISTANCES];
};

struct comparison {
  struct setup mpi;
  pthread_mutex_t lock;
  pthread_cond_t given;
  _Atomic int64_t held; /* number << 32 | how many have begun; 0 if nobody has the turn */
  _Atomic int32_t begun, waits; /* waits: the number of a call that waits for the turn, or 0 */
};

static struct comparison *comparisons[MOST_COMPARISONS];

/* ---------------------------------------------------------------- for Python */

void jaxmpi_open(int32_t index, const struct setup *mpi) {
  struct comparison *made = calloc(1, sizeof *made);
  made->mpi = *mpi;
  pthread_mutex_init(&made->lock, NULL);
  pthread_cond_init(&made->given, NULL);
  comparisons[index] = made;
}

int64_t jaxmpi_held(int32_t index) { return atomic_load(&comparisons[index]->held); }
int32_t jaxmpi_begun(int32_t index) { return atomic_load(&comparisons[index]->begun); }
int32_t jaxmpi_waits(int32_t index) { return atomic_load(&comparisons[index]->waits); }

/* ---------------------------------------------------------------- turn and comparison */

static _Atomic int64_t *place(struct comparison *c, int rank, int32_t count) {
  return c->mpi.board + rank * LINE_WORDS + count % 2;
}

enum { TAKEN = 1 }; /* of `held`, for the moment until the number is there */

static int is_free(struct comparison *c) {
  int64_t nobody = 0;
  return atomic_compare_exchange_strong(&c->held, &nobody, TAKEN);
}

/* Nearly always the turn is free, so no lock is taken. A call that waits sets `waits` before it looks again, and `give`
   frees the turn before it looks at `waits`: one of them sees the other. */
static void take(struct comparison *c, int32_t number) {
  if (is_free(c)) return;
  pthread_mutex_lock(&c->lock);
  for (c->waits = number; !is_free(c); c->waits = number) pthread_cond_wait(&c->given, &c->lock);
  c->waits = 0;
  pthread_cond_broadcast(&c->given); /* another one that waits sets it anew */
  pthread_mutex_unlock(&c->lock);
}

static void give(struct comparison *c) {
  c->held = 0;
  if (!c->waits) return;
  pthread_mutex_lock(&c->lock);
  pthread_cond_broadcast(&c->given);
  pthread_mutex_unlock(&c->lock);
}

static int begin(struct comparison *c, int32_t number) {
  struct setup *mpi = &c->mpi;
  take(c, number);
  int32_t count = (c->begun + 1u) & INT32_MAX; /* loops of hours come to 2^31 */
  c->begun = count;
  int64_t held = (int64_t)number << 32 | (uint32_t)count;
  atomic_store_explicit(&c->held, held, memory_order_release);
  if (mpi->board) {
    atomic_store_explicit(place(c, mpi->rank, count), held, memory_order_release);
    return 0;
  }
  int code = 0;
  for (int i = 0; !code && i < mpi->distances; i++)
    code = mpi->send(&number, 1, mpi->int32, (mpi->rank + mpi->distance[i]) % mpi->size, 0, mpi->others);
  return code;
}

/* The number of a rank that has come, or comes, to a call. MPI goes on meanwhile: what this rank has sent may not have
   left yet. */
static int32_t number_on_board(struct comparison *c, int rank, int32_t count) {
  _Atomic int64_t *at = place(c, rank, count);
  int64_t found;
  for (int i = 0; (int32_t)(found = atomic_load_explicit(at, memory_order_acquire)) != count; i++) {
    if (i < SPINS) continue;
    int flag;
    int64_t status[32];
    c->mpi.iprobe(c->mpi.rank, 0, c->mpi.others, &flag, status);
    sched_yield();
  }
  return (int32_t)(found >> 32);
}

static int end(struct comparison *c, int32_t index, int32_t number) {
  struct setup *mpi = &c->mpi;
  int32_t theirs[MOST_DISTANCES], count = c->begun;
  int is_same = 1;
  for (int i = 0; i < mpi->distances; i++) {
    int rank = (mpi->rank - mpi->distance[i] + mpi->size) % mpi->size;
    if (mpi->board) {
      theirs[i] = number_on_board(c, rank, count);
    } else {
      int64_t status[32];
      int code = mpi->recv(&theirs[i], 1, mpi->int32, rank, 0, mpi->others, status);
      if (code) return code;
    }
    is_same = is_same && theirs[i] == number;
  }
  if (!is_same) mpi->differs(index, number, theirs);
  give(c);
  return 0;
}

/* ---------------------------------------------------------------- a call */

static int count_of(const XLA_FFI_Buffer *x) {
  int64_t count = 1;
  for (int64_t i = 0; i < x->rank; i++) count *= x->dims[i];
  return (int)count; /* Python has refused more than an int holds */
}

static int operation(struct setup *mpi, const int32_t *words, const XLA_FFI_Buffer *x, const XLA_FFI_Buffer *y) {
  if (words[KIND] == BARRIER) return mpi->barrier(mpi->comm);
  handle type = mpi->types[x->dtype], op = mpi->ops[words[OP]], comm = mpi->comm;
  int n = count_of(x), root = words[ROOT], is_root = root == mpi->rank;
  switch (words[KIND]) {
    case ALLREDUCE: return mpi->allreduce(x->data, y->data, n, type, op, comm);
    case REDUCE: return mpi->reduce(x->data, y->data, n, type, op, root, comm);
    case SCAN: return mpi->scan(x->data, y->data, n, type, op, comm);
    case BCAST: return mpi->bcast(is_root ? x->data : y->data, n, type, root, comm);
    case ALLGATHER: return mpi->allgather(x->data, n, type, y->data, n, type, comm);
    case GATHER: return mpi->gather(x->data, n, type, y->data, n, type, root, comm);
    case SCATTER: {
      int row = is_root ? n / mpi->size : n;
      return mpi->scatter(x->data, row, type, y->data, row, type, root, comm);
    }
    default: return mpi->alltoall(x->data, n / mpi->size, type, y->data, n / mpi->size, type, comm);
  }
}

XLA_FFI_Error *jaxmpi_compiled_calls(XLA_FFI_CallFrame *frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return NULL;
  }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  const int32_t *words = ((XLA_FFI_Array *)frame->attrs.attrs[0])->data;
  int32_t index = words[COMPARISON], number = words[NUMBER];
  struct comparison *c = comparisons[index];
  int code = 0;
  if (words[KIND] == BEGIN) {
    code = begin(c, number);
  } else {
    if (words[KIND] != END)
      code = operation(&c->mpi, words, frame->args.size ? frame->args.args[0] : NULL,
                       frame->rets.size ? frame->rets.rets[0] : NULL);
    if (!code && words[ENDS]) code = end(c, index, number);
  }
  if (code) c->mpi.failed(words[KIND], code); /* it ends the job */
  return NULL;
}
