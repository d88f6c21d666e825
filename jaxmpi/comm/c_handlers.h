/* What the package's handlers in C share. `c_handlers.py` compiles them, with HANDLE and other names defined. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

typedef HANDLE handle; /* of MPI: an int in MPICH, a pointer in Open MPI and in MPI's own binary interface */

typedef int64_t status[32]; /* room for any MPI's MPI_Status */

/* XLA calls a handler for other things than work: at its registration, to ask for the version of the header. */
static int is_work(XLA_FFI_CallFrame *frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return 0;
  }
  return frame->stage == XLA_FFI_ExecutionStage_EXECUTE;
}

/* The first attribute of a call that has this type. */
static void *attribute(XLA_FFI_CallFrame *frame, XLA_FFI_AttrType type) {
  int64_t i = 0;
  while (i < frame->attrs.size && frame->attrs.types[i] != type) i++;
  return i < frame->attrs.size ? frame->attrs.attrs[i] : NULL;
}

/* The words of a call, s32[]. */
static const int32_t *words_of(XLA_FFI_CallFrame *frame) {
  return ((XLA_FFI_Array *)attribute(frame, XLA_FFI_AttrType_ARRAY))->data;
}

static XLA_FFI_Error *error(XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, XLA_FFI_Error_Code_INTERNAL};
  return frame->api->XLA_FFI_Error_Create(&args);
}

static int64_t numbers_in(const XLA_FFI_Buffer *x) {
  int64_t count = 1;
  for (int64_t i = 0; i < x->rank; i++) count *= x->dims[i];
  return count;
}
