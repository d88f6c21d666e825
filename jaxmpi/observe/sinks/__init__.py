"""Sinks: where lines of the record go besides the record.

`base` has the contract, `files` TensorBoard and CSV, `services` trackers of experiments, `registry` a row for each.
"""
