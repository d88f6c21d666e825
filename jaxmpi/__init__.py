"""Data-parallel training of JAX models wherever MPI runs.

A public name is imported when it is first used: importing jaxmpi starts neither MPI nor a device, and loads no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmpi.allreduce.api import exchange as exchange
    from jaxmpi.allreduce.api import exchange_gradients as exchange_gradients
    from jaxmpi.allreduce.sharded import sharded as sharded
    from jaxmpi.checkpoint.export import TrainedModel as TrainedModel
    from jaxmpi.checkpoint.export import load as load
    from jaxmpi.checkpoint.exported_files import load_program as load_program
    from jaxmpi.collectives.nonblocking import start as start
    from jaxmpi.collectives.nonblocking import wait as wait
    from jaxmpi.comm.axis import AxisComm as AxisComm
    from jaxmpi.comm.base import SoloComm as SoloComm
    from jaxmpi.comm.job import broadcast as broadcast
    from jaxmpi.comm.job import same_on_all_ranks as same_on_all_ranks
    from jaxmpi.comm.mpi import MpiComm as MpiComm
    from jaxmpi.comm.mpi import world as world
    from jaxmpi.core.errors import TrainingError as TrainingError
    from jaxmpi.core.errors import UsageError as UsageError
    from jaxmpi.data.in_memory import InMemory as InMemory
    from jaxmpi.functions import function as function
    from jaxmpi.functions import shared as shared
    from jaxmpi.functions import variable as variable
    from jaxmpi.functions.lifecycle import close as close
    from jaxmpi.functions.lifecycle import fork as fork
    from jaxmpi.functions.optimizer import optimizer as optimizer
    from jaxmpi.own_loop.accumulation import accumulate_gradients as accumulate_gradients
    from jaxmpi.own_loop.checkpoints import Checkpoints as Checkpoints
    from jaxmpi.own_loop.ranks import average_statistics as average_statistics
    from jaxmpi.own_loop.ranks import join as join
    from jaxmpi.own_loop.ranks import on_rank0 as on_rank0
    from jaxmpi.own_loop.ranks import print0 as print0
    from jaxmpi.own_loop.ranks import rank_key as rank_key
    from jaxmpi.own_loop.ranks import sampler as sampler
    from jaxmpi.tasks.base import Task as Task
    from jaxmpi.trainer.api import Trainer as Trainer
    from jaxmpi.trainer.callbacks import Callback as Callback
    from jaxmpi.trainer.callbacks import EarlyStop as EarlyStop
    from jaxmpi.trainer.callbacks import Moment as Moment
    from jaxmpi.trainer.callbacks import ReduceOnPlateau as ReduceOnPlateau

_PLACES = {  # module to the public names that it has
    "jaxmpi.allreduce.api": ("exchange", "exchange_gradients"),
    "jaxmpi.allreduce.sharded": ("sharded",),
    "jaxmpi.checkpoint.export": ("TrainedModel", "load"),
    "jaxmpi.checkpoint.exported_files": ("load_program",),
    "jaxmpi.collectives.nonblocking": ("start", "wait"),
    "jaxmpi.comm.axis": ("AxisComm",),
    "jaxmpi.comm.base": ("SoloComm",),
    "jaxmpi.comm.job": ("broadcast", "same_on_all_ranks"),
    "jaxmpi.comm.mpi": ("MpiComm", "world"),
    "jaxmpi.core.errors": ("TrainingError", "UsageError"),
    "jaxmpi.functions": ("function", "shared", "variable"),
    "jaxmpi.functions.lifecycle": ("close", "fork"),
    "jaxmpi.functions.optimizer": ("optimizer",),
    "jaxmpi.data.in_memory": ("InMemory",),
    "jaxmpi.own_loop.accumulation": ("accumulate_gradients",),
    "jaxmpi.own_loop.checkpoints": ("Checkpoints",),
    "jaxmpi.own_loop.ranks": ("average_statistics", "join", "on_rank0", "print0", "rank_key", "sampler"),
    "jaxmpi.tasks.base": ("Task",),
    "jaxmpi.trainer.api": ("Trainer",),
    "jaxmpi.trainer.callbacks": ("Callback", "EarlyStop", "Moment", "ReduceOnPlateau"),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("collectives", "functions"):
        return importlib.import_module(f"jaxmpi.{name}")
    if name == "metrics":
        return importlib.import_module("jaxmpi.own_loop.metrics")
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxmpi' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
