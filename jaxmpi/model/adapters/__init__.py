"""Models of other libraries, made into the contract of `jaxmpi.model`.

In reading order: `common`, what adapters share; `functions`; `nnx` and `linen` of Flax; `equinox`; `loading`, trained
arrays into a module.

It imports `core` and `model`.
"""
