"""Failures during a run: noticed, agreed upon, survived.

In reading order: `signals` to save and leave; `watchdog`, who is late; `replica_check`, equal bits on all workers;
`decisions` that all ranks take together; `shrink`, the run without a dead rank.

It imports `core`, `runtime`, `config`, `comm`, `checkpoint` and `observe`.
"""
