"""Sinks: where lines of the record go besides the record.

In reading order: `base`, the contract; `files`, TensorBoard and CSV; `services`, trackers of experiments; `registry`, a
row for each.

It imports `core` and `runtime`.
"""
