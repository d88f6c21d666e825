"""mpi4jax's API: `import jaxmpi.compat.mpi4jax as mpi4jax`; see `jaxmpi.collectives.mpi4jax_api`."""

from jaxmpi.collectives.mpi4jax_api import *  # noqa: F403
from jaxmpi.collectives.mpi4jax_api import __all__ as __all__
from jaxmpi.collectives.mpi4jax_api import __version__ as __version__
