"""NumPy arrays that would lose their numbers on their way into JAX; this imports no JAX, as loader processes do not."""

from typing import Any

import numpy as np

from jaxmpi.core.errors import check


def check_holds(where: str, array: np.ndarray, dtype: Any, op: str = "", workers: int = 1) -> None:
    """Refuse numbers, or their reduction over workers, that `dtype` would wrap or make infinite.

    If w x fits on each worker, so does the sum over w workers; likewise |x|^w for the product. A mean of integers
    never wraps.

    Args:
        op: sum, mean or prod; others enlarge no number.
    """
    is_whole = array.dtype.kind in "iu"
    if array.dtype.kind not in "iufc":
        return
    parts: list[np.ndarray] = [np.real(array), np.imag(array)] if array.dtype.kind == "c" else [array]
    for part in parts if is_whole else [part[np.isfinite(part)] for part in parts]:
        for number in (part.max(), part.min()) if part.size else ():
            x: Any = int(number) if is_whole else np.float64(number)
            with np.errstate(over="ignore"):
                is_summed = op == "sum" or (op == "mean" and not is_whole)
                largest = x * workers if is_summed else abs(x) ** workers if op == "prod" else x
                if np.dtype(dtype).kind in "iu":
                    fits = np.iinfo(dtype).min <= largest <= np.iinfo(dtype).max
                else:
                    fits = bool(np.isfinite(np.float64(largest).astype(np.zeros(1, dtype).real.dtype)))
            reduction = f", with {op} over {workers} workers" if largest != x else ""
            way_out = f"set jax_enable_x64, or give {'floats' if is_whole else 'smaller numbers'}"
            check(fits, f"{where}: got {number}, which {np.dtype(dtype)} cannot hold{reduction}; {way_out}")


def check_unmasked(where: str, value: Any) -> None:
    """Refuse a masked array: its mask would be lost."""
    check(not isinstance(value, np.ma.MaskedArray), f"{where}: got a masked array; fill it: x.filled(0) for one")
