"""Basics: errors, files, pytrees, shared memory; nothing here needs training or MPI.

In reading order: `errors`, with messages for the user; `frames`, lines of the user's code in these; `env`, environment
variables; `files`, opened and written safely; `json_tree`, differences of JSON values; `pytrees`, leaves by name;
`random_keys` as numbers; `train_state` between two steps; `sharding` of trees over workers, for ZeRO, and
`sharding_trial`, whether an optimizer allows it; `host_arrays` and `to_jax`, numbers of the user's on their way into
JAX; `shared_memory` between processes of a host; `futex`, sleep until a word of it changes; `scheduling` of a thread.

It imports no other room.
"""
