"""Data on its way to the device: batches made ahead, data kept in memory and shuffled between workers.

In reading order: `device_feed`, `memory_shuffle`, `peer_memory`, `in_memory`, `mpi_loaders`.

It imports `core`, `runtime`, `config`, `comm`, `model` and `data`.
"""
