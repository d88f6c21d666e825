/* Wires outside programs, for asynchronous rules. `wires.py` compiles it. */

#include "compiled_wires.h"

void jaxmpi_encode(int wire, char *to, const float *x, int64_t n) { encode(wire, to, x, n); }
void jaxmpi_decode(int wire, float *to, const char *sent, int64_t n) { decode(wire, to, sent, n, 0, n); }
