"""Rules: how workers combine what they learn.

A rule is a function here and a row of `registry.RULES`. In reading order: `base`, the contract; in lock step
`gradients` and `synchronous`; `asynchronous`, workers that do not wait; `averaged`, params averaged over steps;
`registry`, the table.

It imports `core`, `runtime`, `config`, `comm`, `allreduce`, `checkpoint` and `optim`.
"""
