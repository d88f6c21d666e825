"""APIs of other libraries on jaxmpi: a program changes its import line only.

In reading order: `mpi4jax`, the names of mpi4jax 0.9.

It imports `core`, `comm` and `collectives`.
"""
