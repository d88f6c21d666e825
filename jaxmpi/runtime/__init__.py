"""One process of a job: its launcher, cores, devices, caches, and the hooks that end the job when it fails.

In reading order: `launchers`, `prepare`, `affinity`, `fair_cores`, `device_setup`, `allocator`, `caches`, `job_folder`,
`mpi_end`, `failures`, `phases`, `provenance`, `spans`, `screen`, `gpu_buffers`, `host_callbacks`, `fault_injection`.

It imports `core`.
"""
