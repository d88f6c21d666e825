"""Communication: the control plane between processes, and collectives inside jit.

`control` carries small messages outside jit; `base` is the protocol inside jit, with `mpi`, `axis`, `xla_mesh` and
`mpi_fault_tolerant` behind it; `call_comparison` compares which exchange ranks have come to; `shared_sum` adds in
shared memory; `topology` says which ranks and devices the workers are.

It imports `core` and `runtime`.
"""
