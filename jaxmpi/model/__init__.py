"""The model contract: three functions and a few facts, and adapters that make them from other libraries' models.

In reading order: `contract`, `batch_statistics`, `adapters`, `check`.

It imports `core`.
"""

from jaxmpi.model.adapters.equinox import equinox_model as equinox_model
from jaxmpi.model.adapters.functions import plain_model as plain_model
from jaxmpi.model.adapters.linen import linen_model as linen_model
from jaxmpi.model.adapters.nnx import nnx_model as nnx_model
from jaxmpi.model.batch_statistics import batch_mean as batch_mean
from jaxmpi.model.contract import Model as Model
