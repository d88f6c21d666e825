"""Checkpoints and run directories: what is on disk is whole, checked and its owner's.

In reading order: `format`, `uncoordinated`, `run_directory`, `manager`, `orbax_export`.

It imports `core`, `runtime`, `config` and `comm`.
"""
