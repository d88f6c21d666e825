"""Data on its way to the devices, or kept in memory.

In reading order: `device_feed`, batches for the devices; `memory_shuffle`, a data set in memory that moves each epoch;
`peer_memory`, reads of other processes' memory; `in_memory`, for a loop of one's own; `mpi_loaders`, started by MPI.

It imports `core`, `runtime`, `model`, `config`, `comm`, `data` and `tasks`.
"""
