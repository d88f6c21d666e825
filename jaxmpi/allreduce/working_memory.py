"""Memory of an exchange beside the gradients: arrays as big as these, results included, as measured.

`python scripts/exchange_memory.py` measures them; docs/exchange.md has its figures.
"""

from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.allreduce.compression import is_compressor

AT_WORK = {"shm": 1, "asa": 3, "none": 1}
OTHERS, COMPRESSORS = 4, 6
SHARDED = 2  # at least: rows of a bucket, and new params
SHARED_PARAMS = 0.75  # a rank's slices, some buckets, and holes in the heap: 0.28 and 0.73 on 4 ranks


def at_work(strategy: str, *, is_sharded: bool = False, shares_params: bool = False) -> float:
    """Working arrays of a strategy, by its spelling; with sharded updates new params are among them, unless shared."""
    if shares_params:
        return SHARED_PARAMS
    if is_compressor(strategy):
        return COMPRESSORS
    arrays = OTHERS if is_auto(strategy) else AT_WORK.get(parse(strategy).name.partition(":")[0], OTHERS)
    return max(arrays, SHARDED) if is_sharded else arrays
