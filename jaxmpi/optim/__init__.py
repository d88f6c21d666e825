"""Optimizers and schedules, made from settings.

In reading order: `schedules` of the learning rate; `optimizers` by name, with masks and averages.

It imports `core`, `runtime`, `model` and `config`.
"""
