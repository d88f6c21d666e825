"""Checkpoints and run directories: atomic, checksummed, and locked by one job.

In reading order: `format`, `uncoordinated`, `run_directory`, `manager`, `orbax_export`, `trained`.

It imports `core`, `runtime`, `config` and `comm`.
"""
