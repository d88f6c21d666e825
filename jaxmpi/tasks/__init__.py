"""Tasks: the fields of a batch, its losses, metrics and predictions.

The trainer knows tasks alone. A task of one's own is a `base.Task`; for a model with inputs and labels `registry` has
rows that make one. In reading order: `base` (the contract), `inputs` (the way of an image into a model), `supervised`
(a task of a model), `classes` and `numbers` (the rows), `registry` (the table), `check` (tried on shapes first).
"""
