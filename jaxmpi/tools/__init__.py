"""Commands besides training, and the table of all.

In reading order: `cli`, the table, which imports a command by its name when it is called; `doctor`, machine, MPI and
JAX; `scaling_plan`, speed with more workers; `experiments` that come with jaxmpi.

It imports `core`, `runtime`, `config`, `comm`, `allreduce`, `observe`, `recover` and `launch`.
"""
