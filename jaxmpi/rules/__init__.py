"""Rules: how workers combine what they learn. A rule is a file here and a row of `registry.RULES`.

`base` is the contract. Lock-step rules: `gradients`, `subgd`, `awagd`, `local_sgd`, `diloco`. Asynchronous ones:
`easgd`, `asgd` with `parameter_server` and its transport; `gosgd` with `gossip_transport`.

It imports `core`, `runtime`, `config`, `comm` and `allreduce`.
"""
