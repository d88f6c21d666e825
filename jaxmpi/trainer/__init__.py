"""The trainer: builds a run from an experiment and carries it out.

In reading order: `main`, `compatibility`, `build`, `step`, `run`; `loop` and `timetable` for all rules; `lock_step`,
`guard`, `recovery`; `asynchronous` with its worker, chief, servers, start; `evaluate`, `progress`, `resume` for both;
`finished` and `exported` for runs that are over; `api`.

It imports every room below.
"""
