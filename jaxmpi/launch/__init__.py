"""Launch of a job: the launcher's command line, the supervisor that restarts it, the cause of its end.

In reading order: `command`, `supervisor`, `postmortem`; `script` runs one of the user's own.

It imports `core`, `runtime`, `config`, `checkpoint` and `rules`.
"""
