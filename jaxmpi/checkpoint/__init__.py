"""Checkpoints and run directories: atomic, checksummed, and locked by one job.

`manifests`, which checkpoints there are and what they hold; `manager` writes them, in the background; `restore` reads
the newest that is whole, resharded for the run; `run_directory`, a run's folder, its lock and its checks; `export`, a
model out of a run, and `exported_files` of it. `manifests` and `run_directory` import no JAX, for
the supervisor of a job.

It imports `core`, `runtime`, `model`, `config` and `comm`.
"""
