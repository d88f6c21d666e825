"""Data-parallel training of JAX models wherever MPI runs. Importing starts neither MPI nor a device."""

from jaxmpi.comm import AxisComm as AxisComm
from jaxmpi.comm import MpiComm as MpiComm
from jaxmpi.comm import SoloComm as SoloComm
from jaxmpi.comm import world as world
from jaxmpi.config import UsageError as UsageError
from jaxmpi.exchange import exchange as exchange
from jaxmpi.exchange import exchange_gradients as exchange_gradients
from jaxmpi.processes import broadcast as broadcast
from jaxmpi.processes import same_on_all_ranks as same_on_all_ranks
