"""Error bounds, derived from what is computed. None of them is fitted to what comes out.

u = 2^-24 is the largest relative error of one f32 operation, r that of one rounding to a wire (`Wire.rounding`).

Sum over workers. Entry j of worker i reaches the result through at most k roundings and w - 1 additions, each of which
multiplies it by 1 + d with |d| <= r or u. With A_j = sum_i |x_ij| the result is therefore within

    ((1 + r)^k (1 + u)^(w - 1) - 1) A_j

of the exact sum. Wire 16 scales by a power of two (exact) so that the largest entry sent, m, is in [2^14, 2^15); an
entry that is subnormal in half precision has an absolute error of half its spacing, 2^-25, which is at most
2^-25 m / 2^14 = 2^-39 m back in the sender's scale. Partial sums are at most M = sum_i max_j |x_ij| (times the factor
above), and a result has seen the floor of k of them:

    k 2^-39 M (1 + r)^k (1 + u)^(w - 1)

Where f32 results are subnormal XLA may flush them: 2^-126 for each operation, of which there are fewer than 8 w.

k: `ar` 0; `asa` 2 (slices sent, sum sent); `ring` w (once a hop, of which there are w - 1, and the sum).
"""

import numpy as np

from jaxmpi.strategies import parse
from jaxmpi.wires import WIRES

U = 2.0**-24
TINY = 2.0**-126  # smallest normal f32
# Largest relative error of one rounding to a leaf's dtype, and half the spacing of its subnormals. bf16 has the
# exponents of f32, and XLA may flush what is subnormal.
ROUNDING = {"float32": (U, TINY), "bfloat16": (2.0**-8, TINY), "float16": (2.0**-11, 2.0**-25)}


def roundings(algorithm: str, workers: int) -> int:
    """Roundings to the wire on the longest way from an input to the result."""
    return {"ar": 0, "asa": 2, "ring": workers}[algorithm]


def bound(strategy: str, rows: np.ndarray) -> np.ndarray:
    """f64[n]: the largest error of the sum of f32[workers, n]."""
    algorithm, _, wire = parse(strategy).name.partition(":")
    rows = np.abs(rows.astype(np.float64))
    workers = len(rows)
    k, r = roundings(algorithm, workers), WIRES[wire].rounding
    growth = (1 + r) ** k * (1 + U) ** (workers - 1)
    floor = 2.0**-39 if wire == "16" else 0.0
    largest = rows.max(1, initial=0).sum()
    return (growth - 1) * rows.sum(0) + k * floor * largest * growth + 8 * workers * TINY


def leaf_bound(strategy: str, rows: np.ndarray, dtype: str, op: str) -> np.ndarray:
    """The same for a leaf of `exchange`: the mean divides once more, and the result is rounded to the leaf's dtype."""
    error = bound(strategy, rows)
    magnitude = np.abs(rows.astype(np.float64)).sum(0)
    if op == "mean":
        error, magnitude = error / len(rows), magnitude / len(rows)
        error = error + U * (magnitude + error)
    r, floor = ROUNDING[dtype]
    return error + r * (magnitude + error) + floor


def linear_iteration(matrices: list[np.ndarray], local: float) -> np.ndarray:
    """Largest errors after e <- M_t e + d_t for t = 1, 2, ..., with |d_t| <= local.

    e_T = d_T + M_T d_(T-1) + M_T M_(T-1) d_(T-2) + ... : at most the sum of the products' absolute values times local.
    """
    product = np.eye(len(matrices[0]))
    total = np.abs(product)
    for matrix in reversed(matrices[1:]):
        product = product @ matrix
        total += np.abs(product)
    return total.sum(1) * local
