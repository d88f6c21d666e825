"""Data-parallel functions: any JAX function over all workers.

Synkhronos (Stooke and Abbeel 2017) did the same with Theano.

In reading order: `function`: scatter, compute, reduce; `reductions`, words for inputs and outputs, and trees of them;
`rows`, which rows each worker takes; `variable`, arrays on the workers; `shared_array`, arrays of a host; `optimizer`,
synchronous descent; `lifecycle`, start and end of the workers; `groups`, all workers together: devices, ranks or forked
processes; `commands` to them; `worker`, a worker's part of a call; `transport`, messages between processes;
`fork_memory`, sums of forked ones; `import_by_name`, functions in another process; `profiling` of calls.

It imports `core`, `runtime`, `comm` and `allreduce`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmpi.comm.job import broadcast as broadcast
from jaxmpi.comm.job import processes
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import PyTree
from jaxmpi.functions import shared_array
from jaxmpi.functions.function import Function, Marker
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


def function(
    f: Callable,
    inputs: Mapping[str, Marker] | Sequence[Marker] | Marker = scatter,
    outputs: PyTree = mean,
    updates: Any = (),
    strategy: str | None = None,
) -> Function:
    """Make a function that runs `f` over all workers.

    The function returns y = op_r f(x_r, ...), with x_r the r-th share of the examples.

    Args:
        f: a JAX function of arrays and trees of them; it must give for shares what goes together by its outputs' ops.
        inputs: for every argument of f, or one for all: `scatter` (rows divided, as evenly as can be), `broadcast`
            (whole), a variable (each worker's own). `scatter(variable)` is also possible (its rows, for `slices` and
            `batch_local`). A dict names parameters of f, which it then gets by name; those that it leaves out keep
            their defaults.
        outputs: for every output, or one for the only one: `mean` (weighted by examples), `sum`, `prod`, `min`, `max`,
            `gather` (rows in order), `local` (left on the workers, as a variable). `mean(variable)` keeps the result
            on all workers instead of returning it; `local(mean)` says how pieces combine. Words do as well: "sum".
            A tree of them, such as a dict, reduces an output leaf by leaf: each stands for all that is below its place.
        updates: variables, or pairs (variable, op), that take what f returns after its outputs, each worker for itself;
            op is over pieces: `mean` (default), `sum`, `prod`, `min`, `max`, `gather`; `add` adds to the old value.
            One may stand alone; with outputs=() it is what f returns.
        strategy: how sums and means travel, as of `jaxmpi.exchange`; default: `shm` on one host's CPUs, `ar` over
            GPUs of one process, else `asa32`.

    Communicates: at its calls; see `Function.__call__`. Raises: UsageError: no such input, output or update.
    """
    check(callable(f), f"function: got {f!r}; expected a function")
    check(
        isinstance(updates, (Variable, tuple, list)),
        f"updates: got {updates!r}; expected a jaxmpi.variable, a pair (variable, add), or several",
    )
    return Function(function=f, inputs=inputs, outputs=outputs, updates=updates, strategy=strategy)


def variable(tree: PyTree) -> Variable:
    """Make a variable: every worker begins with its own copy of `tree`.

    If every rank runs the script each keeps the tree that it gives. Communicates: the tree, if workers wait.
    """
    return make_variable(current_group(), tree)


def shared(
    value: Any = None, *, name: str = "", oversize: float = 1.0, dtype: Any = None, force: bool = False
) -> SharedArray:
    """An array in the host's shared memory, which workers read without messages.

    Args:
        value: an array to copy in, or a function that gives one; None attaches to `name`.
        name: for other processes of this user: `jaxmpi.shared(name=...)`. It goes with `free`, or with this process.
        oversize: room for growth, as a factor >= 1 of the array's bytes.
        dtype: of the shared array; it must hold the value's without loss, or `force` casts.

    If every rank runs the script, the first of each host calls a function `value` and writes; the others attach;
    what fails on one fails on all.

    Raises:
        UsageError: no numbers, a lossy cast, a name that is taken or unknown, no room.
    """
    check(value is not None or bool(name), "shared: give an array, or the name of one")
    if value is None:
        return shared_array.attach(name)
    make = functools.partial(shared_array.create, value, name, oversize, dtype, force)
    if launched_workers() == 1 or current_group().is_serial:
        return make()
    # The first rank of each host makes the array, the others map it; if one rank cannot, all raise.
    made: list[SharedArray] = []
    errors: list[Exception] = []

    def attempt(work: Callable[[], SharedArray]) -> str | None:
        try:
            made.append(work())
            return made[0].path
        except Exception as error:
            errors.append(error)
            return None

    path = processes().bcast_from_host_leader(lambda: attempt(make))
    if path and not made:
        attempt(lambda: shared_array.open_array(path))
    texts = [text for text in processes().allgather_object("; ".join(f"{e}" or repr(e) for e in errors)) if text]
    if errors:
        raise errors[0]
    check(not texts, f"shared: another rank could not make or see it: {texts and texts[0]}")
    made[0].name = name
    return made[0]
