"""Communication: messages between processes, and collectives inside jit.

In reading order: `agreement`, fingerprints of calls; `polling`, waits
that give up; `mailbox`, messages without a wait; `mpi_info`, facts about the MPI library; `membership`, who the ranks
are, also after a death; `control`, small messages outside jit; `solo`, the same for one process; `job`, how this job
comes by one of the two; `link_times`, how quick messages are; `base`, the protocol inside jit; `axis` over a mapped
axis; `mpi` over mpi4jax; `mpi_fault_tolerant` over mpi4py, whose errors return; `xla_mesh`, XLA's own collectives;
`topology`, which ranks and devices the workers are; `host_processes`, the protocol of the ranks of a host;
`shared_sync`, how far they are; `shared_sum`, sums in shared memory; `shared_params`, one copy a host;
`shared_compile`, one compilation a host; `exchange_watch`, absent ranks by name; `c_handlers`, sources in C that call
MPI from programs; `compiled_calls`, one of them; `call_comparison`, the exchange that each rank has come to.

It imports `core` and `runtime`.
"""
