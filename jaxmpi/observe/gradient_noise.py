"""Gradient noise scale over workers: how far the batch can usefully grow."""

from typing import NamedTuple

KEPT = 0.9  # share of the moving averages that stays from one progress line to the next


class Means(NamedTuple):
    """Mean squared gradient norms over some steps and all workers."""

    local: float  # mean of |g_i|^2, g_i one worker's gradient, the mean over its b examples
    whole: float  # mean of |g|^2, g = (1/k) sum_i g_i


class Noise:
    """Estimates from squared gradient norms at batch sizes b and k b.

    variance  V = (1/(k-1)) sum_i |g_i - g|^2 = k / (k-1) (|g_i|^2 - |g|^2)      between workers
    square    |G|^2 = |g|^2 - V / k                                             of the gradient without noise
    noise     B = tr(S) / |G|^2, tr(S) = b V                                    examples

    B is a ratio of moving averages over progress lines: each of the two is unbiased, their ratio at one step is not. At
    an effective batch of B, a step makes half the progress of one without noise. Far beyond B, more examples change
    little. McCandlish et al. 2018, arXiv:1812.06162, equation 2.8 and appendix A.1.
    """

    def __init__(self, workers: int, local_batch: int) -> None:
        """For k >= 2 workers with b examples each."""
        self.workers, self.local_batch = workers, local_batch
        self._trace = self._square = 0.0

    def fields(self, means: Means) -> dict[str, float]:
        """Record fields; `noise_scale` is infinite if the noise hides the gradient."""
        variance = self.workers / (self.workers - 1) * (means.local - means.whole)
        square = means.whole - variance / self.workers
        self._trace = KEPT * self._trace + (1 - KEPT) * self.local_batch * variance
        self._square = KEPT * self._square + (1 - KEPT) * square
        scale = self._trace / self._square if self._square > 0 else float("inf")
        return {"worker_variance": variance, "gradient_square": square, "noise_scale": scale}
