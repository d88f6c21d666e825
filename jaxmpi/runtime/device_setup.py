"""Devices that a process may use: GPUs, or devices of the CPU."""

import itertools
import os
from pathlib import Path

from jaxmpi.core.errors import check
from jaxmpi.runtime.launchers import launched

MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # share of a GPU's memory that JAX takes when its device starts


def pin_gpu(local_rank: int, local_size: int, devices: int = 1) -> None:
    """Take this rank's GPUs, and its part of their memory.

    This assumes that all ranks of the host see the same GPUs. A launcher may give each rank its own; `share_gpu`
    corrects that once ranks can communicate.

    Raises:
        UsageError: a GPU has started already, and there are several.
    """
    gpus = visible_gpus()
    if len(gpus) > 1:
        import jax
        from jax._src import xla_bridge  # nothing public shows if a device has started

        check(
            not (xla_bridge.backends_are_initialized() and jax.default_backend() == "gpu"),
            "JAX's device has started before jaxmpi could give this rank a GPU of its own: all ranks of the host would "
            "be on the first; call jaxmpi.world() before the first JAX array",
        )
        mine = {(local_rank * devices + i) % len(gpus) for i in range(devices)}
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, sorted(mine))))
    if gpus:
        share_gpu(-(-local_size * devices // len(gpus)))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by CUDA's numbers or names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    names = (name.strip() for name in visible.split(","))
    return list(itertools.takewhile(lambda name: name and name != "-1", names))  # CUDA reads no further


def my_gpu() -> str:
    """Name of this rank's GPU within its host; empty if none."""
    here, gpus = launched(), visible_gpus()
    if here is None or not gpus:
        return ""
    mine = gpus[here.local_rank % len(gpus)]
    of_step = int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) if here.launcher == "srun" else 0
    given = of_step >= here.local_size * len(gpus)  # by task: every rank may call its own "0"
    return f"{mine} of local rank {here.local_rank}" if given else mine


def share_gpu(ranks: int) -> None:
    """Give each of `ranks` processes on a GPU an equal memory share.

    It counts only before the device starts. A share that the user has set stays.
    """
    global _share
    if os.environ.get(MEMORY_SHARE, _share) != _share:
        return
    _share = f"{0.9 / ranks:.3f}" if ranks > 1 else ""
    os.environ.pop(MEMORY_SHARE, None)
    if _share:
        os.environ[MEMORY_SHARE] = _share


_share = ""  # value that `share_gpu` has set, to distinguish it from the user's


def take_devices(devices: int) -> None:
    """Before MPI starts, take `devices` GPUs or CPU devices for this rank."""
    here = launched()
    if devices > 1 and here is not None and here.size > 1:
        pin_gpu(here.local_rank, here.local_size, devices)
    make_cpu_devices(devices)


def make_cpu_devices(devices: int) -> None:
    """Let the CPU backend offer `devices` devices; GPUs stay as they are."""
    if devices == 1:
        return
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # the backend has started: what it has must do
        have = jax.local_device_count()
        check(
            have >= devices,
            f"asked for {devices} devices after the device started with {have}; set it first: before the first JAX "
            "array, in a notebook after a restart; or train in processes, jaxmpi.Trainer(experiment, workers=N)",
        )
