/* Operations between the ranks of one host, through shared memory.

   MPI moves one message after another, of which each wakes a rank that waits: log2 w times for a reduction over w ranks,
   and more if ranks share cores. Here all ranks put their arrays where all see them, and wait once.

   An array of a few numbers is copied behind the number by which calls are compared, so that a cache line has both.

   For longer arrays a rank has two slots, for even and for odd chunks. It copies a chunk into one, waits until all have
   come to this round, and takes what it wants from the slots of all. It writes a slot again when all have come to the
   first round of the next chunk, since they had taken everything then. If a reduction is long, each rank reduces one part
   for all, into a third place, and there is a second round before all take those parts. For what MPI does in less time
   (a long scan, long rows for many ranks) Python calls MPI.

   Numbers are combined in rank order, by MPI: the same bits on all ranks, for all dtypes. */

enum { SHORT_BYTES = 8192, ALIGNED_BYTES = 64 }; /* of a chunk that each rank reduces by itself; of parts */

/* A call's arrays: x, or its rows, and y. */
struct job {
  const char *x;
  char *y;
  int64_t items, item_bytes; /* items of the array, or of one row; bytes of an item */
  int32_t kind, root;
  int64_t most; /* items of a chunk */
  handle type, op;
  int is_inline, is_compared;
};

static char *slot(struct comparison *c, struct job *job, int rank) {
  if (job->is_inline) return (char *)(place(c, rank) + 1);
  return c->mpi.slots + rank * (2 * c->mpi.slot_bytes + c->mpi.part_bytes) + c->chunks % 2 * c->mpi.slot_bytes;
}

static _Atomic int64_t *rounds_of(struct comparison *c, int rank) {
  return words_of_rank(c, rank) + 2 * c->mpi.place_words;
}

static char *reduced_part(struct comparison *c, int rank) {
  return c->mpi.slots + rank * (2 * c->mpi.slot_bytes + c->mpi.part_bytes) + 2 * c->mpi.slot_bytes;
}

/* Say that this rank has come to a round, and wait for others. Nothing of another rank's is read before its number. */
static int meet(struct comparison *c, struct job *job) {
  int code = 0;
  if (!job->is_compared) {
    job->is_compared = 1;
    publish(c);
    return compare(c);
  }
  atomic_store_explicit(rounds_of(c, c->mpi.rank), ++c->rounds, memory_order_release);
  for (int i = 1; !code && i < c->mpi.size; i++) {
    int rank = other(c, i);
    for (int64_t looks = 0; !code && atomic_load_explicit(rounds_of(c, rank), memory_order_acquire) < c->rounds; looks++)
      code = between_looks(c, rank, looks);
  }
  return code;
}

/* y <- x_0 op ... op x_(ranks - 1), of so many items from this byte of all slots. */
static int combine(struct comparison *c, struct job *job, int ranks, int64_t from, int64_t items, char *y) {
  int code = 0;
  memcpy(y, slot(c, job, 0) + from, items * job->item_bytes);
  for (int rank = 1; !code && rank < ranks; rank++)
    code = c->mpi.reduce_local(slot(c, job, rank) + from, y, (int)items, job->type, job->op);
  return code;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Each rank reduces its part for all; y may be NULL. */
static int reduce_by_parts(struct comparison *c, struct job *job, int64_t items, char *y) {
  int64_t b = job->item_bytes, each = (items + c->mpi.size - 1) / c->mpi.size;
  each = (each * b + ALIGNED_BYTES - 1) / ALIGNED_BYTES * ALIGNED_BYTES / b;
  int64_t start = least(c->mpi.rank * each, items), mine = least(each, items - start);
  int code = combine(c, job, c->mpi.size, start * b, mine, reduced_part(c, c->mpi.rank));
  if (!code) code = meet(c, job);
  for (int rank = 0; !code && y && rank < c->mpi.size; rank++) {
    start = least(rank * each, items);
    memcpy(y + start * b, reduced_part(c, rank), least(each, items - start) * b);
  }
  return code;
}

/* Copy a chunk of the other ranks' rows into a slot, where they lie side by side. */
static void rows_in(struct comparison *c, struct job *job, int64_t from, int64_t bytes) {
  for (int rank = 0; rank < c->mpi.size; rank++)
    if (rank != c->mpi.rank)
      memcpy(slot(c, job, c->mpi.rank) + rank * bytes, job->x + rank * job->items * job->item_bytes + from, bytes);
}

/* Return MPI's error, or 0; -1 if ranks differ. */
static int chunk_through_slots(struct comparison *c, struct job *job, int64_t start, int64_t items) {
  int64_t from = start * job->item_bytes, bytes = items * job->item_bytes, row = job->items * job->item_bytes;
  int size = c->mpi.size, mine = c->mpi.rank, is_root = mine == job->root, is_long = bytes > SHORT_BYTES, code;
  char *y = job->y + from;
  if (job->kind == ALLTOALL || (job->kind == SCATTER && is_root))
    rows_in(c, job, from, bytes);
  else if (job->kind != SCATTER && (job->kind != BCAST || is_root))
    memcpy(slot(c, job, mine), job->x + from, bytes);
  if ((code = meet(c, job))) return code;
  switch (job->kind) {
    case REDUCE:
    case ALLREDUCE:
      if (job->kind == REDUCE && !is_root) y = NULL;
      if (is_long) code = reduce_by_parts(c, job, items, y);
      else if (y) code = combine(c, job, size, 0, items, y);
      break;
    case SCAN: code = combine(c, job, mine + 1, 0, items, y); break;
    case BCAST:
      if (!is_root) memcpy(y, slot(c, job, job->root), bytes);
      break;
    case SCATTER: memcpy(y, is_root ? job->x + mine * row + from : slot(c, job, job->root) + mine * bytes, bytes); break;
    case ALLTOALL:
      for (int rank = 0; rank < size; rank++)
        memcpy(y + rank * row, rank == mine ? job->x + rank * row + from : slot(c, job, rank) + mine * bytes, bytes);
      break;
    default: /* ALLGATHER, GATHER */
      for (int rank = 0; rank < size && (job->kind == ALLGATHER || is_root); rank++)
        memcpy(y + rank * row, slot(c, job, rank), bytes);
  }
  c->chunks += !job->is_inline;
  return code;
}

/* The arrays of a call; items are of a row if it has rows. */
static struct job job_of(struct comparison *c, const int32_t *words, const XLA_FFI_Buffer *x, const XLA_FFI_Buffer *y) {
  struct setup *mpi = &c->mpi;
  struct job job = {.x = x->data, .y = y->data, .items = numbers_in(x), .item_bytes = mpi->item_bytes[x->dtype]};
  job.kind = words[KIND], job.root = words[ROOT];
  job.type = mpi->types[x->dtype], job.op = mpi->ops[words[OP]];
  if (job.kind == ALLTOALL || (job.kind == SCATTER && mpi->rank == job.root)) job.items /= mpi->size;
  int rows = job.kind == ALLTOALL || job.kind == SCATTER ? mpi->size : 1;
  job.is_inline = job.items * job.item_bytes * rows <= 8 * (mpi->place_words - 1);
  job.most = job.is_inline ? job.items : mpi->slot_bytes / (job.item_bytes * rows); /* to divide takes as long as to copy */
  return job;
}

static int through_slots(struct comparison *c, const int32_t *words, const XLA_FFI_Buffer *x, const XLA_FFI_Buffer *y) {
  struct job job = job_of(c, words, x, y);
  int64_t start = 0;
  int code;
  do {
    int64_t items = least(job.most, job.items - start);
    code = chunk_through_slots(c, &job, start, items);
    start += items;
  } while (!code && start < job.items);
  return code;
}
