"""MPI's operations on JAX pytrees, in and out of jit, with derivatives.

    from jaxmpi import collectives as mpi
    total = mpi.allreduce(x, "sum")

In reading order: `api`, the functions; `arguments`, which they check; `table`, a row for each operation; `call`, one
call without its arrays; `primitive`, the place of calls in JAX; `messages`, from one rank to another; `nonblocking`,
`start` and `wait`; `__main__`, a list of the functions with what each sends: `python -m jaxmpi.collectives`.

It imports `core`, `runtime`, `comm` and `allreduce`.
"""

from jaxmpi.collectives.api import allgather as allgather
from jaxmpi.collectives.api import allgatherv as allgatherv
from jaxmpi.collectives.api import allreduce as allreduce
from jaxmpi.collectives.api import alltoall as alltoall
from jaxmpi.collectives.api import alltoallv as alltoallv
from jaxmpi.collectives.api import barrier as barrier
from jaxmpi.collectives.api import bcast as bcast
from jaxmpi.collectives.api import exscan as exscan
from jaxmpi.collectives.api import gather as gather
from jaxmpi.collectives.api import recv as recv
from jaxmpi.collectives.api import reduce as reduce
from jaxmpi.collectives.api import reduce_scatter as reduce_scatter
from jaxmpi.collectives.api import scan as scan
from jaxmpi.collectives.api import scatter as scatter
from jaxmpi.collectives.api import send as send
from jaxmpi.collectives.api import sendrecv as sendrecv
from jaxmpi.collectives.call import NOBODY as NOBODY
from jaxmpi.collectives.nonblocking import Handle as Handle
from jaxmpi.collectives.nonblocking import start as start
from jaxmpi.collectives.nonblocking import wait as wait
