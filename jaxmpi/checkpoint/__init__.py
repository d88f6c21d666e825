"""Checkpoints and run directories: atomic, checksummed, and locked by one job.

In reading order: `format`, `uncoordinated`, `run_directory`, `manager`, `orbax_export`.

It imports `core`, `runtime`, `config` and `comm`.
"""
