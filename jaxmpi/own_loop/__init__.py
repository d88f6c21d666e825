"""Parts around the exchange that a loop of one's own needs.

In reading order: `metrics`, sums and means over ranks; `ranks`, shares, keys and output of a rank; `accumulation` of
gradients; `checkpoints`, saved and restored.

It imports `core`, `runtime`, `comm`, `allreduce`, `data` and `checkpoint`.
"""
