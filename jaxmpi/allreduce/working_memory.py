"""Measured memory of an exchange, in arrays as big as the gradients.

Results are included, the gradients are not. `python scripts/exchange_memory.py` measures the memory;
docs/performance.md has the figures. `jaxmpi bench` uses them to choose how many ranks a case may have.
"""

from jaxmpi.allreduce.algorithms import parse
from jaxmpi.allreduce.autotune import is_auto
from jaxmpi.allreduce.compression import is_compressor

AUTO, COMPRESSORS = 4, 6  # `auto` before it has chosen


def at_work(strategy: str) -> float:
    """Number of working arrays of a strategy, by its spelling."""
    if is_compressor(strategy):
        return COMPRESSORS
    return AUTO if is_auto(strategy) else parse(strategy).spec.arrays_at_work
