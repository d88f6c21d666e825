"""Checkpoints and run directories: atomic, checksummed, and locked by one job.

In reading order: `manifests`, which checkpoints there are and what they hold; `leaves`, read and checked; `write`, all
state for a bit-exact resume; `restore`, the newest that is whole; with it `recut`, a rule's state for a run that holds
it otherwise; `uncoordinated`, parts of asynchronous workers; `run_folder`, the choice and lock of a run's folder, and
`run_directory`, its checks; `manager`, writes in the background; `orbax_export`, for other programs; `trained`, a model
out of a run. `manifests` and `run_folder` import no JAX, for the supervisor of a job.

It imports `core`, `runtime`, `model`, `config` and `comm`.
"""
