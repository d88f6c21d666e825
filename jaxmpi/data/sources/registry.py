"""Table of the sources of examples, and sources of others' examples: a share that is held out, mixtures by weight.

A new source is a class, a function of the settings and the split, and a row.

An epoch of a mixture has as many examples as the parts have together. Each part gives the share of them that its weight
says. It continues in an epoch where it ended the one before, in an order of its own, so over epochs all its examples
are visited equally often. Example i of epoch e is a function of (e, i) alone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.data.decode import MODES
from jaxmpi.data.sampler import random_bits
from jaxmpi.data.sources.arrays import animals, array, digits, synthetic
from jaxmpi.data.sources.arrow import HuggingFaceSource, ParquetSource
from jaxmpi.data.sources.base import Source, open_table, place_in_parts, sha256, where
from jaxmpi.data.sources.grain_datasets import grain, is_stream
from jaxmpi.data.sources.image_folder import imagefolder
from jaxmpi.data.sources.numpy_files import BatchFileSource, numpy_files
from jaxmpi.data.sources.packed import packed
from jaxmpi.data.sources.text import stdlib, text
from jaxmpi.data.sources.tfds import tfds
from jaxmpi.data.sources.web_dataset import WebDatasetSource

SPLITS = ("train", "validation")


def open_source(config: Data, split: str) -> Source:
    """The source that `data.source` names, of the split "train" or "validation"; refuse what is not there."""
    if split not in SPLITS:
        raise UsageError(f"split: got {split!r}; expected one of {', '.join(SPLITS)}")
    given = config.validation if split == "validation" else None
    if isinstance(given, Data) or (given is not None and config.source not in ("array", "grain")):
        return open_source(as_data(given, "validation", split), split)
    source = lookup(SOURCES, config.source, "data source")(config, "train" if config.holdout else split)
    if getattr(source, "is_compressed", False) and config.channels not in MODES:
        raise UsageError(f"data.channels: got {config.channels}; expected {', '.join(map(str, MODES))}")
    return hold_out(source, config.holdout, split) if config.holdout else source


SOURCES: dict[str, Callable[[Data, str], Source]] = {
    "digits": digits,
    "animals": animals,
    "synthetic": synthetic,
    "array": array,
    "imagefolder": imagefolder,
    "batchfiles": partial(open_table, BatchFileSource),
    "tfds": tfds,
    "numpy": numpy_files,
    "parquet": partial(open_table, ParquetSource),
    "huggingface": partial(open_table, HuggingFaceSource),
    "webdataset": partial(open_table, WebDatasetSource),
    "grain": grain,
    "mixture": lambda config, split: mixture(config, split, open_source),
    "text": text,
    "stdlib": stdlib,
    "packed": packed,
}


class View:
    """Examples of other sources by numbers of its own; `parts` are the sources."""

    def __init__(self, name: str, parts: Sequence[Source]) -> None:
        self.name, self.parts = name, tuple(parts)
        self.classes = max(part.classes for part in parts)
        names = {tuple(getattr(part, "names", ())) for part in parts}
        self.names = names.pop() if len(names) == 1 else ()  # of the classes
        self.is_counted = all(getattr(part, "is_counted", False) for part in parts)
        self.in_process = any(getattr(part, "in_process", False) for part in parts)
        self.notes = tuple(note for part in parts for note in getattr(part, "notes", ()))

    def place(self, number: int) -> tuple[Any, int]:
        """The source of an example, and its number there."""
        raise NotImplementedError

    def __getitem__(self, number: int) -> Any:
        source, index = self.place(number)
        return source[index]

    @property
    def encoded(self) -> Callable[[int], tuple[Any, Any]] | None:
        """(bytes, label) by number if all sources have it, else None."""
        return self._encoded if all(getattr(part, "encoded", None) for part in self.parts) else None

    def _encoded(self, number: int) -> tuple[Any, Any]:
        source, index = self.place(number)
        return source.encoded(index)

    def where(self, number: int) -> str:
        return where(*self.place(number))

    def paths(self) -> Iterator[str]:
        """The files of all sources."""
        return (path for part in self.parts for path in getattr(part, "paths", tuple)())


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
    subset = Subset(source, np.flatnonzero(is_validation if split == "validation" else ~is_validation))
    subset.notes = subset.notes if split == "train" else ()  # training has said them of the same files
    return subset


class Mixture(View):
    """Sources with weights.

    Args:
        parts: the sources.
        weights: of each, > 0; their sum is of no matter.
    """

    endless = True  # an epoch's examples are not those of the next

    def __init__(self, parts: Sequence[Source], weights: Sequence[float]) -> None:
        title = f"mixture of {', '.join(part.name for part in parts)}"
        if not parts or not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise UsageError(f"{title}: got the weights {list(weights)}; expected a number > 0 a part")
        super().__init__("mixture", parts)
        self.lengths = [len(part) for part in parts]
        self.counts = split_by_weight(sum(self.lengths), weights)
        if min(*self.lengths, *self.counts) < 1:
            raise UsageError(
                f"{title}: got parts of {self.lengths} examples and the weights {list(weights)}, which give "
                f"{self.counts} examples of an epoch; expected >= 1 of each part: raise the smallest"
            )
        self.ends = np.cumsum(self.counts)
        self.orders = [
            random_bits(n, 0, 0, stream=3, index=k).argsort(kind="stable") for k, n in enumerate(self.lengths)
        ]
        classes = [part.classes for part in parts]
        if not self.is_counted and len(set(classes)) > 1:
            raise UsageError(
                f"{title}: got {classes} classes; expected one number: a label must mean the same in all parts"
            )
        self.bytes_each, self.tokens_each = self._mean("bytes_each"), self._mean("tokens_each")

    def _mean(self, name: str) -> float:
        """Mean of the parts' values by their share of an epoch; 0 if a part has none."""
        values = [getattr(part, name, 0) for part in self.parts]
        shares = [count / len(self) for count in self.counts]
        return math.fsum(v * share for v, share in zip(values, shares, strict=True)) if all(values) else 0

    def __len__(self) -> int:
        return int(self.ends[-1])

    def place(self, number: int) -> tuple[Source, int]:
        """The part with example `number` of all epochs, and its number there."""
        epoch, index = divmod(int(number), len(self))
        k, visits = place_in_parts(self.ends, index)  # of the part's examples of this epoch
        turn, place = divmod(epoch * self.counts[k] + visits, self.lengths[k])
        is_endless = bool(getattr(self.parts[k], "endless", False))
        return self.parts[k], int(self.orders[k][place]) + turn * self.lengths[k] * is_endless

    def digest(self) -> str:
        parts = [getattr(part, "digest", str)() for part in self.parts]
        return sha256([f"{parts}{self.lengths}{self.counts}"])


def split_by_weight(examples: int, weights: Sequence[float]) -> list[int]:
    """Split `examples` by weight; the largest remainders are rounded up."""
    exact = [examples * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda k: (counts[k] - exact[k], k))
    for k in by_remainder[: examples - sum(counts)]:
        counts[k] += 1
    return counts


def mixture(config: Data, split: str, open_source: Callable[[Data, str], Source]) -> Source:
    """The parts of `data.train` by weight; held out is each part's validation, all of it once."""
    pairs = config.train
    is_form = isinstance(pairs, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[1], (int, float)) for pair in pairs
    )
    if not is_form or not pairs:
        raise UsageError(
            f"data.train: got {pairs!r:.80} for a mixture; expected ((Data(...), 3.0), (Data(...), 1.0)): "
            "a Data, or an object with __len__ and __getitem__, and its weight"
        )
    parts = [as_data(part, "train", split) for part, _ in pairs]  # only a `Data` knows what is held out
    sources = [open_source(part, split) for part in parts]
    weights = [weight for _, weight in pairs] if split == "train" else [len(source) for source in sources]
    return Mixture(sources, weights)


def as_data(part: Any, field: str, split: str) -> Data:
    """The settings of a part, which may be an object as for `array`, given as this field; a stream is refused."""
    data = part if isinstance(part, Data) else Data("array", **{field: part})
    if data.source == "grain" and is_stream(getattr(data, split)):
        raise UsageError(
            f"data.{split}: got an IterDataset of Grain as a part; expected examples by index: take a MapDataset"
        )
    return data
