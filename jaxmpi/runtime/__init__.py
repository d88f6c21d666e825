"""One process of a job: launcher, cores, devices, and what ends it.

In reading order: `launchers`, rank and size; `affinity`, cores; `allocator`, freed memory; `caches` of
compiled programs; `device_setup`, GPUs and CPU devices; `job_folder`, marks in shared memory; `prepare`, set-up before
JAX starts; `interrupts`, signals to leave; `mpi_end`, hooks before MPI ends; `spared_threads`, whose errors do not end
the run; `failures`, hooks that end the job; `phases` without a step, such as a compilation; `spans` of time;
`provenance` of a run; `screen`, the terminal's width; `in_flight`, code that may not communicate; `gpu_buffers` as
arrays; `host_callbacks`, Python functions in programs, with `xla_ffi`, structures of XLA's C interface; `c_library`,
sources in C; `fault_injection`, failures on purpose.

It imports `core`.
"""
