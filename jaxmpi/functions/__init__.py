"""Data-parallel functions: any JAX function over all workers.

Synkhronos (Stooke and Abbeel 2017) did the same with Theano.

In reading order: `function`: scatter, compute, reduce; `reductions`, words for inputs and outputs, and trees of them;
`rows`, which rows each worker takes; `variable`, arrays on the workers; `shared_array`, arrays of a host; `optimizer`,
synchronous descent; `lifecycle`, start and end of the workers; `groups`, all workers together: devices, ranks or forked
processes; `commands` to them; `program`, a function for certain shapes; `worker`, a worker's part of a call, and
`reports` on it; `transport`, messages between processes; `profiling` of calls.

It imports `core`, `runtime`, `comm` and `allreduce`.
"""

from typing import Any

from jaxmpi.comm.job import broadcast as broadcast
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import PyTree
from jaxmpi.functions import shared_array
from jaxmpi.functions.function import Function
from jaxmpi.functions.lifecycle import close as close
from jaxmpi.functions.lifecycle import current_group
from jaxmpi.functions.lifecycle import fork as fork
from jaxmpi.functions.optimizer import optimizer as optimizer
from jaxmpi.functions.profiling import profile as profile
from jaxmpi.functions.reductions import add as add
from jaxmpi.functions.reductions import gather as gather
from jaxmpi.functions.reductions import local as local
from jaxmpi.functions.reductions import max as max
from jaxmpi.functions.reductions import mean as mean
from jaxmpi.functions.reductions import min as min
from jaxmpi.functions.reductions import prod as prod
from jaxmpi.functions.reductions import scatter as scatter
from jaxmpi.functions.reductions import sum as sum
from jaxmpi.functions.shared_array import SharedArray
from jaxmpi.functions.variable import Variable, make_variable
from jaxmpi.runtime.process import launched_workers

function = Function  # rebinds the name of the module


def variable(tree: PyTree) -> Variable:
    """Make a variable: every worker begins with its own copy of `tree`.

    If every rank runs the script each keeps the tree that it gives. Communicates: the tree, if workers wait.
    """
    return make_variable(current_group(), tree)


def shared(value: Any = None, *, name: str = "") -> SharedArray:
    """An array in the host's shared memory, which workers read without messages.

    Args:
        value: an array to copy in, or a function that gives one; None attaches to `name`.
        name: for other processes of this user: `jaxmpi.shared(name=...)`. It goes with `free`, or with this process.

    If every rank runs the script, the first of each host calls a function `value` and writes; the others attach;
    what fails on one fails on all.

    Raises:
        UsageError: no numbers, a name that is taken or unknown, no room.
    """
    if value is None and not name:
        raise UsageError("shared: got neither an array nor a name; expected an array, or the name of one")
    if value is None:
        return shared_array.attach(name)
    if launched_workers() == 1 or current_group().is_serial:
        return shared_array.create(value, name)
    return shared_array.shared_by_host(lambda: shared_array.create(value, name), name)
