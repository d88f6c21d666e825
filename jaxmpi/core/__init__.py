"""Basics: errors, files, pytrees, shared memory; nothing here needs training or MPI.

In reading order: `errors`, `env`, `files`, `pytrees`, `slices`, `random_keys`, `json_tree`, `shared_memory`, `futex`,
`scheduling`, `train_state`.

It imports no other room.
"""
