"""The model contract, and adapters for models of other libraries.

In reading order: `contract`, three functions and a few facts; `batch_statistics` over workers; `adapters` for Flax,
Equinox and plain functions; `check`, a model tried on shapes alone.

It imports `core`.
"""

from jaxmpi.model.adapters.equinox import equinox_model as equinox_model
from jaxmpi.model.adapters.functions import plain_model as plain_model
from jaxmpi.model.adapters.linen import linen_model as linen_model
from jaxmpi.model.adapters.nnx import nnx_model as nnx_model
from jaxmpi.model.batch_statistics import batch_mean as batch_mean
from jaxmpi.model.contract import Model as Model
