"""Launch of a job: command line, supervisor and cause of its end.

In reading order: `command`, which builds and runs the launcher's line; `options`, what it is given; `experiment_facts`,
what another process reads in the experiment; `supervisor`, signals and restarts; `postmortem`, the rank that ended
first; `script`, one of the user's own.

It imports `core`, `runtime`, `config`, `checkpoint` and `rules`.
"""
