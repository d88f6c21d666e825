"""Starting a job: mpirun's line, the supervisor that restarts it, and what it ended of.

In reading order: `command`, `supervisor`, `postmortem`.

It imports `core`, `runtime`, `config`, `checkpoint` and `rules`.
"""
