"""Failures during a run: noticed, agreed upon, survived.

In reading order: `signals`, `watchdog`, `replica_check`, `decisions`, `shrink`.

It imports `core`, `runtime`, `config`, `comm`, `allreduce`, `checkpoint` and `observe`.
"""
