"""A share of the training examples, held out for validation: `data.holdout`, for data without a split of its own."""

from typing import Any

import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.data.sampler import random_bits
from jaxmpi.data.sources.base import Source, View, sha256


class Subset(View):
    """Some examples of a source, in their order."""

    def __init__(self, source: Any, indices: np.ndarray) -> None:
        super().__init__(source.name, [source])
        self.indices = indices
        self.bytes_each, self.tokens_each = getattr(source, "bytes_each", 0), getattr(source, "tokens_each", 0)
        labels = getattr(source, "labels", None)
        self.labels = None if labels is None else np.asarray(labels)[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def place(self, number: int) -> tuple[Any, int]:
        return self.parts[0], int(self.indices[number])

    def digest(self) -> str:
        """The source's, and which examples."""
        return sha256([getattr(self.parts[0], "digest", str)()], [self.indices])


def hold_out(source: Source, share: float, split: str) -> Source:
    """The examples that are left for training, or those that are held out.

    In a random order of each class, one class behind the other, example j is held out if floor((j + 1) share) >
    floor(j share): of n examples floor(n share), of each class its share to within one. That depends on the number of
    examples and their labels alone, so it is the same on any number of workers and in every run.

    Raises:
        UsageError: a stream or a mixture, whose examples have no fixed numbers, or too few examples for both parts.
    """
    if getattr(source, "endless", False):
        raise UsageError(f"data.holdout: got {share} with {source.name}, whose examples change by epoch")
    n, labels = len(source), getattr(source, "labels", None)
    order = np.argsort(random_bits(n, seed=0, epoch=0, stream=8), kind="stable")
    if labels is not None and np.ndim(labels) == 1 and np.asarray(labels).dtype.kind in "iu":
        order = order[np.argsort(np.asarray(labels)[order], kind="stable")]
    counts = np.floor(np.arange(n + 1) * share)
    is_validation = np.zeros(n, bool)
    is_validation[order] = counts[1:] > counts[:-1]
    if not 0 < is_validation.sum() < n:
        raise UsageError(f"data.holdout: got {share} of {n} examples, which leaves one part empty")
    return Subset(source, np.flatnonzero(is_validation if split == "validation" else ~is_validation))
