"""One process of a job: launcher, cores, devices, and what ends it.

`process`: rank and size by the launcher's variables, cores, devices, set-up before JAX starts; `allocator`, freed
memory; `caches` of compiled programs; `job_folder`, marks in shared memory; `interrupts`, signals to leave; `failures`,
hooks that end the job or run before MPI ends; `progress`, phases, spans and the terminal; `provenance` of a run;
`host_callbacks`, Python functions in programs, with `gpu_buffers`; `c_library`, sources in C; `fault_injection`,
failures on purpose. It imports `core`.
"""
