"""APIs of other libraries on jaxmpi: programs change only their import line.

In reading order: `mpi4jax`, the names of mpi4jax 0.9.

It imports `core`, `runtime`, `comm` and `collectives`.
"""
