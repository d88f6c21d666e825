"""The table of commands, and those that belong to no other room.

In reading order: `cli`, the table, which imports a command by its name when it is called; `options` of the commands
here, without JAX; `doctor`, machine, MPI and JAX; `scaling_plan`, speed with more workers; `experiments` that come with
jaxmpi.

It imports `core`, `runtime`, `config`, `comm`, `allreduce`, `observe`, `recover` and `launch`.
"""
