"""One process of a job: launcher, cores, devices, and what ends it.

`process`: rank and size by the launcher's variables, freed memory, cores, devices, set-up before JAX starts;
`compile_cache` of programs and of sources in C; `job_folder`, marks in shared memory; `failures`, hooks that end the
job or run before MPI ends, and signals to leave; `progress`, phases and spans; `provenance` of a run;
`host_callbacks`, Python functions in programs, with `gpu_buffers`; `fault_injection`, failures on purpose. It imports
`core`.
"""
