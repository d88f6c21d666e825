"""Error bounds, derived from what is computed. None of them is fitted to what comes out.

u = 2^-24 is the largest relative error of one f32 operation, r that of one rounding to a wire.

Sum over workers. Entry j of worker i reaches the result through at most k roundings and w - 1 additions. Each of them
multiplies it by 1 + d with |d| <= r or u. With A_j = sum_i |x_ij| the result is therefore within

    ((1 + r)^k (1 + u)^(w - 1) - 1) A_j

of the exact sum. Beside that a wire may have an error of a part f of the largest entry that shares its scale. A partial
sum of the workers in S has entries of at most sum_S max_j |x_ij| (times the factor above). Each worker is in at most
k of the partial sums that are rounded. With M = sum_i max_j |x_ij| the errors come to at most

    k f M (1 + r)^k (1 + u)^(w - 1)

Wire 16 scales by a power of two (exact) so that the largest entry sent, m, is in [2^14, 2^15). An entry that is
subnormal in half precision has an absolute error of half its spacing, 2^-25. Back in the sender's scale that is at
most 2^-25 m / 2^14 = 2^-39 m. Wire 8 sends multiples of a scale s <= (m / 127) (1 + 2^-15) (1 + u), with m that of a
block. It is off by half of s, and by 127 2 u s because x / s is computed as x (1 / s). That is less than m / 253 in
all. 127 s may be above m by 2^-14 at most: that is its r.

If f32 results are subnormal XLA may flush them, and wire 8 has no scale below 2^-126: 2^-126 for each operation, of
which there are fewer than 8 w.

k: 0 for `ar` and `shm`; 2 for `asa` (chunks sent, sum sent) and `root` (vectors sent, sum sent); w for `ring` and
`pipering` (once a hop, of which there are w - 1, and the sum); one a halving and one for the sum for `tree`, and one
more where w is no power of two; height + 1 for `color<k>`; that of <cross> over the hosts for `hier-<cross>`.
"""

import os

import numpy as np

from jaxmpi.allreduce.algorithms import parse

U = 2.0**-24

# For jax.jit: XLA's emitters as users have them. Those that conftest.py chooses compile sooner; they write a value out
# wherever it is used, and a multiply and an add may be one operation in one program and two in another.
ON_CPU = not os.environ.get("JAX_PLATFORMS", "").startswith("cuda")  # to ask JAX would start the device
USUAL_EMITTERS = {"xla_cpu_use_fusion_emitters": True} if ON_CPU else {}
TINY = 2.0**-126  # smallest normal f32
WIRE = {"32": (0.0, 0.0), "16": (2.0**-11, 2.0**-39), "bf16": (2.0**-8, 0.0), "8": (2.0**-14, 1 / 253)}  # r and f
# Largest relative error of one rounding to a leaf's dtype, and half the spacing of its subnormals. bf16 has the
# exponents of f32, and XLA may flush what is subnormal.
ROUNDING = {"float32": (U, TINY), "bfloat16": (2.0**-8, TINY), "float16": (2.0**-11, 2.0**-25)}


def roundings(algorithm: str, workers: int, hosts: int = 1) -> int:
    """Roundings to the wire on the longest way from an input to the result."""
    if algorithm.startswith("hier-"):
        return roundings(algorithm.removeprefix("hier-"), hosts) if hosts > 1 else 0
    if algorithm.startswith("color"):
        return height(workers, int(algorithm.removeprefix("color"))) + 1
    levels = workers.bit_length() - 1
    counts = {"ar": 0, "shm": 0, "asa": 2, "root": 2, "ring": workers, "pipering": workers}
    return counts.get(algorithm, levels + 1 + (workers > 1 << levels))


def height(workers: int, colours: int) -> int:
    """The height of the widest trees where each place has children in one only: floor(w / k) places have children."""
    arity = max(1, -(-(workers - 1) // (workers // min(colours, workers))))
    height, row, reached = 0, 1, 1
    while reached < workers:
        height, row = height + 1, row * arity
        reached += row
    return height


def bound(strategy: str, rows: np.ndarray, hosts: int = 1) -> np.ndarray:
    """f64[n]: the largest error of the sum of f32[workers, n]."""
    algorithm, _, wire = parse(strategy).name.partition(":")
    rows = np.abs(rows.astype(np.float64))
    workers, (r, floor) = len(rows), WIRE[wire]
    k = roundings(algorithm, workers, hosts)
    growth = (1 + r) ** k * (1 + U) ** (workers - 1)
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
