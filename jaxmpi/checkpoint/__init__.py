"""Checkpoints and run directories: atomic, checksummed, and locked by one job.

In reading order: `format`, all state for a bit-exact resume; `uncoordinated`, parts of asynchronous workers;
`run_directory`, its choice, lock and checks; `manager`, writes in the background; `orbax_export`, for other programs;
`trained`, a model out of a run.

It imports `core`, `runtime`, `model`, `config` and `comm`.
"""
