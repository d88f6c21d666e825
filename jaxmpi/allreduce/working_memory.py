"""Measured memory of an exchange, in arrays as big as the gradients.

Results are included, the gradients are not. `python scripts/exchange_memory.py` measures the memory;
docs/performance.md has the figures.
"""

from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.allreduce.compression import is_compressor

AUTO, OF_DEVICES, COMPRESSORS = 4, 4, 6  # `auto` before it has chosen
SHARDED = 2  # at least: rows of a bucket, and new params
SHARDED_OF_DEVICES = 3  # 2.2 to 2.9 with any strategy, if devices of a process add up first; 3.1 to 3.7 unsharded
# If workers update whole tensors, of the padded rows of all: 2.5 to 3.9, 5.6 to 6 with devices that add up, 1.7 shared.
WHOLE, WHOLE_OF_DEVICES, WHOLE_SHARED = 4, 6.5, 2
SHARED_PARAMS = 1.25  # slices, joined leaves below 1 MiB and holes in the heap: GoogLeNet 1.23, AlexNet 0.68, 3 ranks


def at_work(
    strategy: str,
    *,
    is_sharded: bool = False,
    shares_params: bool = False,
    takes_whole: bool = False,
    adds_devices: bool = False,
) -> float:
    """Number of working arrays of a strategy, by its spelling.

    Args:
        is_sharded: updates are sharded; new params are then among the arrays, unless shared.
        takes_whole: sharded updates are of whole tensors, of which each worker has some. Arrays are then as big as the
            padded rows of all workers.
        adds_devices: each process adds up several devices first; the figure is of one device.
    """
    if shares_params:
        return WHOLE_SHARED if takes_whole else SHARED_PARAMS
    if is_compressor(strategy):
        return COMPRESSORS
    if adds_devices:
        of_devices = WHOLE_OF_DEVICES if takes_whole else SHARDED_OF_DEVICES
        return of_devices if is_sharded else OF_DEVICES
    if takes_whole:
        return WHOLE
    arrays = AUTO if is_auto(strategy) else parse(strategy).spec.arrays_at_work
    return max(arrays, SHARDED) if is_sharded else arrays
