"""Build an MPI wrapper for XLA's collectives, with only jaxlib's calls.

jaxlib's MPI calls go through MPItrampoline. It loads an MPI's wrapper from MPITRAMPOLINE_LIB and wants every name of
its binary interface in it. MPIwrapper has all of them, and is to be built from its sources. This one is for machines
without it. Its names are read from jaxlib, and it passes 16 functions on to MPI. Any other call ends the process with
its name. MPI must have been started before, as jaxmpi does.

    python scripts/mpiwrapper.py libmpiwrapper.so
    export MPITRAMPOLINE_LIB=$PWD/libmpiwrapper.so JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi
    jaxmpi train -n 2 --comm xla digits
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
import jaxlib

# Types of the interface are pointers or numbers of eight bytes; an MPI's own are at most as wide.
FUNCTIONS = """
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define HANDLE(type, x) ((type)(intptr_t)(x))
typedef void *Any;

static int not_here(const char *name) {
  fprintf(stderr, "this MPI wrapper has no %s: build MPIwrapper\\n", name);
  abort();
}

int MPIABI_Init_thread(int *n, char ***args, int required, int *provided) { return MPI_Query_thread(provided); }
int MPIABI_Initialized(int *flag) { return MPI_Initialized(flag); }
int MPIABI_Finalized(int *flag) { return MPI_Finalized(flag); }
int MPIABI_Is_thread_main(int *flag) { return MPI_Is_thread_main(flag); }
int MPIABI_Get_library_version(char *text, int *length) { return MPI_Get_library_version(text, length); }
int MPIABI_Error_string(int code, char *text, int *length) { return MPI_Error_string(code, text, length); }
int MPIABI_Comm_rank(Any comm, int *rank) { return MPI_Comm_rank(HANDLE(MPI_Comm, comm), rank); }
int MPIABI_Comm_size(Any comm, int *size) { return MPI_Comm_size(HANDLE(MPI_Comm, comm), size); }
int MPIABI_Comm_split(Any comm, int color, int key, Any *out) {
  MPI_Comm made;
  int code = MPI_Comm_split(HANDLE(MPI_Comm, comm), color, key, &made);
  *out = HANDLE(Any, made);
  return code;
}
int MPIABI_Comm_free(Any *comm) {
  MPI_Comm gone = HANDLE(MPI_Comm, *comm);
  int code = MPI_Comm_free(&gone);
  *comm = HANDLE(Any, gone);
  return code;
}
int MPIABI_Allreduce(const void *in, void *out, int n, Any type, Any op, Any comm) {
  return MPI_Allreduce(in, out, n, HANDLE(MPI_Datatype, type), HANDLE(MPI_Op, op), HANDLE(MPI_Comm, comm));
}
int MPIABI_Allgather(const void *in, int n, Any type, void *out, int m, Any other, Any comm) {
  return MPI_Allgather(in, n, HANDLE(MPI_Datatype, type), out, m, HANDLE(MPI_Datatype, other), HANDLE(MPI_Comm, comm));
}
int MPIABI_Reduce_scatter(const void *in, void *out, const int counts[], Any type, Any op, Any comm) {
  return MPI_Reduce_scatter(in, out, counts, HANDLE(MPI_Datatype, type), HANDLE(MPI_Op, op), HANDLE(MPI_Comm, comm));
}
int MPIABI_Irecv(void *out, int n, Any type, int source, int tag, Any comm, Any *request) {
  MPI_Request made;
  int code = MPI_Irecv(out, n, HANDLE(MPI_Datatype, type), source, tag, HANDLE(MPI_Comm, comm), &made);
  *request = HANDLE(Any, made);
  return code;
}
int MPIABI_Isend(const void *in, int n, Any type, int target, int tag, Any comm, Any *request) {
  MPI_Request made;
  int code = MPI_Isend(in, n, HANDLE(MPI_Datatype, type), target, tag, HANDLE(MPI_Comm, comm), &made);
  *request = HANDLE(Any, made);
  return code;
}
int MPIABI_Wait(Any *request, void *status) {
  MPI_Request gone = HANDLE(MPI_Request, *request);
  int code = MPI_Wait(&gone, MPI_STATUS_IGNORE);
  *request = HANDLE(Any, gone);
  return code;
}
int MPIABI_Sendrecv(const void *in, int n, Any type, int target, int tag, void *out, int m, Any other, int source,
                    int other_tag, Any comm, void *status) {
  return MPI_Sendrecv(in, n, HANDLE(MPI_Datatype, type), target, tag, out, m, HANDLE(MPI_Datatype, other), source,
                      other_tag, HANDLE(MPI_Comm, comm), MPI_STATUS_IGNORE);
}
int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 10, mpiwrapper_version_patch = 0;
int mpiabi_version_major = 2, mpiabi_version_minor = 9, mpiabi_version_patch = 0;
void mpiwrapper_export_fortran_constants_(void) {}
"""
HANDLES = (
    *("COMM_WORLD", "COMM_NULL", "REQUEST_NULL", "SUM", "PROD", "MIN", "MAX", "BYTE", "FLOAT", "DOUBLE"),
    *("INT8_T", "UINT8_T", "INT16_T", "UINT16_T", "INT32_T", "UINT32_T", "INT64_T", "UINT64_T"),
    *("C_COMPLEX", "C_DOUBLE_COMPLEX"),
)
NUMBERS = ("SUCCESS", "UNDEFINED", "THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")


def names() -> set[str]:
    """Names of the interface's functions and constants that jaxlib looks for."""
    library = Path(jaxlib.__file__).parent / "libjax_common.so"
    return {name.decode() for name in re.findall(rb"\0(MPIX?ABI_\w+)(?=\0)", library.read_bytes())}


def source(known: set[str]) -> str:
    """The wrapper in C."""
    constants = {f"MPIABI_{name}": f"Any MPIABI_{name} = (Any)(intptr_t)MPI_{name};" for name in HANDLES}
    constants |= {f"MPIABI_{name}": f"intptr_t MPIABI_{name} = MPI_{name};" for name in NUMBERS}
    passed_on = set(re.findall(r"int (MPIABI_\w+)\(", FUNCTIONS))
    rest = sorted(known - passed_on - set(constants))
    is_function = re.compile(r"MPIX?ABI_[A-Z][a-z]").match
    absent = [f'int {n}(void) {{ return not_here("{n}"); }}' if is_function(n) else f"Any {n} = 0;" for n in rest]
    return "\n".join([FUNCTIONS, *constants.values(), *absent, ""])


def build(library: Path, mpicc: str) -> None:
    """Compile the wrapper.

    Raises:
        SystemExit: the compiler fails; what it says is shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mpiwrapper.c"
        file.write_text(source(names()))
        line = [mpicc, "-shared", "-fPIC", "-O2", "-o", str(library), str(file)]
        ended = subprocess.run(line, capture_output=True, text=True, timeout=300)
    if ended.returncode:
        raise SystemExit(f"{' '.join(line)} ended with code {ended.returncode}:\n{ended.stderr}")


def main() -> None:
    """Build the wrapper with the `mpicc` beside this Python or on PATH."""
    parser = harness.parser(__doc__)
    parser.add_argument("library", type=Path, help="file to write")
    beside = Path(sys.executable).parent / "mpicc"
    parser.add_argument("--mpicc", default=str(beside) if beside.exists() else "mpicc", help="MPI's C compiler")
    asked = parser.parse_args()
    build(asked.library, asked.mpicc)


if __name__ == "__main__":
    main()
