"""Rules: how workers combine what they learn.

A rule is a file here and a row of `registry.RULES`. In reading order: `base`, the contract; in lock step `gradients`,
`subgd`, `awagd`, `local_sgd` and `diloco`; asynchronous `easgd`, `asgd` and `gosgd`; `parameter_server`, the center;
`parameter_server_transport` and `gossip_transport`, messages over MPI; `averaged`, params averaged over steps;
`registry`, the table.

It imports `core`, `runtime`, `config`, `comm`, `allreduce` and `optim`.
"""
