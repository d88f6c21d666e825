"""Commands besides training: `jaxmpi doctor`, `plan`, `experiments`, and the table of all.

`cli` finds the command; `doctor` and `scaling_forecast` are its larger ones.

It imports every room but `trainer` and `bench`.
"""
