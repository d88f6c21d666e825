"""Launch of a job: command line, supervisor and cause of its end.

In reading order: `start`, the command; `options`, what it is given; `experiment_facts`, what a process of its own reads
in the experiment, `read_experiment`; `command`, the launcher's line; `supervisor`, signals and restarts; `postmortem`,
the rank that ended first; `script`, one of the user's own.

It imports `core`, `runtime`, `config`, `checkpoint` and `rules`.
"""
