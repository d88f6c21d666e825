"""Memory of an exchange beside the gradients: arrays as big as these, results included, as measured.

`python scripts/exchange_memory.py` measures them; docs/exchange.md has its figures.
"""

from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.allreduce.compression import is_compressor

AT_WORK = {"shm": 1, "asa": 3, "none": 1}
OTHERS, COMPRESSORS = 4, 6


def at_work(strategy: str) -> int:
    """Working arrays of a strategy, by its spelling, at most."""
    if is_compressor(strategy):
        return COMPRESSORS
    return OTHERS if is_auto(strategy) else AT_WORK.get(parse(strategy).name.partition(":")[0], OTHERS)
