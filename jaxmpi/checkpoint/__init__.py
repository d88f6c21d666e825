"""Checkpoints and run directories: atomic, checksummed, and locked by one job.

In reading order: `manifests`, which checkpoints there are and what they hold; `write`, all state for a bit-exact
resume; `restore`, the newest that is whole, resharded for the run; `manager`, writes in the background; `run_folder`,
the choice and lock of a run's folder, and `run_directory`, its checks; `export`, a model out of a run. `manifests` and
`run_folder` import no JAX, for the supervisor of a job.

It imports `core`, `runtime`, `model`, `config` and `comm`.
"""
