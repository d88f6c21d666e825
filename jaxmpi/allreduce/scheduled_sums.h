/* Sums between processes by schedules, with many parts of a vector under way at once.

   `schedules.py` writes a vector's schedule: the vector is cut into parts, and each part has a list of steps that sends,
   receives and adds. All that a thread has under way is in one array of MPI requests. A part goes on whenever its own
   messages have come, whatever becomes of the others: it adds, begins its next messages, and so on to its end. So slow
   links are kept full, and nobody waits for a message while another could be used. A thread's sums are its own: no lock
   is needed here. */

enum step { STEPS };
enum memory { MEMORIES }; /* the lowest two bits of where a step reads and writes */
enum { FLOATS = 1024 };   /* of a block in the nearest cache */

static struct { /* pointers, in the order of `FUNCTIONS` and of the callbacks in host_engine.py; `byte` follows them */
  int (*isend)(const void *, int, handle, int, int, handle, handle *);
  int (*irecv)(void *, int, handle, int, int, handle, handle *);
  int (*testsome)(int, handle *, int *, int *, void *);
  void (*failed)(int32_t engine, int32_t code);                              /* ends the job */
  void (*waits)(int32_t engine, int64_t key, int64_t index, double seconds); /* likewise, if it was too long */
  void (*learn)(int32_t engine, const char *text, int64_t length); /* adds the plan of a program traced elsewhere */
  handle byte;
} mpi;

struct pace { /* of looks that find nothing: first some that yield, then pauses. Other threads change it at any time. */
  _Atomic int32_t is_woken, yields, pause_us;
};

struct record { /* the schedule of one vector's sum on this rank */
  const int64_t *steps, *parts;         /* words of all steps; where each part begins */
  int64_t count, window, scratch_bytes; /* parts, and how many at once; one part's memory */
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

static _Thread_local struct sum *sums;
static struct scratch *_Atomic idle; /* of a sum that has ended: fresh memory would cost page faults in each sum */

/* Messages of all sums of a thread. MPI wants their requests in one array; the others go with it. */
static _Thread_local int awaited, room;
static _Thread_local handle *requests;
static _Thread_local struct part **owners, **ready; /* of requests; parts of which all messages have come */
static _Thread_local int *complete;                 /* indices */
static _Thread_local status *statuses;

void jaxmpi_sum_setup(const void *functions, handle byte) {
  memcpy(&mpi, functions, (char *)&mpi.byte - (char *)&mpi);
  mpi.byte = byte;
}

/* Begin a sum, whose parts have tags from `first_tag` on, modulo `tags`. Return NULL if there is no memory. */
struct sum *jaxmpi_sum_begin(const struct record *record, handle comm, int64_t tags, void *from, void *to, int64_t first_tag) {
  int64_t size = (record->count < record->window ? record->count : record->window) * record->scratch_bytes;
  struct sum *made = calloc(1, sizeof *made), **end = &sums;
  struct scratch *scratch = atomic_exchange(&idle, NULL);
  if (!scratch || scratch->size < size) {
    free(scratch);
    if ((scratch = aligned_alloc(LINE_BYTES, sizeof *scratch + size))) scratch->size = size;
  }
  if (!made || !scratch) return NULL;
  *made = (struct sum){.record = record, .comm = comm, .from = from, .to = to, .scratch = scratch};
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
  int memory = where & 3;
  return (memory == SCRATCH ? part->scratch : memory == OPERAND ? part->sum->from : part->sum->to) + (where >> 2);
}

/* Make room for one more message; return NO_MEMORY, or 0. */
static int reserve(void) {
  if (awaited < room) return 0;
  room = 2 * room + 64;
  requests = realloc(requests, room * sizeof *requests);
  owners = realloc(owners, room * sizeof *owners);
  ready = realloc(ready, room * sizeof *ready);
  complete = realloc(complete, room * sizeof *complete);
  statuses = realloc(statuses, room * sizeof *statuses);
  return requests && owners && ready && complete && statuses ? 0 : NO_MEMORY;
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

/* Begin parts while fewer than the window are under way. Return MPI's error, or 0. */
static int begin_parts(struct sum *sum) {
  int code = 0;
  for (int i = 0; !code && i < sum->record->window && sum->begun < sum->record->count; i++) {
    struct part *part = &sum->under_way[i];
    while (!code && !part->sum && sum->begun < sum->record->count) { /* a part may end at once */
      part->sum = sum;
      part->scratch = sum->scratch->bytes + i * sum->record->scratch_bytes;
      part->tag = (int32_t)((sum->first_tag + sum->begun) % sum->tags);
      part->at = sum->record->steps + sum->record->parts[sum->begun++];
      code = resume(part);
    }
  }
  return code;
}

/* Look once at all messages; go on with the parts whose messages have all come. Return MPI's error, or 0. */
static int look(int32_t *has_moved) {
  int found = 0, kept = 0, many = 0;
  int code = awaited ? mpi.testsome(awaited, requests, &found, complete, statuses) : 0;
  if (code || found <= 0) return code;
  *has_moved = 1;
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
  for (int i = 0; !code && i < many; i++) code = resume(ready[i]); /* which may move the arrays */
  return code;
}

static int64_t now_ns(void) { /* Python's time.perf_counter_ns */
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void pause_for(int32_t us) { nanosleep(&(struct timespec){.tv_nsec = 1000 * us}, NULL); }

/* Carry this thread's sums on for `most_us`, or until one has ended or `is_woken`. Return MPI's error, or 0. */
int jaxmpi_sums_go_on(int32_t most_us, const struct pace *pace, int32_t *has_moved) {
  int64_t end_ns = now_ns() + 1000 * (int64_t)most_us;
  *has_moved = 0;
  for (int looks = 0;; looks++) {
    int32_t moved = 0;
    int code = 0;
    for (struct sum *sum = sums; !code && sum; sum = sum->next) code = begin_parts(sum);
    if (!code) code = look(&moved);
    if (code) return code;
    *has_moved |= moved;
    for (struct sum *sum = sums; sum; sum = sum->next)
      if (sum->ended == sum->record->count) return 0;
    if (pace->is_woken || now_ns() >= end_ns) return 0;
    if (moved) looks = -1;
    else if (looks < pace->yields) sched_yield();
    else pause_for(pace->pause_us);
  }
}
