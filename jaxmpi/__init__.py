"""Data-parallel training of JAX models wherever MPI runs. Importing starts neither MPI nor a device."""

from jaxmpi.comm import AxisComm as AxisComm
from jaxmpi.comm import MpiComm as MpiComm
from jaxmpi.comm import SoloComm as SoloComm
from jaxmpi.comm import world as world
from jaxmpi.config import TrainingError as TrainingError
from jaxmpi.config import UsageError as UsageError
from jaxmpi.exchange import exchange as exchange
from jaxmpi.exchange import exchange_gradients as exchange_gradients
from jaxmpi.function import close as close
from jaxmpi.function import fork as fork
from jaxmpi.function import function as function
from jaxmpi.function import optimizer as optimizer
from jaxmpi.function import shared as shared
from jaxmpi.function import variable as variable
from jaxmpi.function.ops import add as add
from jaxmpi.function.ops import gather as gather
from jaxmpi.function.ops import local as local
from jaxmpi.function.ops import max as max
from jaxmpi.function.ops import mean as mean
from jaxmpi.function.ops import min as min
from jaxmpi.function.ops import prod as prod
from jaxmpi.function.ops import scatter as scatter
from jaxmpi.function.ops import sum as sum
from jaxmpi.processes import broadcast as broadcast
from jaxmpi.processes import same_on_all_ranks as same_on_all_ranks
