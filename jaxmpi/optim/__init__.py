"""Optimizers and schedules, made from settings.

`schedules`, then `optimizers`.

It imports `core` and `config`.
"""
