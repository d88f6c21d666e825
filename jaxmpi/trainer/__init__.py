"""The trainer: builds a run from an experiment and carries it out.

In reading order: `main`, `run`, `build`, `step`, `loop`, `evaluate`, `resume`, `guard`, `progress`; `async_loop` for
asynchronous rules.

It imports every room below.
"""
