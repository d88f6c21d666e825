"""Communication: messages between processes, and collectives inside jit.

Outside programs: `agreement`, fingerprints of calls; `polling`, waits that give up; `mpi_info`, facts about the MPI
library; `control`, the ranks and their small messages, also after a death; `solo`, the same for one process; `job`,
which of the two this job has. Inside: `base`, the protocol of communicators; `axis` over a mapped axis; `mpi` over MPI;
`xla_mesh`, XLA between processes; `topology`, which ranks and devices the workers are. On one host: `shared_sync`,
`shared_sum`, `shared_params`, `shared_compile`. `call_comparison` compares calls in C (`c_handlers`); `diagnosis` names
ranks that are late or at another call.

It imports `core` and `runtime`.
"""
