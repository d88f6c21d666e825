"""Tasks: the fields of a batch, its losses, metrics and predictions.

The trainer knows tasks alone. A task of one's own is a `base.Task`; for a model with inputs and labels the registry has
rows that make one.

In reading order: `base`, the contract; `supervised`, a task of a model, and how an image gets into it;
`classes` and `numbers`, tasks by kind of labels; `registry`, the table; `check`, a task tried on shapes first.

It imports `core`, `model` and `config`.
"""
