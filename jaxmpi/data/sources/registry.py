"""Table of the sources of examples: a new one is a class, a function of the settings and the split, and a row."""

from collections.abc import Callable

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.data.decode import MODES
from jaxmpi.data.sources.arrays import animals, array, digits, synthetic
from jaxmpi.data.sources.arrow import huggingface, parquet
from jaxmpi.data.sources.base import Source
from jaxmpi.data.sources.batch_files import batchfiles
from jaxmpi.data.sources.grain_datasets import grain
from jaxmpi.data.sources.image_folder import imagefolder
from jaxmpi.data.sources.numpy_files import numpy_files
from jaxmpi.data.sources.packed import packed
from jaxmpi.data.sources.text import stdlib, text
from jaxmpi.data.sources.tfds import tfds
from jaxmpi.data.sources.views import as_data, hold_out, mixture
from jaxmpi.data.sources.web_dataset import webdataset

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
    "batchfiles": batchfiles,
    "tfds": tfds,
    "numpy": numpy_files,
    "parquet": parquet,
    "huggingface": huggingface,
    "webdataset": webdataset,
    "grain": grain,
    "mixture": lambda config, split: mixture(config, split, open_source),
    "text": text,
    "stdlib": stdlib,
    "packed": packed,
}
