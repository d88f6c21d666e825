"""The trainer: builds a run from an experiment and carries it out.

In reading order: `main`, `compatibility`, `build`, `step`, `run`; `loop` and `timetable` for all; `lock_step`, `guard` and
`recovery`; `asynchronous` with its worker, chief, servers and start; `evaluate`, `progress` and `resume` for both.

It imports every room below.
"""
